"""Which program to compile next: all of them in turn, or only those that could still win a key.

A search is asked for the next program whenever a worker is free, and told each verdict. What it leaves out
has no row: another run, with other versions or a better model, may want it.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from autotune.kernel.problem import BlockSizes, Layout, Program, Settings, TableKey
from autotune.model.surrogate import fit
from autotune.search.plan import Trial
from autotune.search.space import expected_compile_seconds
from autotune.tpu.compiler import Compiled

# A program is left out if no key could be this much faster with it: below what a model, or a clock, can tell.
WORTH_A_COMPILE = 0.005
# Of a program that takes longer to compile, more is asked: of one that takes ten minutes, ten times as much.
DEAR_SECONDS = 60.0
# Programs that a layout of heads starts from, cheap ones spread over the space.
SEEDS = 7
# Shares of the programs, and of the time that they would take, that searches of the published keys came to
# compile, on all generations: the outlook for layouts of which nothing is known yet.
TYPICAL_PROGRAMS = 0.37
TYPICAL_SECONDS = 0.1
# Relative half-width of a prediction's band from which on little is known of a program.
WIDE_BAND = 0.3
# Expected seconds of a compile that is run for a comparison only.
QUICK_SECONDS = 5.0

# Modelled seconds of a trial, its workloads taken together, given its program's cycles by loop depth.
Latency = Callable[[Trial, tuple[int, ...]], float]
# Cycles of compiled programs by loop depth, with all trials that have them.
Known = Mapping[Program, tuple[tuple[int, ...], list[Trial]]]


class Outlook(NamedTuple):
    """Programs still to be compiled, and the seconds that one core is expected to take for them."""

    programs: int
    seconds: float

    @classmethod
    def of(cls, programs: Iterable[Program]) -> Outlook:
        seconds = [expected_compile_seconds(program) for program in programs]
        return cls(len(seconds), sum(seconds))


class Search(abc.ABC):
    """waiting: programs without a verdict, each with the trials that it is for. best: of each key the least
    latency that is known, and whose; of no key where `latency` is None."""

    def __init__(
        self,
        waiting: Mapping[Program, list[Trial]],
        known: Known | None = None,
        latency: Latency | None = None,
    ) -> None:
        self.waiting = dict(waiting)
        self.best: dict[TableKey, tuple[float, BlockSizes]] = {}
        self._latency = latency
        self._in_flight: set[Program] = set()
        for cycles, trials in (known or {}).values():
            self._improve(trials, cycles)

    def add(self, waiting: Mapping[Program, list[Trial]], known: Known) -> None:
        """Take further candidates in. waiting: of programs that wait already, with the trials of before."""
        self.waiting.update(waiting)
        for cycles, trials in known.values():
            self._improve(trials, cycles)

    def next(self) -> Program | None:
        """A program to compile now; None if there is none, or none before another verdict is told."""
        program = self._pick()
        if program:
            self._in_flight.add(program)
        return program

    def tell(self, program: Program, verdict: Compiled) -> dict[Program, Compiled]:
        """A program's verdict; returns the verdicts of others that follow from it without a compile.

        What is no smaller than an overflow in both block sizes overflows.
        """
        self._in_flight.discard(program)
        trials = self.waiting.pop(program)
        if verdict.schedule:
            self._improve(trials, verdict.schedule.cycles)
        self._learn(program, verdict)
        implied = {}
        if verdict.status == "vmem_oom":
            for other in [p for p in self.waiting if p not in self._in_flight and _contains(p, program)]:
                del self.waiting[other]
                implied[other] = dataclasses.replace(
                    verdict,
                    seconds=None,
                    error="not compiled: {},{} overflows already".format(*program.blocks),
                )
                self._learn(other, implied[other])
        return implied

    @abc.abstractmethod
    def prospects(self) -> set[Program]:
        """Programs that would be compiled if no verdict changed anything, those under way included."""

    @abc.abstractmethod
    def outlook(self) -> Outlook:
        """What is still to be compiled, what is under way included, as far as can be told now."""

    @abc.abstractmethod
    def _pick(self) -> Program | None: ...

    @abc.abstractmethod
    def _learn(self, program: Program, verdict: Compiled) -> None: ...

    def _improve(self, trials: Iterable[Trial], cycles: tuple[int, ...]) -> None:
        if self._latency is None:
            return
        for trial in trials:
            found = self._latency(trial, cycles), trial.program.blocks
            self.best[trial.key] = min(found, self.best.get(trial.key, found))


def _contains(program: Program, other: Program) -> bool:
    """Whether a program has the other's layout and settings, and blocks no smaller than its."""
    return (
        program.layout == other.layout
        and program.settings == other.settings
        and all(mine >= theirs for mine, theirs in zip(program.blocks, other.blocks, strict=True))
    )


