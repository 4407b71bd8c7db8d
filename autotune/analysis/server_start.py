"""Whether a server's attention compiles: what its stack runs for each case of a call, and what would fit."""

from __future__ import annotations

import dataclasses
import functools
import queue
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autotune.compile.local_pool import CompilePool
from autotune.compile.rpa_v3 import Answer, Answers, Job
from autotune.kernel.problem import Problem, Settings
from autotune.kernel.rpa_v3.blocks import (
    CASES,
    DECODE,
    VARIABLES,
    Blocks,
    broken_rule,
    scratch_bytes,
    smaller,
)
from autotune.kernel.workload import Sequence as Lengths
from autotune.kernel.workload import Workload, generate
from autotune.model.calibrate import current
from autotune.model.rpa_v3 import bundles, latency_seconds
from autotune.tpu.compiler import Compiled
from autotune.tpu.generations import Generation, hardware

# Of smaller block sizes, two at a time are compiled, at these shares of the tokens in blocks, until one fits:
# registers that spill may double what large blocks need, and a compile takes up to some minutes.
SHARES = ((2, 8), (32, 128), (512, 2048))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """What is asked about: a server's layers of one kind.

    layers: their name where a model has several kinds. given: block sizes that the environment sets, by case.
    folder: the one that holds tpu_inference.
    """

    layers: str
    generation: Generation
    problem: Problem
    settings: Settings
    given: Mapping[str, Blocks]
    folder: Path

    @property
    def vmem_limit_bytes(self) -> int:
        """The kernel's own limit is all that a TensorCore has."""
        return self.settings.vmem_limit_bytes or hardware(self.generation).vmem_bytes


