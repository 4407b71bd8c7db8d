"""Sweeps on a device: the CPU, with the kernel interpreted, through the very path of a TPU."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest

from autotune import sweep
from autotune.errors import EXIT_MACHINE, EXIT_USAGE, MachineError
from autotune.kernel.problem import BlockSizes, Problem
from autotune.results import dataset, schema
from autotune.results.schema import KERNEL_EVENTS, WALL_CLOCK
from autotune.results.winners import choose, scores
from autotune.search.plan import Request
from autotune.sweep import Summary
from autotune.timing.device_process import Chip, Device, Owner
from autotune.timing.devices import Devices, Timing
from autotune.timing.slot import Slot
from autotune.timing.statistics import StoppingRule
from autotune.tpu import generations
from tests.timing.on_cpu import KEY, LONGER, RULE, Cpu, Quiet, Signaller, request, rows, statuses
from tests.timing.scripted import Script, dies, known

pytestmark = pytest.mark.usefixtures("known_programs")
SMALL, LARGE = BlockSizes(2, 32), BlockSizes(4, 32)


def devices(*slots: Slot) -> Devices:
    return Devices(Timing(source=schema.INTERPRETED, device_kind="cpu", rule=RULE), slots)


def measured(*slots: Slot) -> Devices:
    rule = StoppingRule(max_seconds=1e9)
    return Devices(Timing(source=schema.MEASURED, device_kind="TPU v6 lite", rule=rule), slots)


def run(asked: Request, folder: Path, used: Devices, progress: Quiet | None = None) -> Summary:
    return sweep.sweep(asked, folder, progress or Quiet(), devices=used, jobs=2, timeout=600.0)


def test_from_the_command_line(
    autotune: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    shape = "q_heads=4,kv_heads=1,head_dim=128,page_size=64,max_num_batched_tokens=128,max_model_len=256"
    command = ("sweep", "--interpret", "--shape", shape, "--kv-pages", "2,4", "--queries", "32")
    command = (*command, "--workload", "mixed", "--out", "r")
    done = autotune(*command)
    assert done.returncode == 0, done.stderr
    assert "newly interpreted (a candidate on a workload each): 2 ok; by wall clock\n" in done.stderr
    assert "did not load" not in done.stderr
    assert "no table can be made from them" in done.stdout
    timed = rows(tmp_path / "r", schema.INTERPRETED)
    assert timed["workload"].tolist() == ["mixed (cut)"] * 2
    assert (timed["device_kind"] == "cpu").all() and (timed["chip"] == 0).all()
    assert (timed["timer"] == "wall clock").all() and (timed["vmem_used_bytes"] > 0).all()
    assert (timed["latency_low_us"] <= timed["latency_us"]).all()
    assert (timed["latency_us"] <= timed["latency_high_us"]).all()
    assert all(len(samples) >= 6 for samples in timed["samples_us"])
    for allowed in ((), ("--allow-modelled",)):
        refused = autotune("emit", "r", *allowed)
        assert refused.returncode == EXIT_USAGE
        assert refused.stderr.startswith("Error: results folder 'r' holds 2 interpreted rows")
    again = autotune(*command)
    assert again.returncode == 0
    assert "0 programs to compile" in again.stderr
    assert "newly interpreted (a candidate on a workload each): none" in again.stderr


def test_no_tpu_and_not_interpreted(autotune: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = autotune("sweep", "--preset", "smoke", "--precision", "2%", "--out", "r")
    assert done.returncode == 3 and "no TPU is attached" in done.stderr
    wrong = autotune("sweep", "--preset", "smoke", "--precision", "2", "--out", "r")
    assert wrong.returncode == EXIT_USAGE and "'2' is not a percentage such as 1% or 0.5%" in wrong.stderr


def test_a_candidate_that_kills_the_device_and_what_the_next_run_does(tmp_path: Path) -> None:
    cpu = Cpu()
    with Signaller(cpu, LARGE, signal.SIGKILL, times=2):
        summary = run(request(), tmp_path, devices(cpu.slot))
    assert statuses(tmp_path) == {SMALL: "ok", LARGE: "crashed"}
    assert summary.timings == {"ok": 1, "crashed": 1}
    crashed = rows(tmp_path, schema.INTERPRETED).set_index("num_kv_pages_per_blk").loc[4]
    assert crashed["error"].endswith("2 times") and pd.isna(crashed["latency_us"])
    # The next run times nothing and takes no device; asked to try again, it tries the crashed one alone.
    before = dataset.read(tmp_path)
    cpu = Cpu()
    assert run(request(), tmp_path, devices(cpu.slot)).timings == {}
    assert cpu.started == [] and len(dataset.read(tmp_path)) == len(before)
    cpu, progress = Cpu(), Quiet()
    run(request(retry_failed=True), tmp_path, devices(cpu.slot), progress)
    assert [(r.blocks, r.status) for r in progress.results] == [(LARGE, "ok")]
    assert statuses(tmp_path) == {SMALL: "ok", LARGE: "ok"}


def test_a_device_that_cannot_be_taken_leaves_the_schedules(tmp_path: Path) -> None:
    def start() -> Device:
        return Owner(Chip("tpu"), start_timeout=60)  # there is none here

    with pytest.raises(MachineError, match="chip 0 could not be taken"):
        run(request(), tmp_path, devices(Slot(0, start, sleep=lambda seconds: None)))
    assert len(rows(tmp_path, schema.MODELLED)) == 2
    assert rows(tmp_path, schema.INTERPRETED).empty


def test_measured_rows_make_a_table_without_more_ado(
    autotune: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Executables compiled for v6e, on a device of known latencies where the model's second is the best."""
    asked = request(kv_pages=(1, 2, 4))
    ranking = [BlockSizes(4, 32), BlockSizes(2, 32), BlockSizes(1, 32)]
    script = Script(known(dict(zip(ranking, (110e-6, 100e-6, 150e-6), strict=True))), noise=0.002)
    folder = tmp_path / "r"
    run(asked, folder, measured(Slot(0, script.start)))
    timed = rows(folder, schema.MEASURED)
    modelled = rows(folder, schema.MODELLED)
    assert len(timed) == len(modelled) == 3
    assert (timed["vmem_used_bytes"].to_numpy() == modelled["vmem_used_bytes"].to_numpy()).all()
    assert timed["compile_seconds"].notna().all() and (timed["workload"] == "mixed").all()
    done = autotune("emit", "r", "-o", "table.py")
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "table.py").read_text()
    assert "MEASURED: every value was timed on a TPU." in table and "): (2, 32)," in table


