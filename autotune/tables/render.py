"""The jax dialect: a Python module that stands in for JAX's own tuned_block_sizes.

The module has JAX's names, signatures, errors and clamping. Where JAX's look-up goes wrong it does not: it
tells v5e from v5p, consults the table on v4, and asks for the device once. It needs jax and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from autotune.kernel.problem import BlockSizes, TableKey
from autotune.tpu.generations import GENERATIONS

_HEADER = '''\
"""Tuned block sizes for JAX's ragged paged attention kernel on TPU.

{provenance}

Written by tpu-autotune ({mark}); stands in for
jax.experimental.pallas.ops.tpu.ragged_paged_attention.tuned_block_sizes.
"""

import functools
import logging

import jax
import jax.numpy as jnp

# Where the values come from: 'measured' on a TPU, or 'modelled' from the
# compiler's schedule without one.
SOURCE = {source!r}
MODELLED = {modelled}

# The kernel's vmem_limit_bytes that the values were compiled at; None for
# the compiler's own. With a lower one they may not fit.
VMEM_LIMIT_BYTES = {vmem_limit_bytes}

# Pages of a sequence that the kernel handles well; see get_min_page_size.
MAX_PAGES_PER_SEQ = 16

# The generation of each device_kind.
DEVICE_NAMES = {{
{device_names}}}

# By generation, then by (q dtype, kv dtype, q heads per block, KV heads per
# block, head_dim, page_size, max_num_batched_tokens, max_model_len):
# (num_kv_pages_per_block, num_queries_per_block).
TUNED_BLOCK_SIZES = {{
'''

FUNCTIONS = '''\
}


def next_power_of_2(x: int):
    """The smallest power of two that is at least x, which must be positive."""
    assert x > 0
    return 1 << (x - 1).bit_length()


def simplify_key(key):
    """The key that a call with these arguments is looked up under."""
    q_dtype, kv_dtype, q_heads, kv_heads, head_dim, page_size, tokens, pages = key
    return (
        jnp.dtype(q_dtype).name,
        jnp.dtype(kv_dtype).name,
        next_power_of_2(q_heads),
        next_power_of_2(kv_heads),
        -(-head_dim // 128) * 128,
        next_power_of_2(page_size),
        next_power_of_2(tokens),
        next_power_of_2(page_size * pages),
    )


@functools.cache
def _first_device_kind() -> str:
    return jax.devices()[0].device_kind


def _device_kind() -> str:
    # A default device is how a program is traced for a TPU that is not here.
    device = jax.config.jax_default_device
    return getattr(device, 'device_kind', None) or _first_device_kind()


def get_tpu_version() -> int:
    """The TPU's version as a number, or -1 without a TPU."""
    kind = _device_kind()
    if 'TPU' not in kind:
        return -1
    digits = kind.removeprefix('TPU').strip().removeprefix('v')[:1]
    assert digits.isdigit(), kind
    return int(digits)


def get_device_name(num_devices: int | None = None):
    """The name that TUNED_BLOCK_SIZES has for this device."""
    kind = _device_kind()
    name = DEVICE_NAMES.get(kind, kind)
    return name if num_devices is None else f'{name}-{num_devices}'


@functools.cache
def _warn_of_default(device: str, key, default) -> None:
    """Once a key: a call that the table does not have may run far slower."""
    logging.getLogger(__name__).warning(
        'no tuned block sizes for %s and the key %s: using the default %s', device, key, default)


def get_tuned_block_sizes(
    q_dtype,
    kv_dtype,
    num_q_heads_per_blk,
    num_kv_heads_per_blk,
    head_dim,
    page_size,
    max_num_batched_tokens,
    pages_per_seq,
) -> tuple[int, int]:
    """(num_kv_pages_per_blk, num_queries_per_blk) of a call, from the table or by default."""
    version = get_tpu_version()
    if version < 4:
        raise NotImplementedError('TPU version must be 4 or higher.')
    key = simplify_key((
        q_dtype,
        kv_dtype,
        num_q_heads_per_blk,
        num_kv_heads_per_blk,
        head_dim,
        page_size,
        max_num_batched_tokens,
        pages_per_seq,
    ))
    # JAX's own defaults; v4 has the least VMEM.
    default = (32, 32) if version == 4 else (128, 32)
    device = get_device_name()
    tuned = TUNED_BLOCK_SIZES.get(device, {}).get(key)
    if tuned is None:
        _warn_of_default(device, key, default)
    pages, queries = tuned or default
    return (min(pages_per_seq, pages), min(max_num_batched_tokens, queries))


def get_min_page_size(max_model_len, min_page_size=16):
    """The smallest page size at which the kernel handles a model length well."""
    return max(next_power_of_2(max_model_len) // MAX_PAGES_PER_SEQ, min_page_size)
'''


def device_name(generation: str) -> str:
    """The name of a generation in the emitted table: 'TPU v5e', 'TPU v7x'."""
    return f"TPU {generation}"


def render(
    tables: Mapping[str, Mapping[TableKey, BlockSizes]],
    source: str,
    provenance: list[str],
    vmem_limit_bytes: int | None = None,
) -> str:
    """The module's text, the same for the same values in whatever order.

    tables: values by generation name and key. source: 'measured', 'modelled', or several. provenance: lines
    of at most 100 printable characters for the docstring. vmem_limit_bytes: that they were compiled at.
    """
    kinds = sorted((kind, device_name(g.name)) for g in GENERATIONS.values() for kind in g.device_kinds)
    said = "\n".join(_harmless(line) for line in provenance)
    parts = [
        _HEADER.format(
            provenance=said,
            mark=header_mark(said),
            source=source,
            modelled="modelled" in source,
            vmem_limit_bytes=vmem_limit_bytes,
            device_names="".join(f"    {kind!r}: {name!r},\n" for kind, name in kinds),
        )
    ]
    for generation in sorted(tables):
        parts.append(f"    {device_name(generation)!r}: {{\n")
        for key, blocks in sorted(tables[generation].items()):
            parts.append(f"        {tuple(key)!r}: {tuple(blocks)!r},\n")
        parts.append("    },\n")
    return "".join([*parts, FUNCTIONS])


def header_mark(said: str) -> str:
    """What the header has of its lines, by which lines that were added by hand are told."""
    return hashlib.sha256(said.encode()).hexdigest()[:8]


def _harmless(line: str) -> str:
    """A line that cannot end the docstring it is written into."""
    printable = "".join(c if c.isprintable() else "?" for c in line)
    return printable.replace("\\", "/").replace('"""', "'''")
