"""The compiler's verdicts on a handful of programs, for commands that ask about a table or a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Protocol

from autotune.compile.cache import Store, default_path
from autotune.compile.local_pool import CompilePool
from autotune.compile.pool import Task
from autotune.errors import MachineError
from autotune.io import installed
from autotune.kernel.problem import Program
from autotune.results.schema import Tools
from autotune.search import space
from autotune.search.strategy import Outlook
from autotune.tpu.compiler import Compiled
from autotune.tpu.generations import Generation


class Progress(contextlib.AbstractContextManager["Progress"], Protocol):
    """Told of each program that is to be compiled, and of each that has its verdict, with what is left."""

    def compiling(self, task: Task) -> None: ...

    def advance(self, task: Task, verdict: Compiled, outlook: Outlook) -> None: ...


def require_compiler() -> None:
    """Raises MachineError where libtpu, and so the TPU compiler, is not there, or jax does not fit.

    A jax that does not fit need not stop a sweep: it could fill it with rows of failures.
    """
    why = installed.too_old()
    if why is None and installed.libtpu_file() is None:
        why = (
            "libtpu, which holds the TPU compiler, is not installed: on Linux x86-64 type "
            "`pip install 'jax[tpu]'`; it does not exist for other systems"
        )
    if why:
        raise MachineError(f"{why}; `autotune doctor` says more")


def cached(generation: Generation, programs: Iterable[Program]) -> dict[Program, Compiled]:
    """The verdicts that need no compile: what was compiled before, and what its scratch alone rules out."""
    path, programs = default_path(), list(programs)
    known = Store(path).get(generation.name, Tools.installed(), programs) if path.is_file() else {}
    for program in programs:
        if program not in known and (verdict := space.scratch_overflow(generation, program, named=False)):
            known[program] = verdict
    return known


def compile_all(
    generation: Generation,
    programs: Iterable[Program],
    *,
    named: bool,
    jobs: int,
    timeout: float,
    start_progress: Callable[[Outlook, int], Progress],
) -> dict[Program, Compiled]:
    """A verdict on each program, those expected to take longest first.

    named: compile also what its scratch alone rules out, for the compiler's own figure; see
    `space.scratch_overflow`. jobs: compiles at once. timeout: seconds that one may take. start_progress:
    given what is to be compiled, and how many at once. What the cache knows is not compiled again.

    Raises:
      MachineError: there is something to compile, and no compiler.
    """
    store, tools = Store(default_path()), Tools.installed()
    distinct = list(dict.fromkeys(programs))
    verdicts = store.get(generation.name, tools, distinct)
    waiting = []
    for program in distinct:
        if program in verdicts:
            continue
        if verdict := space.scratch_overflow(generation, program, named=named):
            verdicts[program] = verdict
        else:
            waiting.append(program)
    if not waiting:
        return verdicts
    require_compiler()
    waiting.sort(key=space.expected_compile_seconds)
    at_once = min(jobs, len(waiting))
    under_way: set[Program] = set()

    def next_task() -> Task | None:
        if not waiting:
            return None
        program = waiting.pop()
        under_way.add(program)
        task = Task(generation.name, program)
        progress.compiling(task)
        return task

    progress = start_progress(Outlook.of(waiting), at_once)
    with CompilePool(at_once, timeout) as pool, progress:
        for task, verdict in pool.run(next_task):
            verdicts[task.program] = verdict
            store.put(generation.name, tools, task.program, verdict)
            under_way.discard(task.program)
            progress.advance(task, verdict, Outlook.of([*waiting, *under_way]))
    return verdicts
