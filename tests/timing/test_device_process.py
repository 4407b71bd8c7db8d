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

from autotune.kernel.jax_rpa.inputs import pool_pages
from autotune.kernel.problem import NO_SETTINGS, BlockSizes, Problem, Settings
from autotune.kernel.workload import Sequence, Workload
from autotune.results.schema import WALL_CLOCK
from autotune.timing import device_process as owner_module
from autotune.timing.device_process import Chip, DeviceDied, Owner, PrepareFailed
from autotune.timing.device_worker import Turn
from autotune.timing.timer import EMPTY_PROFILES
from autotune.tpu.executable import Call, compile_ahead
from tests.conftest import ROOT

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


def call(blocks: BlockSizes, settings: Settings = NO_SETTINGS, device: int = 0) -> Call:
    pages = pool_pages(PROBLEM, BATCHES, interpreted=True)
    return Call(
        target=None, problem=PROBLEM, total_num_pages=pages, blocks=blocks, settings=settings, device=device
    )


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    owner = Owner(Chip("cpu"), run_timeout=60)
    owner.prepare(PROBLEM, BATCHES, NO_SETTINGS, 0, None)
    yield owner
    owner.close()


@pytest.fixture
def doomed(payloads: dict[BlockSizes, bytes]) -> Iterator[Owner]:
    """An owner of its own, with a candidate taken in."""
    owner = Owner(Chip("cpu"), run_timeout=2.0)
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
        assert owner.load(blocks, payloads[blocks]) == ("ok", None, False, None)
    for _ in range(EMPTY_PROFILES):
        assert owner.time([Turn(0, SMALL)]).seconds == {}
    found = owner.time([Turn(1, SMALL), *[Turn(0, LARGE)] * 2, *[Turn(0, SMALL)] * 3])
    assert found.timer == WALL_CLOCK
    assert {turn: len(seconds) for turn, seconds in found.seconds.items()} == {
        Turn(1, SMALL): 1,
        Turn(0, LARGE): 2,
        Turn(0, SMALL): 3,
    }
    # A wall clock's samples are differences: on a busy machine one may be below zero, hardly all.
    assert any(second > 0 for seconds in found.seconds.values() for second in seconds)
    assert all(abs(second) < 60 for seconds in found.seconds.values() for second in seconds)


def test_compiles_itself_where_loading_fails(owner: Owner, payloads: dict[BlockSizes, bytes]) -> None:
    loaded = owner.load(SMALL, payloads[SMALL][:-100])
    assert loaded[:3] == ("ok", None, True) and "truncated" in (loaded.refused or "")
    assert owner.load(LARGE, None) == ("ok", None, True, None)
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
                owner.time([Turn(0, LARGE)] * 50)
    finally:
        timer.cancel()
    return raised.value


def test_killed_in_mid_measurement(doomed: Owner) -> None:
    died = busy(doomed, signal.SIGKILL)
    assert (died.blocks, died.status) == (LARGE, "crashed")
    assert "ended by SIGKILL" in died.said
    with pytest.raises(DeviceDied):  # it stays dead
        doomed.time([Turn(0, LARGE)])


def test_hangs_in_mid_measurement(doomed: Owner) -> None:
    died = busy(doomed, signal.SIGSTOP)
    assert (died.blocks, died.status) == (LARGE, "timeout")
    assert died.said == "no answer from the device for 2 s"
    with pytest.raises(ProcessLookupError):
        os.kill(doomed.pid, 0)  # and was ended


_TIME_FOR_A_WHILE = """
import time
from autotune.timing.device_process import Chip, Owner
from tests.conftest import ROOT
from tests.timing.test_device_process import BATCHES, LARGE, NO_SETTINGS, PROBLEM, Turn
owner = Owner(Chip("cpu"), run_timeout=3.0)
owner.prepare(PROBLEM, BATCHES[:1], NO_SETTINGS, 0, None)
owner.load(LARGE, None)
print("timing", flush=True)
end = time.monotonic() + 6.0
while time.monotonic() < end:
    owner.time([Turn(0, LARGE)] * 50)
owner.close()
print("timed")
"""


