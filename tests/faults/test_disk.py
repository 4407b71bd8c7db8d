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
    goes_on(home)


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
