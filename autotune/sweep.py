"""A sweep: plan, compile, predict, record. Rows are all that it makes; tables are made of rows elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from autotune import results, shard, space
from autotune.calibrate import current
from autotune.claims import Claims
from autotune.cost import Calibration, latency_seconds
from autotune.errors import MachineError
from autotune.folders import Folder
from autotune.kernel.problem import Program
from autotune.outbox import Outbox
from autotune.plan import Plan, Request, Trial, make_plan
from autotune.pool import StartPool, Task
from autotune.search import Contenders, Exhaustive, Outlook, Search
from autotune.shard import Shard
from autotune.sharing import Sharing
from autotune.store import Store
from autotune.tpu.chips import Generation
from autotune.tpu.compiler import Compiled
from autotune.workers import CompilePool


@dataclasses.dataclass
class Summary:
    """What a sweep did.

    statuses: candidates newly recorded, by status. compiled: programs compiled. shared: compiles saved, as
    other keys have the same program. implied: candidates that overflow as a smaller one does. left_out:
    candidates of programs that could not win a key. Of programs that another sweep into the folder compiled
    meanwhile: elsewhere, candidates that it recorded; learned, those that were recorded here.

    Of a sweep on a device: timings, candidates newly timed, by status and once a workload; clocks, what timed
    them; compiled_here, those whose executable did not load; refused, why the first of those did not.
    """

    statuses: Counter[str] = dataclasses.field(default_factory=Counter)
    compiled: int = 0
    shared: int = 0
    elsewhere: int = 0
    learned: int = 0
    implied: int = 0
    left_out: int = 0
    timings: Counter[str] = dataclasses.field(default_factory=Counter)
    clocks: Counter[str] = dataclasses.field(default_factory=Counter)
    compiled_here: int = 0
    refused: str | None = None


class Progress(contextlib.AbstractContextManager["Progress"], Protocol):
    """Told of each program that is to be compiled, of each that has its verdict, with what is left after it,
    and of new rows."""

    def compiling(self, task: Task) -> None: ...

    def advance(self, task: Task, verdict: Compiled, outlook: Outlook) -> None: ...

    def recorded(self, rows: Iterable[Mapping[str, Any]]) -> None: ...


def load(folder: Folder, request: Request, store: Store | None, part: Shard | None = None) -> Plan:
    """The plan of a sweep into a folder, which need not exist yet.

    store: verdicts of earlier sweeps. part: only the programs of this shard.
    """
    files = results.names(folder)  # before they are read: what comes later is news
    frame = results.read(folder) if files or folder.is_dir() else None
    tools = results.Tools.installed()

    def kept(programs: list[Program]) -> dict[Program, Compiled]:
        return store.get(request.generation.name, tools, programs) if store else {}

    mine = shard.programs(request, part) if part else None
    plan = make_plan(request, frame, tools, current(request.generation).version, kept, mine)
    return dataclasses.replace(plan, files=frozenset(files))


def require_compiler() -> None:
    """Raises MachineError where libtpu, and so the TPU compiler, is not there, or jax does not fit.

    A jax that does not fit need not stop a sweep: it could fill it with rows of failures.
    """
    from autotune import installed

    why = installed.too_old()
    if why is None and installed.libtpu_file() is None:
        why = (
            "libtpu, which holds the TPU compiler, is not installed: on Linux x86-64 type "
            "`pip install 'jax[tpu]'`; it does not exist for other systems"
        )
    if why:
        raise MachineError(f"{why}; `autotune doctor` says more")


def search_for(request: Request, plan: Plan) -> Search:
    """How the programs of a plan are gone through.

    All of them where the user named block sizes or asked for all; else those that could still win a key.
    """
    if request.all_of_them:
        return Exhaustive(plan.waiting)

    calibration = current(request.generation)

    def latency(trial: Trial, cycles: tuple[int, ...]) -> float:
        blocks = trial.program.blocks
        logs = [
            math.log(latency_seconds(request.generation, trial.problem, blocks, batch, cycles, calibration))
            for batch in trial.workloads
        ]
        return math.exp(sum(logs) / len(logs))

    wanted = [
        program
        for program, trials in plan.waiting.items()
        if any(program.blocks in plan.incumbents[trial.key] for trial in trials)
    ]
    return Contenders(plan.waiting, plan.known, latency, wanted)


def run(
    request: Request,
    plan: Plan,
    search: Search,
    store: Store | None,
    folder: Folder,
    jobs: int,
    timeout: float,
    progress: Progress,
    start_pool: StartPool = CompilePool,
) -> Summary:
    """Carry out a plan; each verdict's rows are on disk before the next one is looked at.

    Raises:
      MachineError: there is something to compile, and no compiler.
      UsageError: the folder cannot be written.
    """
    tools = results.Tools.installed()
    calibration = current(request.generation)
    summary = Summary()
    results.remove_abandoned(folder)
    with Outbox(folder, plan.replaced) as outbox, Claims(folder) as claims:
        sharing = Sharing(request, plan, search, folder, claims, calibration.version)

        def record(settled: Iterable[tuple[Trial, Compiled]]) -> None:
            rows = []
            for trial, verdict in settled:
                made = list(model_rows(request.generation, trial, verdict, tools, calibration))
                summary.statuses[made[0]["status"]] += 1
                rows += made
            sharing.wrote(outbox.append(rows))
            progress.recorded(rows)

        def learn(task: Task, verdict: Compiled, trials: list[Trial]) -> None:
            record((trial, verdict) for trial in trials)
            for program, implied in search.tell(task.program, verdict).items():
                record((trial, implied) for trial in plan.waiting[program])
                summary.implied += len(plan.waiting[program])
            sharing.done(task.program)
            progress.advance(task, verdict, search.outlook())

        record(plan.settled)
        if not search.waiting:
            return summary
        require_compiler()
        compiling = 0

        def next_task() -> Task | None:
            nonlocal compiling
            while True:
                for program, verdict, trials in sharing.news():
                    summary.learned += len(trials)
                    summary.elsewhere += len(plan.waiting[program]) - len(trials)
                    learn(Task(request.generation.name, program), verdict, trials)
                if found := sharing.next():
                    compiling += 1
                    task = Task(request.generation.name, found)
                    progress.compiling(task)
                    return task
                if compiling or not sharing.elsewhere:
                    return None
                sharing.wait()

        # The progress ends before the pool does, which takes its time after a Ctrl-C.
        with start_pool(min(jobs, len(search.waiting)), timeout) as pool, progress:
            for task, verdict in pool.run(next_task):
                compiling -= 1
                trials = plan.waiting[task.program]
                if store:
                    store.put(request.generation.name, tools, task.program, verdict)
                summary.compiled += 1
                summary.shared += len(trials) - 1
                learn(task, verdict, trials)
    summary.left_out = sum(map(len, search.waiting.values()))
    return summary


def accounts(summary: Summary, plan: Plan) -> list[str]:
    """What became of every candidate, in sums that a person can check."""

    def count(number: int, noun: str) -> str:
        return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

    statuses = ", ".join(f"{number} {status}" for status, number in summary.statuses.most_common())
    newly = summary.statuses.total()
    fates = [f"{newly} newly recorded"]
    if plan.recorded:
        fates.append(f"{plan.recorded} recorded before")
    if summary.elsewhere:
        fates.append(f"{summary.elsewhere} recorded meanwhile by another sweep into the folder")
    if summary.left_out:
        fates.append(f"{summary.left_out} left out as they could not win (--exhaustive compiles them)")
    ways = [f"{count(summary.compiled, 'program')} compiled"]
    # Said also where it is nothing: it is what a sweep of several keys is for.
    ways.append(f"{count(summary.shared, 'compile')} saved by sharing programs between keys")
    for number, way in (
        (summary.implied, "overflow as smaller ones do"),
        (plan.ruled_out, "ruled out by size alone"),
        (plan.reused, "known from compiles of the same program"),
        (summary.learned, "known from compiles of another sweep meanwhile"),
    ):
        if number:
            ways.append(f"{number} {way}")
    return [
        f"{count(plan.candidates, 'candidate')} = {' + '.join(fates)}",
        f"newly recorded candidates: {statuses or 'none'}",
        *([f"{newly} newly recorded = {' + '.join(ways)}"] if newly else []),
    ]


def model_rows(
    generation: Generation,
    trial: Trial,
    verdict: Compiled,
    tools: results.Tools,
    calibration: Calibration,
) -> Iterator[dict[str, Any]]:
    """The modelled rows of one candidate of one key, a row a workload."""
    compiled = verdict.schedule
    if compiled:
        overflow = space.smem_overflow(generation, trial.problem, trial.program, compiled.smem_bytes)
        if overflow:
            verdict = dataclasses.replace(overflow, schedule=compiled, seconds=verdict.seconds)
    for batch in trial.missing:
        latency_us = None
        if verdict.status == "ok" and compiled:
            blocks = trial.program.blocks
            latency_us = 1e6 * latency_seconds(
                generation, trial.problem, blocks, batch, compiled.cycles, calibration
            )
        yield results.row(
            target=generation.name,
            device_kind=generation.device_kinds[0],
            key=trial.key,
            problem=trial.problem,
            program=trial.program,
            workload=batch,
            source=results.MODELLED,
            model=calibration.version,
            status=verdict.status,
            tools=tools,
            latency_us=latency_us,
            cycles=compiled.cycles if compiled else None,
            vmem_used_bytes=compiled.vmem_bytes if compiled else None,
            smem_used_bytes=compiled.smem_bytes if compiled else None,
            needed_bytes=verdict.needed_bytes,
            limit_bytes=verdict.limit_bytes,
            compile_seconds=verdict.seconds,
            error=verdict.error,
        )
