"""The bounds that readers run in: whatever goes wrong in one is seen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.guard import Wrong, answer


class Refusal(Exception):
    """What a reader may answer."""


def _hang(folder: Path) -> None:
    while True:
        pass


def _swallow(folder: Path) -> None:
    try:
        _hang(folder)
    except Exception:
        time.sleep(0)


def _refuse(message: str) -> None:
    raise Refusal(message)


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        (lambda folder: int("x"), ValueError, "invalid literal"),
        (_hang, Wrong, "too much processor time"),
        (_swallow, Wrong, "too much processor time"),
        (lambda folder: eval("1 + 1"), Wrong, "compile"),
        (lambda folder: os.system("true"), Wrong, "os.system"),
        (lambda folder: (folder.parent / "elsewhere").write_text(""), Wrong, "open"),
        (lambda folder: (folder.parent / "elsewhere").mkdir(), Wrong, "os.mkdir"),
        (lambda folder: bytearray(16 << 30), MemoryError, ""),
        (lambda folder: _refuse("x\n" * 50), Wrong, "not a few printable lines"),
        (lambda folder: _refuse("\x1b[31m"), Wrong, "not a few printable lines"),
        (lambda folder: _refuse("x" * 5000), Wrong, "a refusal of 5000 characters"),
    ],
)
def test_a_fault_is_seen_and_what_comes_after_it_runs(
    fault: Callable[[Path], object], error: type[Exception], said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "its own"
    folder.mkdir()
    with pytest.raises(error, match=said):
        answer(lambda data, folder: fault(folder), b"", folder, (Refusal,), seconds=0.2)
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "elsewhere").write_text("outside of the bounds")
    assert answer(lambda data, folder: (folder / "x").write_bytes(data), b"x", folder, (Refusal,))
    assert not answer(lambda data, folder: _refuse("one line"), b"", folder, (Refusal,))
