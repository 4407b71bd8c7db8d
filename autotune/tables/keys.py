"""Keys of the three dialects, and how each one's look-up makes a key of a call's numbers.

How the two stacks do it was read in sgl-project/sglang-jax at cddbf6f and vllm-project/tpu-inference at
b8692ff.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

from autotune.kernel.problem import DTYPE_BITS, TableKey, next_power_of_2
from autotune.tables.table import Key

MAX_HEADS = 4096  # past this, keys are not looked for a call that would ask for them


class SglangKey(NamedTuple):
    """A key of sglang-jax: the call's own head counts, no max_model_len."""

    q_dtype: str
    kv_dtype: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_num_tokens: int


class InferenceKey(NamedTuple):
    """A key of tpu-inference, level by level as its nested dicts hold it.

    `length` is text in every key that its look-up builds; the published table holds two that are numbers.
    """

    page_size: int
    dtypes: str
    heads: str
    length: str | int


_INFERENCE_PARTS = (
    re.compile(r"q_(?P<q_dtype>[a-z]\w*?)_kv_(?P<kv_dtype>\w+)"),
    re.compile(
        r"q_head-(?P<num_q_heads>\d{1,9})_kv_head-(?P<num_kv_heads>\d{1,9})_head-(?P<head_dim>\d{1,9})"
    ),
    re.compile(r"max_model_len-(?P<max_model_len>\d{1,9})-sw-(?P<sliding_window>None|\d{1,9})"),
)


def inference_key(
    q_dtype: str,
    kv_dtype: str,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    max_model_len: int,
    sliding_window: int | None,
) -> InferenceKey:
    """The key that tpu-inference builds of these, once simplified."""
    return InferenceKey(
        page_size,
        f"q_{q_dtype}_kv_{kv_dtype}",
        f"q_head-{num_q_heads}_kv_head-{num_kv_heads}_head-{head_dim}",
        f"max_model_len-{max_model_len}-sw-{sliding_window}",
    )


def inference_dimensions(key: Any) -> dict[str, Any]:
    dimensions: dict[str, Any] = {"page_size": key.page_size}
    for pattern, part in zip(_INFERENCE_PARTS, (key.dtypes, key.heads, key.length), strict=True):
        if match := pattern.fullmatch(str(part)):
            dimensions.update(match.groupdict())
        elif isinstance(part, int):
            dimensions.update(max_model_len=part, sliding_window="None")
        else:
            return {}
    for name in ("num_q_heads", "num_kv_heads", "head_dim", "max_model_len"):
        dimensions[name] = int(dimensions[name])
    window = dimensions["sliding_window"]
    dimensions["sliding_window"] = None if window == "None" else int(window)
    return dimensions


def _positive(key: Key) -> bool:
    return all(value > 0 for value in key if isinstance(value, int))


def _aligned(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def asked_jax(key: TableKey) -> Key | None:
    """The key that a call with a key's own numbers asks for; None where there is no such call."""
    if not _positive(key):
        return None
    simple = TableKey.simplified(*key[:7], pages_per_seq=1)
    return simple._replace(max_model_len=next_power_of_2(key.max_model_len))


def asked_sglang(key: SglangKey) -> Key | None:
    """The key that a call with a key's own numbers asks for; None where there is no such call."""
    if not _positive(key) or key.num_q_heads < key.num_kv_heads:
        return None
    return SglangKey(
        key.q_dtype,
        key.kv_dtype,
        next_power_of_2(key.num_q_heads),
        next_power_of_2(key.num_kv_heads),
        _aligned(key.head_dim, 128),
        next_power_of_2(key.page_size),
        next_power_of_2(key.max_num_tokens),
    )


def asked_inference(key: InferenceKey) -> Key | None:
    """The key that a call with a key's own numbers asks for; None where there is no such call."""
    d = _call_of(key)
    return None if d is None else _inference_key_of(d, *_padded_heads(d, d["num_q_heads"], d["num_kv_heads"]))


def found_inference(key: InferenceKey) -> Key | None:
    """The key itself if some call asks for it, else the one that a call with its own numbers asks for.

    Heads are padded to what fits in 32 bits, and so a key's heads may be those of a call with fewer.
    """
    d = _call_of(key)
    if d is None:
        return None
    heads = (d["num_q_heads"], d["num_kv_heads"])
    if _some_call_has(heads, d["head_dim"] == 64, d["q_dtype"], d["kv_dtype"]):
        return _inference_key_of(d, *heads)
    return asked_inference(key)


def _call_of(key: InferenceKey) -> dict[str, Any] | None:
    """A key's parts, where a call may have them."""
    d = inference_dimensions(key)
    if not d or d["q_dtype"] not in DTYPE_BITS or d["kv_dtype"] not in DTYPE_BITS:
        return None
    numbers = (d["page_size"], d["num_q_heads"], d["num_kv_heads"], d["head_dim"], d["max_model_len"])
    return d if min(numbers) > 0 else None


def _padded_heads(d: dict[str, Any], q_heads: int, kv_heads: int) -> tuple[int, int]:
    return _padded(q_heads, kv_heads, d["head_dim"] == 64, d["q_dtype"], d["kv_dtype"])


def _padded(q_heads: int, kv_heads: int, narrow: bool, q_dtype: str, kv_dtype: str) -> tuple[int, int]:
    """The heads of the key of a call with these. narrow: a head_dim of 64, which has a kernel of its own."""
    q_packing, kv_packing = 32 // DTYPE_BITS[q_dtype], 32 // DTYPE_BITS[kv_dtype]
    group = _aligned(-(-q_heads // kv_heads), q_packing)
    if narrow:
        kv = next_power_of_2(_aligned(kv_heads, kv_packing))
    else:
        kv = next_power_of_2(_aligned(2 * kv_heads, kv_packing)) // 2
    return next_power_of_2(group * kv_heads), kv


@functools.cache
def _some_call_has(heads: tuple[int, int], narrow: bool, q_dtype: str, kv_dtype: str) -> bool:
    """Whether the key of some call has these heads."""
    if any(count & (count - 1) for count in heads):
        return False  # they are padded to powers of two
    if max(heads) > MAX_HEADS:
        return _padded(*heads, narrow, q_dtype, kv_dtype) == heads
    return any(
        _padded(group * kv_heads, kv_heads, narrow, q_dtype, kv_dtype) == heads
        for kv_heads in range(1, heads[1] + 1)
        for group in range(1, heads[0] // kv_heads + 1)
    )


def _inference_key_of(d: dict[str, Any], q_heads: int, kv_heads: int) -> InferenceKey:
    return inference_key(
        d["q_dtype"],
        d["kv_dtype"],
        q_heads,
        kv_heads,
        64 if d["head_dim"] == 64 else _aligned(d["head_dim"], 128),
        next_power_of_2(d["page_size"]),
        next_power_of_2(d["max_model_len"]),
        d["sliding_window"],
    )