class Exhaustive(Search):
    """Every program, those expected to take longest first, so that no core ends up waiting."""

    _order: list[Program] | None = None

    def add(self, waiting: Mapping[Program, list[Trial]], known: Known) -> None:
        super().add(waiting, known)
        self._order = None

    def _pick(self) -> Program | None:
        if self._order is None:
            free = (program for program in self.waiting if program not in self._in_flight)
            self._order = sorted(free, key=expected_compile_seconds)
        while self._order:
            if (program := self._order.pop()) in self.waiting:
                return program
        return None

    def prospects(self) -> set[Program]:
        return set(self.waiting)

    def outlook(self) -> Outlook:
        return Outlook.of(self.waiting)

    def _learn(self, program: Program, verdict: Compiled) -> None:
        pass


class Contender(NamedTuple):
    """A program worth a compile: the share by which it may make a key faster, and its compile seconds."""

    gain: float
    seconds: float
    program: Program


_UNKNOWN = TYPICAL_PROGRAMS, TYPICAL_SECONDS


class Contenders(Search):
    """Only programs that could still win a key, given what is known of those already compiled.

    wanted: programs to compile at last although they cannot win, if that is quick: what a winner is compared
    with.
    """

    _latency: Latency

    def __init__(
        self,
        waiting: Mapping[Program, list[Trial]],
        known: Known,
        latency: Latency,
        wanted: Iterable[Program] = (),
    ) -> None:
        super().__init__(waiting, known, latency)
        quick = [p for p in set(wanted) if expected_compile_seconds(p) <= QUICK_SECONDS]
        self._wanted = sorted(quick, key=expected_compile_seconds)
        self._groups: dict[object, _Group] = {}
        self._join(waiting, known)
        for group in self._groups.values():
            group.seeds = seeds(group.waiting, SEEDS - len(group.known))

    def add(self, waiting: Mapping[Program, list[Trial]], known: Known) -> None:
        super().add(waiting, known)
        self._join(waiting, known)

    def _join(self, waiting: Mapping[Program, list[Trial]], known: Known) -> None:
        """Put programs with those of their heads."""
        for program, trials in waiting.items():
            group = self._groups.setdefault(heads_of(program), _Group())
            group.waiting[program] = trials
            group.contenders = None
        for program, (cycles, _) in known.items():
            group = self._groups.setdefault(heads_of(program), _Group())
            group.known[program] = cycles
            group.contenders = None

    def prospects(self) -> set[Program]:
        found = {p for p in (*self._in_flight, *self._wanted) if p in self.waiting}
        for group in self._groups.values():
            self._contender(group)
            found.update(p for p in group.seeds if p in self.waiting)
            found.update(c.program for c in group.contenders or ())
            if group.unknown:
                found.update(group.waiting)
        return found

    def outlook(self) -> Outlook:
        found = {p for p in (*self._in_flight, *self._wanted) if p in self.waiting}
        for group in self._groups.values():
            found.update(p for p in group.seeds if p in self.waiting)
        programs, seconds = Outlook.of(found)
        expected = float(programs)
        for group in self._groups.values():
            self._contender(group)
            for program in group.waiting:
                if program not in found:
                    of_programs, of_seconds = group.chances.get(program, _UNKNOWN)
                    expected += of_programs
                    seconds += of_seconds * expected_compile_seconds(program)
        return Outlook(round(expected), seconds)

    def _pick(self) -> Program | None:
        # Seeds of all groups first: they are cheap, and everything else follows from them.
        for group in self._groups.values():
            while group.seeds:
                if (program := group.seeds.pop()) in self.waiting:
                    return program
        ranked = [found for group in self._groups.values() if (found := self._contender(group))]
        if ranked:
            return max(ranked, key=_promise).program
        while self._wanted:
            program = self._wanted.pop()
            if program in self.waiting and program not in self._in_flight:
                return program
        return None

    def _learn(self, program: Program, verdict: Compiled) -> None:
        group = self._groups[heads_of(program)]
        del group.waiting[program]
        group.contenders = None
        if verdict.schedule:
            group.known[program] = verdict.schedule.cycles

    def _contender(self, group: _Group) -> Contender | None:
        """The group's most promising program that is not on its way."""
        if group.contenders is None:
            group.contenders = self._rank(group)
        while group.contenders and group.contenders[-1].program in self._in_flight:
            group.contenders.pop()
        return group.contenders[-1] if group.contenders else None

    def _rank(self, group: _Group) -> list[Contender]:
        """The group's programs that are worth a compile, the most promising last."""
        surrogate = fit((program, cycles[3]) for program, cycles in group.known.items())
        group.unknown = surrogate is None
        if surrogate is None:
            # Too little is known to leave anything out: the cheapest, unless verdicts are on the way.
            if any(program in self._in_flight for program in group.waiting):
                return []
            found = (Contender(math.inf, expected_compile_seconds(p), p) for p in group.waiting)
            return sorted(found, key=lambda c: -c.seconds)[-1:]
        outer = _least_outer_cycles(group.known.values())
        predicted = {
            program: self._latencies(trials, (*outer, round(surrogate.cycles(program))))
            for program, trials in group.waiting.items()
        }
        hoped = self._hoped(predicted.values())
        contenders = []
        for program, trials in group.waiting.items():
            least = self._latencies(trials, (*outer, round(surrogate.least_cycles(program))))
            gain = max(1.0 - latency / self._best_of(key) for key, latency in least.items())
            seconds = expected_compile_seconds(program)
            if gain <= WORTH_A_COMPILE * max(1.0, seconds / DEAR_SECONDS):
                group.chances[program] = 0.0, 0.0
                continue
            contenders.append(Contender(gain, seconds, program))
            short = min(latency / hoped[key] for key, latency in predicted[program].items()) - 1.0
            band = short + 1.0 - min(latency / hoped[key] for key, latency in least.items())
            # The band is 0 where copies take the time, whatever the cycles.
            group.chances[program] = (chance(short / max(band, 1e-9), band),) * 2
        return sorted(contenders, key=_promise)

    def _best_of(self, key: TableKey) -> float:
        return self.best[key][0] if key in self.best else math.inf

    def _latencies(self, trials: Iterable[Trial], cycles: tuple[int, ...]) -> dict[TableKey, float]:
        """By key, the latency of a program that has these cycles."""
        return {trial.key: self._latency(trial, cycles) for trial in trials}

    def _hoped(self, predicted: Iterable[Mapping[TableKey, float]]) -> dict[TableKey, float]:
        """By key, the best latency that is known or, if the surrogate is right, will be."""
        hoped: dict[TableKey, float] = {}
        for latencies in predicted:
            for key, latency in latencies.items():
                hoped[key] = min(latency, hoped.get(key, self._best_of(key)))
        return hoped


