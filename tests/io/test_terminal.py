"""What one sees: commands in a real terminal of 80x24 and narrower ones, piped, and under NO_COLOR."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyte
import pytest
from click.testing import CliRunner

from autotune.cli import progress
from autotune.cli.main import COMMANDS, cli
from autotune.cli.progress import Best, CompileProgress, Part, UnderWay, clock, fitted
from autotune.compile.pool import Task
from autotune.errors import AutotuneError
from autotune.io.terminal import cell, folded, named, printable, said_if_slow, typed
from autotune.results import dataset
from autotune.search.strategy import Outlook
from autotune.tables.load import committed_path
from tests.conftest import command_line, program, user_environment
from tests.factories import SWEEP, make_row

Run = Callable[..., subprocess.CompletedProcess[str]]
COLOUR = re.compile(rb"\x1b\[[0-9;]*m")


class Seen(NamedTuple):
    """The bytes that a terminal got, what it shows in the end, and all of its lines before it wraps them."""

    code: int
    sent: bytes
    screen: list[str]

    @property
    def states(self) -> list[str]:
        """Every state that a line was in, those written over included."""
        return [state.rstrip() for state in re.split(r"[\r\n]+", self.sent.decode()) if state.strip()]


def in_terminal(
    folder: Path,
    *arguments: object,
    columns: int = 80,
    then: Callable[[int, bytes], None] = lambda terminal, sent: None,
    **environment: str,
) -> Seen:
    """Run a command as the session of a terminal; `then` gets the terminal and what was sent so far."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {**user_environment(folder / "cache"), "TERM": "xterm-256color", **environment}
    del env["COLUMNS"]  # the terminal itself knows
    process = subprocess.Popen(
        command_line(*arguments),
        cwd=folder,
        env=env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    sent, deadline = b"", time.monotonic() + 300
    with contextlib.suppress(OSError):  # how a terminal says that nobody has it open any more
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.1)[0]:
                if not (data := os.read(ours, 65536)):
                    break
                sent += data
            then(ours, sent)
    code = process.wait(timeout=60)
    os.close(ours)
    screen = pyte.Screen(columns, 24)
    pyte.ByteStream(screen).feed(sent)
    return Seen(code, sent, [line.rstrip() for line in screen.display if line.strip()])


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, slowly_replayed: str) -> tuple[Path, Seen]:
    """A sweep in a terminal of 80x24, of which some programs do not fit, all told; and its folder."""
    folder = tmp_path_factory.mktemp("terminal")
    arguments = (*SWEEP, "--vmem-limit", "700KiB", "--verbose")
    seen = in_terminal(folder, *arguments, PYTHONPATH=slowly_replayed)
    return folder, seen


def test_a_sweep_in_a_terminal(swept: tuple[Path, Seen]) -> None:
    seen = swept[1]
    assert seen.code == 0, seen.screen
    said = "\n".join(seen.states)
    # The compiler's own words, in full and indented, between states of the bar.
    failures = re.findall(r"^\d+,\d+ of q4 kv1 dim128 page16 bfloat16: vmem_oom\n  \S.*", said, re.M)
    assert failures and len(failures) == int(re.findall(r"(\d) failed", said)[-1])
    assert "memory space vmem" in said
    assert max(len(state) for state in seen.states if not state.startswith("  ")) <= 80
    bars = [state for state in seen.states if "compiled |" in state or "|#" in state]
    assert bars[0].startswith("0/4 compiled |      ")
    counts = [int(state.split("/")[0]) for state in bars]
    assert counts == sorted(counts) and set(range(5)) <= set(counts)
    for state in bars:  # the bar says what n/N says
        bar = re.search(r"\|([# ]+)\|", state)
        assert bar and bar[1].count("#") == int(state.split("/")[0]) * len(bar[1]) // 4, state
    assert re.search(r"4/4 compiled, \d failed, best \d+,\d+, modelled [\d.]+ us \|#+\| 0:\d\d$", bars[-1])
    assert not COLOUR.search(seen.sent)
    # Nothing of the bar is left.
    assert not any("|#" in line or "| 0:" in line for line in seen.screen)
    assert seen.states[0].startswith("1 key, 4 candidates; 4 programs to compile for v6e")
    assert seen.screen[-1].startswith("Next: ") and "emit r --allow-modelled" in seen.screen[-1]


