"""Timing a key: on real processes that hold the CPU as their device, and on a device of known latencies."""

from __future__ import annotations

import math
import random
import signal
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from autotune.errors import EXIT_MACHINE, MachineError
from autotune.kernel.jax_rpa.inputs import pool_pages
from autotune.kernel.problem import NO_SETTINGS, BlockSizes, Problem, Settings, TableKey
from autotune.kernel.workload import Sequence as Tokens
from autotune.kernel.workload import Workload
from autotune.results.schema import KERNEL_EVENTS, MODULE_EVENTS, WALL_CLOCK
from autotune.timing.device_process import Chip, Device, Owner, PrepareFailed
from autotune.timing.device_worker import Loaded, Timed, Turn
from autotune.timing.key_timing import Executables, Job, KeyTiming, Result
from autotune.timing.shortlist import Shortlist
from autotune.timing.slot import RESTART_SECONDS, Slot
from autotune.timing.statistics import Median, StoppingRule
from autotune.tpu.compiler import Compiled
from autotune.tpu.executable import Call, Executable, compile_ahead
from tests.timing.on_cpu import Cpu, Signaller
from tests.timing.scripted import Script, ScriptedDevice, dies, known

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
        pages = pool_pages(PROBLEM, BATCHES, interpreted=True)
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


def test_a_device_that_cannot_be_taken() -> None:
    starts = 0

    def start() -> Device:
        nonlocal starts
        starts += 1
        return Owner(Chip("tpu"), start_timeout=60)  # there is none here

    slot = Slot(0, start, sleep=lambda seconds: None)
    with pytest.raises(MachineError, match=r"chip 0 could not be taken, .*exit code 1") as raised:
        time_key(slot, job(), executables())
    assert raised.value.exit_code == EXIT_MACHINE and starts == 1 + len(RESTART_SECONDS)


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


MANY = tuple(BlockSizes(pages, queries) for pages in (2, 4, 8, 16) for queries in (16, 32, 64))
ANY = Executable(verdict=Compiled(status="ok", seconds=1.0), payload=b"")


RULE = StoppingRule(precision=0.01, max_seconds=1e9)
EVERY = Shortlist(MANY, exhaustive=True)


def time_scripted(script: Script, a_job: Job, rule: StoppingRule = RULE) -> list[Result]:
    return time_key(
        Slot(0, script.start, sleep=lambda seconds: None), a_job, executables(lambda b: ANY), rule
    )


def test_precision_is_reached_and_no_more_is_timed() -> None:
    found = time_scripted(Script(known(dict.fromkeys(MANY, 0.001)), noise=0.02), job(MANY, shortlist=EVERY))
    assert len(found) == len(MANY) * len(BATCHES)
    for result in found:
        assert result.found is not None and result.found.precision <= 0.01
        assert 6 <= len(result.seconds) <= 120


def test_noise_that_cannot_be_averaged_ends_with_the_samples() -> None:
    rule = StoppingRule(precision=1e-6, max_seconds=1e9, max_samples=100)
    found = time_scripted(Script(known(dict.fromkeys(BLOCKS, 0.001)), noise=0.2), job(BLOCKS), rule)
    assert {r.status for r in found} == {"ok"}
    assert all(r.found is not None and r.found.precision > 1e-6 for r in found)


def test_drift_hits_all_candidates_alike() -> None:
    """A device that gets 20% slower in 1,000 calls: equal candidates still come out equal."""
    script = Script(known(dict.fromkeys(MANY, 0.001)), noise=0.002, drift=0.2)
    rule = StoppingRule(precision=0.02, max_seconds=1e9)
    found = time_scripted(script, job(MANY, shortlist=EVERY), rule)
    medians = [r.found.median for r in found if r.found and r.workload == BATCHES[0]]
    assert max(medians) / min(medians) < 1.015
    for turns in script.rounds:  # as often each
        for workload in range(len(BATCHES)):
            assert len({count for turn, count in turns.items() if turn.workload == workload}) <= 1


