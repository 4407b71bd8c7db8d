"""Processes that are stopped, killed, starved or full of garbage, and what a user sees of them."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import INTERPRETED, ROWS, SWEEP, Home, Told, line_with, wait_until_gone

AGAIN = "--retry-failed tries again"
LOCKFILE = Path("/tmp/libtpu_lockfile")
SLOW = {"worker": {"seconds": 3.0}}  # to answer: there is time for a signal
NOTICE_SECONDS = 30.0  # between a preempted VM's SIGTERM and its end


def wait_for(happened: Callable[[], Any], running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert running.poll() is None and time.monotonic() < deadline, running.communicate()
        time.sleep(0.05)


def terminate(running: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> str:
    """What a sweep says to a signal, within the time that a preempted VM has."""
    running.send_signal(number)
    _, said = running.communicate(timeout=NOTICE_SECONDS)
    assert running.returncode == 130, said
    assert "Traceback" not in said
    wait_until_gone(running.pid)
    return said


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (signal.SIGTERM, "SIGTERM, as a preempted VM gets it, while it compiles"),
        (signal.SIGHUP, "SIGHUP, as of a terminal that is closed, while it compiles"),
        (signal.SIGQUIT, "SIGQUIT while it compiles"),
        (signal.SIGUSR1, "SIGUSR1, as a batch system gives notice, while it compiles"),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "",
)
def test_a_signal_while_it_compiles(home: Home, told: Told, number: signal.Signals, fault: str) -> None:
    """One program has its rows, and the next is under way."""
    running = home.start(*SWEEP, "--jobs", "1", faults=SLOW)
    wait_for(lambda: list(home.results.glob("*.parquet")), running)
    said = terminate(running, number)
    kept = home.rows()
    assert kept
    assert not list(home.tmp.iterdir())
    told(
        fault,
        line_with("interrupted", said),
        "exit 130, at once; the command follows, and goes on",
    )
    assert "  python -m autotune sweep --target v6e" in said


def test_sigterm_before_anything_is_done(home: Home, told: Told) -> None:
    running = home.start(*SWEEP, faults=SLOW)
    wait_for(lambda: list(home.results.glob(".sweep-*.json")), running)
    said = terminate(running)
    assert home.rows() == []
    told("SIGTERM before the first compile", line_with("interrupted", said), "exit 130; nothing is left")
    assert not home.left_behind()


def test_sigterm_while_it_times(home: Home, told: Told) -> None:
    running = home.start(*INTERPRETED, "--max-seconds", "600")

    def timing() -> bool:
        return any("device_worker" in line for line in commands(running.pid)) and len(home.rows()) >= 2

    wait_for(timing, running)
    time.sleep(3.0)
    said = terminate(running)
    assert not list(home.tmp.iterdir())
    told(
        "SIGTERM while it times candidates",
        line_with("interrupted", said),
        "exit 130, at once; the chip is free; the command follows, and goes on",
    )


def commands(session: int) -> list[str]:
    """Command lines of the processes of a session."""
    from tests.faults.conftest import processes

    found = []
    for pid in processes(session):
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def errors(home: Home) -> set[str]:
    return {row["error"] for row in home.rows()}


ONE = (*SWEEP, "--kv-pages", "8", "--queries", "32")


def test_a_worker_out_of_memory(home: Home, told: Told) -> None:
    """A limit that Python and jax keep to, and libtpu does not."""
    home = Home(home.path)
    done = home.run(*ONE, faults={"worker": {"memory": 1 << 30}})
    assert done.returncode == 0, done.stderr
    assert {row["status"] for row in home.rows()} == {"crashed"}
    [error] = errors(home)
    how, _, why = error.partition(": ")
    assert "symbolize" not in why, "a trace is no reason"
    told("a compiler that gets no more memory", f"{how}: ...", f"rows say `crashed`; {AGAIN}")
    assert not home.left_behind()


def test_garbage_and_a_clock_that_went_back(home: Home, told: Told) -> None:
    """Megabytes with what steers terminals: none reaches the screen. The rows of that are then replaced by
    rows that are older, by the clock."""
    garbage = {"worker": {"garbage": 4 << 20, "abort": True}}
    real = Home(home.path)
    crashed = real.run(*ONE, faults=garbage)
    assert crashed.returncode == 0, crashed.stderr
    screen = crashed.stdout + crashed.stderr
    assert screen.replace("\n", "").isprintable() and len(screen) < 4096
    assert {row["status"] for row in home.rows()} == {"crashed"}
    [error] = errors(home)
    assert error.isprintable()
    told("a compiler that prints garbage and aborts", error, f"rows say `crashed`; {AGAIN}")
    rows = home.raw_rows()
    again = home.run(*ONE, "--retry-failed", faults={"sweep": {"back": 86_400}})
    assert again.returncode == 0
    assert home.raw_rows() == 2 * rows
    assert {row["status"] for row in home.rows()} == {"ok"}
    told(
        "the clock goes back a day before --retry-failed",
        line_with("newly recorded candidates", again.stderr),
        "new rows are made newer than those that they replace, and count",
    )


def test_standard_error_is_a_pipe_that_nobody_reads(home: Home, told: Told) -> None:
    """Full before the first word."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    done = home.run(*SWEEP, stderr=writer)
    os.close(writer)
    os.close(reader)
    assert done.returncode == 0
    assert len(home.rows()) == ROWS
    told(
        "nobody reads the pipe that `2>` goes to",
        line_with("Next:", done.stdout),
        "after 5 seconds the sweep goes on; its progress is lost",
    )


def test_a_reader_that_has_seen_enough(home: Home, undisturbed: Home, told: Told) -> None:
    """autotune show r | head -1"""
    with home.start("show", undisturbed.results) as shown:
        assert shown.stdout
        first = shown.stdout.readline()
        shown.stdout.close()
        assert shown.stderr
        said = shown.stderr.read()
    complaints = [line for line in said.splitlines() if not line.startswith("Next: ")]
    assert (shown.returncode, complaints) == (0, [])
    told("`autotune show r \\| head -1`", first.strip(), "exit 0, and no complaint")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "held"), [("was left by a killed process", False), ("is held by another process", True)]
)
def test_libtpus_lockfile(home: Home, told: Told, fault: str, held: bool) -> None:
    """Compiling asks for no TPU: a lockfile that a killed process left, or that one holds, is no matter."""
    there = LOCKFILE.exists()
    try:
        with LOCKFILE.open("ab") as file:
            if held:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            done = Home(home.path).run(*ONE, "--no-cache")
    except OSError as error:
        pytest.skip(f"{LOCKFILE} is in use: {error}")
    finally:
        if not there:
            LOCKFILE.unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
    said = line_with("newly recorded candidates", done.stderr)
    told(f"/tmp/libtpu_lockfile {fault}", said, "a sweep with --target compiles all the same")
