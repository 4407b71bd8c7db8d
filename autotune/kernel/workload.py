"""Ragged batches: which sequences a call works on, and where a serving engine put their pages."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from autotune.errors import UsageError
from autotune.kernel.problem import Problem

MAX_CSV_BYTES = 1 << 20


class Sequence(NamedTuple):
    """One sequence of a batch: its new tokens, and all its tokens with the new ones; 0 < q_len <= kv_len."""

    q_len: int
    kv_len: int


@dataclasses.dataclass(frozen=True)
class Workload:
    """A named ragged batch."""

    name: str
    sequences: tuple[Sequence, ...]

    @functools.cached_property
    def fingerprint(self) -> str:
        """12 hex digits that are the same for the same sequences in the same order, whatever the name."""
        text = ";".join(f"{q},{kv}" for q, kv in self.sequences)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @functools.cached_property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """q_lens and kv_lens, i64[number of sequences] each; for counting loops, which is done often."""
        q_lens, kv_lens = np.array(self.sequences, dtype=np.int64).T
        return q_lens, kv_lens

    def misfit(self, problem: Problem) -> str | None:
        """Why this batch cannot be a call of the problem's shape; None if it can."""
        if not self.sequences:
            return "it has no sequence"
        if len(self.sequences) > problem.max_num_seqs:
            return f"its {len(self.sequences)} sequences are more than max_num_seqs={problem.max_num_seqs}"
        tokens = sum(s.q_len for s in self.sequences)
        if tokens > problem.max_num_batched_tokens:
            limit = problem.max_num_batched_tokens
            return f"its {tokens} new tokens are more than max_num_batched_tokens={limit}"
        longest = max(s.kv_len for s in self.sequences)
        if longest > problem.max_model_len:
            return f"its kv_len {longest} is more than max_model_len={problem.max_model_len}"
        return None


@dataclasses.dataclass(frozen=True)
class Batch:
    """The ragged arguments of one call, int32 arrays in the kernel's own shapes."""

    kv_lens: Any  # [max_num_seqs]
    page_indices: Any  # [max_num_seqs, pages_per_seq]
    cu_q_lens: Any  # [max_num_seqs + 1]
    num_seqs: Any  # [1]
    total_num_pages: int


