"""The data of a problem's calls, made once for all its candidates, and the output that they must have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune.kernel.problem import DTYPE_BITS, Problem, Settings
from autotune.kernel.rpa import real_arguments
from autotune.kernel.workload import Batch, Workload, place

# By bits of the KV pages' dtype, absolute and relative at once: the tolerance of JAX's own test of this
# kernel, tests/pallas/tpu_ragged_paged_attention_test.py. Outputs are about 1.0 for standard normal inputs.
TOLERANCES = {32: 0.15, 16: 0.2, 8: 0.2, 4: 0.2}

# The reference makes every logit of a sequence at once; sequences with more are left out of the comparison.
MAX_REFERENCE_LOGITS = 1 << 28
# Each sequence of the reference is compiled on its own: this many of a batch, the telling ones.
MAX_REFERENCE_SEQUENCES = 6


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of one problem's calls on jax's default device, a batch a workload.

    The queries and the pool of pages are the same arrays for all of them.
    """

    batches: tuple[Batch, ...]
    arguments: tuple[tuple[Any, ...], ...]


@dataclasses.dataclass(frozen=True)
class Expected:
    """What the reference says for some tokens of a batch.

    tokens: their places in the output, int64[n]. values: float32[n, num_q_heads, head_dim].
    """

    tokens: Any
    values: Any
    tolerance: float

    def mismatch(self, output: Any) -> str | None:
        """Why an output is not the expected one; None where it is within the tolerance."""
        found = np.asarray(output[self.tokens], np.float32)
        error = np.abs(found - self.values)
        # Not `error > allowed`: that is false for a NaN.
        wrong = ~(error <= self.tolerance + self.tolerance * np.abs(self.values))
        if not wrong.any():
            return None
        rows = wrong.any(axis=(1, 2))
        at = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)
        return (
            f"{int(rows.sum())} of {len(rows)} compared tokens differ from the reference by more than "
            f"{self.tolerance:g}: {found[at]:.4g} for {self.values[at]:.4g} "
            f"at token {int(self.tokens[at[0]])}"
        )


def pool_pages(problem: Problem, workloads: Sequence[Workload]) -> int:
    """Pages of the pool that all of a problem's workloads share: one program then serves them all."""
    return max(batch.total_num_pages for batch in _placed(problem, workloads, 0))


def _placed(problem: Problem, workloads: Sequence[Workload], seed: int) -> list[Batch]:
    return [place(problem, batch, problem.layout.kv_bytes_per_token, seed) for batch in workloads]


def make_inputs(problem: Problem, workloads: Sequence[Workload], seed: int = 0) -> Inputs:
    """The data of a problem's calls, on jax's default device."""
    import jax.numpy as jnp

    batches = _placed(problem, workloads, seed)
    total = max(batch.total_num_pages for batch in batches)
    batches = [dataclasses.replace(batch, total_num_pages=total) for batch in batches]
    q, kv_pages, *_ = real_arguments(problem, batches[0], seed)
    arguments = tuple(
        (q, kv_pages, *map(jnp.asarray, (b.kv_lens, b.page_indices, b.cu_q_lens, b.num_seqs)))
        for b in batches
    )
    return Inputs(tuple(batches), arguments)


def compared_sequences(workload: Workload, num_q_heads: int) -> list[int]:
    """Which sequences of a batch are compared: the first, the last, and the extremes of both lengths.

    Fewer where the reference would take more memory than MAX_REFERENCE_LOGITS float32 for one of them; if it
    would for all, the one with the fewest logits.
    """
    sequences = workload.sequences
    logits = [q * kv * num_q_heads for q, kv in sequences]
    fitting = [i for i, count in enumerate(logits) if count <= MAX_REFERENCE_LOGITS]
    if not fitting:
        return [min(range(len(sequences)), key=logits.__getitem__)]
    chosen = [
        fitting[0],
        fitting[-1],
        max(fitting, key=lambda i: sequences[i].q_len),
        max(fitting, key=lambda i: sequences[i].kv_len),
        min(fitting, key=lambda i: sequences[i].kv_len),
        fitting[len(fitting) // 2],
    ]
    return sorted(set(chosen))[:MAX_REFERENCE_SEQUENCES]


def expected(
    problem: Problem, workload: Workload, batch: Batch, arguments: tuple[Any, ...], settings: Settings
) -> Expected:
    """What JAX's reference gives for the compared sequences of a batch, computed where the arguments are."""
    import jax
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    chosen = compared_sequences(workload, problem.num_q_heads)
    spans = [np.arange(batch.cu_q_lens[i], batch.cu_q_lens[i + 1]) for i in chosen]
    tokens = np.concatenate(spans)
    lengths = np.cumsum([0, *map(len, spans)]).astype(np.int32)

    # The lengths are constants of the program: the reference slices by them. One program for all sequences
    # compiles many times faster than the reference's operations one by one.
    def compute(q: Any, kv_pages: Any) -> Any:
        return kernel.ref_ragged_paged_attention(
            q[tokens],
            kv_pages,
            batch.kv_lens[chosen],
            batch.page_indices[chosen],
            lengths,
            np.array([len(chosen)], np.int32),
            sliding_window=settings.sliding_window,
            soft_cap=settings.soft_cap,
            k_scale=settings.k_scale,
            v_scale=settings.v_scale,
        )

    values = np.asarray(jax.jit(compute)(*arguments[:2]), np.float32)
    return Expected(tokens, values, TOLERANCES[DTYPE_BITS[problem.kv_dtype]])