def test_a_clock_ticks_during_a_long_compile(swept: tuple[Path, Seen]) -> None:
    """The first verdict takes a second: meanwhile the same line shows other times."""
    waiting = [state for state in swept[1].states if state.startswith("0/4 compiled")]
    assert len({state.split("|")[-1] for state in waiting}) > 1


def test_a_sweep_that_is_piped_is_quiet_and_plain(autotune: Run, tmp_path: Path) -> None:
    done = autotune(*SWEEP, "--workload", "mixed")
    assert done.returncode == 0
    for text in (done.stdout, done.stderr):
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "compiled |" not in done.stderr and len(done.stderr.splitlines()) <= 6


@pytest.mark.parametrize(
    "environment", [{"NO_COLOR": "1"}, pytest.param({"TERM": "dumb"}, marks=pytest.mark.slow)]
)
def test_no_color_and_dumb_terminals(
    tmp_path: Path, slowly_replayed: str, environment: dict[str, str]
) -> None:
    queries = ("--queries", "32", "--workload", "mixed")
    seen = in_terminal(tmp_path, *SWEEP, *queries, PYTHONPATH=slowly_replayed, **environment)
    assert seen.code == 0, seen.screen
    assert b"\x1b" not in seen.sent
    # A dumb terminal cannot write over a line: there is none.
    assert ("compiled |" in seen.sent.decode()) == ("NO_COLOR" in environment)
    assert max(map(len, seen.states)) <= 80


def test_a_ctrl_c_in_a_terminal_is_answered_at_once(tmp_path: Path, slowly_replayed: str) -> None:
    pressed: list[int] = []

    def press(terminal: int, sent: bytes) -> None:
        if b"0/4 compiled" in sent and len(pressed) < 3:
            pressed.append(os.write(terminal, b"\x03"))

    seen = in_terminal(tmp_path, *SWEEP, "--no-cache", then=press, PYTHONPATH=slowly_replayed)
    assert seen.code == 130
    assert [line for line in seen.screen if line.endswith("stopping ...")], seen.sent
    assert sum("stopping" in line for line in seen.screen) == 1
    assert "To go on:" in "\n".join(seen.screen) and "Traceback" not in seen.sent.decode()
    assert not any("compiled |" in line for line in seen.screen)


@pytest.mark.slow
def test_a_window_that_is_made_narrower(tmp_path: Path) -> None:
    narrow: list[int] = []

    def resize(terminal: int, sent: bytes) -> None:
        if b"1/4 compiled" in sent and not narrow:
            narrow.append(len(sent))
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))

    seen = in_terminal(tmp_path, *SWEEP, "--no-cache", "--jobs", "1", then=resize)
    assert seen.code == 0
    later = re.split(r"[\r\n]+", seen.sent[narrow[0] :].decode())
    bars = [state for state in later if " compiled" in state and "/4" in state]
    assert bars and all(len(state.rstrip()) <= 40 for state in bars[1:])


