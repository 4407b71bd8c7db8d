"""Faults for real: a sweep whose compiler answers at once, and the page that says what a user sees of each.

`told` holds docs/dev/reliability.md to what was seen. With AUTOTUNE_RELIABILITY in the environment (`make
reliability`) the tables of that page are written anew instead.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.results import dataset, schema
from autotune.results.rows import rows_of
from tests.conftest import ROOT, in_this_process, user_environment, with_faults

PAGE = ROOT / "docs" / "dev" / "reliability.md"
SHAPE = "q_heads=4,kv_heads=1,head_dim=128,page_size=16,max_num_batched_tokens=512,max_model_len="
# Two keys of one layout, four programs: each verdict makes rows of both keys.
SWEEP = ("sweep", "--target", "v6e", "--shape", f"{SHAPE}512", "--shape", f"{SHAPE}1024")
SWEEP = (*SWEEP, "--kv-pages", "8,16", "--queries", "32,64", "--jobs", "2", "--out", "r")
ROWS = 2 * 4 * 3
# The same programs, one key, timed by the CPU.
INTERPRETED = ("sweep", "--interpret", "--max-seconds", "0.5", "--workload", "mixed", "--jobs", "2")
INTERPRETED = (*INTERPRETED, "--shape", f"{SHAPE}512".replace("tokens=512", "tokens=128"))
INTERPRETED = (*INTERPRETED, "--kv-pages", "8", "--queries", "32,64", "--out", "r")
# What two runs of the same sweep may differ in.
CHANCE = ("time", "host", "compile_seconds")
TIMING = ("latency_us", "latency_low_us", "latency_high_us", "samples_us", "timer")

UPDATE = "AUTOTUNE_RELIABILITY" in os.environ
_TABLES: dict[str, list[str]] = {}


@dataclasses.dataclass(frozen=True)
class Home:
    """A user's folder. verdicts: the store that the compiler's answers are taken from; None to compile."""

    path: Path
    verdicts: Path | None = None

    def __post_init__(self) -> None:
        for folder in (self.tmp, self.cache):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def tmp(self) -> Path:
        return self.path / "tmp"

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    @property
    def results(self) -> Path:
        return self.path / "r"

    def start(
        self, *arguments: object, faults: dict[str, Any] | None = None, env: Any = (), **kwargs: Any
    ) -> subprocess.Popen[str]:
        """The command line, in a session of its own, so that all its processes can be found."""
        environment = {**user_environment(self.cache), "TMPDIR": str(self.tmp), "COLUMNS": "80"}
        environment["PYTHONPATH"] = f"{self._hook(faults or {})}:{ROOT}"
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [sys.executable, "-m", "autotune", *map(str, arguments)],
            cwd=self.path,
            env={**environment, **dict(env)},
            text=True,
            errors="replace",
            start_new_session=True,
            **{**streams, **kwargs},
        )

    def _hook(self, faults: dict[str, Any]) -> Path:
        """A folder for PYTHONPATH, by which the processes of a command have these faults."""
        faults = {role: dict(what) for role, what in faults.items()}
        if self.verdicts:
            faults.setdefault("worker", {})["replayed"] = str(self.verdicts)
        return with_faults(Path(tempfile.mkdtemp(dir=self.path, prefix="hook-")), faults)

    def run(self, *arguments: object, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments, **kwargs) as process:
            try:
                stdout, stderr = process.communicate(timeout=300)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def answer(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """As `run`, in this process: for what compiles nothing and has no faults."""
        return in_this_process(list(arguments), self.path, user_environment(self.cache))

    def rows(self, *, besides: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        """The rows that count, without what differs by chance."""
        rows = rows_of(dataset.read(self.results)) if self.results.is_dir() else []
        rows = [{k: v for k, v in row.items() if k not in (*CHANCE, *besides)} for row in rows]
        return sorted(rows, key=lambda row: [str(row[name]) for name in schema.IDENTITY])

    def raw_rows(self) -> int:
        """Rows in all files, doubles included."""
        return sum(t.num_rows for t in dataset.tables(self.results, schema.arrow()))

    def left_behind(self) -> list[str]:
        """Files that no finished sweep leaves: half-written ones, notes, temporary ones.

        Not the one with which Python tries, for a moment, whether it can write to TMPDIR: see tempfile.py.
        """
        found = [*self.results.glob(".*"), *self.tmp.glob("*")]
        found = [path for path in found if not re.fullmatch("[a-z0-9_]{8}", path.name)]
        return sorted(str(path.relative_to(self.path)) for path in found)


def processes(session: int) -> list[int]:
    """Those of a session that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = stat.read_text().rsplit(")", 1)[1].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_until_gone(session: int) -> None:
    deadline = time.monotonic() + 30
    while found := processes(session):
        assert time.monotonic() < deadline, f"processes {found} outlive their sweep"
        time.sleep(0.1)


def line_with(words: str, said: str) -> str:
    """The one line of what was said that has these words."""
    lines = [line for line in said.splitlines() if words in line]
    assert len(set(lines)) == 1, f"{words!r} in {lines or said[-3000:]}"
    return lines[0]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, verdicts: Path) -> Home:
    """A sweep that nothing happened to."""
    home = Home(tmp_path_factory.mktemp("undisturbed"), verdicts)
    done = home.run(*SWEEP)
    assert done.returncode == 0, done.stderr
    assert len(home.rows()) == ROWS
    return home


@pytest.fixture
def home(undisturbed: Home, tmp_path: Path) -> Home:
    """A new user, whose compiler answers at once."""
    return Home(tmp_path / "home", undisturbed.verdicts)


Told = Callable[[str, str, str], None]


@pytest.fixture
def told(home: Home) -> Told:
    """Compare a line of the page's table with what was seen: (fault, what the user saw, what follows)."""

    def tell(fault: str, seen: str, then: str) -> None:
        seen = seen.replace(str(home.path), "~").replace("python -m autotune", "autotune").strip()
        for pattern, word in (
            (r"\b([0-9a-f]{16}|[0-9a-f]{32})\b", "..."),
            (r"autotune-(\w+)-\w+\.live", r"autotune-\1-..."),
            (r"~/\S*python\S*|/\S*/python\S*", "python"),
        ):
            seen = re.sub(pattern, word, seen)
        line = f"| {fault} | `{seen}` | {then} |"
        enter("faults", line)
        assert UPDATE or line in PAGE.read_text().splitlines(), f"not in {PAGE}: `make reliability`\n{line}"

    return tell


def enter(table: str, line: str) -> None:
    """Put a line into a table of the page, if it is being written."""
    assert "\n" not in line
    print(line)
    _TABLES.setdefault(table, []).append(line)


@pytest.fixture(scope="session", autouse=True)
def page(request: pytest.FixtureRequest) -> Iterator[None]:
    """Write the tables of the page anew, where that is asked for and every test of them went well."""
    yield
    if UPDATE and not request.session.testsfailed:
        text = PAGE.read_text()
        for table, lines in _TABLES.items():
            begin, end = f"<!-- {table} -->\n", f"<!-- end of {table} -->\n"
            head, rest = text.split(begin)
            old, tail = rest.split(end)
            titles = old.splitlines()[:2]
            text = head + begin + "\n".join([*titles, *lines]) + "\n" + end + tail
        PAGE.write_text(text)
