"""The dialects of tables: whose keys, how a look-up simplifies them, and what device names mean.

jax: flat, eight numbers and names a key. sglang-jax: flat, seven, without max_model_len. tpu-inference:
nested dicts by page size, dtypes, heads and length, without max_num_batched_tokens. How the two stacks
simplify a key and name a device was read in sgl-project/sglang-jax at cddbf6f and vllm-project/tpu-inference
at b8692ff; their kernels are not JAX's, so block sizes tuned for one are a guess for another.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from autotune.kernel.problem import DTYPE_BITS, Problem, TableKey, next_power_of_2
from autotune.tables.table import Key
from autotune.tpu.chips import GENERATIONS


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


def _inference_dimensions(key: Any) -> dict[str, Any]:
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


def _simplified_jax(key: TableKey) -> Key | None:
    if not _positive(key):
        return None
    simple = TableKey.simplified(*key[:7], pages_per_seq=1)
    return simple._replace(max_model_len=next_power_of_2(key.max_model_len))


def _simplified_sglang(key: Any) -> Key | None:
    if not _positive(key):
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


def _simplified_inference(key: Any) -> Key | None:
    d = _inference_dimensions(key)
    dtypes = (d.get("q_dtype"), d.get("kv_dtype"))
    if not d or any(dtype not in DTYPE_BITS for dtype in dtypes):
        return None
    if min(d["page_size"], d["num_q_heads"], d["num_kv_heads"], d["head_dim"], d["max_model_len"]) <= 0:
        return None
    q_packing, kv_packing = (32 // DTYPE_BITS[dtype] for dtype in dtypes if dtype)
    group = _aligned(-(-d["num_q_heads"] // d["num_kv_heads"]), q_packing)
    if d["head_dim"] == 64:  # a kernel and a table of its own
        kv_heads, head_dim = next_power_of_2(_aligned(d["num_kv_heads"], kv_packing)), 64
    else:
        kv_heads = next_power_of_2(_aligned(2 * d["num_kv_heads"], kv_packing)) // 2
        head_dim = _aligned(d["head_dim"], 128)
    return inference_key(
        d["q_dtype"],
        d["kv_dtype"],
        next_power_of_2(group * d["num_kv_heads"]),
        kv_heads,
        head_dim,
        next_power_of_2(d["page_size"]),
        next_power_of_2(d["max_model_len"]),
        d["sliding_window"],
    )


def _aligned(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dialect:
    """One way of writing a table.

    name: jax, sglang-jax or tpu-inference.
    key_type: the NamedTuple of its keys.
    quote: the quotation mark that its own file uses.
    names: device name to the generations whose look-up asks for it.
    written: generation to the device name that its rows are written under.
    simplify: a key to the one that a look-up with its numbers asks for; None if no look-up builds such keys.
    dimensions: a key to its parts by name; empty if the key cannot be read.
    missing: the dimension of a call that its keys leave out, or None.
    """

    name: str
    key_type: type[Any]
    quote: str
    names: Mapping[str, tuple[str, ...]]
    written: Mapping[str, str]
    simplify: Callable[[Any], Key | None]
    dimensions: Callable[[Any], dict[str, Any]]
    missing: str | None

    def generations(self, device: str) -> tuple[str, ...]:
        """Names of the generations that find their rows under a device name; none if it is unknown."""
        return self.names.get(device, ())

    def __str__(self) -> str:
        return self.name


# 'TPU v5e' and the like are what emitted modules and their own look-up say. On v7x the look-up of jax 0.10
# asks for 'TPU7x', that of 0.12 for 'TPU v7'; on v5e and v5p both ask for 'TPU v5'.
_JAX_NAMES: dict[str, tuple[str, ...]] = {}
for _generation in GENERATIONS.values():
    for _kind in (_generation.name, f"TPU {_generation.name}", *_generation.device_kinds):
        _JAX_NAMES[_kind] = (_generation.name,)
for _name in {g.published_name for g in GENERATIONS.values()}:
    _JAX_NAMES[_name] = tuple(g.name for g in GENERATIONS.values() if g.published_name == _name)
_JAX_NAMES["TPU v7"] = ("v7x",)

# A v5p says device_kind 'TPU v5', which both stacks keep; 'TPU v5p' is what they make of the other spelling.
_STACK_NAMES = {
    "TPU v4": ("v4",),
    "TPU v5e": ("v5e",),
    "TPU v5": ("v5p",),
    "TPU v5p": ("v5p",),
    "TPU v6e": ("v6e",),
    "TPU v7": ("v7x",),
}
_STACK_WRITTEN = {generations[0]: name for name, generations in _STACK_NAMES.items() if name != "TPU v5p"}

JAX = Dialect(
    name="jax",
    key_type=TableKey,
    quote="'",
    names=_JAX_NAMES,
    written={g: f"TPU {g}" for g in GENERATIONS},
    simplify=_simplified_jax,
    dimensions=lambda key: key._asdict(),
    missing=None,
)
SGLANG = Dialect(
    name="sglang-jax",
    key_type=SglangKey,
    quote='"',
    names=_STACK_NAMES,
    written=_STACK_WRITTEN,
    simplify=_simplified_sglang,
    dimensions=lambda key: key._asdict(),
    missing="max_model_len",
)
INFERENCE = Dialect(
    name="tpu-inference",
    key_type=InferenceKey,
    quote="'",
    names=_STACK_NAMES,
    written=_STACK_WRITTEN,
    simplify=_simplified_inference,
    dimensions=_inference_dimensions,
    missing="max_num_batched_tokens",
)

DIALECTS = {dialect.name: dialect for dialect in (JAX, INFERENCE, SGLANG)}


def call_key(dialect: Dialect, problem: Problem) -> Key:
    """A call's key in a dialect other than JAX's, before it is simplified: of all heads of the call."""
    dtypes = (problem.q_dtype, problem.kv_dtype)
    sizes = (problem.num_q_heads, problem.num_kv_heads, problem.head_dim, problem.page_size)
    if dialect is SGLANG:
        return SglangKey(*dtypes, *sizes, problem.max_num_batched_tokens)
    return inference_key(*dtypes, *sizes, problem.max_model_len, None)
