"""Disks that are full or read-only, files that are not whole, and what a user sees of them."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.faults.conftest import ROWS, SWEEP, Home, Told, line_with

GOES_ON = "with room again, the same command goes on"


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A disk of this size in place of a folder."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted by this user")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, leave: int) -> None:
    """Fill a folder's disk but for so many bytes, in a file of its own."""
    with (folder / "full").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    size = (folder / "full").stat().st_size
    os.truncate(folder / "full", max(0, size - leave))


def goes_on(home: Home) -> None:
    again = home.run(*SWEEP)
    assert again.returncode == 0, again.stderr
    assert len(home.rows()) == home.raw_rows() == ROWS
    assert not home.left_behind()


def test_the_results_folders_disk_is_full(home: Home, told: Told) -> None:
    with small_disk(home.results, "256k"):
        fill(home.results, 44 << 10)
        done = home.run(*SWEEP)
        assert done.returncode == 3, done.stderr
        kept = home.rows()
        assert 0 < len(kept) < ROWS
        told("the results folder's disk is full", line_with("Error", done.stderr), f"exit 3; {GOES_ON}")
        (home.results / "full").unlink()
        goes_on(home)


def test_a_limit_on_files(home: Home, told: Told) -> None:
    """As `ulimit -f` and quotas set it: too small for a file of rows."""
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (4096, 4096))
    done = home.run(*SWEEP, "--no-cache", preexec_fn=limit)
    assert done.returncode == 3, done.stderr
    assert home.rows() == []
    told("`ulimit -f` is too small for the rows", line_with("Error", done.stderr), f"exit 3; {GOES_ON}")


def test_the_stores_disk_is_full(home: Home, told: Told) -> None:
    with small_disk(home.cache, "32k"):
        fill(home.cache, 0)
        done = home.run(*SWEEP)
        assert done.returncode == 0, done.stderr
        assert len(home.rows()) == ROWS
        said = line_with("compile results are not kept", done.stderr)
        told("the disk of compile results is full", said, "the sweep is complete; others compile anew")


def test_the_compilers_disk_is_full(home: Home, told: Told) -> None:
    """With a real compiler, whose listings do not fit."""
    home = Home(home.path)
    with small_disk(home.tmp, "100k"):
        done = home.run(*SWEEP)
        assert done.returncode == 3, done.stderr
        assert home.rows() == []
        told("TMPDIR's disk is full", line_with("Error", done.stderr), f"exit 3; {GOES_ON}")
        assert not list(home.tmp.iterdir())
    assert not home.left_behind()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_full_disk_behind_a_stream(home: Home, told: Told, stream: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = home.run(*SWEEP, **{stream: full})
    assert len(home.rows()) == ROWS
    assert not home.left_behind()
    if stream == "stderr":
        assert done.returncode == 0
        seen = line_with("Next:", done.stdout)
        told("`2>` goes to a full disk", seen, "the sweep is complete; its progress is lost")
    else:
        assert done.returncode == 2
        told("`>` goes to a full disk", line_with("Error", done.stderr), "exit 2; all rows are recorded")


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder that not even root can write to."""
    mounts = (["mount", "--bind", folder, folder], ["mount", "-o", "remount,ro,bind", folder])
    for command in mounts:
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("nothing can be mounted by this user")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_results_folder_that_is_read_only(home: Home, told: Told) -> None:
    home.results.mkdir()
    with read_only(home.results):
        done = home.run(*SWEEP)
    assert done.returncode == 2, done.stderr
    told("the results folder is read-only", line_with("Error", done.stderr), "exit 2, before any compile")


def test_a_folder_of_compile_results_that_is_read_only(home: Home, told: Told) -> None:
    (home.cache / "autotune").mkdir()
    store = home.cache / "autotune" / "compiles.sqlite"
    store.write_bytes(b"no database" * 100)
    with read_only(home.cache):
        done = home.run(*SWEEP)
        cleared = home.run("cache", "--clear")
    assert done.returncode == 0, done.stderr
    assert len(home.rows()) == ROWS
    said = line_with("compile results are not kept", done.stderr)
    told("the file of compile results is no database", said, "the sweep is complete; others compile anew")
    assert cleared.returncode == 2
    told("`autotune cache --clear` may not", line_with("Error", cleared.stderr), "exit 2")
    assert home.run("cache", "--clear").returncode == 0
    assert not store.exists()


def changed(rows: pa.Table, name: str, value: Any) -> pa.Table:
    number = rows.schema.get_field_index(name)
    column = pa.array([value] * rows.num_rows, rows.schema.field(name).type)
    return rows.set_column(number, rows.schema.field(name), column)


FILES: list[tuple[str, Any]] = [
    ("is truncated", lambda content, rows: content[:-100]),
    ("is empty", lambda content, rows: b""),
    ("is of another schema version", lambda content, rows: changed(rows, "schema_version", 2)),
    ("has a latency of NaN", lambda content, rows: changed(rows, "latency_us", float("nan"))),
    ("has a negative latency", lambda content, rows: changed(rows, "latency_us", -1.0)),
    ("has more columns", lambda content, rows: rows.append_column("mine", pa.array(["x"] * len(rows)))),
]


@pytest.mark.parametrize(("fault", "spoil"), FILES, ids=[fault for fault, _ in FILES])
def test_a_file_of_rows_that_is_not_as_it_was(
    home: Home, undisturbed: Home, told: Told, fault: str, spoil: Any
) -> None:
    """All at once is read, so that no table is made of a part of the rows."""
    shutil.copytree(undisturbed.results, home.results)
    path = min(home.results.glob("*.parquet"))
    content = path.read_bytes()
    spoilt = spoil(content, pq.ParquetFile(path).read())
    if isinstance(spoilt, bytes):
        path.write_bytes(spoilt)
    else:
        pq.write_table(spoilt, path)
    before = path.read_bytes()
    done = home.answer("show", "r")
    assert path.read_bytes() == before, "what is wrong is not touched"
    if fault == "has more columns":
        assert done.returncode == 0, done.stderr
        told(f"a file of rows {fault}", line_with("candidates modelled", done.stdout), "they are passed over")
        return
    assert done.returncode == 2, done.stderr
    told(f"a file of rows {fault}", line_with("Error", done.stderr), "exit 2; nothing is deleted")
