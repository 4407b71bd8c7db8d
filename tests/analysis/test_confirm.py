"""`autotune confirm`: on the CPU from end to end, and on devices that have one fault each."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune.analysis import confirm
from autotune.analysis.confirm import FAILED, NAMES, NOT_APPLICABLE, OK, Check, Study
from autotune.cli.render import confirm as confirm_formats
from autotune.compile.cache import Store
from autotune.errors import EXIT_MACHINE, EXIT_USAGE, MachineError
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results import dataset, schema
from autotune.search.plan import Request
from autotune.timing.device_worker import Loaded
from autotune.timing.devices import Devices, Timing
from autotune.timing.slot import Slot
from autotune.timing.statistics import StoppingRule
from autotune.tpu import generations
from autotune.tpu.attached import Attached
from tests.timing.on_cpu import Quiet
from tests.timing.scripted import Script, dies, known, raises

pytestmark = pytest.mark.usefixtures("known_programs")
KEY = TableKey("bfloat16", "bfloat16", 4, 1, 128, 64, 128, 256)
LARGE, SMALL = BlockSizes(4, 32), BlockSizes(2, 32)  # in the order that the model predicts
LATENCIES = {LARGE: 100e-6, SMALL: 120e-6}
TPU = confirm.head(interpreted=False, generation=generations.V6E, device_kind="TPU v6 lite")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One for all, so that schedules are compiled once."""
    return Store(tmp_path_factory.mktemp("store") / "store.sqlite")


@pytest.fixture
def study(tmp_path: Path, store: Store) -> Study:
    request = Request(
        generation=generations.V6E, keys=(KEY,), kv_pages=(2, 4), queries=(32,), workloads=("mixed",)
    )
    return Study(
        request=request,
        folder=tmp_path,
        store=store,
        jobs=1,
        timeout=300.0,
        progress=lambda plan, search: Quiet(),
    )


def script(latencies: dict[BlockSizes, float] = LATENCIES, **values: object) -> Script:
    return Script(known(latencies), noise=0.002, **values)  # type: ignore[arg-type]


def devices(*scripts: Script) -> Devices:
    rule = StoppingRule(max_seconds=1e9)
    slots = tuple(Slot(chip, each.start, sleep=lambda seconds: None) for chip, each in enumerate(scripts))
    return Devices(Timing(source=schema.MEASURED, device_kind="TPU v6 lite", rule=rule), slots)


def examined(study: Study, first: Devices, second: Devices | None = None) -> dict[str, Check]:
    """What came of the checks; second: None where the second sweep is never come to."""
    made: Iterator[Devices] = iter([first, *([second] if second else [])])
    found = list(confirm.examine(study, lambda: next(made)))
    assert tuple(check.name for check in found) == NAMES[1:]
    return {check.name: check for check in found}


def failed(found: dict[str, Check]) -> list[str]:
    return [name for name, check in found.items() if check.state == FAILED]


