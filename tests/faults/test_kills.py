"""kill -9 at every step of a sweep: the same command, run again, ends with the rows of a sweep left alone.

A step is an operation on a file, or the moment before or after one is on disk. The steps of a sweep are
counted in one that is left alone; then it is killed before the n-th, for one n after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from tests.faults.conftest import INTERPRETED, SWEEP, TIMING, Home, enter, wait_until_gone

QUICK_POINTS = 3


class Tally(NamedTuple):
    """What came of kills: how many, how many of them after the first rows, rows lost or changed, rows made a
    second time, files left behind when all was done."""

    points: int = 0
    with_rows: int = 0
    differing: int = 0
    twice: int = 0
    files: int = 0

    def plus(self, other: Tally) -> Tally:
        return Tally(*map(sum, zip(self, other, strict=True)))

    def line(self, what: str, steps: int) -> str:
        return f"| {what} | {steps} | {self.points} | {self.differing} | {self.twice} | {self.files} |"


def faults(home: Home, role: str = "sweep", steps: str = "steps", **more: Any) -> dict[str, Any]:
    places = [str(home.results), str(home.cache), str(home.tmp)]
    return {role: {"places": places, "steps": str(home.path / steps), **more}}


def steps(home: Home) -> list[str]:
    return (home.path / "steps").read_text().splitlines()


def kill_and_go_on(
    home: Home, n: int, arguments: tuple[str, ...], want: list[dict[str, Any]], **besides: Any
) -> Tally:
    killed = home.start(*arguments, faults=faults(home, kill_at=n))
    _, said = killed.communicate(timeout=300)
    assert killed.returncode == -9, f"step {n}: {said}"
    assert "Traceback" not in said and "resource_tracker" not in said, said
    wait_until_gone(killed.pid)
    kept = home.raw_rows() if home.results.is_dir() else 0
    again = home.run(*arguments)
    assert again.returncode == 0, f"step {n}: {again.stderr}"
    have = home.rows(**besides)
    left = home.left_behind()
    assert not left, f"step {n} leaves {left}"
    return Tally(
        points=1,
        with_rows=int(bool(kept)),
        differing=sum(row not in have for row in want) + sum(row not in want for row in have),
        twice=home.raw_rows() - len(have),
        files=len(left),
    )


def spread(points: int, of: int) -> list[int]:
    return sorted({1 + round(i * (of - 1) / (points - 1)) for i in range(points)})


@pytest.fixture
def alone(home: Home) -> list[str]:
    """The steps of a sweep that is left alone."""
    done = home.run(*SWEEP, faults=faults(home))
    assert done.returncode == 0, done.stderr
    assert not home.left_behind()
    return steps(home)


def kills(
    home: Home, points: Iterable[int], arguments: tuple[str, ...], want: list[dict[str, Any]], **besides: Any
) -> Tally:
    """Two at a time; each in a folder of its own."""
    tally = Tally()
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(
                kill_and_go_on, Home(home.path / f"kill-{n}", home.verdicts), n, arguments, want, **besides
            )
            for n in points
        ]
        for one in waiting:
            tally = tally.plus(one.result())
    assert (tally.differing, tally.twice, tally.files) == (0, 0, 0), tally
    return tally


def test_kills_at_some_steps_lose_nothing(home: Home, alone: list[str], undisturbed: Home) -> None:
    """Steps of every kind: before the first file, in the midst of one, between rows and the store."""
    assert len(alone) > 40
    tally = kills(home, spread(QUICK_POINTS, len(alone)), SWEEP, undisturbed.rows())
    assert 0 < tally.with_rows < QUICK_POINTS


@pytest.mark.slow
def test_kills_at_every_step_lose_nothing(home: Home, alone: list[str], undisturbed: Home) -> None:
    tally = kills(home, range(1, len(alone) + 1), SWEEP, undisturbed.rows())
    enter("kills", tally.line("the command, its compiler answering at once", len(alone)))


@pytest.mark.slow
def test_kills_while_compilers_are_at_work_lose_nothing(
    home: Home, alone: list[str], undisturbed: Home
) -> None:
    """With the real compiler, at each twelfth step: what is under way then is seconds of work."""
    tally = kills(Home(home.path / "real"), range(3, len(alone) + 1, 12), SWEEP, undisturbed.rows())
    enter("kills", tally.line("the command, while compilers are at work", len(alone)))


def interpreted(home: Home) -> tuple[list[str], list[dict[str, Any]]]:
    """The steps, and the rows, of a sweep on a device that is left alone."""
    done = home.run(*INTERPRETED, faults=faults(home))
    assert done.returncode == 0, done.stderr
    assert not home.left_behind()
    rows = home.rows(besides=TIMING)
    assert {(row["source"], row["status"]) for row in rows} == {("modelled", "ok"), ("interpreted", "ok")}
    return steps(home), rows


@pytest.mark.slow
def test_kills_of_a_sweep_that_times_lose_nothing(home: Home) -> None:
    """Interpreted: the processes, files and messages are those of a TPU."""
    alone, want = interpreted(home)
    points = range(1, len(alone) + 1, 16)
    tally = kills(home, points, INTERPRETED, want, besides=TIMING)
    enter("kills", tally.line("the command, timing candidates on the CPU", len(alone)))


def kill_a_process(
    home: Home, role: str, n: int, want: list[dict[str, Any]], arguments: tuple[str, ...]
) -> Tally:
    """Kill the first worker or owner that comes to its n-th step: the sweep gets over it by itself."""
    once = home.path / "killed"
    asked = faults(home, role, steps=role, messages=True, kill_at=n, once=str(once))
    done = home.run(*arguments, faults=asked)
    assert done.returncode == 0, f"step {n}: {done.stderr}"
    assert "Traceback" not in done.stderr
    have = home.rows(besides=TIMING)
    tally = Tally(
        points=int(once.exists()),  # chance, and the clock, decide on how many steps there are
        with_rows=1,
        differing=sum(row not in have for row in want) + sum(row not in want for row in have),
        twice=home.raw_rows() - len(have),
        files=len(home.left_behind()),
    )
    assert tally[2:] == (0, 0, 0), f"step {n}: {tally}"
    return tally


@pytest.mark.slow
@pytest.mark.parametrize("role", ["worker", "owner"])
def test_kills_of_other_processes_lose_nothing(home: Home, role: str) -> None:
    """A worker at every step, and the owner of the device at each kind of step and at every twentieth."""
    arguments = INTERPRETED if role == "owner" else SWEEP
    alone = Home(home.path / "alone", home.verdicts)
    done = alone.run(*arguments, faults=faults(alone, role, steps=role, messages=True))
    assert done.returncode == 0, done.stderr
    steps = [line.partition("/")[0] for line in (alone.path / role).read_text().splitlines()]
    points: Iterable[int] = range(1, len(steps) + 1)
    if role == "owner":
        points = sorted({*(1 + steps.index(kind) for kind in steps), *points[::20]})
    want = alone.rows(besides=TIMING)

    def kill(n: int) -> Tally:
        return kill_a_process(Home(home.path / f"{n}", home.verdicts), role, n, want, arguments)

    tally = Tally()
    with ThreadPoolExecutor(2) as pool:
        for one in pool.map(kill, points):
            tally = tally.plus(one)
    assert tally.points
    what = "a compiling process" if role == "worker" else "the process that holds the device"
    enter("kills", tally.line(what, len(steps)))
