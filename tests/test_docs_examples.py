"""Every command of the pages in PAGES is run, in the order of the page, in a folder of its own.

What is run instead of what is written is listed here: large sets of keys become a small one (SUBSTITUTIONS),
a few commands are not for a test to run (CHECKED), and a sweep that needs a TPU must say so, and is then run
for a TPU that is not there. A command that belongs to no category fails its test.

Fences: none or bash for commands, python and yaml, output for what the commands before it print, text for
anything else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from autotune.cli.main import COMMANDS, cli
from tests.conftest import ROOT, in_this_process, user_environment

PAGES = ("README.md", "docs/serving.md", "docs/tables.md", "docs/recipes.md", "docs/report.md")
SHAPE = "q_heads=4,kv_heads=1,head_dim=128,page_size=16,max_num_batched_tokens=512,max_model_len=512"
FEW = "--kv-pages 8 --queries 32,64"

# What to run in place of what is written: a pattern, what takes its place, and why. Applied in turn.
SUBSTITUTIONS = (
    (r"--preset (published|smoke)", f"--shape {SHAPE} {FEW}", "hundreds of keys take ten minutes"),
    (r"(autotune sweep .*)--shape q_heads=[^4]\S*", rf"\1--shape {SHAPE} {FEW}", "32 heads take a minute"),
    (
        r"(autotune sweep .*?)--model \S+(?: --(?:tp|max-model-len) \S+)*",
        rf"\1--shape {SHAPE} {FEW}",
        "dozens of keys take minutes",
    ),
    (r"(autotune lookup .*) --compile", r"\1", "its two compiles take half a minute"),
    (
        r"(autotune check --kernel \S+) .*",
        rf"\1 --kernel-source {ROOT}/build/kernels --model qwen3-8b --tp 8 --target v6e --max-model-len 1024",
        "32 heads take minutes",
    ),
    (r"(autotune report) \S*rows/\S* \S*rows/\S*", r"\1 results/v6e", "hundreds of keys take seconds"),
    (r"(autotune emit )(?!.*--allow-modelled)", r"\1--allow-modelled ", "rows are of no TPU here"),
)

# Commands that a test does not run, by their first words, and what is asserted instead.
CHECKED = ("pip install", "make ")

RUN = ("autotune ", "mv ")


class Block(NamedTuple):
    """A fenced block: its page, line and language."""

    page: str
    line: int
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    return [Block(page, text[: found.start()].count("\n") + 1, found[1], found[2]) for found in fences]


def commands(block: Block) -> Iterator[tuple[str, int]]:
    """A block's commands, each with its documented exit code, which a comment `# exit 1` names."""
    if block.language == "yaml":
        text = "\n".join(re.findall(r"^\s*- run: (.*)$", block.text, re.M))
    else:
        # A comment before a continued line would end the command there.
        text = re.sub(r"\\\n\s*", "", block.text)
    for line in filter(str.strip, text.splitlines()):
        command, _, comment = line.partition("  #") if "  #" in line else line.partition(" # ")
        said = re.search(r"\bexit (\d+)", comment)
        yield command.strip(), int(said[1]) if said else 0


class Shell:
    """A folder to run commands in. path: PYTHONPATH. said: the output of the last one."""

    def __init__(self, folder: Path, cache: Path, path: str) -> None:
        self.folder = folder
        self.environment = {**user_environment(cache), "PYTHONPATH": path}
        self.environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{self.environment['PATH']}"
        self.said = ""

    def run(self, command: str, code: int = 0) -> str:
        if command.startswith("autotune ") and not set(command) & set("|&;<>$*?~"):
            done = in_this_process(shlex.split(command)[1:], self.folder, self.environment)
        else:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self.environment,
                text=True,
                capture_output=True,
                timeout=300,
            )
        said = done.stdout + done.stderr
        assert done.returncode == code, f"{command}\nexited with {done.returncode}:\n{said}"
        assert "Traceback" not in said
        self.said = said
        return said


def substituted(command: str) -> str:
    for pattern, instead, _ in SUBSTITUTIONS:
        command = re.sub(pattern, instead, command)
    return command


def needs_tpu(command: str) -> bool:
    alone = ("--target", "--interpret", "--dry-run", "--help")
    timed = command.startswith(("autotune sweep", "autotune confirm"))
    return timed and not any(option in command for option in alone)


def check(command: str) -> None:
    """What can be said of a command that a test does not run."""
    if command.startswith("make "):
        subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, check=True, capture_output=True)
        return
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for wanted in re.findall(r"\.\[(\w+)\]", command):
        assert wanted in extras, command


def without_numbers(text: str) -> str:
    """A page's tables are larger than the test's."""
    return re.sub(r"\d+( keys?\b)?", lambda found: "# keys" if found[1] else "#", text)


