"""Keys to sweep: those of models as they are served, of calls' shapes, of presets and of files of keys."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

from autotune.errors import UsageError
from autotune.io.terminal import counted
from autotune.kernel.jax_rpa.tiling import canonical_key, sweep_key
from autotune.kernel.problem import DEFAULT_MAX_NUM_SEQS, Problem, TableKey
from autotune.keys.estimates import Estimates
from autotune.keys.files import MAX_KEYS
from autotune.keys.models import Model, divisors, per_chip, recommended_page_size
from autotune.keys.padding import Option, head_dim_padding, nearest, options, refusal

# The sizes that vLLM pads batches to on TPUs, the largest first: doubling from 16 (get_token_paddings in
# tpu_inference/runner/utils.py, with VLLM_TPU_BUCKET_PADDING_GAP at its default), up to the largest
# max_num_batched_tokens that it takes by itself on a TPU that it knows: 2048 on v6e, 1024 on v5e, 512 on v5p,
# half of that in its API server (EngineArgs.get_batch_defaults in vllm/engine/arg_utils.py; read in 2026-12).
PADDED_TOKENS = tuple(1 << i for i in range(11, 3, -1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """How models are served. None: of tokens PADDED_TOKENS, of lengths the model's longest, of page_sizes
    the recommended one for each length, of dtypes the model's own, and q's for the KV cache."""

    tps: tuple[int, ...] = (1,)
    tokens: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS


@dataclasses.dataclass(frozen=True)
class Asked:
    """One call's shape that a key is wanted for, and who wants it; the model, where it is one's.

    copies: the chips that each KV head is kept on.
    """

    problem: Problem
    origin: str
    model: Model | None = None
    copies: int = 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """A key to sweep and who wants it. problem: the call it stands for, as it is served, if one is known.

    padded: the layout that takes the place of heads that do not tile. copies: see `Asked`.
    """

    key: TableKey
    origin: str
    problem: Problem | None = None
    padded: Option | None = None
    copies: int = 1


def of_model(model: Model, serving: Serving) -> Iterator[Asked]:
    """The calls of a model as it is served: one for each tp, length, page size and number of tokens.

    Raises:
      UsageError: its heads cannot be divided so, or it names no longest length and none is given.
    """
    lengths = serving.lengths or ((model.max_model_len,) if model.max_model_len else ())
    if not lengths:
        raise UsageError(f"{model.name}: {model.source} names no longest length: give --max-model-len")
    dtype = serving.dtype or model.dtype
    batches = serving.tokens or PADDED_TOKENS
    several = (serving.tps, lengths, serving.page_sizes or (0,), batches, model.attentions)
    if math.prod(map(len, several)) > MAX_KEYS:
        raise too_many()
    for tp in serving.tps:
        for attention in model.attentions:
            try:
                q_heads, kv_heads = per_chip(model, attention, tp)
            except UsageError as error:
                dtypes = dtype, serving.kv_dtype or dtype
                raise UsageError(f"{error}: {_would_do(model, *dtypes)}") from None
            layers = f" {attention.layers}" if attention.layers else ""
            for length in lengths:
                for page in serving.page_sizes or (recommended_page_size(length, serving.max_num_seqs),):
                    for tokens in batches:
                        problem = Problem(
                            q_dtype=dtype,
                            kv_dtype=serving.kv_dtype or dtype,
                            num_q_heads=q_heads,
                            num_kv_heads=kv_heads,
                            head_dim=attention.head_dim,
                            page_size=page,
                            max_num_batched_tokens=tokens,
                            pages_per_seq=-(-length // page),
                            max_num_seqs=serving.max_num_seqs,
                        )
                        copies = tp * kv_heads // attention.num_kv_heads
                        yield Asked(problem, f"{model.name} tp={tp}{layers}", model, copies)


def _would_do(model: Model, q_dtype: str, kv_dtype: str) -> str:
    """Which numbers of chips a model's heads can be divided among, and are not refused as not tiling then."""
    any_problem = Problem(
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=128,
        page_size=16,
        max_num_batched_tokens=PADDED_TOKENS[0],
        pages_per_seq=1,
    )
    as_they_are = [tp for tp, *_ in unpadded(model, any_problem)]
    padded = [tp for tp in _divide_all(model) if tp not in as_they_are]
    first, second = (", ".join(map(str, tps[:12])) for tps in (as_they_are, padded))
    if not padded:
        return f"--tp {first} would do"
    if not as_they_are:
        return f"--tp {second} would do with --pad-heads"
    return f"--tp {first} would do, and with --pad-heads {second}"


def _divide_all(model: Model) -> Iterator[int]:
    """The numbers of chips that the heads of all of a model's layers can be divided among."""
    for tp in divisors(model.attentions[0]):
        with contextlib.suppress(UsageError):
            for attention in model.attentions:
                per_chip(model, attention, tp)
            yield tp


def unpadded(model: Model, problem: Problem) -> Iterator[tuple[int, int, int]]:
    """(chips, query heads, KV heads) of each division of a model's heads that needs no padding.

    problem: for what else decides that. The heads are those of the model's first kind of layers.
    """
    for tp in _divide_all(model):
        heads = [per_chip(model, attention, tp) for attention in model.attentions]
        try:
            for attention, (q_heads, kv_heads) in zip(model.attentions, heads, strict=True):
                dim = attention.head_dim
                sweep_key(
                    dataclasses.replace(problem, num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=dim)
                )
        except UsageError:
            continue
        yield tp, *heads[0]


