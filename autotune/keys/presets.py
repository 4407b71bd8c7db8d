"""Named sets of keys to sweep."""

from __future__ import annotations

from autotune.errors import UsageError
from autotune.kernel.jax_rpa.call import published_table
from autotune.kernel.jax_rpa.tiling import canonical_key
from autotune.kernel.problem import TableKey

PRESETS = {
    "smoke": "two small head-and-page layouts, four keys each: minutes on two cores",
    "published": "every canonical key that a key of the installed JAX's table stands for",
    "serving": "the published layouts as they are served: 16 to 4096 tokens, lengths 2048 to 131072",
    "long": "of the same, length 32768 in pages of 16, for --max-num-seqs 64 or fewer",
}
_TOKENS = tuple(1 << i for i in range(4, 13))
_LENGTHS = tuple(1 << i for i in range(11, 18))
_PAGES_PER_SEQ = 1024  # of powers of two the most of which SMEM holds a page table for 128 sequences
_LONG = 16, 32768


def keys(preset: str) -> tuple[TableKey, ...]:
    """The canonical keys of a preset, sorted.

    Raises:
      UsageError: no preset has this name.
    """
    if preset == "smoke":
        return tuple(
            TableKey("bfloat16", "bfloat16", q_heads, kv_heads, 128, page_size, tokens, model_len)
            for q_heads, kv_heads, page_size in ((4, 1, 64), (8, 2, 128))
            for tokens in (1024, 2048)
            for model_len in (1024, 2048)
        )
    stood_for = {canonical_key(key) for table in published_table().values() for key in table}
    published = sorted(key for key in stood_for if key)
    if preset == "published":
        return tuple(published)
    layouts = sorted({key[:6] for key in published})
    if preset == "serving":
        return tuple(
            TableKey(*layout, tokens, length)
            for layout in layouts
            for tokens in _TOKENS
            for length in _LENGTHS
            if length <= _PAGES_PER_SEQ * layout[5]
        )
    if preset == "long":
        page_size, length = _LONG
        return tuple(
            TableKey(*layout, tokens, length)
            for layout in layouts
            for tokens in _TOKENS
            if layout[5] == page_size
        )
    raise UsageError(f"preset {preset!r} is unknown: use {', '.join(PRESETS)}")