def mixed(problem: Problem, rng: np.random.Generator) -> list[Sequence]:
    """A tenth of the tokens decode, the rest are chunks of prompts, at contexts of every length."""
    return _decodes(problem, rng, problem.max_num_batched_tokens // 10) + _prefills(problem, rng, 0.3)


def decode_heavy(problem: Problem, rng: np.random.Generator) -> list[Sequence]:
    """As many decodes as the batch holds, long contexts among them, and one chunk of a prompt."""
    decodes = _decodes(problem, rng, problem.max_num_batched_tokens)
    if len(decodes) == problem.max_num_seqs:  # a row of the page table for the chunk
        decodes.pop()
    return decodes + _prefills(problem, rng, 0.1, most=1)


def prefill_heavy(problem: Problem, rng: np.random.Generator) -> list[Sequence]:
    """Whole prompts, and a few decodes between them."""
    return _decodes(problem, rng, min(4, problem.max_num_batched_tokens // 10)) + _prefills(problem, rng, 1.0)


def _decodes(problem: Problem, rng: np.random.Generator, count: int) -> list[Sequence]:
    """Sequences of one new token each, their contexts uniform between an eighth and all of max_model_len."""
    count = min(count, problem.max_num_batched_tokens, problem.max_num_seqs - 1)
    shortest = max(1, problem.max_model_len // 8)
    return [Sequence(1, int(kv)) for kv in rng.integers(shortest, problem.max_model_len + 1, count)]


def _prefills(
    problem: Problem, rng: np.random.Generator, chunk: float, most: int | None = None
) -> list[Sequence]:
    """Chunks of up to chunk * max_model_len tokens; `_fitted` cuts them to what the batch has room for."""
    longest = max(1, round(chunk * problem.max_model_len))
    sequences: list[Sequence] = []
    tokens = 0
    while tokens < problem.max_num_batched_tokens and len(sequences) < (most or problem.max_num_seqs):
        q_len = int(rng.integers(max(1, longest // 2), longest + 1))
        sequences.append(Sequence(q_len, int(rng.integers(q_len, problem.max_model_len + 1))))
        tokens += q_len
    return sequences


def _fitted(problem: Problem, sequences: list[Sequence]) -> tuple[Sequence, ...]:
    """The sequences that fit in the problem's tokens and rows; the last one is cut short, not dropped."""
    room = problem.max_num_batched_tokens
    fitted: list[Sequence] = []
    for q_len, kv_len in sequences[: problem.max_num_seqs]:
        if room == 0:
            break
        fitted.append(Sequence(min(q_len, room), kv_len))
        room -= fitted[-1].q_len
    return tuple(fitted)


GENERATORS: dict[str, Callable[[Problem, np.random.Generator], list[Sequence]]] = {
    "mixed": mixed,
    "decode-heavy": decode_heavy,
    "prefill-heavy": prefill_heavy,
}


def generate(name: str, problem: Problem, seed: int = 0) -> Workload:
    """The named workload for a problem; the same for the same name, problem and seed.

    Raises:
      UsageError: no workload has this name.
    """
    if name not in GENERATORS:
        raise UsageError(
            f"workload {name!r} is unknown: use {', '.join(GENERATORS)}, or a CSV file of q_len,kv_len"
        )
    # A seed of its own for each name, so that leaving one workload out does not change the others.
    rng = np.random.default_rng([seed, list(GENERATORS).index(name)])
    return Workload(name, _fitted(problem, GENERATORS[name](problem, rng)))


def from_csv(path: str) -> Workload:
    """A workload from a CSV file of q_len,kv_len lines; a header line and # comments are allowed.

    Raises:
      UsageError: the file cannot be read, is larger than 1 MiB, or a line is not two whole numbers with
        0 < q_len <= kv_len; the message names the line.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113
        raise UsageError(f"workload file {path!r} is no file")  # reading a pipe could wait for ever
    if not path.isprintable():  # rows keep the name, and text holds no bytes that are no UTF-8
        raise UsageError(f"workload file {path!a} has a name that rows cannot keep: rename it")
    try:
        with open(path, encoding="utf-8-sig") as file:  # noqa: PTH123
            text = file.read(MAX_CSV_BYTES + 1)
    except (OSError, ValueError) as error:  # a name that no file system takes is a ValueError, as is the text
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"workload file {path!r} cannot be read: {reason}") from None
    if len(text) > MAX_CSV_BYTES:
        raise UsageError(f"workload file {path!r} is larger than {MAX_CSV_BYTES} bytes")
    sequences = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line or (number == 1 and line.replace(" ", "") == "q_len,kv_len"):
            continue
        fields = line.split(",")
        try:
            q_len, kv_len = (int(field) for field in fields)
        except ValueError:
            raise UsageError(
                f"workload file {path!r}, line {number}: {line[:40]!r} is not q_len,kv_len"
            ) from None
        if not 0 < q_len <= kv_len <= 2**31 - 1:
            raise UsageError(
                f"workload file {path!r}, line {number}: {line[:40]!r} must have 0 < q_len <= kv_len"
            )
        sequences.append(Sequence(q_len, kv_len))
    if not sequences:
        raise UsageError(f"workload file {path!r} has no q_len,kv_len line")
    return Workload(path, tuple(sequences))


def pages_needed(problem: Problem, workload: Workload) -> int:
    """Pages that the sequences of a batch fill, all together."""
    return sum(_pages_of_sequences(problem, workload))


def _pages_of_sequences(problem: Problem, workload: Workload) -> list[int]:
    return [-(-s.kv_len // problem.page_size) for s in workload.sequences]


def place(problem: Problem, workload: Workload, total_num_pages: int, seed: int = 0) -> Batch:
    """The call's ragged arguments, with pages scattered over the pool as an engine that frees and reuses
    them leaves them.

    Where the sequences need more than the pool's total_num_pages, they share pages.

    Rows past num_seqs and page columns past a sequence's length hold zeros, as the kernel expects of padding.
    """
    shuffled = np.random.default_rng(seed).permutation(total_num_pages).astype(np.int32)
    page_indices = np.zeros((problem.max_num_seqs, problem.pages_per_seq), np.int32)
    start = 0
    for row, pages in enumerate(_pages_of_sequences(problem, workload)):
        page_indices[row, :pages] = np.take(shuffled, np.arange(start, start + pages), mode="wrap")
        start += pages
    count = len(workload.sequences)
    kv_lens = np.zeros(problem.max_num_seqs, np.int32)
    kv_lens[:count] = [s.kv_len for s in workload.sequences]
    cu_q_lens = np.zeros(problem.max_num_seqs + 1, np.int32)
    cu_q_lens[1 : count + 1] = np.cumsum([s.q_len for s in workload.sequences])
    cu_q_lens[count + 1 :] = cu_q_lens[count]
    return Batch(kv_lens, page_indices, cu_q_lens, np.array([count], np.int32), total_num_pages)
