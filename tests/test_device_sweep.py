"""Sweeps on a device: the CPU, with the kernel interpreted, through the very path of a TPU."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from autotune import device_sweep, results, sweep
from autotune.devices import Devices, Timing
from autotune.errors import EXIT_USAGE, MachineError
from autotune.kernel.problem import BlockSizes, Program, TableKey
from autotune.measure import Result, Slot
from autotune.owner import Device, Owner
from autotune.plan import Request
from autotune.pool import Task
from autotune.sweep import Summary
from autotune.tpu import chips
from autotune.tpu.compiler import Compiled
from autotune.tpu.statistics import StoppingRule
from tests.test_measure import Cpu, KnownLatencies, Signaller

KEY = TableKey("bfloat16", "bfloat16", 4, 1, 128, 64, 128, 256)
LONGER = KEY._replace(max_model_len=512)
SMALL, LARGE = BlockSizes(2, 32), BlockSizes(4, 32)
RULE = StoppingRule(precision=0.5, max_seconds=0.2)


def request(**values: Any) -> Request:
    values = {"keys": (KEY,), "kv_pages": (2, 4), "queries": (32,), "workloads": ("mixed",), **values}
    return Request(generation=chips.V6E, **values)


class Quiet(contextlib.AbstractContextManager["Quiet"]):
    """Progress that counts."""

    def __init__(self) -> None:
        self.modelled = 0
        self.results: list[Result] = []

    def compiling(self, task: Task) -> None: ...

    def advance(self, task: Task, verdict: Compiled, left: Iterable[Program]) -> None:
        self.modelled += 1

    def __exit__(self, *error: object) -> None:
        pass

    def recorded(self, made: Iterable[Mapping[str, Any]]) -> None:
        pass

    def timed(self, key: TableKey, result: Result) -> None:
        self.results.append(result)

    def keys_timed(self, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.keys = done, total


def devices(*slots: Slot) -> Devices:
    return Devices(Timing(source=results.INTERPRETED, device_kind="cpu", rule=RULE), slots)


def run(asked: Request, folder: Path, used: Devices, progress: Quiet | None = None) -> Summary:
    plan = sweep.load(folder, asked, None)
    search = sweep.search_for(asked, plan)
    return device_sweep.run(asked, plan, search, None, folder, 2, 600.0, used, progress or Quiet())


def rows(folder: Path, source: str) -> pd.DataFrame:
    frame = results.read(folder)
    return frame[frame["source"] == source]


def statuses(folder: Path) -> dict[BlockSizes, str]:
    frame = rows(folder, results.INTERPRETED)
    columns = (frame[name].tolist() for name in (*results.BLOCK_COLUMNS, "status"))
    return {BlockSizes(pages, queries): status for pages, queries, status in zip(*columns, strict=True)}


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
    assert "No table can be made of this" in done.stdout
    timed = rows(tmp_path / "r", results.INTERPRETED)
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
    crashed = rows(tmp_path, results.INTERPRETED).set_index("num_kv_pages_per_blk").loc[4]
    assert crashed["error"].endswith("2 times") and pd.isna(crashed["latency_us"])
    # The next run times nothing and takes no device; asked to try again, it tries the crashed one alone.
    before = results.read(tmp_path)
    cpu = Cpu()
    assert run(request(), tmp_path, devices(cpu.slot)).timings == {}
    assert cpu.started == [] and len(results.read(tmp_path)) == len(before)
    cpu, progress = Cpu(), Quiet()
    run(request(retry_failed=True), tmp_path, devices(cpu.slot), progress)
    assert [(r.blocks, r.status) for r in progress.results] == [(LARGE, "ok")]
    assert statuses(tmp_path) == {SMALL: "ok", LARGE: "ok"}


def test_a_device_that_cannot_be_taken_leaves_the_schedules(tmp_path: Path) -> None:
    def start() -> Device:
        return Owner("tpu", start_timeout=60)  # there is none here

    with pytest.raises(MachineError, match="could not be taken, 3 times in a row"):
        run(request(), tmp_path, devices(Slot(0, start)))
    assert len(rows(tmp_path, results.MODELLED)) == 2
    assert rows(tmp_path, results.INTERPRETED).empty


def test_measured_rows_make_a_table_without_more_ado(
    autotune: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Executables compiled for v6e, on a device of known latencies where the model's second is the best."""
    asked = request(kv_pages=(1, 2, 4))
    ranking = [BlockSizes(4, 32), BlockSizes(2, 32), BlockSizes(1, 32)]
    known = dict(zip(ranking, (110e-6, 100e-6, 150e-6), strict=True))
    device = KnownLatencies(known, noise=0.002)
    timing = Timing(source=results.MEASURED, device_kind="TPU v6 lite", rule=StoppingRule(max_seconds=1e9))
    folder = tmp_path / "r"
    run(asked, folder, Devices(timing, (Slot(0, lambda: device),)))
    timed = rows(folder, results.MEASURED)
    modelled = rows(folder, results.MODELLED)
    assert len(timed) == len(modelled) == 3
    assert (timed["vmem_used_bytes"].to_numpy() == modelled["vmem_used_bytes"].to_numpy()).all()
    assert timed["compile_seconds"].notna().all() and (timed["workload"] == "mixed").all()
    done = autotune("emit", "r", "-o", "table.py")
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "table.py").read_text()
    assert "MEASURED: every value was timed on a TPU." in table and "): (2, 32)," in table


@pytest.mark.slow
def test_two_chips_share_the_keys_and_rows_say_which(tmp_path: Path) -> None:
    chips_used = [Slot(chip, lambda: Owner("cpu")) for chip in (0, 1)]
    summary = run(request(keys=(KEY, LONGER)), tmp_path, devices(*chips_used))
    assert summary.timings == {"ok": 4} and summary.compiled == 2
    timed = rows(tmp_path, results.INTERPRETED)
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


def test_two_sweeps_at_once_time_each_key_once(tmp_path: Path) -> None:
    asked = request(keys=(KEY, LONGER))
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(run, asked, tmp_path, devices(Cpu().slot)) for _ in range(2)]
        done = [sweep_done.result() for sweep_done in running]
    assert sum(summary.compiled for summary in done) == 2
    assert sum(summary.timings["ok"] for summary in done) == 4
    timed = rows(tmp_path, results.INTERPRETED)
    assert timed.groupby("max_model_len").size().tolist() == [2, 2]
    raw = pd.concat([table.to_pandas() for table in results.tables(tmp_path, results.schema())])
    assert not raw.duplicated(results.IDENTITY).any(), "something was done twice"
