"""The process that owns a device, on this machine's CPU: real programs, real deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.kernel.inputs import pool_pages
from autotune.kernel.problem import NO_SETTINGS, BlockSizes, Problem, Settings
from autotune.kernel.workload import Sequence, Workload
from autotune.owner import DeviceDied, Owner, PrepareFailed, environment
from autotune.tpu.executable import Call, compile_ahead
from autotune.tpu.timer import EMPTY_PROFILES
from autotune.tpu.trace import WALL_CLOCK

PROBLEM = Problem(
    num_q_heads=4,
    num_kv_heads=1,
    head_dim=128,
    page_size=16,
    max_num_batched_tokens=32,
    pages_per_seq=4,
    max_num_seqs=4,
)
BATCHES = (
    Workload("decodes", (Sequence(1, 64), Sequence(1, 35))),
    Workload("chunk", (Sequence(20, 33), Sequence(1, 64))),
)
SMALL, LARGE = BlockSizes(2, 16), BlockSizes(4, 32)


def call(blocks: BlockSizes, settings: Settings = NO_SETTINGS) -> Call:
    pages = pool_pages(PROBLEM, BATCHES)
    return Call(target=None, problem=PROBLEM, total_num_pages=pages, blocks=blocks, settings=settings)


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    owner = Owner("cpu", run_timeout=60)
    owner.prepare(PROBLEM, BATCHES, NO_SETTINGS, 0, None)
    yield owner
    owner.close()


@pytest.fixture
def doomed(payloads: dict[BlockSizes, bytes]) -> Iterator[Owner]:
    """An owner of its own, with a candidate taken in."""
    owner = Owner("cpu", run_timeout=2.0)
    owner.prepare(PROBLEM, BATCHES[:1], NO_SETTINGS, 0, None)
    assert owner.load(LARGE, payloads[LARGE]).status == "ok"
    yield owner
    owner.close()


@pytest.fixture(scope="module")
def payloads() -> dict[BlockSizes, bytes]:
    made = {blocks: compile_ahead(call(blocks)) for blocks in (SMALL, LARGE)}
    assert all(executable.verdict.status == "ok" for executable in made.values())
    return {blocks: executable.payload for blocks, executable in made.items() if executable.payload}


def test_loads_compares_and_times(owner: Owner, payloads: dict[BlockSizes, bytes]) -> None:
    assert owner.device_kind == "cpu"
    for blocks in (SMALL, LARGE):
        assert owner.load(blocks, payloads[blocks]) == ("ok", None, False)
    for _ in range(EMPTY_PROFILES):
        assert owner.time(0, [SMALL]).seconds == {}
    found = owner.time(1, [SMALL, LARGE, LARGE, SMALL, SMALL])
    assert found.timer == WALL_CLOCK
    assert {blocks: len(seconds) for blocks, seconds in found.seconds.items()} == {SMALL: 3, LARGE: 2}
    # A wall clock's samples are differences: on a busy machine one may be below zero, hardly all.
    assert any(second > 0 for seconds in found.seconds.values() for second in seconds)
    assert all(abs(second) < 60 for seconds in found.seconds.values() for second in seconds)


def test_compiles_itself_where_loading_fails(owner: Owner, payloads: dict[BlockSizes, bytes]) -> None:
    assert owner.load(SMALL, payloads[SMALL][:-100]) == ("ok", None, True)
    assert owner.load(LARGE, None) == ("ok", None, True)
    loaded = owner.load(BlockSizes(8, 16), None)  # more pages than a sequence has
    assert loaded.status != "ok" and "must be in range" in (loaded.error or "")
    assert owner.load(SMALL, payloads[SMALL]).status == "ok"  # the owner is as it was


def test_a_program_with_another_result_is_wrong(owner: Owner) -> None:
    """An executable of the kernel with a sliding window, where none was asked for."""
    other = compile_ahead(call(SMALL, Settings(sliding_window=4)))
    loaded = owner.load(SMALL, other.payload)
    assert loaded.status == "wrong_result"
    assert loaded.error is not None and loaded.error.startswith("workload decodes: ")
    assert "differ from the reference by more than 0.2" in loaded.error


def test_inputs_that_cannot_be_made(owner: Owner) -> None:
    too_long = Workload("too long", (Sequence(1, 1000),))
    with pytest.raises(PrepareFailed):
        owner.prepare(PROBLEM, [too_long], NO_SETTINGS, 0, None)
    owner.prepare(PROBLEM, BATCHES, NO_SETTINGS, 0, None)


def busy(owner: Owner, with_signal: int) -> DeviceDied:
    """What comes of a signal to the owner half a second into timing the large candidate."""
    timer = threading.Timer(0.5, os.kill, (owner.pid, with_signal))
    timer.start()
    try:
        with pytest.raises(DeviceDied) as raised:
            while True:
                owner.time(0, [LARGE] * 50)
    finally:
        timer.cancel()
    return raised.value


def test_killed_in_mid_measurement(doomed: Owner) -> None:
    died = busy(doomed, signal.SIGKILL)
    assert (died.blocks, died.status) == (LARGE, "crashed")
    assert "ended by SIGKILL" in died.said
    with pytest.raises(DeviceDied):  # it stays dead
        doomed.time(0, [LARGE])


def test_hangs_in_mid_measurement(doomed: Owner) -> None:
    died = busy(doomed, signal.SIGSTOP)
    assert (died.blocks, died.status) == (LARGE, "timeout")
    assert died.said == "no answer from the device for 2 s"
    with pytest.raises(ProcessLookupError):
        os.kill(doomed.pid, 0)  # and was ended


def test_a_run_that_raises_ends_the_owner(doomed: Owner) -> None:
    """A program for another shape of the inputs is refused when it is called."""
    other = Call(target=None, problem=PROBLEM, total_num_pages=3, blocks=SMALL, settings=NO_SETTINGS)
    with pytest.raises(DeviceDied) as raised:
        doomed.load(SMALL, compile_ahead(other).payload)
    assert (raised.value.blocks, raised.value.status) == (SMALL, "crashed")
    assert "Argument types differ" in raised.value.said


def test_no_device_says_what_the_runtime_said() -> None:
    with pytest.raises(DeviceDied) as raised:
        Owner("tpu", start_timeout=60)
    assert raised.value.blocks is None
    assert "exit code 1: " in raised.value.said and "tpu" in raised.value.said.lower()


def test_ends_when_its_parent_is_killed() -> None:
    code = (
        "import time; from autotune.owner import Owner; "
        "owner = Owner('cpu'); print(owner.pid, flush=True); time.sleep(99)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and Path(f"/proc/{pid}/cmdline").exists():
        if Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
            break  # ended, and nobody has asked for its exit code
        time.sleep(0.1)
    else:
        assert not Path(f"/proc/{pid}").exists()


def test_one_chip_a_process_where_there_are_several() -> None:
    assert environment("tpu", 2, 4) | {"TPU_MIN_LOG_LEVEL": ""} == environment("tpu", 0, 1) | {
        "TPU_VISIBLE_CHIPS": "2",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_MIN_LOG_LEVEL": "",
    }
    assert environment("cpu", 0, 1)["JAX_PLATFORMS"] == "cpu"