def test_the_clock_is_followed_beyond_the_edge_that_the_model_sees_no_use_in(tmp_path: Path) -> None:
    """On this device fewer queries are faster, down to 4; the grid begins at 32."""

    def latency(blocks: BlockSizes, workload: str) -> float:
        return 100e-6 * (1 + abs(blocks.num_queries_per_blk - 4) / 10 + 1 / blocks.num_kv_pages_per_blk)

    asked = Request(generation=generations.V6E, keys=(KEY,), workloads=("mixed",))
    script = Script(latency, noise=0.001)
    run(asked, tmp_path, measured(Slot(0, script.start)))
    won = choose(scores(rows(tmp_path, schema.MEASURED)))
    assert won[schema.BLOCK_COLUMNS].to_numpy().tolist() == [[4, 4]]
    # Typed again, nothing is left to do.
    again = Script(latency, noise=0.001)
    assert run(asked, tmp_path, measured(Slot(0, again.start))).timings == {}
    # What a user names is all that is tried.
    named = Script(latency, noise=0.001)
    chosen = dataclasses.replace(asked, kv_pages=(4,), queries=(32, 64))
    run(chosen, tmp_path / "named", measured(Slot(0, named.start)))
    assert set(rows(tmp_path / "named", schema.MEASURED)["num_queries_per_blk"]) == {32, 64}


@pytest.mark.slow
def test_two_chips_share_the_keys_and_rows_say_which(tmp_path: Path) -> None:
    chips_used = [Slot(chip, lambda: Owner(Chip("cpu"))) for chip in (0, 1)]
    summary = run(request(keys=(KEY, LONGER)), tmp_path, devices(*chips_used))
    assert summary.timings == {"ok": 4} and summary.compiled == 2
    timed = rows(tmp_path, schema.INTERPRETED)
    by_key = timed.groupby("max_model_len")["chip"].unique()
    assert sorted(chip for found in by_key for chip in found) == [0, 1]  # one chip a key, and both are used


@pytest.mark.slow
def test_rows_of_another_workload_are_timed_anew(tmp_path: Path) -> None:
    cpu = Cpu()
    run(request(kv_pages=(2,)), tmp_path, devices(cpu.slot))
    cpu = Cpu()
    progress = Quiet()
    run(request(kv_pages=(2,), workloads=("mixed", "decode-heavy")), tmp_path, devices(cpu.slot), progress)
    assert [r.workload.name for r in progress.results] == ["decode-heavy (cut)"]
    assert progress.modelled == 0  # the schedule was known, and the other workload's row is made of it


def test_two_sweeps_at_once_never_harm_each_other(tmp_path: Path) -> None:
    asked = request(keys=(KEY, LONGER))
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(run, asked, tmp_path, devices(Cpu().slot)) for _ in range(2)]
        done = [sweep_done.result() for sweep_done in running]
    assert [summary.timings["ok"] for summary in done] == [4, 4]
    timed = rows(tmp_path, schema.INTERPRETED)
    assert timed.groupby("max_model_len").size().tolist() == [2, 2], "what is there twice counts once"


# Scripted devices: what is done where a chip does not behave.

KEYS = (KEY, LONGER, KEY._replace(max_model_len=1024), KEY._replace(max_num_batched_tokens=256))
LATENCIES = known({SMALL: 1e-4, LARGE: 1.2e-4})


def scripted(script: Script, chip: int = 0) -> Slot:
    return Slot(chip, script.start, sleep=lambda seconds: None)


def winning(folder: Path) -> list[BlockSizes]:
    chosen = choose(scores(rows(folder, schema.MEASURED)))
    return [BlockSizes(*pair) for pair in chosen[schema.BLOCK_COLUMNS].itertuples(index=False, name=None)]