def test_a_predicted_key_takes_two_traces() -> None:
    """At 1% of noise and kernels of 100 us; three candidates, then the wider ones do not come."""
    table = {blocks: 1e-4 * (1 + i / 3) for i, blocks in enumerate(MANY)}
    predicted = {b: {batch.fingerprint: seconds for batch in BATCHES} for b, seconds in table.items()}
    traces = []
    for seed in range(20):
        script = Script(known(table), noise=0.01, seed=seed)
        found = time_scripted(script, job(MANY, predicted=predicted))
        assert {r.blocks for r in found} == set(MANY[:4]) and {r.timer for r in found} == {KERNEL_EVENTS}
        traces.append(script.traces)
    assert statistics.mean(traces) <= 3 and max(traces) <= 5


def test_a_prediction_keeps_a_trace_short() -> None:
    """Kernels of 50 ms: as many calls as fill half a second, and no candidate more often than another."""
    table = dict.fromkeys(MANY[:4], 0.05)
    predicted = {b: {batch.fingerprint: 0.05 for batch in BATCHES} for b in table}
    script = Script(known(table), noise=0.001)
    time_scripted(script, job(MANY[:4], predicted=predicted))
    assert max(sum(turns.values()) for turns in script.rounds) <= 10


def test_widens_until_the_fastest_is_not_the_last() -> None:
    """The prediction is upside down: the shortlist grows to the end."""
    script = Script(known({b: 1e-3 / (1 + i) for i, b in enumerate(MANY)}), noise=0.001)
    asked: list[BlockSizes] = []
    found = time_key(Slot(0, script.start), job(MANY), executables(lambda b: ANY, asked), RULE)
    assert asked == list(MANY) and {r.blocks for r in found} == set(MANY)


def test_stays_with_the_shortlist_while_the_prediction_holds() -> None:
    script = Script(known({b: 1e-3 * (1 + i) for i, b in enumerate(MANY)}), noise=0.001)
    today = MANY[-1]
    found = time_scripted(script, job(MANY, shortlist=Shortlist(MANY, always=(today,))))
    assert list(dict.fromkeys(blocks for blocks, _ in script.loaded)) == [*MANY[:4], today]
    assert {r.blocks for r in found} == {*MANY[:4], today}


def test_candidates_are_timed_together_though_their_executables_come_one_by_one() -> None:
    script = Script(known(dict.fromkeys(MANY, 0.001)))
    threads: list[threading.Timer] = []

    def request(store: Executables, wanted: Sequence[BlockSizes]) -> None:
        for place, blocks in enumerate(wanted):
            threads.append(threading.Timer(0.05 * place, store.add, (blocks, ANY)))
            threads[-1].start()

    time_key(Slot(0, script.start), job(MANY), Executables(request), RULE)
    assert {turn.blocks for turn in script.rounds[0]} == set(MANY[:4])


# What dies.


def test_an_executable_that_kills_its_loader_is_the_last_that_is_sent() -> None:
    def load(blocks: BlockSizes, payload: bytes | None) -> None:
        if payload is not None:
            raise dies(blocks, "killed", loading=True)

    script = Script(known(dict.fromkeys(MANY, 0.001)), on_load=load)
    pauses: list[float] = []
    slot = Slot(0, script.start, sleep=pauses.append)
    found = time_key(slot, job(MANY, shortlist=EVERY), executables(lambda blocks: ANY), RULE)
    assert {r.status for r in found} == {"ok"} and all(r.compiled_here for r in found)
    assert script.started == 2 and sum(pauses) == RESTART_SECONDS[0]
    assert [payload for _, payload in script.loaded] == [b"", *[None] * len(MANY)]
    assert slot.refused == "killed"


def test_an_executable_that_does_not_load_is_the_last_that_is_sent() -> None:
    def refuse(blocks: BlockSizes, payload: bytes | None) -> Loaded:
        return Loaded("ok", None, compiled=True, refused=None if payload is None else "of another chip")

    script = Script(known(dict.fromkeys(MANY, 0.001)), on_load=refuse)
    found = time_scripted(script, job(MANY, shortlist=EVERY))
    assert {r.status for r in found} == {"ok"} and script.started == 1
    assert [payload for _, payload in script.loaded] == [b"", *[None] * (len(MANY) - 1)]


