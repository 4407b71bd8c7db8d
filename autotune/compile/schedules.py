"""The schedules of a sweep's candidates: which program to compile next, and what follows from a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from autotune.compile.cache import Store
from autotune.compile.pool import Task
from autotune.kernel.problem import BlockSizes, Program, TableKey
from autotune.results.schema import Tools
from autotune.search.plan import Plan, Request, Trial
from autotune.search.strategy import Outlook, Search
from autotune.tpu.compiler import Compiled

Settled = Iterable[tuple[Trial, Compiled]]


class Schedules:
    """Of one plan. record: told of trials that have their verdict, to write their rows. store: where verdicts
    are kept for other sweeps.

    compiled: programs compiled. shared: compiles saved, as other keys have the same program. implied:
    candidates that overflow as a smaller one does.
    """

    def __init__(
        self,
        request: Request,
        plan: Plan,
        search: Search,
        store: Store | None,
        record: Callable[[Settled], None],
    ) -> None:
        self._request = request
        self._plan = plan
        self._search = search
        self._store = store
        self._record = record
        self._tools = Tools.installed()
        self._open = dict.fromkeys(plan.incumbents)  # keys of which something may still be compiled, in order
        self._programs: dict[TableKey, set[Program]] = {key: set() for key in self._open}
        self._take_in(plan.waiting)
        self.compiled = self.shared = self.implied = 0

    @property
    def left_out(self) -> int:
        """Candidates whose program is not compiled."""
        return sum(map(len, self._search.waiting.values()))

    def outlook(self) -> Outlook:
        """What is still to be compiled, as far as can be told now."""
        return self._search.outlook()

    def waits(self, program: Program) -> bool:
        """Whether a program has no verdict."""
        return program in self._search.waiting

    def next(self) -> Task | None:
        """A program to compile now; None if there is none, or none before another verdict."""
        found = self._search.next()
        return Task(self._request.generation.name, found) if found else None

    def tell(self, task: Task, verdict: Compiled) -> None:
        """A program was compiled: its rows, and those of the programs of which the same follows."""
        trials = self._plan.waiting[task.program]
        if self._store:
            self._store.put(task.target, self._tools, task.program, verdict)
        self.compiled += 1
        self.shared += len(trials) - 1
        self._learn(task.program, verdict)
        for program, implied in self._search.tell(task.program, verdict).items():
            self.implied += len(self._plan.waiting[program])
            self._learn(program, implied)

    def complete(self) -> list[TableKey]:
        """The keys, each once, of which all is compiled that could win, and whose best is not on an edge."""
        found: list[TableKey] = []
        while self._open:
            # What the search will not compile, as it stands, no key waits for.
            wanted = self._search.prospects()
            done = [key for key in self._open if not self._programs[key] & wanted]
            if not done:
                break
            best = self._search.best
            wider = self.widen({key: best[key][1] for key in done if key in best})
            for key in done:
                if not wider.get(key):
                    del self._open[key]
                    found.append(key)
        return found

    def widen(self, best: Mapping[TableKey, BlockSizes]) -> dict[TableKey, set[BlockSizes]]:
        """Go on beyond the edges on which keys have their best: the candidates that are new, by key.

        None where the user named block sizes. A key that has some is not complete again.
        """
        if self._request.named:
            return {}
        assert self._plan.planner
        more = self._plan.planner.beyond(self._plan, best)
        self._plan.take_in(more)
        self._search.add({program: self._plan.waiting[program] for program in more.waiting}, more.known)
        self._take_in(more.waiting)
        self._open.update(dict.fromkeys(key for key, blocks in more.tried.items() if blocks))
        self._record(more.settled)
        return more.tried

    def _take_in(self, waiting: Mapping[Program, Iterable[Trial]]) -> None:
        for program, trials in waiting.items():
            for trial in trials:
                self._programs[trial.key].add(program)

    def _learn(self, program: Program, verdict: Compiled) -> None:
        assert self._plan.planner
        self._plan.planner.learned(program, verdict)
        self._record((trial, verdict) for trial in self._plan.waiting[program])
