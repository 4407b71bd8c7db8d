"""The dialects of tables: whose keys, how a look-up simplifies them, and what device names mean.

jax: flat, eight numbers and names a key. sglang-jax: flat, seven, without max_model_len. tpu-inference:
nested dicts by page size, dtypes, heads and length, without max_num_batched_tokens. The kernels of the two
stacks are not JAX's, so block sizes tuned for one are a guess for another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from autotune.kernel.problem import Problem, TableKey
from autotune.tables.keys import (
    InferenceKey,
    SglangKey,
    asked_inference,
    asked_jax,
    asked_sglang,
    found_inference,
    inference_dimensions,
    inference_key,
)
from autotune.tables.table import Key
from autotune.tpu.chips import GENERATIONS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dialect:
    """One way of writing a table.

    name: jax, sglang-jax or tpu-inference.
    key_type: the NamedTuple of its keys.
    quote: the quotation mark that its own file uses.
    names: device name to the generations whose look-up asks for it.
    written: generation to the device name that its rows are written under.
    asked: the key that a call with a key's own numbers asks for; None where there is no such call.
    simplify: a key itself if some call asks for it, else as `asked`.
    dimensions: a key to its parts by name; empty if the key cannot be read.
    missing: the dimension of a call that its keys leave out, or None.
    """

    name: str
    key_type: type[Any]
    quote: str
    names: Mapping[str, tuple[str, ...]]
    written: Mapping[str, str]
    asked: Callable[[Any], Key | None]
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
    asked=asked_jax,
    simplify=asked_jax,
    dimensions=lambda key: key._asdict(),
    missing=None,
)
SGLANG = Dialect(
    name="sglang-jax",
    key_type=SglangKey,
    quote='"',
    names=_STACK_NAMES,
    written=_STACK_WRITTEN,
    asked=asked_sglang,
    simplify=asked_sglang,
    dimensions=lambda key: key._asdict(),
    missing="max_model_len",
)
INFERENCE = Dialect(
    name="tpu-inference",
    key_type=InferenceKey,
    quote="'",
    names=_STACK_NAMES,
    written=_STACK_WRITTEN,
    asked=asked_inference,
    simplify=found_inference,
    dimensions=inference_dimensions,
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
