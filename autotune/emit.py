"""Winners to a Python table that people commit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autotune import results, winners
from autotune.errors import UsageError
from autotune.incumbents import incumbents_of
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.tables import jax_module
from autotune.tpu.chips import MIB

if TYPE_CHECKING:
    import pandas as pd


def winning_lines(folder: Path) -> pd.DataFrame:
    """The winner of each entry in a results folder, today's look-up being the incumbent of ties.

    Raises:
      UsageError: the folder cannot be read, or holds no candidate that is ok.
    """
    frame = results.read(folder, winners.READ_COLUMNS)
    scored = winners.scores(frame)
    if scored.empty:
        raise UsageError(
            f"results folder {str(folder)!r} has {len(frame)} rows and no candidate that is ok: nothing "
            f"can win; `autotune show {folder}` says what failed"
        )
    return winners.choose(scored, incumbents_of(scored))


def emit(lines: pd.DataFrame, *, allow_modelled: bool) -> str:
    """The jax dialect's module of winning lines; the same text for the same lines.

    Raises:
      UsageError: the rows are not measured and that is not allowed, are interpreted, or hold more than one
        setting of the kernel's static arguments.
    """
    sources = set(lines["source"])
    if results.INTERPRETED in sources:
        raise UsageError(
            "some winners come from interpreted rows, which show that the kernel is right, not how fast "
            "it is: sweep on a TPU, or for a --target without one"
        )
    if results.MODELLED in sources and not allow_modelled:
        count = int((lines["source"] == results.MODELLED).sum())
        raise UsageError(
            f"{count} of {len(lines)} winners are modelled, from the compiler's schedule and not timed on a "
            "TPU: add --allow-modelled to emit them, and the table will say so"
        )
    settings = lines[results.SETTING_COLUMNS].drop_duplicates()
    if len(settings) > 1:
        kinds = "; ".join(_settings_text(row) for row in results.rows_of(settings))
        raise UsageError(
            f"the rows hold {len(settings)} settings of the kernel's static arguments ({kinds}), and a table "
            "holds one: keep each in a results folder of its own"
        )
    tables: dict[str, dict[TableKey, BlockSizes]] = {}
    for target, key, blocks in zip(
        lines["target"], winners.keys_of(lines), winners.blocks_of(lines), strict=True
    ):
        tables.setdefault(target, {})[key] = blocks
    source = results.MODELLED if results.MODELLED in sources else results.MEASURED
    return jax_module.render(tables, source, _provenance(lines, source))


def _provenance(lines: pd.DataFrame, source: str) -> list[str]:
    """What a reviewer asks of a table; nothing in it depends on when or where it is emitted."""
    settings = results.rows_of(lines[results.SETTING_COLUMNS].head(1))[0]
    text = []
    if source == results.MODELLED:
        modelled = int((lines["source"] == results.MODELLED).sum())
        models = ", ".join(sorted(lines["model"].dropna().unique()))
        text += [
            f"MODELLED: {modelled} of {len(lines)} values come from the compiler's schedule and a cost model",
            f"({models}). They were not timed on a TPU.",
        ]
    else:
        text.append("MEASURED: every value was timed on a TPU.")
    counts = sorted(lines["target"].value_counts().items())
    text += [
        f"keys: {', '.join(f'{count} {target}' for target, count in counts)}",
        f"settings: {_settings_text(settings)}",
    ]
    for column in ("jax", "jaxlib", "libtpu", "kernel_fingerprint"):
        values = ", ".join(sorted(lines[column].dropna().unique())) or "not installed"
        text.append(f"{column.replace('_', ' ')}: {values}")
    newest = lines["time"].max()
    text.append(f"newest row: {newest:%Y-%m-%d %H:%M:%S} UTC")
    return text


def _settings_text(settings: dict[str, object]) -> str:
    """The static arguments that were given, and the VMEM limit whether given or not."""
    limit = settings["vmem_limit_bytes"]
    parts = [
        f"{name}={value:g}"
        for name, value in settings.items()
        if isinstance(value, int | float) and name != "vmem_limit_bytes"
    ]
    parts.append(
        f"vmem_limit_bytes={limit} ({limit / MIB:g} MiB)"
        if isinstance(limit, int)
        else "the compiler's own VMEM limit"
    )
    return ", ".join(parts)
