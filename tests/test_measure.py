"""Timing a key: on real processes that hold the CPU as their device, and on a device of known latencies."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from autotune.errors import EXIT_MACHINE, MachineError
from autotune.kernel.inputs import pool_pages
from autotune.kernel.problem import NO_SETTINGS, BlockSizes, Problem, Settings, TableKey
from autotune.kernel.workload import Sequence as Tokens
from autotune.kernel.workload import Workload
from autotune.measure import Executables, Job, KeyTiming, Result, Slot
from autotune.owner import Device, DeviceDied, Owner
from autotune.shortlist import Shortlist
from autotune.tpu.compiler import Compiled
from autotune.tpu.executable import Call, Executable, compile_ahead
from autotune.tpu.session import Loaded, Timed
from autotune.tpu.statistics import Median, StoppingRule
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
BATCHES = (Workload("decodes", (Tokens(1, 64), Tokens(1, 35))), Workload("chunk", (Tokens(20, 33),)))
KEY = TableKey("bfloat16", "bfloat16", 4, 1, 128, 16, 32, 64)
BLOCKS = (BlockSizes(2, 16), BlockSizes(2, 32), BlockSizes(4, 32))


def job(ranking: Sequence[BlockSizes] = BLOCKS, **values: Any) -> Job:
    values = {"workloads": BATCHES, "shortlist": Shortlist(tuple(ranking)), "target": None, **values}
    return Job(key=KEY, problem=PROBLEM, settings=NO_SETTINGS, **values)


_compiled: dict[tuple[BlockSizes, Settings], Executable] = {}


def compiled(blocks: BlockSizes, settings: Settings = NO_SETTINGS) -> Executable:
    if (blocks, settings) not in _compiled:
        pages = pool_pages(PROBLEM, BATCHES)
        call = Call(target=None, problem=PROBLEM, total_num_pages=pages, blocks=blocks, settings=settings)
        _compiled[blocks, settings] = compile_ahead(call)
    return _compiled[blocks, settings]


def executables(
    make: Callable[[BlockSizes], Executable] = compiled, asked: list[BlockSizes] | None = None
) -> Executables:
    def request(store: Executables, wanted: Sequence[BlockSizes]) -> None:
        if asked is not None:
            asked.extend(wanted)
        for blocks in wanted:
            store.add(blocks, make(blocks))

    return Executables(request)


QUICK = StoppingRule(precision=0.5, max_seconds=0.3)


class Cpu:
    """Slots whose devices are real processes; keeps the one that runs."""

    def __init__(self, run_timeout: float = 60.0) -> None:
        self.run_timeout = run_timeout
        self.started: list[int] = []
        self.owner: Owner | None = None
        self.slot = Slot(0, self.start)

    def start(self) -> Device:
        self.owner = Owner("cpu", run_timeout=self.run_timeout, compile_timeout=20)
        self.started.append(self.owner.pid)
        return self.owner


def time_key(slot: Slot, a_job: Job, store: Executables, rule: StoppingRule = QUICK) -> list[Result]:
    try:
        return list(KeyTiming(a_job, slot, store, rule, random.Random(0)).run())
    finally:
        slot.close()


def test_every_candidate_is_timed_on_every_workload() -> None:
    cpu = Cpu()
    found = time_key(cpu.slot, job(), executables())
    assert Counter((r.blocks, r.workload.name) for r in found) == Counter(
        (blocks, batch.name) for blocks in BLOCKS for batch in BATCHES
    )
    for result in found:
        assert result.status == "ok" and result.error is None and result.timer == WALL_CLOCK
        assert result.found is not None and len(result.seconds) >= 1
        assert result.found.median == statistics.median(result.seconds)
        assert min(result.seconds) <= result.found.low <= result.found.high <= max(result.seconds)
        assert not result.compiled_here
    assert len(cpu.started) == 1


def test_wrong_result_is_never_timed() -> None:
    def make(blocks: BlockSizes) -> Executable:
        return compiled(blocks, Settings(sliding_window=4) if blocks == BLOCKS[1] else NO_SETTINGS)

    found = time_key(Cpu().slot, job(), executables(make))
    wrong = [r for r in found if r.blocks == BLOCKS[1]]
    assert [r.status for r in wrong] == ["wrong_result"] * 2 and not any(r.seconds for r in wrong)
    assert "differ from the reference" in (wrong[0].error or "")
    assert {r.status for r in found if r.blocks != BLOCKS[1]} == {"ok"}


class Signaller:
    """Sends a signal to the device's process when a candidate has just begun to run, as often as told."""

    def __init__(self, cpu: Cpu, victim: BlockSizes, with_signal: int, times: int) -> None:
        self.cpu, self.victim, self.signal, self.left = cpu, victim, with_signal, times
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *exception: object) -> None:
        self.stop.set()
        self.thread.join()

    def watch(self) -> None:
        before = None
        while self.left and not self.stop.wait(0.0005):
            owner = self.cpu.owner
            now = owner.running if owner else None
            if now == self.victim != before and owner:
                os.kill(owner.pid, self.signal)
                self.left -= 1
                self.stop.wait(0.5)  # until the parent has noticed
            before = now


