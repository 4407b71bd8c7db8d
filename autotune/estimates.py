"""What a key would take by programs that were compiled before: modelled, with nothing compiled for it now."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from autotune import results, space
from autotune.calibrate import current
from autotune.cost import latency_seconds
from autotune.kernel import workload
from autotune.kernel.problem import DEFAULT_MAX_NUM_SEQS, BlockSizes, Layout, Program, TableKey
from autotune.scoreboard import COMMITTED_ROWS
from autotune.store import Store
from autotune.tpu.chips import Generation

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
    the compiler's own; what comes of them says so by its origin.
    """

    def __init__(
        self,
        generation: Generation,
        store: Store | None = None,
        max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
    ) -> None:
        self.generation = generation
        self._store = store
        self._max_num_seqs = max_num_seqs

    def best(self, key: TableKey) -> Estimate | None:
        """The fastest pair of a key among those whose program is known; None where none is."""
        problem = key.canonical_problem(self._max_num_seqs)
        batches = [workload.generate(name, problem) for name in workload.GENERATORS]
        calibration = current(self.generation)
        found = []
        for origin, known in (
            ("the committed rows", self._committed.get(problem.layout, {})),
            ("compiles kept from earlier sweeps", self._kept(key)),
        ):
            for blocks, cycles in known.items():
                if space.ruled_out(problem, blocks) is None:
                    logs = [
                        math.log(latency_seconds(self.generation, problem, blocks, b, cycles, calibration))
                        for b in batches
                    ]
                    found.append(Estimate(blocks, math.exp(sum(logs) / len(logs)), origin))
        return min(found, key=lambda estimate: (estimate.seconds, estimate.blocks), default=None)

    @functools.cached_property
    def _committed(self) -> dict[Layout, Cycles]:
        folder = COMMITTED_ROWS / self.generation.name
        if not folder.is_dir():
            return {}
        layout = ["q_dtype", "kv_dtype", "num_q_heads", "num_kv_heads", "head_dim", "page_size"]
        frame = results.read(folder, [*layout, "cycles"])
        ok = frame[(frame["status"] == "ok") & frame["cycles"].notna()]
        distinct = ok.drop_duplicates([*layout, *results.BLOCK_COLUMNS])
        known: dict[Layout, Cycles] = {}
        for row in results.rows_of(distinct):
            blocks = BlockSizes(*(row[name] for name in results.BLOCK_COLUMNS))
            known.setdefault(Layout(**{name: row[name] for name in layout}), {})[blocks] = tuple(
                row["cycles"]
            )
        return known

    def _kept(self, key: TableKey) -> Cycles:
        """Of the programs of a sweep without settings, those that the store holds."""
        if self._store is None or not self._store.path.is_file():  # asking would make the file
            return {}
        problem = key.canonical_problem(self._max_num_seqs)
        programs = [Program(layout=problem.layout, blocks=blocks) for blocks in space.candidates(problem)]
        verdicts = self._store.get(self.generation.name, results.Tools.installed(), programs)
        return {
            program.blocks: verdict.schedule.cycles
            for program, verdict in verdicts.items()
            if verdict.schedule is not None
        }
