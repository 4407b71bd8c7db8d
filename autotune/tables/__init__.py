"""Tables of tuned block sizes: load one, look a call up in it, make JAX's kernel use it.

from autotune import tables

tables.get_tuned_block_sizes("bfloat16", "bfloat16", 32, 8, 128, 16, 2048, 256)
with tables.use("tuned_block_sizes.py"):
    ...  # in this thread JAX's kernel, jitted or not, takes its block sizes from the file
tables.install("tuned_block_sizes.py")  # and from here on in every thread
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.tables.load import load
from autotune.tables.lookup import Answer, explain, get_tuned_block_sizes
from autotune.tables.table import Table

if TYPE_CHECKING:
    from autotune.tables.override import install, use

__all__ = ["Answer", "Table", "explain", "get_tuned_block_sizes", "install", "load", "use"]


def __getattr__(name: str) -> Any:
    """`use` and `install`, whose module imports jax, when they are asked for."""
    if name in ("install", "use"):
        from autotune.tables import override

        return getattr(override, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
