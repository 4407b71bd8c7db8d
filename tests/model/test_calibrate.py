from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

from autotune.errors import UsageError
from autotune.kernel.problem import BlockSizes, Program, TableKey
from autotune.kernel.workload import Workload, generate
from autotune.model import calibrate
from autotune.model.cost import CALIBRATIONS, CONSTANTS, Calibration, latency_seconds, seconds
from autotune.results import dataset, schema
from autotune.results.schema import Tools
from autotune.tpu.generations import GENERATIONS, V5E, V6E, Generation

TOOLS = Tools("0.10.2", "0.10.2", "0.0.42.1", "abcdef012345")
PLANTED = Calibration(
    call_seconds=15e-6,
    copy_seconds=0.9e-6,
    bandwidth_fraction=0.75,
    stall=1.2,
    kv_block_seconds=0.4e-6,
    origin="planted",
)
CALIBRATION = CALIBRATIONS["v6e"]
SHAPES = ((4, 1, 64), (8, 1, 16), (8, 4, 128), (32, 8, 16), (32, 8, 64))


def timing(latency: float) -> dict[str, Any]:
    """What a row has of three samples that are alike."""
    ends = {"latency_low_us": latency, "latency_high_us": latency}
    return {"samples_us": [latency] * 3, "timer": "device trace", "chip": 0, **ends}


