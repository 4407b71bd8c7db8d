"""Readers with the faults that fuzzing looks for, so that a test can see it find each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from autotune.tpu.schedule import ListingError
from tests.fuzz.targets import Target

BAD = b"bad"


def _when_bad(fault: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    return lambda data, folder: fault(folder) if BAD in data else None


def _hang(folder: Path) -> None:
    while True:
        pass


def _swallow(folder: Path) -> None:
    try:
        _hang(folder)
    except Exception:
        time.sleep(0)


def _speak(folder: Path) -> None:
    raise ListingError("x\n" * 50)


def _steer(folder: Path) -> None:
    raise ListingError("\x1b[31m")


def _ramble(folder: Path) -> None:
    raise ListingError("x" * 5000)


def _elsewhere(folder: Path) -> None:
    Path(folder.parent, f"{folder.name}-elsewhere").write_text("")


FAULTS: dict[str, Callable[[Path], object]] = {
    "raises": lambda folder: int("x"),
    "hangs": _hang,
    "hangs, and would swallow it": _swallow,
    "dies": lambda folder: os.abort(),
    "leaves": lambda folder: os._exit(3),
    "executes": lambda folder: eval("1 + 1"),
    "starts": lambda folder: os.system("true"),
    "writes": _elsewhere,
    "eats memory": lambda folder: bytearray(6 << 30),
    "many lines": _speak,
    "steers a terminal": _steer,
    "long line": _ramble,
}

TARGETS = {
    name: Target(
        name,
        lambda: [],
        _when_bad(fault),
        # The first inputs, which load what is loaded when needed, are not looked at.
        make=lambda name, seed, number: BAD if number in (60, 61) else b"good",
        refusals=(ListingError,),
        seconds=0.2,
    )
    for name, fault in FAULTS.items()
}
