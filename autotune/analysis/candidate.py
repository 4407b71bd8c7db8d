"""One candidate on one device, by the parts of a sweep: compiled ahead, loaded, compared, timed, profiled."""

from __future__ import annotations

import dataclasses
import queue
import random
import statistics
import time

from autotune.compile.local_pool import CompilePool
from autotune.errors import MachineError
from autotune.kernel.jax_rpa.inputs import pool_pages
from autotune.kernel.jax_rpa.interpret import cut
from autotune.kernel.problem import BlockSizes
from autotune.results.schema import WALL_CLOCK
from autotune.search.plan import Request, workload_of
from autotune.timing.device_process import DeviceDied
from autotune.timing.device_worker import Turn
from autotune.timing.devices import Devices
from autotune.timing.key_timing import Executables, Job, KeyTiming, Result
from autotune.timing.shortlist import Shortlist
from autotune.timing.slot import Slot
from autotune.tpu.compiler import Compiled
from autotune.tpu.executable import Call, Executable

BLOCKS = BlockSizes(4, 32)  # they compile for every generation and layout of the preset
# How long a profile takes is asked of a short and of a long one, so often each.
PROFILE_CALLS = (1, 100)
PROFILE_REPEATS = 3


@dataclasses.dataclass
class Tried:
    """What came of one candidate on one device.

    verdict: of the compile ahead. refused: why its executable did not load. results: one a workload. error:
    why it has no right outputs. calls, found: those that were profiled, and those of them that the profiles
    hold. seconds: of one profile, by its calls.
    """

    verdict: Compiled
    refused: str | None = None
    results: list[Result] = dataclasses.field(default_factory=list)
    error: str | None = None
    calls: int = 0
    found: int = 0
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)


def try_candidate(request: Request, devices: Devices, timeout: float) -> Tried:
    """Compile BLOCKS of the first key ahead, time them on the first device as a sweep does, and see what a
    profile costs. timeout: seconds that the compile may take."""
    slot = devices.slots[0]
    job = _job(request, slot.index, devices.timing.interpreted)
    executable = _compiled_ahead(job, timeout)
    tried = Tried(executable.verdict)
    if executable.verdict.status != "ok":
        executable = Executable(verdict=Compiled(status="ok"))  # the device compiles it itself
    given = Executables(lambda store, wanted: store.add(BLOCKS, executable))
    try:
        for result in KeyTiming(job, slot, given, devices.timing.rule, random.Random(job.seed)).run():
            tried.results.append(result)
            if result.status != "ok" and not tried.error:
                tried.error = f"{result.status}: {result.error}"
        tried.refused = slot.refused
        if not tried.refused and executable.payload and any(r.compiled_here for r in tried.results):
            tried.refused = "no reason was given"
        if not tried.error and tried.results[-1].timer != WALL_CLOCK:
            _profile(slot, tried)
    except DeviceDied as died:
        slot.drop()
        tried.error = died.said
    except MachineError as error:
        tried.error = str(error)
    return tried


def _job(request: Request, index: int, interpreted: bool) -> Job:
    """BLOCKS of the first key, with the workloads of a sweep."""
    key = request.keys[0]
    problem = key.canonical_problem(request.max_num_seqs)
    made = (workload_of(w, key, problem, request.seed) for w in request.workloads)
    return Job(
        key=key,
        problem=problem,
        settings=request.settings,
        workloads=tuple(dict.fromkeys(cut(w, problem) if interpreted else w for w in made)),
        shortlist=Shortlist((BLOCKS,), widens=False),
        target=None if interpreted else request.generation.name,
        seed=request.seed,
        index=index,
    )


def _compiled_ahead(job: Job, timeout: float) -> Executable:
    """What a worker that holds no device makes of a candidate."""
    call = Call(
        target=job.target,
        problem=job.problem,
        total_num_pages=pool_pages(job.problem, job.workloads, interpreted=job.target is None),
        blocks=BLOCKS,
        settings=job.settings,
        device=job.index,
    )
    done: queue.SimpleQueue[Executable] = queue.SimpleQueue()
    with CompilePool(1, timeout) as pool:
        pool.submit(call, done.put)
        executable = done.get()
        if pool.broken:  # what came says nothing then
            return Executable(verdict=Compiled(status="crashed", error=str(pool.broken)))
    return executable


def _profile(slot: Slot, tried: Tried) -> None:
    """See what a profile of the candidate that was just timed costs, and what it loses."""
    for calls in PROFILE_CALLS:
        took = []
        for _ in range(PROFILE_REPEATS):
            start = time.monotonic()
            timed = slot.device().time([Turn(0, BLOCKS)] * calls)
            took.append(time.monotonic() - start)
            tried.calls += calls
            tried.found += sum(map(len, timed.seconds.values()))
        tried.seconds[calls] = statistics.median(took)
