"""Named sets of keys to sweep."""

from __future__ import annotations

from autotune.errors import UsageError
from autotune.kernel.problem import TableKey
from autotune.kernel.rpa import published_table
from autotune.kernel.tiling import canonical_key

PRESETS = {
    "smoke": "two small head-and-page layouts, four keys each: minutes on two cores",
    "published": "every canonical key that a key of the installed JAX's table stands for",
}


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
    if preset == "published":
        stood_for = {canonical_key(key) for table in published_table().values() for key in table}
        return tuple(sorted(key for key in stood_for if key))
    raise UsageError(f"preset {preset!r} is unknown: use {', '.join(PRESETS)}")
