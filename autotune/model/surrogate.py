"""Cycles of a KV block predicted for programs that were not compiled, with how far off that may be.

Within one layout of heads, whatever the page size, the schedule of a KV block is close to bilinear in KV
tokens and queries, with a little for each page: on v6e, 60 programs of five page sizes differ from such a
fit by 5 to 8% (root mean square) and by 25% at most. A few compiles therefore say which others could still
win. Beyond the programs that it was fitted to, where registers spill, the fit is too low: it errs towards
compiling. Programs of the same tokens and queries at other page sizes are nearly the same program: what the
fit has wrong of them, it has wrong of all alike, and is put right.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from autotune.kernel.problem import Program

TERMS = 5
# Half-width of a prediction's band: never below the first, and this many standard errors of the prediction.
# Replayed on 557 of the 619 programs of the 476 published keys on v6e, these cost no key its best candidate,
# by 283 compiles. A band as wide everywhere, and no siblings, lost 8 keys up to 3.7% by as many.
LEAST_ERROR = 0.03
ERRORS = 2.0
_RIDGE = 1e-9  # so that programs of one number of queries, of which others cannot be told, give a wide band


def features(program: Program) -> np.ndarray:
    """(1, KV tokens, queries, tokens * queries, pages) of a program's blocks, each about 1 in size."""
    pages, queries = program.blocks
    tokens = pages * program.layout.page_size
    return np.array([1.0, tokens / 1024, queries / 64, tokens * queries / 65536, pages / 8])


@dataclasses.dataclass(frozen=True)
class Surrogate:
    """A fit to compiled programs of one layout of heads.

    error: relative error of a single program, root mean square. spread: covariance of the coefficients in
    units of it: how little the programs say of a direction. siblings: by tokens and queries, how many times
    the fit's cycles the compiled programs have.
    """

    coefficients: np.ndarray
    error: float
    spread: np.ndarray
    siblings: Mapping[tuple[int, int], float]

    def cycles(self, program: Program) -> float:
        """Predicted depth-3 cycles, core cycles a KV block."""
        fitted = float(features(program) @ self.coefficients)
        return max(1.0, fitted * self.siblings.get(_size(program), 1.0))

    def least_cycles(self, program: Program) -> float:
        """What the cycles are at least, as far as the fit's own error tells.

        Programs of 32 queries hardly say what 64 cost: the band is as wide as the fit is uncertain there.
        """
        cycles = self.cycles(program)
        direction = features(program) / cycles
        band = ERRORS * self.error * float(np.sqrt(direction @ self.spread @ direction))
        return cycles * (1 - min(max(LEAST_ERROR, band), 0.9))


def fit(compiled: Iterable[tuple[Program, int]]) -> Surrogate | None:
    """A surrogate of (program, depth-3 cycles) pairs; None while there are too few to know its error.

    Least squares of the relative error, its coefficients not negative: more work never takes less time. The
    error is that of leaving each program out in turn.
    """
    pairs = list(compiled)
    if len(pairs) <= TERMS:
        return None
    rows = np.array([features(program) / cycles for program, cycles in pairs])
    left_out = [
        rows[i] @ _least_squares(np.delete(rows, i, axis=0)) - 1.0  # relative, as rows are over cycles
        for i in range(len(rows))
    ]
    error = float(np.sqrt(np.mean(np.square(left_out))))
    coefficients = _least_squares(rows)
    shares = defaultdict(list)
    for (program, _), share in zip(pairs, rows @ coefficients, strict=True):
        shares[_size(program)].append(1.0 / max(share, 0.1))
    siblings = {size: float(np.mean(times)) for size, times in shares.items()}
    spread = np.linalg.inv(rows.T @ rows + _RIDGE * np.eye(rows.shape[1]))
    return Surrogate(coefficients, error, spread, siblings)


def _size(program: Program) -> tuple[int, int]:
    """KV tokens and queries of a program's blocks."""
    pages, queries = program.blocks
    return pages * program.layout.page_size, queries


def _least_squares(rows: np.ndarray) -> np.ndarray:
    """Non-negative coefficients c for which rows @ c is nearest to 1.

    Terms whose coefficient comes out negative are dropped and the rest fitted again. Not scipy's nnls: its
    coefficients differ in 11% of fits, and with them a sweep's estimate of its time is 3.8 times too long
    after a tenth of it, in place of 1.3 (`python -m bench.estimate`).
    """
    active = list(range(rows.shape[1]))
    while active:
        solution = np.linalg.lstsq(rows[:, active], np.ones(len(rows)), rcond=None)[0]
        if (solution >= 0).all():
            break
        active = [term for term, value in zip(active, solution, strict=True) if value >= 0]
    coefficients = np.zeros(rows.shape[1])
    coefficients[active] = solution if active else 0.0
    return coefficients
