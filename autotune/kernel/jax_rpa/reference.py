"""What the kernel must give, computed by numpy on the host for a sample of a batch's tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from autotune.kernel.problem import Problem, Settings
from autotune.kernel.workload import Sequence, Workload

# What the sample of one batch may cost, in logits (query rows times heads times tokens): up to 0.3 s of one
# core of a cloud machine, on 20 published keys. With one BLAS thread: several wait for one another in loops.
MAX_LOGITS = 1 << 24
# What fetching the keys and values of one token and head costs, in logits, measured there too.
FETCH_LOGITS = 8
# Query blocks cut the flattened tokens at multiples of powers of two. A multiple of 256 is one of the smaller
# sizes too, so it is the most telling.
BORDERS = (256, 128, 64, 32)
SPREAD_ROWS = 8


class Sample(NamedTuple):
    """A sequence, by its place in the batch, and which of its new tokens are computed: int64, ascending."""

    sequence: int
    rows: Any


def sample(problem: Problem, workload: Workload, settings: Settings) -> list[Sample]:
    """Which tokens of a batch are compared; the same for the same arguments.

    Always the first sequence, the last, and those with the most new tokens, the longest and the shortest
    context; others as long as all of them take half of MAX_LOGITS. Of each its last row, which sees the most,
    and what is left goes to more rows of them, in the order of `rows_by_interest`.
    """
    sequences = workload.sequences
    columns = [s.kv_len - first_column(s, settings) for s in sequences]
    row_cost = [problem.num_q_heads * count for count in columns]
    cost = [
        FETCH_LOGITS * problem.num_kv_heads * count + each
        for count, each in zip(columns, row_cost, strict=True)
    ]
    chosen, others = _by_interest(sequences)
    spent = sum(cost[i] for i in chosen)
    for i in others:
        if spent + cost[i] <= MAX_LOGITS // 2:
            chosen.append(i)
            spent += cost[i]
    left = max(0, MAX_LOGITS - spent)
    starts = np.cumsum([0, *(s.q_len for s in sequences)])
    samples = []
    # Those with few rows first: what they leave is shared by the others.
    chosen.sort(key=lambda i: sequences[i].q_len * row_cost[i])
    for place, i in enumerate(chosen):
        more = min(sequences[i].q_len - 1, left // (len(chosen) - place) // row_cost[i])
        left -= more * row_cost[i]
        rows = rows_by_interest(int(starts[i]), sequences[i].q_len)[: 1 + more]
        samples.append(Sample(i, np.sort(rows)))
    return sorted(samples, key=lambda s: s.sequence)


def _by_interest(sequences: tuple[Sequence, ...]) -> tuple[list[int], list[int]]:
    """The places of the telling sequences, and those of all others in random order."""
    every = range(len(sequences))
    telling = [
        0,
        len(sequences) - 1,
        max(every, key=lambda i: sequences[i].q_len),
        max(every, key=lambda i: sequences[i].kv_len),
        min(every, key=lambda i: sequences[i].kv_len),
    ]
    order = np.random.default_rng(0).permutation(len(sequences)).tolist()
    return list(dict.fromkeys(telling)), [i for i in order if i not in telling]


def rows_by_interest(start: int, count: int) -> Any:
    """All rows of a sequence whose first token is at `start` in the batch, the telling ones first.

    The last, the first, a few evenly spread ones, then those on either side of each border of query blocks,
    the widest blocks first, then the others. Borders of one size are in random order, so that however few of
    them are taken, they lie all over the sequence.
    """
    rng = np.random.default_rng(0)
    levels = [np.array([count - 1, 0]), np.linspace(0, count - 1, SPREAD_ROWS).astype(np.int64)]
    for size in BORDERS:
        borders = rng.permutation(np.arange(-(-start // size) * size, start + count + 1, size)) - start
        levels.append(np.stack([borders - 1, borders], axis=1).ravel())
    levels.append(rng.permutation(count))
    rows = np.concatenate(levels)
    rows = rows[(rows >= 0) & (rows < count)]
    _, first = np.unique(rows, return_index=True)
    return rows[np.sort(first)]


def first_column(sequence: Sequence, settings: Settings) -> int:
    """The first token of its context that any new token of a sequence sees."""
    if settings.sliding_window is None:
        return 0
    return max(0, sequence.kv_len - sequence.q_len + 1 - settings.sliding_window)


def attention(q: Any, block: Any, pages: Any, positions: Any, dtype: Any, settings: Settings) -> Any:
    """What some queries of one sequence get: float32[rows, num_q_heads, head_dim].

    As JAX's ref_ragged_paged_attention computes it, in float32. Scaled keys and values are rounded to q's
    dtype, as there and in the kernel; probabilities are not rounded, as in the kernel. (JAX's reference casts
    them to the values' dtype, which leaves of an int8 only 0 and 1.) sm_scale is the kernel's default, 1.0.

    q: float32[rows, num_q_heads, head_dim]; dtype: numpy's, of q on the device.
    block: float32[n, page_size, 2 * num_kv_heads, head_dim], keys and values of a head side by side.
    pages: int[m], which of the block's pages hold the sequence's context, or its end, in order.
    positions: int[rows], the place of each query's own token among the tokens of these pages.
    """
    rows, num_q_heads, head_dim = q.shape
    num_kv_heads = block.shape[2] // 2
    group = num_q_heads // num_kv_heads
    columns = np.arange(len(pages) * block.shape[1])
    hidden = columns > positions[:, None]
    if settings.sliding_window is not None:
        hidden |= columns <= positions[:, None] - settings.sliding_window
    mask = np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None]
    values = np.empty_like(q)
    for head in range(num_kv_heads):
        k = _scaled(block[pages, :, 2 * head].reshape(-1, head_dim), settings.k_scale, dtype)
        v = _scaled(block[pages, :, 2 * head + 1].reshape(-1, head_dim), settings.v_scale, dtype)
        heads = slice(head * group, (head + 1) * group)
        # One array, changed in place: it is the largest, and all that this costs is reading and writing it.
        logits = (q[:, heads].reshape(-1, head_dim) @ k.T).reshape(rows, group, -1)
        if settings.soft_cap is not None:
            logits /= np.float32(settings.soft_cap)
            np.tanh(logits, out=logits)
            logits *= np.float32(settings.soft_cap)
        logits += mask
        logits -= logits.max(axis=-1, keepdims=True)
        np.exp(logits, out=logits)
        totals = logits.sum(axis=-1, keepdims=True)
        values[:, heads] = (logits.reshape(rows * group, -1) @ v).reshape(rows, group, head_dim) / totals
    return values


def _scaled(values: Any, scale: float | None, dtype: Any) -> Any:
    if scale is None:
        return values
    return (values * np.float32(scale)).astype(dtype).astype(np.float32)