def test_one_chip_of_four_that_never_comes_is_retired(tmp_path: Path) -> None:
    def start() -> None:
        raise dies()

    good = [Script(LATENCIES, seed=chip) for chip in range(3)]
    bad = Script(LATENCIES, starts=[start])
    progress = Quiet()
    slots = [scripted(bad, 3), *(scripted(script, chip) for chip, script in enumerate(good))]
    summary = run(request(keys=KEYS), tmp_path, measured(*slots), progress)
    assert summary.timings == {"ok": len(KEYS) * 2}
    (note,) = progress.notes
    assert note.startswith("chip 3 could not be taken") and note.endswith("goes on with 3 other devices")
    assert set(rows(tmp_path, schema.MEASURED)["chip"]) <= {0, 1, 2}
    assert winning(tmp_path) == [SMALL] * len(KEYS)


def test_no_chip_that_comes_ends_the_sweep(tmp_path: Path) -> None:
    def start() -> None:
        raise dies()

    slots = [scripted(Script(LATENCIES, starts=[start]), chip) for chip in range(2)]
    with pytest.raises(MachineError, match=r"chip \d could not be taken") as raised:
        run(request(keys=KEYS), tmp_path, measured(*slots))
    assert raised.value.exit_code == EXIT_MACHINE
    assert rows(tmp_path, schema.MEASURED).empty and not rows(tmp_path, schema.MODELLED).empty


def test_a_key_whose_preparation_kills_is_crashed_and_the_others_are_timed(tmp_path: Path) -> None:
    def prepare(problem: Problem) -> None:
        if problem.max_model_len == LONGER.max_model_len:
            raise dies(None, "gone")

    script = Script(LATENCIES, on_prepare=prepare)
    summary = run(request(keys=KEYS), tmp_path, measured(scripted(script)))
    assert summary.timings == {"ok": (len(KEYS) - 1) * 2, "crashed": 2}
    timed = rows(tmp_path, schema.MEASURED)
    assert set(timed[timed["status"] == "crashed"]["max_model_len"]) == {LONGER.max_model_len}


def test_where_executables_kill_their_loader_no_more_are_compiled_ahead(tmp_path: Path) -> None:
    def load(blocks: BlockSizes, payload: bytes | None) -> None:
        if payload is not None:
            raise dies(blocks, "killed", loading=True)

    script = Script(LATENCIES, on_load=load)
    summary = run(request(keys=KEYS), tmp_path, measured(scripted(script)))
    assert summary.timings == {"ok": len(KEYS) * 2} and summary.compiled_here == len(KEYS) * 2
    assert script.started == 2 and sum(payload is not None for _, payload in script.loaded) == 1


def test_a_clock_that_changes_between_two_runs_mixes_no_winner(tmp_path: Path) -> None:
    """The first run times one of two candidates, by traces. The second has only the host's clock, by which
    everything takes a little longer, and the slower candidate would win of the mixture."""
    first = Script(known({LARGE: 1.2e-4}))
    run(request(kv_pages=(4,)), tmp_path, measured(scripted(first)))
    assert winning(tmp_path) == [LARGE]
    second = Script(known({SMALL: 1.3e-4, LARGE: 1.5e-4}), profiles=False)
    run(request(), tmp_path, measured(scripted(second)))
    timed = rows(tmp_path, schema.MEASURED)
    assert set(timed["timer"]) == {WALL_CLOCK} and winning(tmp_path) == [SMALL]
    # All that was timed is still there, in the files.
    raw = pd.concat([table.to_pandas() for table in dataset.tables(tmp_path, schema.arrow())])
    assert Counter(raw["timer"].dropna()) == {KERNEL_EVENTS: 1, WALL_CLOCK: 2}


def test_rows_of_two_clocks_never_meet_in_a_winner(tmp_path: Path) -> None:
    """As two folders give them that were merged: the clock that timed the most of a key decides."""
    for folder, script, pages in (
        ("a", Script(known({LARGE: 1.2e-4, BlockSizes(1, 32): 1.4e-4})), (1, 4)),
        ("b", Script(known({SMALL: 1.1e-4}), profiles=False), (2,)),
    ):
        run(request(kv_pages=pages), tmp_path / folder, measured(scripted(script)))
    frame = pd.concat([rows(tmp_path / folder, schema.MEASURED) for folder in "ab"], ignore_index=True)
    scored = scores(frame)
    assert len(scored) == 2 and choose(scored)["num_kv_pages_per_blk"].tolist() == [4]


@pytest.mark.parametrize("lost", [0.01, 0.2])
def test_lost_events_change_no_winner(tmp_path: Path, lost: float) -> None:
    run(request(keys=KEYS), tmp_path, measured(scripted(Script(LATENCIES, lost=lost))))
    timed = rows(tmp_path, schema.MEASURED)
    assert set(timed["timer"]) == {KERNEL_EVENTS} and winning(tmp_path) == [SMALL] * len(KEYS)
    assert max(map(max, timed["samples_us"])) < 1.5 * 120
