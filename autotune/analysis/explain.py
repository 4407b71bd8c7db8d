"""Why a call gets its block sizes: its key step by step, what tables say, what runs and what that costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from autotune.errors import UsageError
from autotune.kernel import workload
from autotune.kernel.jax_rpa.tiling import explain_untileable, heads_per_blk, table_key
from autotune.kernel.problem import BlockSizes, Problem, Program, Settings, TableKey
from autotune.model.calibrate import current
from autotune.model.cost import latency_seconds
from autotune.results.scores import Failure, Score, Scoreboard
from autotune.tables.dialects import JAX
from autotune.tables.keys import Call, Key
from autotune.tables.lookup import DEFAULT, Answer, LookUp
from autotune.tables.table import Table
from autotune.tpu.compiler import Compiled
from autotune.tpu.generations import Generation


class Step(NamedTuple):
    """One part of the key: its name, its value at each step, and the rule."""

    name: str
    values: tuple[object, ...]
    rule: str


@dataclasses.dataclass(frozen=True)
class Said:
    """What one table says of a call, by its own look-up.

    device: the name that is asked for, where the table has it. key, value: None where the look-up refuses
    the call. row: whether a row has the value; else it is the default. answer: None for a table whose kernel
    is not JAX's.
    """

    table: Table
    device: str | None
    key: Key | None
    row: bool
    value: BlockSizes | None
    answer: Answer | None = None


@dataclasses.dataclass(frozen=True)
class Cost:
    """One pair on the call's own shape. seconds: of each default workload, by the model; None if unknown.

    row: what rows say of the pair on the call's key, where its program was not compiled.
    """

    blocks: BlockSizes
    verdict: Compiled | None
    seconds: dict[str, float] | None
    row: Score | Failure | None = None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """All of it. best: the best known pair of the key by the rows, cut to the call, and the rows' source.

    rows_limit: vmem_limit_bytes of those rows; None for the compiler's own.
    """

    problem: Problem
    generation: Generation
    settings: Settings
    steps: list[Step]
    key: TableKey
    said: list[Said]
    best: tuple[BlockSizes, str] | None = None
    rows_limit: int | None = None
    costs: dict[BlockSizes, Cost] = dataclasses.field(default_factory=dict)

    def pairs(self) -> list[BlockSizes]:
        """The distinct pairs that run by some table, and the best known one."""
        found = [said.answer.blocks for said in self.said if said.answer]
        return list(dict.fromkeys(found + ([self.best[0]] if self.best else [])))


def _heads(problem: Problem) -> tuple[int, int] | None:
    """Query and KV heads of a block of JAX's kernel."""
    return heads_per_blk(problem.num_q_heads, problem.num_kv_heads, problem.q_dtype, problem.kv_dtype)


def steps_of(problem: Problem, target: str = "v6e") -> tuple[list[Step], TableKey]:
    """How a call's shape becomes the key that JAX looks up.

    Raises:
      UsageError: the kernel cannot tile the heads; the message names layouts that it does tile.
    """
    heads = _heads(problem)
    if heads is None:
        raise UsageError(explain_untileable(problem, target))
    q, kv = heads
    key = table_key(problem)
    power = "power of two"
    pages = f"{problem.page_size} x {problem.pages_per_seq} pages"
    return [
        Step("dtypes", (f"{key.q_dtype}, {key.kv_dtype}",), "by name"),
        Step("query heads", (problem.num_q_heads, f"{q} a block", key.num_q_heads_per_blk), power),
        Step("KV heads", (problem.num_kv_heads, f"{kv} a block", key.num_kv_heads_per_blk), power),
        Step("head_dim", (problem.head_dim, key.head_dim), "multiple of 128"),
        Step("page_size", (problem.page_size, key.page_size), power),
        Step("tokens", (problem.max_num_batched_tokens, key.max_num_batched_tokens), power),
        Step("model length", (pages, problem.max_model_len, key.max_model_len), power),
    ], key


def explain(
    problem: Problem,
    generation: Generation,
    tables: Sequence[Table],
    settings: Settings = Settings(),  # noqa: B008 - frozen
    board: Scoreboard | None = None,
) -> Explanation:
    """What each table says of a call on a generation, and the best pair that rows know of for its key.

    Each is looked up as its own look-up does; what comes with this package and results folders as
    `autotune.tables` does, which alone tries the nearest key of the layout.

    Raises:
      UsageError: the kernel cannot tile the heads.
    """
    steps, key = steps_of(problem, generation.name)
    heads = _heads(problem)
    assert heads is not None
    said = [_said(table, problem, heads, settings, generation) for table in tables]
    best = None
    if board is not None and (found := board.best(generation.name, key)):
        clamped = found[0].clamped(problem.pages_per_seq, problem.max_num_batched_tokens)
        best = (clamped, found[1].source)
    limit = board.vmem_limit_bytes if board else None
    explanation = Explanation(problem, generation, settings, steps, key, said, best, limit)
    if board is not None:
        for blocks in explanation.pairs():
            row = board.score(generation.name, key, blocks) or board.failure(generation.name, key, blocks)
            explanation.costs[blocks] = Cost(blocks, None, None, row)
    return explanation


def _said(
    table: Table, problem: Problem, heads: tuple[int, int], settings: Settings, generation: Generation
) -> Said:
    """heads: of a block of JAX's kernel. Tables of other kernels are asked with those of the call."""
    of_jax = table.dialect is JAX
    call = Call(
        problem.q_dtype,
        problem.kv_dtype,
        *(heads if of_jax else (problem.num_q_heads, problem.num_kv_heads)),
        problem.head_dim,
        problem.page_size,
        problem.max_num_batched_tokens,
        problem.max_model_len,
        settings.sliding_window,
    )
    if of_jax:
        look_up = LookUp(table, generation.name, generation.version)
        answer = look_up.answer(call)
        return Said(table, look_up.device, answer.key, answer.origin != DEFAULT, answer.value, answer)
    found = table.look_up.find(table.devices, generation.name, call)
    if found is None:
        return Said(table, None, None, False, None)
    return Said(table, found.device, found.key, found.row, found.value)


def program(explanation: Explanation, blocks: BlockSizes) -> Program:
    """The program that the call runs with a pair: of its own heads, not of the padded ones."""
    return Program(layout=explanation.problem.layout, blocks=blocks, settings=explanation.settings)


def cost(explanation: Explanation, blocks: BlockSizes, verdict: Compiled) -> Cost:
    """What a pair costs on the call, given what the compiler says of its program.

    The model, with the user's calibration of the device where there is one, is of one block of heads; heads
    in several blocks run one after the other.
    """
    problem = explanation.problem
    if verdict.schedule is None:
        return Cost(blocks, verdict, None)
    heads = _heads(problem)
    assert heads is not None
    calibration = current(explanation.generation)
    block = dataclasses.replace(problem, num_q_heads=heads[0], num_kv_heads=heads[1])
    seconds = {
        name: (problem.num_kv_heads // heads[1])
        * latency_seconds(
            explanation.generation,
            block,
            blocks,
            workload.generate(name, problem),
            verdict.schedule.cycles,
            calibration,
        )
        for name in workload.GENERATORS
    }
    return Cost(blocks, verdict, seconds)
