"""What to type next: the last line of a command, on standard error where the output is data."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.cli.options import command_name
from autotune.io.terminal import typed
from autotune.results import schema

if TYPE_CHECKING:
    from autotune.analysis.overview import Overview
    from autotune.io.folders import Folder
    from autotune.results.unfinished import Begun

GIT_SECONDS = 5.0


def after_rows(seen: Overview, folder: Folder, target: str | None = None) -> str | None:
    """What to do with a folder whose sweeps have ended; None if there is nothing to say."""
    if not seen.lines or schema.INTERPRETED in seen.statuses:  # no table is made of such a folder
        return None
    allow = " --allow-modelled" if any(line.source == schema.MODELLED for line in seen.lines) else ""
    only = f" --target {target}" if target else ""
    # No table goes into a results folder, which may be the current one.
    name = "../tuned_block_sizes.py" if Path(str(folder)).resolve() == Path.cwd() else "tuned_block_sizes.py"
    return f"{command_name()} emit {typed(folder)}{only}{allow} -o {name}"


def going_on(begun: Sequence[Begun]) -> str:
    """How the oldest of some unfinished sweeps goes on."""
    for sweep in begun:
        if sweep.command:
            return f"{command_name()} {typed(*sweep.command)}"
    return "the command of the sweep again: it goes on where it was"


def committable(path: Path) -> bool:
    """Whether a file lies in the work tree of a git repository that does not ignore it."""
    name = path.resolve()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(
            # A repository's own monitor is a program that it names: it is not to be run for this.
            ["git", "-C", str(name.parent), "-c", "core.fsmonitor=false", "check-ignore", "-q", str(name)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_SECONDS,
            check=False,
        )
        return asked.returncode == 1  # 0: ignored; 128: no repository
    return False