def statuses(found: Sequence[Result]) -> dict[BlockSizes, set[str]]:
    return {blocks: {r.status for r in found if r.blocks == blocks} for blocks in BLOCKS}


@pytest.mark.slow
def test_a_candidate_that_kills_the_device_once_is_timed_all_the_same() -> None:
    cpu = Cpu()
    with Signaller(cpu, BLOCKS[1], signal.SIGKILL, times=1):
        found = time_key(cpu.slot, job(), executables())
    assert statuses(found) == {blocks: {"ok"} for blocks in BLOCKS}
    assert {r.blocks for r in found if r.compiled_here} <= {BLOCKS[1]}  # the second attempt
    assert len(cpu.started) == 2
    assert len(found) == len(BLOCKS) * len(BATCHES)  # each exactly once


def test_a_candidate_that_kills_the_device_twice_is_crashed_and_the_others_are_timed() -> None:
    cpu = Cpu()
    with Signaller(cpu, BLOCKS[1], signal.SIGKILL, times=2):
        found = time_key(cpu.slot, job(), executables())
    assert statuses(found) == {BLOCKS[0]: {"ok"}, BLOCKS[1]: {"crashed"}, BLOCKS[2]: {"ok"}}
    (error,) = {r.error for r in found if r.status == "crashed"}
    assert error is not None and "ended by SIGKILL" in error and error.endswith("2 times")
    assert len(cpu.started) == 3


def test_a_candidate_that_hangs_twice_is_a_timeout() -> None:
    cpu = Cpu(run_timeout=3.0)
    with Signaller(cpu, BLOCKS[2], signal.SIGSTOP, times=2):
        found = time_key(cpu.slot, job(), executables())
    assert statuses(found) == {BLOCKS[0]: {"ok"}, BLOCKS[1]: {"ok"}, BLOCKS[2]: {"timeout"}}
    (error,) = {r.error for r in found if r.status == "timeout"}
    # Stopped in a run, or while the device compiles its own on the second attempt.
    assert error in (
        "no answer from the device for 3 s, 2 times",
        "no answer from the device for 20 s, 2 times",
    )


def test_a_device_that_cannot_be_taken_three_times() -> None:
    starts = 0

    def start() -> Device:
        nonlocal starts
        starts += 1
        return Owner("tpu", start_timeout=60)  # there is none here

    with pytest.raises(MachineError, match=r"could not be taken, 3 times in a row: .*exit code 1") as raised:
        time_key(Slot(0, start), job(), executables())
    assert raised.value.exit_code == EXIT_MACHINE and starts == 3


def test_a_variable_that_keeps_the_device_from_starting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--bogus_flag")
    with pytest.raises(MachineError, match=r"in XLA_FLAGS.* is kept: unset XLA_FLAGS, then run"):
        time_key(Slot(0, lambda: Owner("cpu", start_timeout=60)), job(), executables())


def test_what_is_known_is_not_timed_again() -> None:
    known = {BLOCKS[0]: {b.fingerprint: Median(1e-3, 1e-3, 1e-3) for b in BATCHES}}
    known[BLOCKS[1]] = {BATCHES[0].fingerprint: Median(1e-3, 1e-3, 1e-3)}
    asked: list[BlockSizes] = []
    cpu = Cpu()
    found = time_key(cpu.slot, job(timed=known, failed=frozenset({BLOCKS[2]})), executables(asked=asked))
    assert asked == [BLOCKS[1]]
    assert [(r.blocks, r.workload.name, r.status) for r in found] == [(BLOCKS[1], "chunk", "ok")]
    everything = dict.fromkeys(BLOCKS, known[BLOCKS[0]])
    cpu = Cpu()
    assert time_key(cpu.slot, job(timed=everything), executables()) == []
    assert cpu.started == []  # no device was taken for nothing


def test_a_candidate_that_does_not_compile_at_the_keys_shape() -> None:
    def make(blocks: BlockSizes) -> Executable:
        if blocks != BLOCKS[0]:
            return compiled(blocks)
        return Executable(
            verdict=Compiled(status="vmem_oom", needed_bytes=9, limit_bytes=8, error="too large")
        )

    found = time_key(Cpu().slot, job(BLOCKS[:2]), executables(make))
    failed = [r for r in found if r.blocks == BLOCKS[0]]
    assert [(r.status, r.error, r.needed_bytes, r.limit_bytes) for r in failed] == [
        ("vmem_oom", "too large", 9, 8)
    ] * 2
    assert statuses(found)[BLOCKS[1]] == {"ok"}


def test_inputs_that_do_not_fit_fail_the_key_and_not_the_device() -> None:
    cpu = Cpu()
    too_long = Workload("too long", (Tokens(1, 1000),))
    found = time_key(cpu.slot, job(workloads=(too_long,)), executables())
    assert statuses(found) == {blocks: {"crashed"} for blocks in BLOCKS}
    assert (found[0].error or "").startswith("the inputs cannot be made on the device: ")


