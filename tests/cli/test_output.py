"""What `-o` takes the place of, and what it does not: each as a user would meet it."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autotune.cli.main import cli
from autotune.errors import AutotuneError
from autotune.results import dataset
from autotune.tables.load import committed_path, load
from tests.conftest import ROOT, user_environment
from tests.factories import KEY, make_row

LONGER = KEY._replace(max_model_len=4096)
Run = Callable[..., Result]
# A command that writes a file, and how its file is called.
WRITERS = {
    "emit": (["emit", "r", "--allow-modelled"], "x.py"),
    "rows to paste": (["emit", "r", "--allow-modelled", "--names", "jax"], "x.py"),
    "report": (["report", "r"], "x.html"),
    "csv": (["results", "export", "r"], "x.csv"),
    "json": (["results", "export", "r"], "x.json"),
    "parquet": (["results", "export", "r"], "x.parquet"),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command in a folder with results in r."""
    monkeypatch.chdir(tmp_path)
    dataset.append(
        tmp_path / "r",
        [
            make_row(8, latency_us=1.0),
            make_row(16, latency_us=2.0),
            make_row(8, key=LONGER, latency_us=2.0),
        ],
    )

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(cli, list(map(str, arguments)))

    return call


def refusal(done: Result) -> str:
    assert isinstance(done.exception, AutotuneError), done.output
    said = str(done.exception)
    assert done.exception.exit_code == 2 and "\n" not in said
    return said


@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_not_autotunes_is_replaced_only_when_asked(run: Run, tmp_path: Path, writer: str) -> None:
    arguments, name = WRITERS[writer]
    path = tmp_path / name
    path.write_text("mine = 1\n")
    path.chmod(0o640)
    assert "not as this autotune writes it: name another file, or add --force" in refusal(
        run(*arguments, "-o", name)
    )
    assert path.read_text() == "mine = 1\n"
    assert run(*arguments, "-o", name, "--force").exit_code == 0
    assert path.read_bytes()[:9] != b"mine = 1\n" and stat.S_IMODE(path.stat().st_mode) == 0o640
    again = run(*arguments, "-o", name)
    if writer == "parquet":  # rows of a sweep look the same
        assert "add --force" in refusal(again)
    else:
        assert again.exit_code == 0, again.output


@pytest.mark.parametrize("writer", WRITERS)
def test_a_read_only_file_and_an_empty_one(run: Run, tmp_path: Path, writer: str) -> None:
    arguments, name = WRITERS[writer]
    (tmp_path / name).touch()  # as mktemp leaves it
    assert run(*arguments, "-o", name).exit_code == 0
    (tmp_path / name).chmod(0o444)
    assert "is read-only" in refusal(run(*arguments, "-o", name))
    assert run(*arguments, "-o", name, "--force").exit_code == 0
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o444


@pytest.mark.parametrize("writer", WRITERS)
def test_a_results_folder_holds_rows_alone(run: Run, tmp_path: Path, writer: str) -> None:
    arguments, name = WRITERS[writer]
    rows = next((tmp_path / "r").glob("*.parquet"))
    before = rows.read_bytes()
    (tmp_path / "link").symlink_to("r")
    for place in (f"r/{name}", f"link/{name}"):
        assert "is in a results folder, which holds rows alone" in refusal(run(*arguments, "-o", place))
    if writer == "parquet":
        assert "is in a results folder" in refusal(run(*arguments, "-o", rows))
    assert [path.read_bytes() for path in (tmp_path / "r").iterdir()] == [before]


@pytest.mark.parametrize("writer", WRITERS)
def test_links_stay_links_and_a_loop_of_them_is_one_line(run: Run, tmp_path: Path, writer: str) -> None:
    arguments, name = WRITERS[writer]
    (tmp_path / "deep").mkdir()
    target = tmp_path / "deep" / name
    target.touch()
    (tmp_path / name).symlink_to(target)
    os.link(target, tmp_path / "hard")
    assert run(*arguments, "-o", name).exit_code == 0
    assert (tmp_path / name).is_symlink() and target.stat().st_nlink == 2
    assert (tmp_path / "hard").read_bytes() == target.read_bytes() != b""
    (tmp_path / f"a-{name}").symlink_to(f"b-{name}")
    (tmp_path / f"b-{name}").symlink_to(f"a-{name}")
    assert "is a link that leads back to itself" in refusal(run(*arguments, "-o", f"a-{name}", "--force"))
    assert (tmp_path / f"a-{name}").is_symlink()


def test_a_dash_is_the_screen_and_a_file_of_that_name_is_not(run: Run, tmp_path: Path) -> None:
    screen = run("emit", "r", "--allow-modelled").stdout
    assert run("emit", "r", "--allow-modelled", "-o", "-").stdout == screen
    assert run("results", "export", "r", "-o", "-").stdout.startswith("schema_version,")
    assert run("report", "r", "-o", "-").stdout.startswith("<!DOCTYPE html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r"]
    run("emit", "r", "--allow-modelled", "-o", "./-")
    assert (tmp_path / "-").read_text() == screen
    for arguments in (
        ["results", "merge", "r", "-o", "-"],
        ["sweep", "--target", "v6e", "--preset", "smoke", "--out", "-"],
        ["confirm", "--interpret", "--out", "-"],
    ):
        done = run(*arguments)
        assert (done.exit_code, "'-' is not a folder, and rows need one" in done.output) == (2, True)