def follow(block: Block, shell: Shell) -> None:
    """Run a block's commands, or its program; compare its output."""
    where = f"{block.page}:{block.line}"
    if block.language == "text":
        return
    if block.language == "python":
        (shell.folder / "example.py").write_text(block.text)
        shell.run(f"JAX_PLATFORMS=cpu {shlex.quote(sys.executable)} example.py")
        return
    if block.language == "output":
        for line in block.text.splitlines():
            assert without_numbers(line) in without_numbers(shell.said), where
        return
    assert block.language in ("", "bash", "yaml"), f"{where}: {block.language} is no language known here"
    for command, code in commands(block):
        if command.startswith(CHECKED):
            check(command)
            continue
        assert command.startswith(RUN), f"{where}: {command!r} is in no category: see this test's module"
        if command.startswith("autotune sweep") and "--model" in command:
            shell.run(f"{command} --dry-run{'' if '--target' in command else ' --target v6e'}")
        if command.startswith("autotune report") and not importlib.util.find_spec("plotly"):
            assert "pip install" in shell.run(substituted(command), 3)
        elif "--kernel-source" in command and not (ROOT / "build" / "kernels").is_dir():
            assert "does not hold" in shell.run(substituted(command), 2)
        elif "emit" in command and "--check" in command:
            shell.run(f"{substituted(command)} || test $? = {code}")
        elif needs_tpu(command):
            assert "no TPU is attached" in shell.run(substituted(command), 3)
            if "sweep" in command:  # tests/analysis/test_confirm.py runs the other one without a TPU
                shell.run(f"{substituted(command)} --target v6e")
        else:
            shell.run(substituted(command), code)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, replayed: str) -> Path:
    """What a reader of the pages has: autotune, a model's config, some results, a table made of them."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "bin").mkdir()
    program = folder / "bin" / "autotune"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m autotune "$@"\n')
    program.chmod(0o755)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    config |= {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps(config))
    shell = Shell(folder, folder / "cache", replayed)
    shell.run(f"autotune sweep --target v6e --shape {SHAPE} {FEW} --vmem-limit 100MiB --out results/v6e")
    shell.run("autotune emit results/v6e --allow-modelled -o tuned_block_sizes.py")
    shutil.copy(folder / "tuned_block_sizes.py", folder / "table.py")
    return folder


@pytest.mark.parametrize(
    "page", [*PAGES[:2], *(pytest.param(page, marks=pytest.mark.slow) for page in PAGES[2:])]
)
def test_every_command_of_a_page_runs(page: str, tmp_path: Path, given: Path, replayed: str) -> None:
    # The small programs are compiled once a generation, for all pages.
    shutil.copytree(given, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("cache"))
    shell = Shell(tmp_path, given / "cache", replayed)
    found = blocks(page)
    assert sum(len(list(commands(block))) for block in found if block.language in ("", "bash", "yaml")) > 1
    for block in found:
        follow(block, shell)


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
)
def test_commands_exist_with_their_options(page: str) -> None:
    """Of any page, also those in backticks, which are too short to be run, such as `autotune cache`."""
    prose = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    texts = re.findall(r"`(autotune [^`]+)`", prose)
    texts += [text for block in blocks(page) for text, _ in commands(block) if text.startswith("autotune ")]
    for text in texts:
        name, *rest = text.split()[1:]
        if name.startswith("-"):
            continue
        for alternative in name.split("|"):
            assert alternative in COMMANDS, f"{page}: {text}"
            command: click.Command | None = cli.get_command(click.Context(cli), alternative)
            while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
                command = command.get_command(click.Context(command), rest.pop(0).split("|")[0])
            assert command, f"{page}: {text}"
            known = {"-h", "--help", *(o for p in command.params for o in (*p.opts, *p.secondary_opts))}
            for option in re.findall(r"(?<!\S)--?[a-z][\w-]*", " ".join(rest)):
                assert option in known, f"{page}: {text}: {alternative} has no {option}"


def test_a_command_of_no_category_would_fail(tmp_path: Path) -> None:
    shell = Shell(tmp_path, tmp_path, str(ROOT))
    with pytest.raises(AssertionError, match="in no category"):
        follow(Block("page", 1, "", "curl example.org\n"), shell)
    with pytest.raises(AssertionError, match="no language known"):
        follow(Block("page", 1, "ruby", "puts 1\n"), shell)


def test_substitutions_apply_to_what_is_written() -> None:
    """One that nothing needs any more is taken out."""
    written = [command for page in PAGES for block in blocks(page) for command, _ in commands(block)]
    for pattern, _, why in SUBSTITUTIONS:
        assert any(re.search(pattern, command) for command in written), why
