"""A sweep's programs among those of other sweeps into the same folder: none is compiled by two at once.

What another has claimed is left for later; by then its verdict is in the folder's rows, or its owner is gone
and the program is free again.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune import results
from autotune.claims import REST_SECONDS, Claims
from autotune.errors import MachineError, UsageError
from autotune.folders import Folder
from autotune.kernel.problem import Program, TableKey
from autotune.plan import Plan, Request, Trial, identity_of, known_from
from autotune.search import Search
from autotune.space import expected_compile_seconds
from autotune.store import program_id
from autotune.tpu.compiler import Compiled

if TYPE_CHECKING:
    import pandas as pd

# How often the folder is looked at while there is nothing to do but wait for others; every sweep a little
# differently, so that they do not keep meeting.
POLL_SECONDS = 2.0
LOOK_SECONDS = 1.0


class Learned(NamedTuple):
    """A verdict that another sweep came by, with the trials of this one that still lack rows."""

    program: Program
    verdict: Compiled
    trials: list[Trial]


class Sharing:
    """elsewhere: programs that the search asked for and that others have under way."""

    def __init__(
        self,
        request: Request,
        plan: Plan,
        search: Search,
        folder: Folder,
        claims: Claims,
        model: str,
        on_rows: Callable[[pd.DataFrame], None] = lambda frame: None,
    ) -> None:
        self._request = request
        self._plan = plan
        self._search = search
        self._folder = folder
        self._claims = claims
        self._model = model
        self._on_rows = on_rows
        self._tools = results.Tools.installed()
        self._read = set(plan.files)
        self._mine: set[Program] = set()
        self._verdicts: dict[Program, Compiled] = {}
        self._recorded: set[tuple[Any, ...]] = set()
        self._names: dict[Program, str] = {}
        self._refused: dict[TableKey, float] = {}
        self._rest_until = self._next_look = 0.0
        self.elsewhere: set[Program] = set()

    def wrote(self, names: Iterable[str]) -> None:
        """Files of rows are this sweep's own: nothing in them is news."""
        self._read.update(names)

    def next(self) -> Program | None:
        """A program to compile here, claimed; None if there is none, or none before another verdict."""
        if self.elsewhere:
            taken = self._claims.taken()
            for program in sorted(self.elsewhere, key=expected_compile_seconds, reverse=True):
                if self._name(program) not in taken and self._claim(program):
                    self.elsewhere.discard(program)
                    return program
        while found := self._search.next():
            if self._claim(found):
                return found
            self.elsewhere.add(found)
        return None

    def done(self, program: Program) -> None:
        """A program's verdict was told to the search, and its rows are published."""
        if program in self._mine:
            self._mine.discard(program)
            self._claims.release(self._name(program))

    def news(self) -> Iterator[Learned]:
        """What others learned since the last call, of programs that the search still has waiting.

        The folder is looked at once a second at most, as this is asked after every event.
        """
        if time.monotonic() >= self._next_look:
            self._look()
        for program, verdict in list(self._verdicts.items()):
            # An earlier one may have implied it.
            if program in self._search.waiting and program not in self._mine:
                self.elsewhere.discard(program)
                trials = [self._lacking(trial) for trial in self._plan.waiting[program]]
                yield Learned(program, verdict, [trial for trial in trials if trial.missing])
        self._verdicts.clear()
        self.elsewhere &= set(self._search.waiting)

    def wait(self) -> None:
        """Wait a little before looking again."""
        time.sleep(POLL_SECONDS * random.uniform(0.5, 1.0))

    def claim_key(self, key: TableKey, source: str) -> bool:
        """Claim the timing of a key, whose rows by others are then taken in; False if another times it.

        After a refusal the same is the answer for a while, as this too is asked after every event.
        """
        if time.monotonic() < self._refused.get(key, 0.0):
            return False
        if not self._claims.take(self._name_of_key(key, source)):
            self._refused[key] = time.monotonic() + POLL_SECONDS
            return False
        self._look()
        return True

    def key_done(self, key: TableKey, source: str) -> None:
        """A key is timed, and its rows are published."""
        self._claims.release(self._name_of_key(key, source))

    def _claim(self, program: Program) -> bool:
        if not self._claims.take(self._name(program)):
            return False
        # Who had it before me published its rows first.
        self._look()
        if program in self._verdicts:
            self._claims.release(self._name(program))
            return False
        self._mine.add(program)
        return True

    def _look(self) -> None:
        """Take in the rows of files that appeared."""
        now = time.monotonic()
        if now < self._rest_until:
            return
        self._next_look = now + LOOK_SECONDS
        try:
            new = [name for name in results.names(self._folder) if name not in self._read]
            if new:
                self._take_in(new)
        except MachineError:
            # A bucket that cannot be read now. A later look may go well, and each can take half a minute.
            self._rest_until = time.monotonic() + REST_SECONDS

    def _take_in(self, new: list[str]) -> None:
        try:
            frame = results.read(self._folder, only=new)
        except UsageError:
            # One that is no sweep's stops who decides from the rows; this sweep is only curious.
            self._read.update(new[:1] if len(new) == 1 else ())
            for name in new if len(new) > 1 else ():
                self._take_in([name])
            return
        self._read.update(new)
        recorded, verdicts = known_from(self._request, frame, self._tools, crashes=True)
        self._recorded |= recorded
        self._verdicts.update((p, v) for p, v in verdicts.items() if p in self._search.waiting)
        self._on_rows(frame)

    def _name(self, program: Program) -> str:
        if program not in self._names:
            target = self._request.generation.name
            self._names[program] = program_id(target, self._tools, program)[:32]
        return self._names[program]

    def _name_of_key(self, key: TableKey, source: str) -> str:
        asked = self._request
        said = [asked.generation.name, source, key, asked.max_num_seqs, asked.settings, self._tools]
        return hashlib.sha256(repr(said).encode()).hexdigest()[:32]

    def _lacking(self, trial: Trial) -> Trial:
        missing = tuple(
            batch
            for batch in trial.missing
            if identity_of(self._request, trial.key, trial.program, batch, self._tools, self._model)
            not in self._recorded
        )
        return trial._replace(missing=missing)