def resolve(
    asked: Iterable[Asked],
    *,
    pad_heads: bool = False,
    estimates: Estimates | None = None,
) -> list[Entry]:
    """The canonical key of each call, in their order.

    pad_heads: where heads do not tile, take the nearest layout that does. estimates: what layouts cost.

    Raises:
      UsageError: heads do not tile and pad_heads is not set; the message names the layouts, what each costs
        and who asked.
    """
    entries = []
    for one in asked:
        try:
            entries.append(Entry(sweep_key(one.problem), one.origin, one.problem, copies=one.copies))
        except UsageError:
            choices = options(one.problem, estimates)
            if not pad_heads:
                free = list(itertools.islice(unpadded(one.model, one.problem), 12)) if one.model else []
                raise UsageError(f"{one.origin}: {refusal(one.problem, choices, free)}") from None
            layout = nearest(choices)
            entries.append(Entry(layout.key, one.origin, one.problem, layout, one.copies))
    return entries


def canonical(keys: Iterable[tuple[TableKey, str, str]]) -> tuple[list[Entry], list[str]]:
    """Entries of (key, origin, place) as a file holds them, and a line for each key that is not canonical.

    Raises:
      UsageError: no call has such a key, or anything like it.
    """
    entries, notes = [], []
    for key, origin, place in keys:
        own = canonical_key(key)
        if own is None:
            raise UsageError(
                f"{place}: ({', '.join(map(str, key))}) is a key that no call has: the kernel does not tile "
                f"{key.num_q_heads_per_blk} query and {key.num_kv_heads_per_blk} KV heads; name the call by "
                "--shape to see which it does"
            )
        if own != key:
            notes.append(
                f"{place}: ({', '.join(map(str, key))}) is looked up as ({', '.join(map(str, own))}), so it "
                "is swept as that"
            )
        entries.append(Entry(own, origin))
    return entries, notes


def merged(entries: Iterable[Entry]) -> dict[TableKey, str]:
    """Each key once, in their order, with everyone who wants it.

    Raises:
      UsageError: there are more keys than a sweep can hold.
    """
    wanted: dict[TableKey, dict[str, None]] = {}
    for entry in entries:
        wanted.setdefault(entry.key, {})[entry.origin] = None
        if len(wanted) > MAX_KEYS:
            raise too_many()
    return {key: "; ".join(filter(None, origins)) for key, origins in wanted.items()}


def too_many() -> UsageError:
    return UsageError(f"more than {MAX_KEYS} keys: name fewer lengths, tokens or models")


def rounded(problem: Problem, key: TableKey) -> str:
    """What JAX rounds up of a call's page size and length to look it up under a key; '' if nothing."""
    page, pages, length = problem.page_size, problem.pages_per_seq, problem.max_model_len
    parts = [f"page_size {page} is rounded up to {key.page_size}"] if page != key.page_size else []
    if length != key.max_model_len:
        parts.append(
            f"max_model_len, which is {pages} whole pages of {page} and so {length}, to {key.max_model_len}"
            if parts
            else f"max_model_len {length} is rounded up to {key.max_model_len}"
        )
    return ", and ".join(parts)


def listing(
    model: Model, entries: Iterable[Entry], recommended: bool, padded_tokens: bool = False
) -> Iterator[str]:
    """A model's keys for a reader: per-chip heads, each key with the serving limits behind it, what to know.

    recommended, padded_tokens: whether nobody named the page size, and the tokens.
    """
    yield f"{model.name}, by {model.source}:"
    for note in model.notes:
        yield f"  {note}"
    if padded_tokens:
        yield (
            f"  tokens: as vLLM pads batches on TPUs, doubling from {PADDED_TOKENS[-1]} to "
            f"{PADDED_TOKENS[0]}; else --max-num-batched-tokens"
        )
    if recommended:
        yield "  page: as vLLM chooses it on TPUs for the length; else --page-size"
    heads = None
    for entry in entries:
        problem = entry.problem
        assert problem is not None
        now = (entry.origin, problem.num_q_heads, problem.num_kv_heads, problem.head_dim)
        if now != heads:
            heads = now
            who = entry.origin.removeprefix(f"{model.name} ")
            yield (
                f"  {who}: {problem.num_q_heads} query and {counted(problem.num_kv_heads, 'KV head')} of "
                f"{problem.head_dim} on a chip"
            )
            if entry.copies > 1:
                yield (
                    f"    each KV head is kept on {entry.copies} chips, and so is its KV cache: "
                    f"{entry.copies} times the bytes in all"
                )
            if padding := head_dim_padding(problem):
                yield f"    {padding}"
            if entry.padded:
                yield f"    {entry.padded.advice(problem)}"
        tokens, above = problem.max_num_batched_tokens, ""
        if model.max_model_len and problem.max_model_len >= model.max_model_len + problem.page_size:
            above = f", above the model's own {model.max_model_len}"
        yield (
            f"    tokens {tokens}, length {problem.max_model_len}{above}, page {problem.page_size}: "
            f"key ({', '.join(map(str, entry.key))})"
        )
        if problem.page_size != entry.key.page_size:
            yield f"      {rounded(problem, entry.key)}"
