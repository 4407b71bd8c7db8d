"""The compiler's verdicts on a handful of programs, for commands that ask about a table or a call."""

from __future__ import annotations

from collections.abc import Iterable

from autotune import sweep
from autotune.cli.progress import CompileProgress
from autotune.compile.cache import Store, default_path
from autotune.compile.local_pool import CompilePool
from autotune.compile.pool import Task
from autotune.kernel.problem import Program
from autotune.results.dataset import Tools
from autotune.search import space
from autotune.search.strategy import Outlook
from autotune.tpu.compiler import Compiled
from autotune.tpu.generations import Generation

# Where nobody watches a bar, a wait that is longer than this is explained.
NOTICE_SECONDS = 2.0


def compile_all(
    generation: Generation, programs: Iterable[Program], *, named: bool, jobs: int, timeout: float
) -> dict[Program, Compiled]:
    """A verdict on each program, those expected to take longest first, with progress on standard error.

    named: compile also what its scratch alone rules out, for the compiler's own figure; see
    `space.scratch_overflow`. jobs: compiles at once. timeout: seconds that one may take. What the store of
    compile results knows is not compiled again.

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
    sweep.require_compiler()
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

    progress = CompileProgress(Outlook.of(waiting), at_once, notice=NOTICE_SECONDS)
    with CompilePool(at_once, timeout) as pool, progress:
        for task, verdict in pool.run(next_task):
            verdicts[task.program] = verdict
            store.put(generation.name, tools, task.program, verdict)
            under_way.discard(task.program)
            progress.advance(task, verdict, Outlook.of([*waiting, *under_way]))
    return verdicts