@pytest.mark.parametrize("name", ["-x.py", "my table.py", "x\udcff.py"])
def test_the_next_line_runs_as_printed(run: Run, tmp_path: Path, name: str) -> None:
    done = run("emit", "r", "--allow-modelled", f"-o{name}")
    assert done.exit_code == 0, done.output
    [line] = [line for line in done.stderr.splitlines() if line.startswith("Next: ")]
    command = line.removeprefix("Next: ").partition(";")[0]
    assert " check " in command
    shell = f"{sys.executable} -m {command.partition(' -m ')[2] or command}"
    checked = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, env=user_environment(), capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr
    assert "no findings" in checked.stdout


def test_the_next_line_of_a_folder_that_is_the_current_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "r")
    said = run("show", ".").stderr
    assert said.rstrip().endswith("emit . --allow-modelled -o ../tuned_block_sizes.py"), said
    assert run("emit", ".", "--allow-modelled", "-o", "../tuned_block_sizes.py").exit_code == 0


def test_names_that_are_no_text(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff.py"
    Path(os.fsdecode(name)).write_bytes(committed_path("v6e").read_bytes())
    dataset.append(Path(os.fsdecode(name + b".r")), [make_row()])
    commands = (
        [b"diff", name, b"v5e", b"--format", b"csv"],
        [b"show", name + b".r", b"--format", b"csv"],
        [b"emit", name + b".r", b"--allow-modelled", b"--base", name, b"--names", b"jax"],
        [b"report", name + b".r", b"-o", name + b".html"],
        [b"results", b"export", name + b".r", b"-o", name + b".csv"],
        [b"results", b"ls", name + b".r"],
    )
    done = subprocess.run(
        [sys.executable, "-c", _EACH, *(word for command in commands for word in (*command, b"END"))],
        cwd=ROOT,
        env={**user_environment(), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert (done.returncode, done.stderr.count(b"Traceback")) == (0, 0), done.stderr


# One process runs all commands, as loading pandas takes longer than any of them.
_EACH = """
import sys
from autotune.cli.main import run
words = sys.argv[1:]
while words:
    end = words.index("END")
    sys.argv, words = ["autotune", *words[:end]], words[end + 1 :]
    if run():
        sys.exit(1)
"""


BY_HAND = """\
# -*- coding: utf-8 -*-
\"\"\"Ours, by hand: \u00e9.\"\"\"
import os

SOURCE = 'measured'   # by hand

TUNED_BLOCK_SIZES = {
  # the one that matters
  "TPU v6e": {
    ("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 2048): (16, 32),  # \u00e9 was (4, 4)
    ("bfloat16", "bfloat16", 8, 2, 128, 64, 1024, 2048): (
        16,
        64)
  },
  "TPU v4": {},
}

def look(): return os.sep
"""


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_base_that_holds_more_keeps_it_to_the_byte(run: Run, tmp_path: Path, newline: str) -> None:
    path = tmp_path / "ours.py"
    path.write_bytes(BY_HAND.replace("\n", newline).encode())
    path.chmod(0o664)
    command = ("emit", "r", "--allow-modelled", "--base", "ours.py", "-o", "ours.py")
    assert run(*command, "--check").exit_code == 1
    assert run(*command).exit_code == 0
    expected = (
        BY_HAND.replace("'measured'", "'modelled'")
        .replace("(16, 32),", "(8, 32),")
        .replace(
            "        64)\n",
            '        64),\n    ("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 4096): (8, 32),\n',
        )
    )
    assert path.read_bytes() == expected.replace("\n", newline).encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o664
    assert run(*command, "--check").exit_code == 0


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_line_by_hand_in_the_header_is_not_dropped(run: Run, tmp_path: Path, newline: str) -> None:
    """Neither by -o, nor where the table is patched; a header of version 0.1 has no mark, and is replaced."""
    assert run("emit", "r", "--allow-modelled", "-o", "x.py").exit_code == 0
    path = tmp_path / "x.py"
    text = path.read_text().replace("keys: 2 v6e\n", "keys: 2 v6e\nAsk Ann before you change it.\n")
    path.write_bytes(text.replace("\n", newline).encode())
    before = path.read_bytes()
    assert "not as this autotune writes it" in refusal(run("emit", "r", "--allow-modelled", "-o", "x.py"))
    path.write_bytes(before + f"ours = 1{newline}".encode())
    said = refusal(run("emit", "r", "--allow-modelled", "--base", "x.py", "-o", "x.py"))
    assert "lines of its header, above 'Written by', were changed by hand" in said
    assert path.read_bytes().startswith(before)
    path.write_text(re.sub(r"tpu-autotune \([0-9a-f]{8}\);", "tpu-autotune;", text))
    assert run("emit", "r", "--allow-modelled", "-o", "x.py").exit_code == 0


def test_what_is_compared_with_is_a_file(run: Run) -> None:
    said = refusal(run("emit", "r", "--allow-modelled", "--check", "-o", "/dev/zero"))
    assert said == "'/dev/zero' is not a file: name the file to compare with"


def test_an_export_is_not_called_as_a_sweeps_rows(run: Run, tmp_path: Path) -> None:
    said = refusal(run("results", "export", "r", "-o", "rows-1.parquet", "--force"))
    assert said.startswith("-o 'rows-1.parquet' begins with rows-")
    assert not (tmp_path / "rows-1.parquet").exists()


def test_an_emitted_table_with_a_line_by_hand(run: Run, tmp_path: Path) -> None:
    command = ("emit", "r", "--allow-modelled", "-o", "x.py")
    run(*command)
    path = tmp_path / "x.py"
    path.write_text(path.read_text().replace("(8, 32),\n", "(4, 32),  # slower, but safe\n") + "LATER = 1\n")
    assert "add --force" in refusal(run(*command))
    assert run(*command, "--base", "x.py").exit_code == 0
    text = path.read_text()
    assert text.endswith("LATER = 1\n") and text.count("# slower, but safe") == 2
    assert "\nmerged into x.py (modelled):\n" in text and "; stands in for" in text


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_modelled_values_never_stand_under_the_word_measured(run: Run, tmp_path: Path, newline: str) -> None:
    command = ("emit", "r", "--allow-modelled", "-o", "x.py")
    run(*command)
    path = tmp_path / "x.py"
    text = re.sub(r"tpu-autotune \([0-9a-f]{8}\);", "tpu-autotune;", path.read_text())  # as of version 0.1
    note = text[text.index("MODELLED:") : text.index("\n\nWritten by")]
    measured = text.replace(note, "MEASURED: every value was timed on a TPU.") + "LATER = 1\n"
    path.write_bytes(measured.replace("(8, 32),\n", "(4, 32),\n").replace("\n", newline).encode())
    assert run(*command, "--base", "x.py").exit_code == 0
    merged = path.read_bytes().decode()
    assert "MEASURED" not in merged and "MODELLED:" in merged and f"LATER = 1{newline}" in merged
    # Where the words around the claim are not autotune's, nothing is changed.
    path.write_text(measured.replace("on TPU.\n\n", "on my TPU!\n\n", 1))
    before = path.read_bytes()
    assert "it says MEASURED in words that are not autotune's" in refusal(run(*command, "--base", "x.py"))
    assert path.read_bytes() == before


def test_one_device_of_a_file_does_not_stand_for_it(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    text = committed_path("v6e").read_text().rstrip().removesuffix("}")
    path.write_text(text + '    "TPU v4": {("bfloat16", "bfloat16", 8, 2, 128, 16, 64, 64): (4, 32)},\n}\n')
    command = ("emit", "r", "--allow-modelled", "--names", "jax", "--base", "two.py:v6e", "-o", "two.py")
    assert run(*command).exit_code == 0
    found = load("two.py").devices
    assert len(found["TPU v4"]) == 1 and len(found["TPU v6e"]) >= len(load("v6e").devices["TPU v6e"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({'"TPU v6e"': '"TPU v5"', '"TPU v4"': '"TPU v6"'}, "'TPU v5' and"),
        ({"SOURCE = 'measured'": "PROVENANCE = {'source': 'x'}"}, "it says PROVENANCE, and other --names"),
    ],
)
def test_a_base_that_cannot_be_changed_in_place_stays(
    run: Run, tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    text = BY_HAND
    for old, new in changes.items():
        text = text.replace(old, new)
    (tmp_path / "ours.py").write_text(text)
    done = run("emit", "r", "--allow-modelled", "--base", "ours.py", "-o", "ours.py", "--force")
    assert said in refusal(done)
    assert (tmp_path / "ours.py").read_text() == text


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["emit", "r", "--min-gain"],
        ["check", "jax", "--slower-than"],
        ["check", "jax", "--compile-timeout"],
        ["check", "jax", "--vmem-limit"],
        *(
            ["sweep", "--target", "v6e", "--preset", "smoke", "--dry-run", option]
            for option in (
                *("--soft-cap", "--k-scale", "--v-scale", "--compile-timeout", "--max-seconds"),
                *("--run-timeout", "--precision", "--vmem-limit"),
            )
        ),
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-1]}",
)
def test_what_is_no_number_is_refused(run: Run, arguments: list[str], value: str) -> None:
    done = run(*arguments[:-1], f"{arguments[-1]}={value}")
    assert done.exit_code == 2
    assert f"Invalid value for '{arguments[-1]}'" in done.output