def test_a_command_that_was_stopped_for_longer_than_a_run_may_take_goes_on() -> None:
    """As by Ctrl-Z, and fg some time later: the process with the device was stopped too."""
    with subprocess.Popen(
        [sys.executable, "-c", _TIME_FOR_A_WHILE],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "timing\n"
        time.sleep(0.5)
        os.killpg(parent.pid, signal.SIGSTOP)
        time.sleep(5.0)
        os.killpg(parent.pid, signal.SIGCONT)
        assert parent.stdout.read() == "timed\n"


def test_a_run_that_raises_ends_the_owner(doomed: Owner) -> None:
    """A program for another shape of the inputs is refused when it is called."""
    other = Call(target=None, problem=PROBLEM, total_num_pages=3, blocks=SMALL, settings=NO_SETTINGS)
    with pytest.raises(DeviceDied) as raised:
        doomed.load(SMALL, compile_ahead(other).payload)
    assert (raised.value.blocks, raised.value.status) == (SMALL, "crashed")
    assert "Argument types differ" in raised.value.said


def test_no_device_says_what_the_runtime_said() -> None:
    with pytest.raises(DeviceDied) as raised:
        Owner(Chip("tpu"), start_timeout=60)
    assert raised.value.blocks is None
    assert "exit code 1: " in raised.value.said and "tpu" in raised.value.said.lower()


def test_ends_when_its_parent_is_killed() -> None:
    code = (
        "import time; from autotune.timing.device_process import Chip, Owner; "
        "owner = Owner(Chip('cpu')); print(owner.pid, flush=True); time.sleep(99)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
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


@pytest.fixture
def pair() -> Iterator[tuple[Owner, Owner]]:
    """A chip of two devices, as v7x has: the CPU, split in two."""
    chip = Chip("cpu", num_devices=2)
    owners = [Owner(chip, index, run_timeout=30.0) for index in range(2)]
    for owner in owners:
        owner.prepare(PROBLEM, BATCHES, NO_SETTINGS, 0, None)
    yield owners[0], owners[1]
    owners[0].close()


def test_two_devices_of_a_chip_share_a_process_and_both_time(pair: tuple[Owner, Owner]) -> None:
    assert pair[0].pid == pair[1].pid
    found = {}

    def work(index: int) -> None:
        owner = pair[index]
        assert owner.load(SMALL, None).status == "ok"
        for _ in range(EMPTY_PROFILES):
            owner.time([Turn(0, SMALL)])
        found[index] = owner.time([Turn(0, SMALL)] * 3)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert found[index].timer == WALL_CLOCK and len(found[index].seconds[Turn(0, SMALL)]) == 3


def test_who_is_to_blame_when_a_chip_of_two_devices_dies(pair: tuple[Owner, Owner]) -> None:
    """The second times a candidate; the first has none at work, and hears of it at its next message."""
    assert pair[1].load(LARGE, None).status == "ok"
    guilty = busy(pair[1], signal.SIGKILL)
    assert guilty.blocks == LARGE and not guilty.bystander
    with pytest.raises(DeviceDied) as raised:
        pair[0].prepare(PROBLEM, BATCHES, NO_SETTINGS, 0, None)
    assert raised.value.blocks is None and raised.value.bystander


def test_the_next_process_of_a_chip_is_shared_again() -> None:
    chip = Chip("cpu", num_devices=2)
    first = [Owner(chip, index) for index in range(2)]
    first[1].close()
    second = [Owner(chip, index) for index in (0, 1)]
    try:
        assert second[0].pid == second[1].pid != first[0].pid
    finally:
        second[0].close()


def test_a_chip_with_fewer_devices_than_asked_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "autotune.timing.device_process._environment", lambda *_: {**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    with pytest.raises(DeviceDied, match="the chip has 1 devices, not 2"):
        Owner(Chip("cpu", num_devices=2))


_COMPILE_TWICE = """
import jax
def run():
    jax.clear_caches()
    jax.block_until_ready(jax.jit(lambda x: x * 2 + 1)(jax.numpy.ones(8)))
events = []
jax.monitoring.register_event_listener(lambda name, **kwargs: events.append(name))
run()
print(sum(name.endswith("/compilation_cache/cache_hits") for name in events))
"""


def test_a_process_that_holds_a_chip_finds_what_the_one_before_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the variables that such a process is given, here for the CPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    variables = {**owner_module._environment("tpu", 0, 1), "JAX_PLATFORMS": "cpu"}
    hits = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _COMPILE_TWICE], env=variables, capture_output=True, text=True, check=True
        )
        hits.append(int(done.stdout))
    assert hits[0] == 0 and hits[1] > 0
    assert any(owner_module.programs_folder().iterdir())