class KnownLatencies:
    """A device whose candidates take what they are said to take, with noise and a drift; it never sleeps."""

    chip = 0
    device_kind = "known"

    def __init__(self, latencies: Mapping[BlockSizes, float], noise: float, drift: float = 0.0) -> None:
        self.latencies, self.noise, self.drift = latencies, noise, drift
        self.rng = random.Random(5)
        self.calls = 0
        self.loaded: list[BlockSizes] = []
        self.rounds: list[Counter[BlockSizes]] = []

    def prepare(self, *arguments: object) -> None:
        pass

    def load(self, blocks: BlockSizes, payload: bytes | None) -> Loaded:
        self.loaded.append(blocks)
        return Loaded("ok", None, compiled=False)

    def time(self, workload: int, order: Sequence[BlockSizes]) -> Timed:
        seconds: dict[BlockSizes, list[float]] = {}
        self.rounds.append(Counter(order))
        for blocks in order:
            self.calls += 1
            slow = 1 + self.drift * self.calls / 1000
            seconds.setdefault(blocks, []).append(
                self.latencies[blocks] * slow * self.rng.gauss(1, self.noise)
            )
        return Timed(seconds, WALL_CLOCK, None)

    def close(self) -> None:
        pass


MANY = tuple(BlockSizes(pages, queries) for pages in (2, 4, 8, 16) for queries in (16, 32, 64))
ANY = Executable(verdict=Compiled(status="ok", seconds=1.0), payload=b"")


def time_known(device: KnownLatencies, a_job: Job, rule: StoppingRule) -> list[Result]:
    return time_key(Slot(0, lambda: device), a_job, executables(lambda blocks: ANY), rule)


def test_precision_is_reached_and_no_more_is_timed() -> None:
    device = KnownLatencies(dict.fromkeys(MANY, 0.001), noise=0.02)
    rule = StoppingRule(precision=0.01, max_seconds=1e9)
    found = time_known(device, job(MANY, shortlist=Shortlist(MANY, exhaustive=True)), rule)
    assert len(found) == len(MANY) * len(BATCHES)
    for result in found:
        assert result.found is not None and result.found.precision <= 0.01
        assert 6 <= len(result.seconds) <= 80


def test_noise_that_cannot_be_averaged_ends_with_the_time() -> None:
    device = KnownLatencies(dict.fromkeys(MANY, 0.001), noise=0.5)
    found = time_known(device, job(BLOCKS), StoppingRule(precision=1e-6, max_seconds=0.02))
    assert {r.status for r in found} == {"ok"}
    assert all(r.found is not None and r.found.precision > 1e-6 for r in found)


def test_drift_hits_all_candidates_alike() -> None:
    """A device that gets 20% slower in 1,000 calls: equal candidates still come out equal."""
    device = KnownLatencies(dict.fromkeys(MANY, 0.001), noise=0.002, drift=0.2)
    rule = StoppingRule(precision=0.02, max_seconds=1e9)
    found = time_known(device, job(MANY, shortlist=Shortlist(MANY, exhaustive=True)), rule)
    medians = [r.found.median for r in found if r.found and r.workload == BATCHES[0]]
    assert max(medians) / min(medians) < 1.015
    assert all(len(set(turn.values())) == 1 for turn in device.rounds)  # as often each


def test_widens_until_the_fastest_is_not_the_last() -> None:
    """The prediction is upside down: the shortlist grows to the end."""
    device = KnownLatencies({b: 1e-3 / (1 + i) for i, b in enumerate(MANY)}, noise=0.001)
    asked: list[BlockSizes] = []
    store = executables(lambda blocks: ANY, asked)
    rule = StoppingRule(precision=0.01, max_seconds=1e9)
    found = time_key(Slot(0, lambda: device), job(MANY), store, rule)
    assert asked == list(MANY) and {r.blocks for r in found} == set(MANY)


def test_stays_with_the_shortlist_while_the_prediction_holds() -> None:
    device = KnownLatencies({b: 1e-3 * (1 + i) for i, b in enumerate(MANY)}, noise=0.001)
    today = MANY[-1]
    shortlist = Shortlist(MANY, always=(today,))
    found = time_known(device, job(MANY, shortlist=shortlist), StoppingRule(max_seconds=1e9))
    assert list(dict.fromkeys(device.loaded)) == [*MANY[:4], today]
    assert {r.blocks for r in found} == {*MANY[:4], today}


def test_a_device_that_dies_with_nothing_running_ends_the_sweep() -> None:
    class Dies(KnownLatencies):
        def prepare(self, *arguments: object) -> None:
            raise DeviceDied(None, "crashed", "gone")

    with pytest.raises(MachineError, match="died 3 times with no candidate running: gone"):
        time_known(Dies({}, 0.0), job(), QUICK)