def test_where_nobody_watches_there_are_plain_lines_and_few(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with CompileProgress(Outlook(2, 100.0), 1):
        time.sleep(0.3)
    assert capsys.readouterr().err == "", "a sweep says nothing in its first minute"
    with CompileProgress(Outlook(2, 100.0), 1, notice=0.0):
        time.sleep(0.3)
    assert re.fullmatch(r"compiling, 0/2 done, about \d+ (s|min) left\n", capsys.readouterr().err)
    monkeypatch.setattr(progress, "LOG_EVERY_SECONDS", 0.0)
    with CompileProgress(Outlook(2, 100.0), 1, candidates=5):
        time.sleep(0.3)
    assert re.fullmatch(r"0/2 compiled, 3 need no compile, 0:00, \d+ (s|min) left\n", capsys.readouterr().err)
    with CompileProgress(Outlook(2, 100.0), 1, candidates=5) as waiting:
        waiting.keys_timed(0, 2)  # so that there is no estimate
        waiting.compiling(Task("v6e", program(8, 32)))
        time.sleep(0.3)
    assert "0/2 compiled, compiling 8,32 for 1 s, 3 need no compile, " in capsys.readouterr().err


def test_what_has_been_compiled_for_longest_does_not_count_its_wait_for_a_worker() -> None:
    tasks = [Task("v6e", program(pages, 32)) for pages in (4, 8)]
    under_way = UnderWay(1)
    for task in tasks:
        under_way.add(task)
    time.sleep(0.05)
    first = under_way.longest()
    assert first and first[0] == (4, 32) and first[1] > 0
    under_way.remove(tasks[0])
    second = under_way.longest()
    assert second and second[0] == (8, 32) and second[1] < first[1]
    under_way.remove(tasks[1])
    assert under_way.longest() is None


def test_slow_work_is_named_and_quick_work_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    with said_if_slow("planning 3 keys ...", 600.0):
        pass
    assert capfd.readouterr().err == ""
    with said_if_slow("planning 3 keys ...", 0.0):
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()
    assert capfd.readouterr().err == "planning 3 keys ...\n"


@pytest.mark.parametrize("columns", [200, 80, 64, 40, 24])
def test_the_line_fits_and_the_least_telling_goes_first(columns: int) -> None:
    parts = [
        Part("118/118 compiled", 0),
        Part("14 failed", 2),
        Part("5824 need no compile", 4),
        Part("best 128,128", 3),
        Part("modelled 1234 us", 6),
    ]
    text, bar = fitted(parts, "1:23, 12 min left", columns)
    assert text.startswith("118/118 compiled")
    if bar:
        assert 6 <= bar <= 18 and len(text) + bar + len(" || 1:23, 12 min left") <= columns
    shown = {part.text: part.text in text for part in parts}
    assert all(shown.values()) == (columns == 200)
    if columns == 80:
        gone = [name for name, there in shown.items() if not there]
        assert gone == ["5824 need no compile", "modelled 1234 us"]
    if columns == 64:
        assert shown["14 failed"] and not shown["5824 need no compile"]


def test_the_best_so_far_is_of_one_key_and_compares_like_with_like() -> None:
    def row(blocks: tuple[int, int], workload: str, us: float | None, source: str) -> dict[str, object]:
        key = ("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 2048)
        names = ("q_dtype", "kv_dtype", "num_q_heads_per_blk", "num_kv_heads_per_blk", "head_dim")
        names = (*names, "page_size", "max_num_batched_tokens", "max_model_len")
        return {
            **dict(zip(names, key, strict=True)),
            "num_kv_pages_per_blk": blocks[0],
            "num_queries_per_blk": blocks[1],
            "workload_fingerprint": workload,
            "latency_us": us,
            "source": source,
        }

    best = Best()
    best.add(row((8, 32), "a", 100.0, "modelled"))
    best.add(row((8, 32), "b", 400.0, "modelled"))
    assert (best.pair, best.latency) == ((8, 32), "modelled 200 us")
    best.add(row((4, 32), "a", 10.0, "modelled"))  # on one of two workloads only
    best.add(row((4, 64), "a", None, "modelled"))
    assert best.pair == (8, 32)
    best.add(row((4, 32), "b", 10.0, "modelled"))
    assert (best.pair, best.latency) == ((4, 32), "modelled 10 us")
    best.add(row((2, 32), "a", 1.0, "interpreted"))
    assert best.pair == (4, 32)
    best.add(row((8, 32), "a", 150.0, "measured"))  # a clock has the last word
    assert (best.pair, best.latency) == ((8, 32), "measured 150 us")
    best.add(row((16, 32), "a", 1.0, "modelled"))
    assert best.pair == (8, 32) and not best.several
    best.add({**row((1, 32), "a", 600.0, "modelled"), "max_model_len": 4096})
    assert best.several and (best.pair, best.latency) == ((1, 32), "modelled 600 us")
    assert best.key == "q/kv 8/2 page 128 tokens 1024 length 4096"


def test_times_and_texts() -> None:
    assert [clock(s) for s in (0.9, 61, 3723)] == ["0:00", "1:01", "1:02:03"]
    assert printable("a\tb\x1b[31mc\r") == "a b?[31mc?"
    assert max(map(len, folded("word " * 40 + "w" * 90).split("\n"))) == 90  # what is to be copied is whole


def test_help_fits(tmp_path: Path) -> None:
    seen = in_terminal(tmp_path, "--help")
    assert seen.code == 0 and not COLOUR.search(seen.sent)
    assert max(map(len, seen.states)) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_fits(name: str) -> None:
    shown = CliRunner().invoke(cli, [name, "--help"], terminal_width=80)
    assert shown.exit_code == 0
    assert [line for line in shown.output.splitlines() if len(line) > 80] == []


def test_what_is_typed_next_is_what_a_shell_takes() -> None:
    words = ["plain", "two words", "it's", "a\nb\x1b[31m\\'", "e\u0301\u202e", "\udcff"]
    said = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {typed(*words)}"],
        capture_output=True,
        check=True,
        env={"LC_ALL": "C"},
    )
    assert typed(*words).isprintable()
    assert said.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1] == words


