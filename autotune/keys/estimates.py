"""What a key would take by programs that were compiled before, or by a single one compiled now: modelled."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from autotune.compile.cache import Store
from autotune.kernel import workload
from autotune.kernel.problem import DEFAULT_MAX_NUM_SEQS, BlockSizes, Layout, Problem, Program, TableKey
from autotune.model.calibrate import current
from autotune.model.cost import latency_seconds
from autotune.results import dataset, schema
from autotune.results.rows import pair_of, rows_of
from autotune.results.scores import COMMITTED_ROWS
from autotune.search import space
from autotune.tpu.compiler import Compiled
from autotune.tpu.generations import Generation

# Tokens of the KV blocks, with the fewest queries, of the one program that is compiled where none is known:
# small enough to fit on every generation, and near what wins in most of the committed rows.
PROBE_TOKENS = 1024

Compile = Callable[[list[Program]], dict[Program, Compiled]]
Cycles = dict[BlockSizes, tuple[int, ...]]


class Estimate(NamedTuple):
    """Modelled seconds of one call of a key, the geometric mean over the default workloads, with the best of
    the block sizes whose programs are known; others may be faster. origin: who compiled them."""

    blocks: BlockSizes
    seconds: float
    origin: str


class Estimates:
    """Estimates on one generation, from the committed rows and from the store of compile results.

    Committed rows may be of another jax and libtpu than the installed ones, and of a higher VMEM limit than
    the compiler's own; what comes of them says so by its origin. compile: where no program of a layout is
    known, compiles one; without it such a key has no estimate.
    """

    def __init__(
        self,
        generation: Generation,
        store: Store | None = None,
        max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
        compile: Compile | None = None,  # noqa: A002 - what it does
    ) -> None:
        self.generation = generation
        self._store = store
        self._max_num_seqs = max_num_seqs
        self._compile = compile
        self._probed: dict[Program, Compiled] = {}

    def best(self, key: TableKey) -> Estimate | None:
        """The fastest pair of a key among those whose program is known; None where none is."""
        problem = key.canonical_problem(self._max_num_seqs)
        found = self._modelled(problem, self._committed.get(problem.layout, {}), "the committed rows")
        found += self._modelled(problem, self._kept(problem), "compiles of earlier sweeps")
        if not found:
            found = self._modelled(problem, self._probe(problem), "one program, and others may be faster")
        return min(found, key=lambda estimate: (estimate.seconds, estimate.blocks), default=None)

    def _modelled(self, problem: Problem, known: Cycles, origin: str) -> list[Estimate]:
        batches = [workload.generate(name, problem) for name in workload.GENERATORS]
        calibration = current(self.generation)
        found = []
        for blocks, cycles in known.items():
            if space.ruled_out(problem, blocks) is None:
                logs = [
                    math.log(latency_seconds(self.generation, problem, blocks, b, cycles, calibration))
                    for b in batches
                ]
                found.append(Estimate(blocks, math.exp(sum(logs) / len(logs)), origin))
        return found

    @functools.cached_property
    def _committed(self) -> dict[Layout, Cycles]:
        folder = COMMITTED_ROWS / self.generation.name
        if not folder.is_dir():
            return {}
        layout = ["q_dtype", "kv_dtype", "num_q_heads", "num_kv_heads", "head_dim", "page_size"]
        frame = dataset.read(folder, [*layout, "cycles"])
        ok = frame[(frame["status"] == schema.Status.OK) & frame["cycles"].notna()]
        distinct = ok.drop_duplicates([*layout, *schema.BLOCK_COLUMNS])
        known: dict[Layout, Cycles] = {}
        for row in rows_of(distinct):
            blocks = pair_of(row)
            known.setdefault(Layout(**{name: row[name] for name in layout}), {})[blocks] = tuple(
                row["cycles"]
            )
        return known

    def _kept(self, problem: Problem) -> Cycles:
        """Of the programs of a sweep without settings, those that the store holds."""
        if self._store is None or not self._store.path.is_file():  # asking would make the file
            return {}
        programs = [Program(layout=problem.layout, blocks=blocks) for blocks in space.candidates(problem)]
        return _cycles(self._store.get(self.generation.name, schema.Tools.installed(), programs))

    def _probe(self, problem: Problem) -> Cycles:
        """Of a single program, compiled now."""
        if self._compile is None:
            return {}
        fitting = [b for b in space.candidates(problem) if space.ruled_out(problem, b) is None]
        blocks = min(
            fitting,
            key=lambda b: (
                b.num_queries_per_blk,
                abs(b.num_kv_pages_per_blk * problem.page_size - PROBE_TOKENS),
            ),
            default=None,
        )
        if blocks is None:
            return {}
        program = Program(layout=problem.layout, blocks=blocks)
        if program not in self._probed:
            self._probed |= self._compile([program])
        return _cycles({program: self._probed[program]})


def _cycles(verdicts: dict[Program, Compiled]) -> Cycles:
    return {
        program.blocks: verdict.schedule.cycles
        for program, verdict in verdicts.items()
        if verdict.schedule is not None
    }