def rows(
    generation: Generation = V6E, noise: float = 0.02, source: str = schema.MEASURED, seed: int = 0
) -> Iterator[dict[str, object]]:
    """Measured rows of a device with known constants, over layouts, block sizes, lengths and batches."""
    rng = np.random.default_rng(seed)
    for q_heads, kv_heads, page in SHAPES:
        for pages in (4, 16, 64):
            for queries in (32, 128):
                for tokens, model_len in ((128, 512), (512, 1024), (2048, 4096)):
                    if pages * page > model_len:
                        continue
                    key = TableKey("bfloat16", "bfloat16", q_heads, kv_heads, 128, page, tokens, model_len)
                    problem, blocks = key.canonical_problem(), BlockSizes(pages, queries)
                    scores = q_heads * queries * pages * page
                    cycles = (60, 200 + 2 * queries, 28, 300 + 20 * pages + scores // 450)
                    for name in ("mixed", "decode-heavy"):
                        batch = generate(name, problem, seed=3)
                        took = latency_seconds(generation, problem, blocks, batch, cycles, PLANTED)
                        latency = 1e6 * took * float(np.exp(noise * rng.normal()))
                        yield schema.row(
                            target=generation.name,
                            device_kind=generation.device_kinds[0],
                            key=key,
                            problem=problem,
                            program=Program(layout=problem.layout, blocks=blocks),
                            workload=batch,
                            source=source,
                            status="ok",
                            tools=TOOLS,
                            latency_us=latency,
                            cycles=list(cycles),
                            vmem_used_bytes=1 << 20,
                            smem_used_bytes=4096,
                            **(timing(latency) if source == schema.MEASURED else {"model": "m"}),
                        )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.mark.parametrize("generation", GENERATIONS.values(), ids=GENERATIONS)
def test_planted_constants_are_recovered(home: Path, generation: Generation) -> None:
    dataset.append(home / "r", rows(generation))
    found, unusable = calibrate.samples(dataset.read(home / "r"), generation.device_kinds[0])
    assert unusable == 0
    fitted = calibrate.fit(found, "test", CALIBRATIONS[generation.name])
    for name in CONSTANTS:
        value, planted = getattr(fitted.calibration, name), getattr(PLANTED, name)
        assert value == pytest.approx(planted, rel=0.1), name
        assert abs(value - planted) < 5 * fitted.uncertainty[name]
    assert fitted.error < 0.02 < fitted.before


def test_a_row_takes_its_schedule_from_another_row_of_its_program(home: Path) -> None:
    measured = [{**r, "cycles": None, "vmem_used_bytes": None, "smem_used_bytes": None} for r in rows()]
    dataset.append(home / "r", measured)
    assert calibrate.samples(dataset.read(home / "r"), "TPU v6 lite") == ([], len(measured))
    dataset.append(home / "r", rows(source=schema.MODELLED))
    found, unusable = calibrate.samples(dataset.read(home / "r"), "TPU v6 lite")
    assert (len(found), unusable) == (len(measured), 0)
    assert calibrate.samples(dataset.read(home / "r"), "TPU v5 lite") == ([], 0)


def test_a_batch_that_cannot_be_made_again_is_left_out(home: Path) -> None:
    changed = {**next(rows()), "workload_fingerprint": "0" * 12}
    gone = {**next(rows()), "workload": str(home / "gone.csv")}
    dataset.append(home / "r", [changed, gone])
    assert calibrate.samples(dataset.read(home / "r"), "TPU v6 lite") == ([], 2)


def test_a_constant_of_which_rows_say_nothing_stays(home: Path) -> None:
    """Copies of no bytes take as long at every bandwidth."""
    dataset.append(home / "r", rows())
    found, _ = calibrate.samples(dataset.read(home / "r"), "TPU v6 lite")
    empty = [s.terms._replace(kv_copy=0.0, q_copy=0.0) for s in found]
    fitted = calibrate.fit(
        [s._replace(terms=t, measured=float(seconds(t, PLANTED))) for s, t in zip(found, empty, strict=True)],
        "test",
        CALIBRATION,
    )
    assert fitted.calibration.bandwidth_fraction == pytest.approx(CALIBRATION.bandwidth_fraction)
    assert fitted.uncertainty["bandwidth_fraction"] > 0.2
    assert fitted.error < 0.05 < fitted.before


def test_too_few_rows_are_refused(home: Path) -> None:
    dataset.append(home / "r", list(rows())[:10])
    with pytest.raises(UsageError, match=r"^10 measured rows of [0-9] programs are too few"):
        calibrate.fit(calibrate.samples(dataset.read(home / "r"), "TPU v6 lite")[0], "test", CALIBRATION)


def test_the_command_stores_what_a_sweep_then_uses(
    home: Path, autotune: Callable[..., CompletedProcess[str]]
) -> None:
    dataset.append(home / "r", rows())
    assert calibrate.current(V6E) is CALIBRATION
    done = autotune("calibrate", home / "r", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert calibrate.current(V6E) is CALIBRATION
    done = autotune("calibrate", home / "r")
    assert done.returncode == 0, done.stderr
    held = calibrate.current(V6E)
    assert held.copy_seconds == pytest.approx(PLANTED.copy_seconds, rel=0.1)
    assert held.version != CALIBRATION.version
    assert "measured rows of TPU v6 lite, libtpu 0.0.42.1" in held.origin
    assert calibrate.current(V5E) is CALIBRATIONS["v5e"], "another device keeps the built-in constants"
    entry = json.loads(calibrate.path().read_text())["TPU v6 lite"]
    assert 0 < entry["error"] < 0.03
    missing = autotune("calibrate", home / "r", "--device-kind", "TPU v4")
    assert missing.returncode == 2
    assert "has no measured rows of 'TPU v4'" in missing.stderr


def test_a_spoilt_file_is_named(home: Path) -> None:
    calibrate.path().parent.mkdir(parents=True)
    for text in ("{", "[]", '{"TPU v6 lite": {"stall": 1}}', '{"TPU v6 lite": 3}'):
        calibrate.path().write_text(text)
        with pytest.raises(UsageError, match="calibration"):
            calibrate.current(V6E)


def test_a_calibration_of_the_version_before_is_read(home: Path) -> None:
    entry = dataclasses.asdict(PLANTED)
    del entry["kv_block_seconds"]
    calibrate.path().parent.mkdir(parents=True)
    calibrate.path().write_text(json.dumps({"TPU v6 lite": entry}))
    assert calibrate.current(V6E) == dataclasses.replace(PLANTED, kv_block_seconds=0.0)


@pytest.mark.parametrize("place", ["file", "folder"])
def test_constants_that_others_may_have_written_predict_nothing(
    home: Path, capfd: pytest.CaptureFixture[str], place: str
) -> None:
    entry = {**dataclasses.asdict(PLANTED), "uncertainty": {}}
    calibrate.path().parent.mkdir(parents=True)
    calibrate.path().write_text(json.dumps({"TPU v6 lite": entry}))
    assert calibrate.current(V6E) == PLANTED
    shared = calibrate.path() if place == "file" else calibrate.path().parent
    shared.chmod(0o777)
    assert [calibrate.current(V6E) for _ in range(3)] == [CALIBRATION] * 3
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "is passed over, and the built-in constants predict" in said
    assert f"chmod go-w {shared}" in said
    fitted = calibrate.Fitted(
        calibration=PLANTED, uncertainty={}, error=0, error_p90=0, before=0, rows=1, programs=1
    )
    with pytest.raises(UsageError, match="is not written, as others may write it: chmod go-w"):
        calibrate.store("TPU v6 lite", fitted)


def test_workloads_of_a_row_are_found_by_their_fingerprint() -> None:
    problem = TableKey("bfloat16", "bfloat16", 8, 1, 128, 16, 512, 1024).canonical_problem()
    batch: Workload = generate("mixed", problem, seed=7)
    assert calibrate._batch("mixed", batch.fingerprint, problem) == batch
    other = dataclasses.replace(batch, sequences=batch.sequences[:-1])
    assert calibrate._batch("mixed", other.fingerprint, problem) is None
