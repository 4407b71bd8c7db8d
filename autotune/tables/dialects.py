"""The dialects of tables: whose keys, and which generation a device name means.

jax: flat, eight numbers and names a key. sglang-jax: flat, seven, without max_model_len. tpu-inference:
nested dicts by page size, dtypes, heads and length, without max_num_batched_tokens. The kernels of the two
stacks are not JAX's, so block sizes tuned for one are a guess for another. How a key is made of a call, and
which device names are asked, is a look-up's: see `rules`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from autotune.kernel.problem import TableKey
from autotune.tables.keys import InferenceKey, SglangKey, inference_dimensions
from autotune.tpu.generations import GENERATIONS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dialect:
    """One way of writing a table.

    name: jax, sglang-jax or tpu-inference.
    key_type: the NamedTuple of its keys.
    quote: the quotation mark that its own file uses.
    names: device name to the generations that it means, whichever look-up asks for it.
    written: generation to the device name that its rows are written under.
    dimensions: a key to its parts by name; empty if the key cannot be read.
    """

    name: str
    key_type: type[Any]
    quote: str
    names: Mapping[str, tuple[str, ...]]
    written: Mapping[str, str]
    dimensions: Callable[[Any], dict[str, Any]]

    def generations(self, device: str) -> tuple[str, ...]:
        """Names of the generations that a device name means; none if it is unknown."""
        return self.names.get(device, ())

    def __str__(self) -> str:
        return self.name


_JAX_NAMES: dict[str, tuple[str, ...]] = {}
for _generation in GENERATIONS.values():
    for _kind in (_generation.name, f"TPU {_generation.name}", *_generation.device_kinds):
        _JAX_NAMES[_kind] = (_generation.name,)
for _name in {g.published_name for g in GENERATIONS.values()}:
    _JAX_NAMES[_name] = tuple(g.name for g in GENERATIONS.values() if g.published_name == _name)
_JAX_NAMES["TPU v7"] = ("v7x",)

# A v5p says device_kind 'TPU v5', which both stacks keep; 'TPU v5p' is what they make of the other spelling.
# 'TPU v6' and 'TPU7x' are what their first look-ups asked for.
_STACK_NAMES = {
    "TPU v4": ("v4",),
    "TPU v5e": ("v5e",),
    "TPU v5": ("v5p",),
    "TPU v5p": ("v5p",),
    "TPU v6e": ("v6e",),
    "TPU v6": ("v6e",),
    "TPU v7": ("v7x",),
    "TPU7x": ("v7x",),
}
_STACK_WRITTEN = {"v4": "TPU v4", "v5e": "TPU v5e", "v5p": "TPU v5", "v6e": "TPU v6e", "v7x": "TPU v7"}

JAX = Dialect(
    name="jax",
    key_type=TableKey,
    quote="'",
    names=_JAX_NAMES,
    written={g: f"TPU {g}" for g in GENERATIONS},
    dimensions=lambda key: key._asdict(),
)
SGLANG = Dialect(
    name="sglang-jax",
    key_type=SglangKey,
    quote='"',
    names=_STACK_NAMES,
    written=_STACK_WRITTEN,
    dimensions=lambda key: key._asdict(),
)
INFERENCE = Dialect(
    name="tpu-inference",
    key_type=InferenceKey,
    quote="'",
    names=_STACK_NAMES,
    written=_STACK_WRITTEN,
    dimensions=inference_dimensions,
)

DIALECTS = {dialect.name: dialect for dialect in (JAX, INFERENCE, SGLANG)}