def test_a_path_is_never_typed_as_an_option() -> None:
    assert typed("--target", Path("-x.py"), Path("a/-x"), named("-y"), "-") == "--target ./-x.py a/-x ./-y -"


def test_cells_are_text_to_a_spreadsheet_and_numbers_stay_numbers() -> None:
    formulas = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\tx", "\r=1", "=", "--shape"]
    assert [cell(text) for text in formulas] == [f"'{text}".replace("\r", " ") for text in formulas]
    assert cell("abc\r=1") == "abc =1", "a carriage return would begin a record"
    plain = [-1, -1.5, None, "", "v6e", "-1", "+1.5e-3", "a=b", "'=1"]
    assert [cell(value) for value in plain] == plain


EVIL = "=HYPERLINK(1)"


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "r", "--format", "csv"],
        ["diff", f"{EVIL}.py", "v5e", "--format", "csv"],
        ["results", "export", "r", "-o", "-"],
        ["keys", "--keys", "evil.csv"],
        ["keys", "--model", EVIL, "--max-model-len", "512"],
    ],
    ids=" ".join,
)
def test_no_csv_of_any_command_has_a_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    dataset.append(tmp_path / "r", [make_row(model=EVIL)])
    Path(f"{EVIL}.py").write_bytes(committed_path("v6e").read_bytes())
    evil = CliRunner().invoke(cli, ["keys", "--preset", "smoke"]).stdout.replace("preset smoke", EVIL)
    Path("evil.csv").write_text(evil)
    Path(EVIL).write_text(
        '{"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, '
        '"max_position_embeddings": 512, "torch_dtype": "bfloat16", "model_type": "llama"}'
    )
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    cells = [word for line in csv.reader(io.StringIO(done.stdout)) for word in line]
    assert any(EVIL in word for word in cells), "the test has something to find"
    assert not [word for word in cells if word.startswith("=")]


HOSTILE = "p\n::error::pwn\x1b[31m"


@pytest.mark.parametrize(
    "arguments",
    [
        ["results", "export", "r", "-o", f"{HOSTILE}.csv"],
        ["results", "merge", "r", "-o", HOSTILE],
        ["results", "compact", f"{HOSTILE}.r"],
        ["report", "r", "-o", f"{HOSTILE}.html"],
        ["emit", "r", "--allow-modelled", "-o", f"{HOSTILE}.py"],
        ["emit", "r", "--allow-modelled", "-o", f"{HOSTILE}-v6e.py", "--check"],
        ["show", f"{HOSTILE}.r"],
        ["check", f"{HOSTILE}-v6e.py"],
        ["check", f"{HOSTILE}-v6e.py", "--format", "markdown"],
        ["check", f"{HOSTILE}-v6e.py", "--format", "github"],
        ["check", f"{HOSTILE}-v6e.py:v5e"],
        ["diff", "v5e", f"{HOSTILE}-v6e.py"],
        ["diff", f"{HOSTILE}-v6e.py", "v5e", "v6e", "--format", "markdown"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]) + arguments[-1].replace(HOSTILE, ""),
)
def test_names_of_files_steer_neither_a_terminal_nor_a_ci(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("r", f"{HOSTILE}.r"):
        dataset.append(tmp_path / folder, [make_row(), make_row(16, latency_us=2.0)])
    Path(f"{HOSTILE}-v6e.py").write_bytes(committed_path("v6e").read_bytes())
    done = CliRunner().invoke(cli, arguments, color=True)
    told = done.output if not isinstance(done.exception, AutotuneError) else str(done.exception)
    assert "pwn" in told
    assert not any(line.startswith("::error::pwn") for line in told.splitlines())
    assert all(line.isprintable() for line in told.split("\n"))
    if "Next: " in told:
        assert "$'p\\x0a::error::pwn\\x1b[31m" in told
