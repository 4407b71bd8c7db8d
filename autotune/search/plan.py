"""What a sweep has to do: the candidates of every key, the distinct programs behind them, what is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.errors import UsageError
from autotune.kernel import workload
from autotune.kernel.jax_rpa.call import published_table
from autotune.kernel.problem import (
    DEFAULT_MAX_NUM_SEQS,
    NO_SETTINGS,
    BlockSizes,
    Problem,
    Program,
    Settings,
    TableKey,
)
from autotune.kernel.workload import Workload
from autotune.results import dataset, schema
from autotune.results.baselines import Incumbent, incumbent
from autotune.results.rows import program_of, rows_of
from autotune.search import space
from autotune.tpu.compiler import LASTING, Compiled
from autotune.tpu.generations import Generation
from autotune.tpu.schedule import Schedule

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for. kv_pages and queries of None leave the candidates to `space`.

    workloads: names that `workload.generate` knows, and Workloads that were read from files.
    """

    generation: Generation
    keys: tuple[TableKey, ...]
    kv_pages: tuple[int, ...] | None = None
    queries: tuple[int, ...] | None = None
    workloads: tuple[str | Workload, ...] = tuple(workload.GENERATORS)
    settings: Settings = NO_SETTINGS
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    seed: int = 0
    retry_failed: bool = False
    exhaustive: bool = False

    @property
    def named(self) -> bool:
        """Whether the user named block sizes."""
        return self.kv_pages is not None or self.queries is not None

    @property
    def all_of_them(self) -> bool:
        """Whether every candidate is compiled, not only those that could win."""
        return self.exhaustive or self.named


class Trial(NamedTuple):
    """A candidate of a key. missing: those of the workloads for which it has no row yet."""

    key: TableKey
    problem: Problem
    program: Program
    workloads: tuple[Workload, ...]
    missing: tuple[Workload, ...]


@dataclasses.dataclass
class Plan:
    """settled: trials whose verdict needs no compile. waiting: programs without a verdict, with their trials.

    known: cycles of programs that were compiled before, with their trials. incumbents: what a look-up answers
    today, by key. tried: the candidates of each key, those included that other shards compile. recorded:
    candidates whose rows are all there already. files: those that these rows are in. replaced: when rows were
    made that are to be made anew. frame: the rows that were there. planner: who plans what lies beyond.
    """

    settled: list[tuple[Trial, Compiled]] = dataclasses.field(default_factory=list)
    waiting: dict[Program, list[Trial]] = dataclasses.field(default_factory=dict)
    known: dict[Program, tuple[tuple[int, ...], list[Trial]]] = dataclasses.field(default_factory=dict)
    incumbents: dict[TableKey, Incumbent] = dataclasses.field(default_factory=dict)
    tried: dict[TableKey, set[BlockSizes]] = dataclasses.field(default_factory=dict)
    recorded: int = 0
    ruled_out: int = 0
    reused: int = 0
    replaced: dataset.Replaced = dataclasses.field(default_factory=dict)
    frame: pd.DataFrame | None = None
    planner: Planner | None = None

    @property
    def candidates(self) -> int:
        """Candidates of all keys, recorded ones included."""
        return self.recorded + len(self.settled) + sum(map(len, self.waiting.values()))

    def take_in(self, more: Plan) -> None:
        """Add the candidates of another plan for the same request, of which none is in this one."""
        self.settled += more.settled
        for program, trials in more.waiting.items():
            self.waiting.setdefault(program, []).extend(trials)
        for program, (cycles, trials) in more.known.items():
            self.known.setdefault(program, (cycles, []))[1].extend(trials)
        for key, blocks in more.tried.items():
            self.tried.setdefault(key, set()).update(blocks)
        self.recorded += more.recorded
        self.ruled_out += more.ruled_out
        self.reused += more.reused


