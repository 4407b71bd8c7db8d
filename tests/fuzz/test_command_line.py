"""Hostile files through the commands themselves: one line, the right exit code, never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, user_environment
from tests.fuzz.targets import TARGETS

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
INPUTS = 5  # of each
Answers = dict[
    tuple[str, str], list[tuple[int, str, str]]
]  # by target and command: exit code, screen, errors

# One process runs them all, each as if it were its own.
_DRIVER = """
import contextlib, io, json, signal, sys, traceback
from autotune.cli.main import run
for line in sys.stdin:
    sys.argv = ["autotune", *json.loads(line)]
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run()
        except BaseException:
            traceback.print_exc()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), file=sys.__stdout__, flush=True)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """By command, what it answered to each input."""
    folder = tmp_path_factory.mktemp("hostile")
    lines: list[tuple[tuple[str, str], list[str]]] = []
    for at, (name, command) in enumerate(COMMANDS):
        make = TARGETS[name].inputs()
        for number in range(INPUTS):
            path = folder / f"{at}-{number}"
            if name.startswith("row-"):
                path.mkdir()
                (path / "rows-1.parquet").write_bytes(make(2, number))
            else:
                path = path.with_suffix(".json" if name == "config" else ".py")
                path.write_bytes(make(2, number))
            lines.append(((name, command), [part.replace("{}", str(path)) for part in command.split()]))
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER],
        input="".join(json.dumps(arguments) + "\n" for _, arguments in lines),
        cwd=folder,
        env={**user_environment(folder / "cache"), "JAX_PLATFORMS": "cpu"},
        text=True,
        capture_output=True,
        timeout=600,
    )
    said: list[Any] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == len(lines), done.stderr[-2000:]
    found: Answers = {}
    for (of, _), answer in zip(lines, said, strict=True):
        found.setdefault(of, []).append(tuple(answer))
    return found


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_a_hostile_file_is_one_line(name: str, command: str, answers: Answers) -> None:
    assert len(answers[name, command]) == INPUTS
    for code, out, err in answers[name, command]:
        assert "Traceback" not in err, err
        assert code in (0, 1, 2), (code, err)
        errors = [line for line in err.splitlines() if line.startswith("Error: ")]
        assert len(errors) == (code == 2), err
        assert (out + err).replace("\n", "").isprintable()
        # What was read in spite of its changes is told of on the screen or in a file.
        assert code != 1 or out


def test_some_of_them_are_refused_and_some_are_not(answers: Answers) -> None:
    codes = [code for answer in answers.values() for code, _, _ in answer]
    assert codes.count(2) > 10
    assert len(codes) - codes.count(2) > 5


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
