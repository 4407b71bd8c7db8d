"""Shell completion: bash is really asked; zsh and fish by the questions that their scripts ask."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_cli import HEAVY, imported
from tests.conftest import user_environment


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A user's environment with `autotune` on PATH, and two files in the current folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "autotune"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m autotune "$@"\n')
    command.chmod(0o755)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "vllm_table.py").touch()
    (tmp_path / "here" / "results").mkdir()
    return {**user_environment(), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def ask_bash(words: list[str], environment: dict[str, str], cwd: Path) -> list[str]:
    """What bash offers for the last of the words."""
    quoted = " ".join(f"'{word}'" for word in words)
    script = (
        'eval "$(autotune completion bash)"\n'
        "complete -p autotune >&2\n"  # it is installed for the command
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}\n"
        "_autotune_completion autotune 2>/dev/null\n"  # compopt fails where no completion is under way
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=environment, cwd=cwd, capture_output=True, text=True, check=True
    )
    assert "-F _autotune_completion autotune" in done.stderr
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["do"], ["doctor"]),
        (["sweep", "--target", "v5"], ["v5e", "v5p"]),
        (["sweep", "--preset", ""], ["smoke", "published", "serving", "long"]),
        (["sweep", "--workload", "de"], ["decode-heavy"]),
        (["keys", "--model", "llama-3.1-"], ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"]),
        (["check", "v"], ["v4", "v5e", "v5p", "v6e", "v7x", "vllm_table.py"]),
        (["check", "jax", "--form"], ["--format"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
    ],
)
def test_bash_is_offered(
    words: list[str], offered: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    assert ask_bash(["autotune", *words], environment, tmp_path / "here") == offered


def ask_click(instruction: str, words: str, number: str, environment: dict[str, str], cwd: Path) -> str:
    asked = {"_AUTOTUNE_COMPLETE": instruction, "COMP_WORDS": words, "COMP_CWORD": number}
    return subprocess.run(
        ["autotune"], env={**environment, **asked}, cwd=cwd, capture_output=True, text=True, check=True
    ).stdout


def test_zsh_and_fish_are_offered(environment: dict[str, str], tmp_path: Path) -> None:
    here = tmp_path / "here"
    lines = ask_click("zsh_complete", "autotune sweep --target v6", "3", environment, here).splitlines()
    assert lines[:2] == ["plain", "v6e"]
    assert ask_click("fish_complete", "autotune sweep --target v6", "v6", environment, here) == "plain,v6e\n"


def test_what_is_no_name_is_left_to_the_shell_as_a_file(environment: dict[str, str], tmp_path: Path) -> None:
    here = tmp_path / "here"
    assert ask_click("fish_complete", "autotune show ", "", environment, here).startswith("dir,")
    assert ask_click("bash_complete", "autotune check resu", "2", environment, here) == "file,resu\n"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_name_the_command(shell: str, environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["autotune", "completion", shell], env=environment, capture_output=True, text=True, check=True
    )
    assert f"_AUTOTUNE_COMPLETE={shell}_complete" in done.stdout
    if path := shutil.which(shell):
        subprocess.run([path, "-n", "/dev/stdin"], input=done.stdout, text=True, check=True)


def test_nothing_heavy_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    code, modules = imported("completion", "bash")
    assert code == 0
    assert not modules & HEAVY
    monkeypatch.setenv("_AUTOTUNE_COMPLETE", "fish_complete")
    monkeypatch.setenv("COMP_WORDS", "autotune lookup --table ")
    monkeypatch.setenv("COMP_CWORD", "")
    code, modules = imported()
    assert code == 0
    assert not modules & HEAVY
