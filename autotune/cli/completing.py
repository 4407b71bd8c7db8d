"""What a shell is offered for a word that is a known name or a file."""

from __future__ import annotations

import glob
from collections.abc import Callable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

COMPLETE_VARIABLE = "_AUTOTUNE_COMPLETE"  # by which the scripts of `autotune completion` ask for words
TABLES = ("jax", "v4", "v5e", "v5p", "v6e", "v7x")
WORKLOADS = ("mixed", "decode-heavy", "prefill-heavy")


def names_or_files(*names: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """What completes a word that is one of these names or a file's."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        fitting = [name for name in names if name.startswith(incomplete)]
        if not fitting:
            return [CompletionItem(incomplete, type="file")]
        # Where a name fits, a shell does not look for files by itself.
        files = sorted(path.name for path in Path().glob(f"{glob.escape(incomplete)}*"))
        return [CompletionItem(word) for word in (*fitting, *(f for f in files if not f.startswith(".")))]

    return complete