@dataclasses.dataclass
class _Group:
    """Programs of one layout of heads and one setting, of every page size: one surrogate serves them.

    contenders: as ranked after the last verdict, None where a verdict came since. unknown: whether too little
    is known to leave any out. chances: what each program counts in the outlook, of its one program and of its
    seconds; empty while there is no surrogate.
    """

    waiting: dict[Program, list[Trial]] = dataclasses.field(default_factory=dict)
    known: dict[Program, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    seeds: list[Program] = dataclasses.field(default_factory=list)
    contenders: list[Contender] | None = None
    unknown: bool = True
    chances: dict[Program, tuple[float, float]] = dataclasses.field(default_factory=dict)


def heads_of(program: Program) -> tuple[Layout, Settings]:
    """What programs share that a search learns from together: all of the layout but the page size."""
    return dataclasses.replace(program.layout, page_size=1), program.settings


def _least_outer_cycles(known: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The least cycles of the outer depths that were seen: they hardly differ between programs."""
    return tuple(min(depth) for depth in zip(*(cycles[:3] for cycles in known), strict=True))


def seeds(programs: Iterable[Program], count: int) -> list[Program]:
    """Programs to start from: cheap ones at the corners and in the middle of the space, the cheapest last."""
    by_cost = sorted(programs, key=expected_compile_seconds)
    # The cheaper half, for a seed only has to show how cycles grow.
    cheap = by_cost[: max(count, len(by_cost) // 2)]

    def position(program: Program) -> tuple[float, float, float]:
        pages, queries = program.blocks
        return math.log2(pages * program.layout.page_size), math.log2(queries), math.log2(pages)

    chosen = cheap[: min(1, max(0, count))]
    while chosen and len(chosen) < min(count, len(cheap)):
        chosen.append(max(cheap, key=lambda p: min(math.dist(position(p), position(c)) for c in chosen)))
    return sorted(chosen, key=expected_compile_seconds, reverse=True)


def _promise(contender: Contender) -> float:
    """Gain by second of compiling: cheap programs first, which may show that a dear one cannot win."""
    return contender.gain / (1.0 + contender.seconds)


def chance(short: float, band: float) -> float:
    """How probable it is that a contender will be compiled, as far as can be told before others are.

    short: by how much it is predicted to miss the best that is hoped for, in half-widths of the prediction's
    band. band: that half-width, relative. From what became of contenders in searches of the published keys on
    v4, v5e and v5p: 0.96 of those that are predicted to be a key's best, 0.65, 0.4, 0.3, 0.2 by quarters of
    the band; but few of those with a wide band, which the next compiles make narrow.
    """
    sure = 0.95 if short <= 0 else 0.8 * math.exp(-1.7 * short)
    return sure * min(1.0, math.exp((WIDE_BAND - band) / 0.25))