def test_a_candidate_that_kills_the_device_while_it_runs_says_nothing_of_executables() -> None:
    deaths = iter([True])

    def load(blocks: BlockSizes, payload: bytes | None) -> None:
        if blocks == MANY[1] and next(deaths, False):
            raise dies(blocks)

    script = Script(known(dict.fromkeys(MANY, 0.001)), on_load=load)
    slot = Slot(0, script.start, sleep=lambda seconds: None)
    found = time_key(slot, job(MANY, shortlist=EVERY), executables(lambda blocks: ANY), RULE)
    assert {r.status for r in found} == {"ok"} and not slot.refused
    assert {blocks for blocks, payload in script.loaded if payload is None} == {MANY[1]}


def test_a_preparation_that_kills_the_device_three_times_is_given_up() -> None:
    def prepare(problem: Problem) -> None:
        raise dies(None, "gone")

    script = Script(known({}), on_prepare=prepare)
    found = time_scripted(script, job())
    assert statuses(found) == {blocks: {"crashed"} for blocks in BLOCKS} and script.started == 3
    assert found[0].error == "the device died 3 times with no candidate running: gone"


def test_inputs_that_a_spoiled_process_could_not_make_are_made_by_the_next() -> None:
    refusals = iter([True])

    def prepare(problem: Problem) -> None:
        if next(refusals, False):
            raise PrepareFailed("INTERNAL: core halted")

    script = Script(known(dict.fromkeys(BLOCKS, 0.001)), on_prepare=prepare)
    found = time_scripted(script, job())
    assert {r.status for r in found} == {"ok"} and script.started == 2


def test_a_device_that_dies_before_its_clock_is_known_is_given_up_after_three_times() -> None:
    """The first profile of each process is empty, and each dies in its second, with nothing running."""
    script = Script(known(dict.fromkeys(BLOCKS, 0.001)), profiles=False)

    class Dies(ScriptedDevice):
        rounds = 0

        def time(self, order: Sequence[Turn]) -> Timed:
            self.rounds += 1
            if self.rounds > 1:
                raise dies(None, "gone")
            return super().time(order)

    def start() -> Device:
        script.start()
        return Dies(script)

    found = time_key(Slot(0, start, sleep=lambda s: None), job(), executables(lambda b: ANY), RULE)
    assert statuses(found) == {blocks: {"crashed"} for blocks in BLOCKS} and script.started == 3


def test_a_candidate_that_takes_its_chip_with_it_is_crashed_before_the_chip_is_given_up() -> None:
    """Else the next chip would be given the same candidate, and be lost too."""

    def load(blocks: BlockSizes, payload: bytes | None) -> None:
        if blocks == BLOCKS[1]:
            raise dies(blocks, "wedged")

    def never() -> None:
        raise dies()

    script = Script(known(dict.fromkeys(BLOCKS, 0.001)), on_load=load, starts=[lambda: None, never])
    slot = Slot(0, script.start, sleep=lambda seconds: None)
    found: list[Result] = []
    with pytest.raises(MachineError, match="chip 0 could not be taken"):
        for result in KeyTiming(job(), slot, executables(lambda b: ANY), RULE, random.Random(0)).run():
            found.append(result)
    assert {(r.blocks, r.status) for r in found} == {(BLOCKS[1], "crashed")}
    assert found[0].error == "wedged, and the chip could not be taken after it"


def test_the_death_of_the_chips_other_device_counts_for_nothing() -> None:
    deaths = iter([True] * 5)

    def prepare(problem: Problem) -> None:
        if next(deaths, False):
            raise dies(None, "gone", bystander=True)

    found = time_scripted(Script(known(dict.fromkeys(BLOCKS, 0.001)), on_prepare=prepare), job())
    assert {r.status for r in found} == {"ok"}


@pytest.mark.parametrize("seconds", [0, 20, 60])
def test_a_chip_that_is_busy_is_waited_for(seconds: float) -> None:
    """As a vfio node is for seconds after its holder was killed."""
    now = [0.0]

    def start() -> None:
        if now[0] < seconds:
            raise dies()

    script = Script(known(dict.fromkeys(BLOCKS, 0.001)), starts=[start])

    def sleep(pause: float) -> None:
        now[0] += pause

    found = time_key(Slot(0, script.start, sleep=sleep), job(), executables(lambda b: ANY), RULE)
    assert {r.status for r in found} == {"ok"}
    assert seconds <= now[0] <= sum(RESTART_SECONDS)