class Planner:
    """Plans of one request, given the rows that its folder holds.

    frame: rows as `results.read` gives them; None for a new folder. model: version of the cost model that
    will fill latencies. kept: verdicts that are kept elsewhere, of programs that the rows do not hold.
    """

    def __init__(
        self,
        request: Request,
        frame: pd.DataFrame | None,
        tools: schema.Tools,
        model: str | None,
        kept: Callable[[list[Program]], dict[Program, Compiled]] = lambda programs: {},
    ) -> None:
        self.request = request
        self._frame = frame
        self._common = {  # parts of an identity that all candidates share
            "target": request.generation.name,
            "max_num_seqs": request.max_num_seqs,
            "source": schema.MODELLED,
            "model": model,
            **dataclasses.asdict(request.settings),
            **dataclasses.asdict(tools),
        }
        self._kept = kept
        self._recorded, self._verdicts = known(request, frame, tools)
        self._published = published_table()

    def plan(self, mine: Collection[Program] | None = None) -> Plan:
        """The plan of the whole request. mine: the programs to sweep, all by default; of the others, what
        rows hold is known.

        Raises:
          UsageError: a workload does not fit a key.
        """
        request = self.request
        plan = Plan(replaced=_replaced(request, self._frame), frame=self._frame, planner=self)
        for key in dict.fromkeys(request.keys):
            problem = key.canonical_problem(request.max_num_seqs)
            now = incumbent(request.generation, key, self._published)
            programs = candidates_of(request, problem, [blocks for blocks in now if blocks])
            plan.tried[key] = {program.blocks for program in programs}
            if mine is None or any(program in mine for program in programs):
                plan.incumbents[key] = now
            self._add(plan, key, problem, programs, mine)
        self._look_elsewhere(plan)
        return plan

    def beyond(self, plan: Plan, best: Mapping[TableKey, BlockSizes]) -> Plan:
        """The plan of what lies beyond the edges of a plan's candidates, by keys that have their best there;
        empty where none has."""
        more = Plan()
        for key, blocks in best.items():
            problem = key.canonical_problem(self.request.max_num_seqs)
            wider = space.beyond(problem, blocks, plan.tried[key])
            programs = [
                Program(layout=problem.layout, blocks=b, settings=self.request.settings) for b in wider
            ]
            more.tried[key] = set(wider)
            self._add(more, key, problem, programs, None)
        self._look_elsewhere(more)
        return more

    def learned(self, program: Program, verdict: Compiled) -> None:
        """A program that was compiled meanwhile."""
        self._verdicts[program] = verdict

    def _add(
        self,
        plan: Plan,
        key: TableKey,
        problem: Problem,
        programs: Iterable[Program],
        mine: Collection[Program] | None,
    ) -> None:
        """Add candidates of a key to a plan."""
        request = self.request
        workloads = tuple(workload_of(w, key, problem, request.seed) for w in request.workloads)
        for program in programs:
            missing = tuple(w for w in workloads if self._identity(key, program, w) not in self._recorded)
            trial = Trial(key, problem, program, workloads, missing)
            compiled = self._verdicts.get(program)
            if compiled and compiled.schedule:
                plan.known.setdefault(program, (compiled.schedule.cycles, []))[1].append(trial)
            if mine is not None and program not in mine:
                continue
            if not missing:
                plan.recorded += 1
            elif verdict := without_compile(request, problem, program):
                plan.ruled_out += 1
                plan.settled.append((trial, verdict))
            elif compiled:
                plan.reused += 1
                plan.settled.append((trial, compiled))
            else:
                plan.waiting.setdefault(program, []).append(trial)

    def _identity(self, key: TableKey, program: Program, batch: Workload) -> tuple[Any, ...]:
        """Of a candidate's modelled row on a workload."""
        own = {"workload_fingerprint": batch.fingerprint, **key._asdict(), **program.blocks._asdict()}
        return schema.identity({**self._common, **own})

    def _look_elsewhere(self, plan: Plan) -> None:
        """Take verdicts that are kept elsewhere into a plan."""
        for program, verdict in self._kept(list(plan.waiting)).items() if plan.waiting else ():
            trials = plan.waiting.pop(program)
            self.learned(program, verdict)
            plan.reused += len(trials)
            plan.settled += [(trial, verdict) for trial in trials]
            if verdict.schedule:
                plan.known.setdefault(program, (verdict.schedule.cycles, []))[1].extend(trials)


def workload_of(wanted: str | Workload, key: TableKey, problem: Problem, seed: int) -> Workload:
    """A workload of a request, at a key's problem; raises UsageError where it does not fit."""
    batch = workload.generate(wanted, problem, seed) if isinstance(wanted, str) else wanted
    if misfit := batch.misfit(problem):
        raise UsageError(f"workload {batch.name!r} does not fit the key {tuple(key)}: {misfit}")
    return batch


def candidates_of(request: Request, problem: Problem, incumbents: list[BlockSizes]) -> list[Program]:
    """The candidates of a key as programs; incumbents: see `space.candidates`."""
    blocks = space.candidates(problem, request.kv_pages, request.queries, incumbents)
    return [Program(layout=problem.layout, blocks=b, settings=request.settings) for b in blocks]


def without_compile(request: Request, problem: Problem, program: Program) -> Compiled | None:
    """The verdict on a candidate that needs no compile to be ruled out; None if it does."""
    return (
        space.ruled_out(problem, program.blocks)
        or space.page_table_overflow(request.generation, problem)
        or space.scratch_overflow(request.generation, program, named=request.named)
    )


def known(
    request: Request, frame: pd.DataFrame | None, tools: schema.Tools
) -> tuple[set[tuple[Any, ...]], dict[Program, Compiled]]:
    """Identities of the rows that are there, and the compiler's verdicts that they hold."""
    recorded: set[tuple[Any, ...]] = set()
    verdicts: dict[Program, Compiled] = {}
    if frame is None:
        return recorded, verdicts
    mine = (frame["target"] == request.generation.name) & (frame["source"] == schema.MODELLED)
    for name, value in dataclasses.asdict(tools).items():
        mine &= frame[name].isna() if value is None else frame[name] == value
    mine &= frame["status"].isin(schema.STATUSES)  # others are another version's, and made anew
    for line in rows_of(frame[mine]):
        if request.retry_failed and line["status"] not in LASTING:
            continue
        recorded.add(schema.identity(line))
        if line["compile_seconds"] is not None:
            verdict = _verdict(line)
            # An ok one without its schedule is of another's row: nothing can be predicted from it.
            if verdict.schedule or verdict.status != "ok":
                verdicts[program_of(line)] = verdict
    return recorded, verdicts


def _replaced(request: Request, frame: pd.DataFrame | None) -> dataset.Replaced:
    """Rows, timings among them, that are made anew though they are there: see `known`."""
    if frame is None:
        return {}
    again = ~frame["status"].isin(schema.STATUSES)
    if request.retry_failed:
        again |= ~frame["status"].isin(LASTING)
    return {schema.identity(line): line["time"] for line in rows_of(frame[again])}


def _verdict(line: Mapping[str, Any]) -> Compiled:
    schedule = None
    if line["cycles"] is not None:
        schedule = Schedule(tuple(line["cycles"]), line["vmem_used_bytes"], line["smem_used_bytes"])
    return Compiled(
        # A program whose page table overflowed at this row's key compiled well, and may fit another key.
        status="ok" if schedule else line["status"],
        schedule=schedule,
        needed_bytes=line["needed_bytes"],
        limit_bytes=line["limit_bytes"],
        error=line["error"],
        seconds=line["compile_seconds"],
    )
