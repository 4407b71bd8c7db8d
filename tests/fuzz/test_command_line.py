"""Hostile files through the commands themselves: one line, the right exit code, never a traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.conftest import ROOT, user_environment
from tests.fuzz.readers import READERS

# Commands that read a file, with {} in its place, and whose inputs it is given.
COMMANDS = (
    ("table", "check {}"),
    ("table", "check {} --format github"),
    ("table", "diff {} jax"),
    ("table", "lookup --q-heads 8 --kv-heads 2 --page-size 128 --max-num-batched-tokens 1024 "
     "--max-model-len 2048 --target v6e --table {}"),
    ("config", "keys --model {}"),
    ("config", "sweep --target v6e --dry-run --out out --model {}"),
    ("keys", "keys --keys {}"),
    ("batch", "sweep --target v6e --dry-run --out out --preset smoke --workload {}"),
    ("row-files", "show {}"),
    ("row-values", "show {}"),
    ("row-values", "results ls {}"),
    ("row-values", "results export {} -o {}.csv"),
    ("row-values", "report {} -o {}.html"),
    ("row-values", "emit {} --allow-modelled -o {}.py"),
)  # fmt: skip
Run = Callable[..., subprocess.CompletedProcess[str]]


def asked(command: str, name: str, data: bytes, folder: Path) -> list[str]:
    """The command's words, with a file, or a results folder, of this input."""
    if name.startswith("row-"):
        path = folder / "input"
        path.mkdir(exist_ok=True)
        (path / "rows-1.parquet").write_bytes(data)
    else:
        path = folder / ("input.json" if name == "config" else "input.py")
        path.write_bytes(data)
    return [word.replace("{}", str(path)) for word in command.split()]


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_a_hostile_file_is_one_line(name: str, command: str, autotune: Run, tmp_path: Path) -> None:
    @settings(max_examples=settings().max_examples // 20, suppress_health_check=list(HealthCheck))
    @given(READERS[name].inputs())
    def hostile(data: bytes) -> None:
        done = autotune(*asked(command, name, data, tmp_path))
        assert done.returncode in (0, 1, 2), done.stderr
        errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
        assert len(errors) == (done.returncode == 2), done.stderr
        assert (done.stdout + done.stderr).replace("\n", "").isprintable()
        # What was read in spite of its changes is told of on the screen or in a file.
        assert done.returncode != 1 or done.stdout

    hostile()


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_a_sound_file_is_taken_and_rubbish_is_refused(
    name: str, command: str, autotune: Run, tmp_path: Path
) -> None:
    """Or every hostile one might be refused, or none."""
    codes = (autotune(*asked(command, name, seed, tmp_path)).returncode for seed in READERS[name].seeds())
    assert any(code in (0, 1) for code in codes)
    assert autotune(*asked(command, name, b"\x00 rubbish", tmp_path)).returncode == 2


def test_nothing_was_run(tmp_path: Path) -> None:
    """A table file that would leave a trace if it were run, imported or evaluated."""
    trace = tmp_path / "executed"
    table = tmp_path / "table.py"
    row = "('bfloat16', 'bfloat16', 8, 2, 128, 128, 1024, 2048)"
    table.write_text(
        f"open({str(trace)!r}, 'w')\nTUNED_BLOCK_SIZES = {{'TPU v6': {{{row}: (8, 32)}}}}\n"
        f"open({str(trace)!r}, 'w')\n"
    )
    for arguments in (["check", str(table)], ["diff", str(table), "jax"]):
        done = subprocess.run(
            [sys.executable, "-m", "autotune", *arguments],
            cwd=ROOT,
            env=user_environment(tmp_path),
            text=True,
            capture_output=True,
            timeout=300,
        )
        assert done.returncode in (0, 1), done.stderr
    assert not trace.exists()