@pytest.mark.slow
def test_on_the_cpu_from_the_command_line(
    autotune: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = autotune("confirm", "--interpret")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and lines[0].startswith("autotune ")
    states = {
        name: state
        for state in (OK, FAILED, NOT_APPLICABLE)
        for name in NAMES
        if f"{state:<16}{name} " in done.stdout
    }
    assert states == {
        **dict.fromkeys(("chips", "executables", "results", "sweep"), OK),
        **dict.fromkeys(("detection", "profile", "clock", "ranking"), NOT_APPLICABLE),
    }
    assert lines[-1] == "None failed. No TPU was used: on a TPU host leave --interpret out."
    assert done.stderr.startswith("about ")
    for name in ("first", "second"):
        rows = dataset.read(tmp_path / "results" / "confirm" / name)
        timed = rows[rows["source"] != schema.MODELLED]
        assert (timed["source"] == schema.INTERPRETED).all() and len(timed) == 4
        assert (timed["status"] == "ok").all()
    again = autotune("confirm", "--interpret", "--format", "json")
    said = json.loads(again.stdout)
    assert (said["schema"], said["exit_code"], said["interpreted"]) == (1, 0, True)
    assert {check["name"]: check["state"] for check in said["checks"]} == states
    assert "4 recorded before" in said["checks"][NAMES.index("sweep")]["seen"]


def test_no_tpu_and_not_interpreted(autotune: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = autotune("confirm")
    assert done.returncode == EXIT_MACHINE and done.stdout == ""
    assert (
        done.stderr.startswith("Error: no TPU is attached to this machine") and "--interpret" in done.stderr
    )


def test_rows_need_a_folder(
    autotune: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    done = autotune("confirm", "--interpret", "--out", "file")
    assert done.returncode == EXIT_USAGE and done.stderr == "Error: --out 'file' is a file: name a folder\n"


def test_a_device_without_a_fault(study: Study) -> None:
    found = examined(study, devices(script(), script()), devices(script(seed=1), script(seed=1)))
    assert {check.state for check in found.values()} == {OK}, found
    assert found["chips"].seen.startswith("2 processes held 2 chips at once; 2 devices, 'TPU v6 lite'")
    assert "303 of 303 calls are in them" in found["profile"].seen
    assert found["sweep"].seen == "2 ok (a candidate on a workload each); by device trace"
    assert found["clock"].seen.startswith("2 of 2 medians of two sweeps are within 2%")
    assert found["ranking"].seen.endswith("the predicted place of the clock's fastest: 1 on 1 key")
    text = "\n".join(map(confirm_formats.line, found.values()))
    assert max(map(len, text.split("\n"))) <= 80
    assert confirm_formats.end(TPU, list(found.values())) == "None failed. Paste this into an issue."


def test_a_clock_that_drifts_from_process_to_process(study: Study) -> None:
    slower = {blocks: 1.1 * seconds for blocks, seconds in LATENCIES.items()}
    found = examined(study, devices(script()), devices(script(slower)))
    assert failed(found) == ["clock"]
    assert found["clock"].seen.startswith("0 of 2 medians") and "of (bfloat16, " in found["clock"].seen


def test_an_executable_that_does_not_load(study: Study) -> None:
    def on_load(blocks: BlockSizes, payload: bytes | None) -> Loaded:
        return Loaded("ok", None, compiled=True, refused="made for another topology" if payload else None)

    one = script(on_load=on_load)
    found = examined(study, devices(one), devices(script()))
    assert failed(found) == ["executables"]
    assert found["executables"].seen.endswith("compile its own: made for another topology")
    # The sweep after it sends none.
    assert [payload is None for _, payload in one.loaded] == [False, True, True]


def test_an_executable_that_kills_the_process_that_loads_it(study: Study) -> None:
    def on_load(blocks: BlockSizes, payload: bytes | None) -> None:
        if payload:
            raise dies(blocks, "ended by SIGSEGV", loading=True)

    one = script(on_load=on_load)
    found = examined(study, devices(one), devices(script()))
    assert failed(found) == ["executables"] and one.started == 2
    assert found["executables"].seen.endswith("compile its own: ended by SIGSEGV")


def test_profiles_without_events(study: Study) -> None:
    found = examined(study, devices(script(profiles=False)), devices(script(profiles=False)))
    assert failed(found) == ["profile"]
    assert found["profile"].seen.startswith("timed by the wall clock, not by the device trace (")


def test_a_wrong_result(study: Study) -> None:
    wrong = Loaded("wrong_result", "workload mixed: 7 values differ", compiled=False)
    found = examined(study, devices(script(on_load=lambda blocks, payload: wrong)))
    assert failed(found) == ["results"]
    assert found["results"].seen == "wrong_result: workload mixed: 7 values differ"
    assert {found[name].state for name in ("profile", "sweep", "clock", "ranking")} == {NOT_APPLICABLE}


def test_a_model_with_another_order_than_the_clock(study: Study) -> None:
    other = {LARGE: 150e-6, SMALL: 120e-6}
    found = examined(study, devices(script(other)), devices(script(other)))
    assert failed(found) == ["ranking"]
    assert found["ranking"].seen.startswith("on 0 of 1 key at least 70%")


def test_a_chip_that_cannot_be_taken_and_a_candidate_that_is_wrong(study: Study) -> None:
    def on_load(blocks: BlockSizes, payload: bytes | None) -> Loaded | None:
        return Loaded("wrong_result", "far off", compiled=False) if blocks == SMALL else None

    def two() -> Devices:
        return devices(script(starts=[raises(dies())]), script(on_load=on_load))

    found = examined(study, two(), two())
    assert failed(found) == ["chips", "sweep"]
    assert found["chips"].seen.startswith("1 of 2 devices: chip 0 could not be taken")
    assert "the first that failed, 2,32 on mixed of (" in found["sweep"].seen
    assert found["clock"].seen.startswith("1 of 1 median")


def test_a_tpu_that_no_process_can_take(study: Study) -> None:
    found = examined(study, devices(script(starts=[raises(dies())])))
    assert failed(found) == ["chips"]
    assert {check.state for check in found.values()} == {FAILED, NOT_APPLICABLE}


def test_a_tpu_that_is_found_and_cannot_be_used() -> None:
    def find() -> Attached:
        raise MachineError("the TPU is held by process 7 (vi\x1b[2J)")

    check, found = confirm.detection(find)
    assert (check.state, found) == (FAILED, None)
    assert confirm_formats.line(check).endswith("the TPU is held by process 7 (vi?[2J)")
    assert [c.state for c in confirm.skipped("detection", "no TPU")] == [NOT_APPLICABLE] * 7
    end = confirm_formats.end(TPU, [check, *confirm.skipped("detection", "no TPU")])
    assert end == "1 failed. Paste this into an issue."
