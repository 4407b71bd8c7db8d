from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.compile.cache import Store
from autotune.results.schema import Tools
from autotune.tpu.compiler import Compiled
from autotune.tpu.schedule import Schedule
from tests.conftest import ROOT, program, user_environment

TOOLS = Tools("1", "1", "1", "x")
OK = Compiled(status="ok", schedule=Schedule((1, 2, 3, 4), 5, 6), seconds=0.5)
OVERFLOW = Compiled(status="vmem_oom", needed_bytes=9, limit_bytes=8, error="no room", seconds=1.5)


def test_verdicts_come_back_as_they_were(tmp_path: Path) -> None:
    first, second, third = program(4), program(8), program(16)
    Store(tmp_path / "s").put("v6e", TOOLS, first, OK)
    Store(tmp_path / "s").put("v6e", TOOLS, second, OVERFLOW)
    assert Store(tmp_path / "s").get("v6e", TOOLS, [first, second, third]) == {first: OK, second: OVERFLOW}


def test_another_target_tool_or_limit_is_another_verdict(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    store.put("v6e", TOOLS, program(4), OK)
    assert not store.get("v5e", TOOLS, [program(4)])
    assert not store.get("v6e", Tools("1", "1", "2", "x"), [program(4)])
    assert not store.get("v6e", Tools("1", "1", "1", "y"), [program(4)])
    assert not store.get("v6e", TOOLS, [program(4, vmem_limit_bytes=1 << 20), program(4, page_size=32)])


@pytest.mark.parametrize("status", ["timeout", "crashed", "wrong_result", "compile_error"])
def test_what_may_go_better_next_time_is_not_kept(tmp_path: Path, status: str) -> None:
    store = Store(tmp_path / "s")
    store.put("v6e", TOOLS, program(4), Compiled(status=status, seconds=1.0))
    assert not store.get("v6e", TOOLS, [program(4)])


def test_a_verdict_that_needed_no_compile_is_not_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    store.put("v6e", TOOLS, program(4), Compiled(status="vmem_oom", needed_bytes=2, limit_bytes=1))
    assert not store.get("v6e", TOOLS, [program(4)])


def test_a_damaged_store_costs_compiles_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(b"no database" * 100)
    store = Store(path)
    store.put("v6e", TOOLS, program(4), OK)
    assert store.get("v6e", TOOLS, [program(4)]) == {}
    assert "not a database" in (store.broken or "")
    store.clear()
    again = Store(path)
    again.put("v6e", TOOLS, program(4), OK)
    assert again.get("v6e", TOOLS, [program(4)])


@pytest.mark.parametrize(
    "text", ["", "{}", "null", '{"status": "won"}', '{"status": "ok", "schedule": 7}', "[1]"]
)
def test_a_damaged_line_is_as_if_it_were_not_there(tmp_path: Path, text: str) -> None:
    store = Store(tmp_path / "s")
    store.put("v6e", TOOLS, program(4), OK)
    with sqlite3.connect(tmp_path / "s") as connection:
        connection.execute("UPDATE verdicts SET verdict = ?", [text])
    assert store.get("v6e", TOOLS, [program(4)]) == {}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "s")
    store.put("v6e", TOOLS, program(4), OK)
    assert store.get("v6e", TOOLS, [program(4)]) == {}
    assert store.broken


_WRITE = """
import sys
from pathlib import Path
from autotune.compile.cache import Store
from tests.conftest import program
from tests.compile.test_cache import OK, TOOLS
store = Store(Path(sys.argv[1]))
for pages in range(1, 40):
    store.put("v6e", TOOLS, program(pages, int(sys.argv[2])), OK)
sys.exit(store.broken)
"""


def test_several_sweeps_may_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "s"
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITE, str(path), str(q)], cwd=ROOT, env=user_environment())
        for q in (32, 64, 128)
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert [line.verdicts for line in Store(path).lines()] == [3 * 39]


def test_cache_command(autotune: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    path = tmp_path / "cache" / "autotune" / "compiles.sqlite"
    assert "compiles.sqlite: 0 compile results" in autotune("cache").stdout
    assert not path.exists(), "looking makes nothing"
    Store(path).put("v6e", TOOLS, program(4), OK)
    shown = autotune("cache").stdout
    assert "1 compile results" in shown
    assert "v6e: 1, 0 s of compiling, jax 1, libtpu 1, kernel x" in shown
    assert autotune("cache", "--clear").returncode == 0
    assert not path.exists()
    path.write_bytes(b"no database" * 100)
    assert "cannot be used" in autotune("cache").stdout


def test_a_store_that_others_may_write_is_not_read(tmp_path: Path) -> None:
    store = Store(tmp_path / "c" / "compiles.sqlite")
    store.put("v6e", TOOLS, program(4), OK)
    assert store.get("v6e", TOOLS, [program(4)])
    store.path.chmod(0o666)
    again = Store(store.path)
    assert again.get("v6e", TOOLS, [program(4)]) == {}
    assert again.broken and "chmod" in again.broken
