"""Keys of the three dialects, a call's numbers, and how look-ups make a key of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from autotune.kernel import problem
from autotune.kernel.problem import BlockSizes, TableKey, next_power_of_2

Key = tuple[Any, ...]
Rows = Mapping[Any, BlockSizes]  # by Key

# Bits of the dtypes that keys name; JAX's kernel takes all but float4, which tpu-inference's takes.
DTYPE_BITS = problem.DTYPE_BITS | {"float4_e2m1fn": 4}
MAX_HEADS = 4096  # past this, keys are not looked for a call that would ask for them
MAX_PAGE = 1024  # nor is it looked for a smaller page that makes a length


class Call(NamedTuple):
    """What a look-up is asked with.

    Heads are those of one block of the kernel for a look-up of the jax dialect, else those of the call.
    max_model_len: page_size x pages_per_seq.
    """

    q_dtype: str
    kv_dtype: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_num_tokens: int
    max_model_len: int
    sliding_window: int | None = None

    @property
    def pages_per_seq(self) -> int:
        return max(1, self.max_model_len // self.page_size)


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

    length: text with the sliding window since 2025-12-17, a number before.
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
    *,
    text: bool = True,
) -> InferenceKey:
    """The key that tpu-inference writes of these. text: as it does since 2025-12-17."""
    return InferenceKey(
        page_size,
        f"q_{q_dtype}_kv_{kv_dtype}",
        head_part(num_q_heads, num_kv_heads, head_dim),
        f"max_model_len-{max_model_len}-sw-{sliding_window}" if text else max_model_len,
    )


def head_part(num_q_heads: int, num_kv_heads: int, head_dim: int) -> str:
    """The part of a tpu-inference key that names the heads."""
    return f"q_head-{num_q_heads}_kv_head-{num_kv_heads}_head-{head_dim}"


def inference_dimensions(key: Any) -> dict[str, Any]:
    """A key's parts by name; empty if it cannot be read."""
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


def call_of(key: Key) -> Call | None:
    """A call with a key's own numbers, one page where its length is not known; None if no call has them."""
    if isinstance(key, TableKey):
        call = Call(*key)
    elif isinstance(key, SglangKey):
        call = Call(*key, max_model_len=max(1, key.page_size))
    elif d := inference_dimensions(key):
        call = Call(**d, max_num_tokens=1)
    else:
        return None
    if any(value <= 0 for value in call[2:8]) or not {call.q_dtype, call.kv_dtype} <= DTYPE_BITS.keys():
        return None
    return call


def _aligned(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def rounded(call: Call) -> TableKey:
    """JAX's: see `TableKey.rounded`."""
    return TableKey(*call[:8]).rounded()


def half_rounded(call: Call) -> TableKey:
    """pytorch/xla's since its pull request 9497: heads and length are the call's own."""
    return rounded(call)._replace(
        num_q_heads_per_blk=call.num_q_heads,
        num_kv_heads_per_blk=call.num_kv_heads,
        max_model_len=call.max_model_len,
    )


def sglang(call: Call) -> SglangKey | None:
    """sglang-jax's since 2025-10-24; None where its look-up refuses the heads."""
    if call.num_q_heads < call.num_kv_heads:
        return None
    return SglangKey(*rounded(call)[:7])


def inference(call: Call, *, align: bool = True, narrow: bool = False, text: bool = True) -> Key | None:
    """tpu-inference's, with heads padded to what fits in 32 bits; None where the look-up refuses the call.

    align: head_dim to a multiple of 128. narrow: of the kernel for a head_dim of 64, which takes no other.
    text: see `inference_key`.
    """
    if narrow and call.head_dim != 64:
        return None
    return inference_key(
        call.q_dtype,
        call.kv_dtype,
        *padded_heads(call.num_q_heads, call.num_kv_heads, narrow, call.q_dtype, call.kv_dtype),
        call.head_dim if narrow or not align else _aligned(call.head_dim, 128),
        next_power_of_2(call.page_size),
        next_power_of_2(call.max_model_len),
        call.sliding_window,
        text=text,
    )


def padded_heads(q_heads: int, kv_heads: int, narrow: bool, q_dtype: str, kv_dtype: str) -> tuple[int, int]:
    """The heads in tpu-inference's key of a call with these."""
    q_packing, kv_packing = 32 // DTYPE_BITS[q_dtype], 32 // DTYPE_BITS[kv_dtype]
    group = _aligned(-(-q_heads // kv_heads), q_packing)
    if narrow:
        kv = next_power_of_2(_aligned(kv_heads, kv_packing))
    else:
        kv = next_power_of_2(_aligned(2 * kv_heads, kv_packing)) // 2
    return next_power_of_2(group * kv_heads), kv


@functools.cache
def some_call_pads_to(heads: tuple[int, int], narrow: bool, q_dtype: str, kv_dtype: str) -> bool:
    """Whether the key of some call of tpu-inference has these heads: that of a call with fewer may."""
    if any(count & (count - 1) for count in heads):
        return False  # they are padded to powers of two
    if max(heads) > MAX_HEADS:
        return padded_heads(*heads, narrow, q_dtype, kv_dtype) == heads
    return any(
        padded_heads(group * kv_heads, kv_heads, narrow, q_dtype, kv_dtype) == heads
        for kv_heads in range(1, heads[1] + 1)
        for group in range(1, heads[0] // kv_heads + 1)
    )


@functools.cache
def least_length(page_size: int, max_model_len: int) -> int:
    """The least length from this one on that some number of pages makes, where a key says page_size.

    A key's page_size is a power of two, and stands for calls with pages of more than its half.
    """
    if max_model_len % page_size == 0:
        return max_model_len
    if page_size > MAX_PAGE:
        return max_model_len if max_model_len > page_size // 2 else page_size
    if any(max_model_len % page == 0 for page in range(page_size // 2 + 1, page_size)):
        return max_model_len
    return _aligned(max_model_len, page_size)