# Called with each compile that is started.
Told = Callable[[Server, str, Blocks | None], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
    """Block sizes that were compiled.

    seconds: modelled; None where they do not run, or the model does not know the loops.
    """

    blocks: Blocks
    answer: Answer
    seconds: float | None = None

    @property
    def fits(self) -> bool:
        return self.answer.verdict.status == "ok"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A case of the call. own: what the stack runs, None where it has no default. broken: a rule that these
    block sizes break. instead: smaller ones that were compiled."""

    name: str
    set_by: str
    own: Tried | None
    refusal: Compiled
    broken: str | None = None
    instead: tuple[Tried, ...] = ()

    @property
    def starts(self) -> bool:
        return self.own is not None and self.own.fits and self.broken is None


def check(pool: CompilePool, server: Server, told: Told) -> tuple[Case, ...]:
    """Both cases, each compiled as the stack would run it, and smaller ones where that would fail.

    Raises:
      MachineError: nothing can be compiled here.
    """
    own = _ask(pool, server, [(case, server.given.get(case)) for case in CASES], told)
    return tuple(_case(pool, server, case, answer, told) for case, answer in zip(CASES, own, strict=True))


def that_fit(
    pool: CompilePool, kinds: Sequence[tuple[Server, tuple[Case, ...]]], told: Told
) -> dict[str, Blocks]:
    """For each case that fails, the fastest block sizes known to fit, by the model.

    The environment sets them for layers of every kind, so those that fit one kind are compiled for the others
    too. A case is left out where none of what was tried fits all.
    """
    found = {}
    for number, name in enumerate(CASES):
        cases = [several[number] for _, several in kinds]
        if all(case.starts for case in cases):
            continue
        known = [
            {tried.blocks: tried for tried in (case.own, *case.instead) if tried is not None}
            for case in cases
        ]
        for blocks in _fastest_first(cases):
            for (server, _), tried in zip(kinds, known, strict=True):
                if blocks not in tried:
                    (answer,) = _ask(pool, server, [(name, blocks)], told)
                    tried[blocks] = _tried(server, name, answer)
            if all(tried[blocks].fits for tried in known):
                found[name] = blocks
                break
    return found


def _fastest_first(cases: Sequence[Case]) -> list[Blocks]:
    """What fits in place of what fails; block sizes whose loops the model does not know come last."""
    seconds: dict[Blocks, float] = {}
    for tried in (tried for case in cases for tried in case.instead if tried.fits):
        modelled = float("inf") if tried.seconds is None else tried.seconds
        seconds[tried.blocks] = max(modelled, seconds.get(tried.blocks, 0.0))
    return sorted(seconds, key=lambda blocks: seconds[blocks])


def _case(pool: CompilePool, server: Server, name: str, answer: Answer, told: Told) -> Case:
    set_by = VARIABLES[name] if name in server.given else "the kernel's own default"
    page_size = server.problem.page_size
    own = _tried(server, name, answer) if answer.blocks else None
    broken = broken_rule(answer.blocks, page_size) if answer.blocks else None
    case = Case(name=name, set_by=set_by, own=own, refusal=answer.verdict, broken=broken)
    if case.starts or answer.verdict.status == "smem_oom":  # which no block sizes change
        return case
    length = server.problem.max_model_len
    start = answer.blocks or Blocks(*((1, length, 1, length) if name == DECODE else (128, length, 128, 512)))
    limit = server.vmem_limit_bytes
    possible = [b for b in smaller(start, page_size) if scratch_bytes(server.problem, b) <= limit]
    found: list[Tried] = []
    for shares in SHARES:
        sizes = [start.bq_sz * start.bkv_sz // share for share in shares]
        batch = [next((b for b in possible if b.bq_sz * b.bkv_sz <= size), None) for size in sizes]
        asked: list[tuple[str, Blocks | None]] = [(name, blocks) for blocks in dict.fromkeys(batch) if blocks]
        answers = _ask(pool, server, asked, told)
        found += [_tried(server, name, answer) for answer in answers]
        if any(tried.fits for tried in found):
            break
    return dataclasses.replace(case, instead=tuple(found))


def _ask(
    pool: CompilePool,
    server: Server,
    asked: list[tuple[str, Blocks | None]],
    told: Told,
) -> list[Answer]:
    """The answers in the order of what is asked."""
    kept = Answers(server.folder)
    done: queue.SimpleQueue[tuple[int, Answer | Compiled]] = queue.SimpleQueue()
    jobs = []
    for number, (case, blocks) in enumerate(asked):
        job = Job(
            target=server.generation.name,
            folder=server.folder,
            case=case,
            blocks=blocks,
            problem=server.problem,
            settings=server.settings,
        )
        jobs.append(job)
        if answer := kept.get(job):
            done.put((number, answer))
        else:
            told(server, case, blocks)
            pool.submit(job, functools.partial(_put, done, number))
    answers: dict[int, Answer] = {}
    for _ in asked:
        number, came = done.get()
        if pool.broken:
            raise pool.broken
        if isinstance(came, Compiled):  # the process hung or died
            came = Answer(blocks=asked[number][1], verdict=came)
        kept.put(jobs[number], came)
        answers[number] = came
    return [answers[number] for number in range(len(asked))]


def _put(done: queue.SimpleQueue[tuple[int, Answer | Compiled]], number: int, answer: Answer) -> None:
    done.put((number, answer))


def _tried(server: Server, case: str, answer: Answer) -> Tried:
    assert answer.blocks
    counted = bundles(case, answer.loops) if answer.loops else None
    seconds = None
    if counted:
        calibration = current(server.generation)
        sequences = _sequences(server.problem, case)
        seconds = latency_seconds(
            server.generation, server.problem, case, answer.blocks, sequences, counted, calibration
        )
    return Tried(blocks=answer.blocks, answer=answer, seconds=seconds)


def _sequences(problem: Problem, case: str) -> tuple[Lengths, ...]:
    """Those of the generated batches that the case computes: sequences of one new token, or of more."""
    batch: Workload = generate("decode-heavy" if case == DECODE else "prefill-heavy", problem)
    return tuple(s for s in batch.sequences if (s.q_len == 1) == (case == DECODE))