def test_a_chip_that_stays_busy_is_given_up() -> None:
    now = [0.0]

    def start() -> None:
        raise dies()

    def sleep(pause: float) -> None:
        now[0] += pause

    script = Script(known({}), starts=[start])
    with pytest.raises(MachineError, match="chip 3 could not be taken, last tried after 65 s: Device or"):
        time_key(Slot(3, script.start, sleep=sleep), job(), executables(lambda b: ANY), RULE)
    assert script.started == 4 and now[0] == 65


# The clock.


@pytest.mark.parametrize("lost", [0.01, 0.2])
def test_events_that_a_profile_lost_cost_samples_and_change_none(lost: float) -> None:
    table = {blocks: 1e-4 * (1 + i / 10) for i, blocks in enumerate(MANY)}
    for seed in range(10):
        found = time_scripted(Script(known(table), lost=lost, seed=seed), job(MANY, shortlist=EVERY))
        assert {r.timer for r in found} == {KERNEL_EVENTS} and len(found) == len(MANY) * len(BATCHES)
        for result in found:
            # A kernel event that fell to another run would be a sample of twice or more the time.
            assert all(0.9 < s / table[result.blocks] < 1.1 for s in result.seconds)
        best = min(found, key=lambda r: r.found.median if r.found else math.inf)
        assert best.blocks == MANY[0]


def test_a_device_whose_profiles_have_programs_and_no_kernel_is_timed_by_programs() -> None:
    script = Script(known(dict.fromkeys(BLOCKS, 1e-4)))
    device = script.start
    found = time_key(Slot(0, lambda: WithoutKernels(device())), job(), executables(lambda b: ANY), RULE)
    assert {r.timer for r in found} == {MODULE_EVENTS}
    assert all(r.found and 1e-4 < r.found.median < 1.1e-4 for r in found)


def WithoutKernels(device: ScriptedDevice) -> ScriptedDevice:
    run = device._run
    device._run = lambda name, seconds, kernel=True: run(name, seconds, kernel=False)  # type: ignore[method-assign]
    return device


def test_another_clock_than_before_times_everything_again() -> None:
    """Two candidates were timed by the device's trace; now there is only the host's clock."""
    before = {b: {batch.fingerprint: Median(1e-4, 1e-4, 1e-4) for batch in BATCHES} for b in MANY[:2]}
    a_job = job(MANY, shortlist=EVERY, timed=before, clock=KERNEL_EVENTS)
    asked: list[BlockSizes] = []
    script = Script(known(dict.fromkeys(MANY, 1e-4)), profiles=False)
    found = time_key(Slot(0, script.start), a_job, executables(lambda b: ANY, asked), RULE)
    assert Counter((r.blocks, r.workload.name, r.timer) for r in found) == Counter(
        (blocks, batch.name, WALL_CLOCK) for blocks in MANY for batch in BATCHES
    )
    assert sorted(asked) == sorted(MANY)


def test_a_clock_that_changes_when_the_device_restarts_times_everything_again() -> None:
    traced, untraced = (
        Script(known(dict.fromkeys(MANY, 1e-4))),
        Script(known(dict.fromkeys(MANY, 1e-4)), profiles=False),
    )
    deaths = iter([False] * 6 + [True])

    def load(blocks: BlockSizes, payload: bytes | None) -> None:
        if next(deaths, False):
            raise dies(None)

    traced.on_load = load
    devices = iter([traced, untraced])
    slot = Slot(0, lambda: next(devices).start(), sleep=lambda seconds: None)
    # The prediction is upside down: six are timed by traces before the seventh ends the process.
    upside_down = {b: 1e-3 / (1 + i) for i, b in enumerate(MANY)}
    traced.latency = untraced.latency = known(upside_down)
    found = time_key(slot, job(MANY), executables(lambda b: ANY), RULE)
    by_clock = Counter(r.timer for r in found)
    assert by_clock[KERNEL_EVENTS] == 6 * len(BATCHES) and by_clock[WALL_CLOCK] == len(MANY) * len(BATCHES)
