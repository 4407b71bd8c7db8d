"""Runs the inputs of a target in children, and gathers what they found."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
WALL_SECONDS = 120.0  # without a new input: it waits for something
PATIENCE = 20  # children that may die in one run


@dataclasses.dataclass
class Outcome:
    """finds: (number of the input, what it found), by number."""

    target: str
    inputs: int
    seconds: float
    finds: list[tuple[int, str]]

    def kinds(self) -> dict[str, list[int]]:
        """The numbers of the inputs that found each thing, by exception and place."""
        kinds: dict[str, list[int]] = {}
        for number, said in self.finds:
            kinds.setdefault(said.partition(": ")[0] + said.partition(": ")[2].partition(": ")[0], []).append(
                number
            )
        return kinds


def run(target: str, inputs: int, seed: int, jobs: int = 1, module: str = "tests.fuzz.targets") -> Outcome:
    """Give a target its inputs 0 to `inputs` of a seed, in `jobs` processes side by side."""
    start = time.monotonic()
    size = -(-inputs // jobs)
    parts = [(first, min(inputs, first + size)) for first in range(0, inputs, size)]
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(lambda part: _part(target, seed, *part, module), parts))
    finds = sorted({find for part in found for find in part})
    return Outcome(target, inputs, time.monotonic() - start, finds)


def _part(target: str, seed: int, first: int, end: int, module: str) -> list[tuple[int, str]]:
    finds: list[tuple[int, str]] = []
    for _ in range(PATIENCE):
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            died = _child(target, seed, first, end, Path(folder), module)
            lines = Path(folder, "finds")
            finds += (
                [(n, said) for n, said in map(json.loads, lines.read_text().splitlines())]
                if lines.exists()
                else []
            )
        if died is None:
            return finds
        finds.append(died)
        first = died[0] + 1
    raise RuntimeError(f"{PATIENCE} children died of {target}: {finds[-1]}")


def _child(target: str, seed: int, first: int, end: int, out: Path, module: str) -> tuple[int, str] | None:
    """Run one child to its end; the input that it died of, and how, if it did."""
    at = out / "at"
    at.write_bytes(struct.pack("<q", -1))
    arguments = [target, seed, first, end, out, module]
    with (out / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.child", *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        seen, since = -1, time.monotonic()
        while True:
            try:
                code = process.wait(timeout=1)
                break
            except subprocess.TimeoutExpired:
                now = struct.unpack("<q", at.read_bytes())[0]
                if now != seen:
                    seen, since = now, time.monotonic()
                elif time.monotonic() - since > WALL_SECONDS:
                    process.kill()
                    code = process.wait()
                    break
    number = struct.unpack("<q", at.read_bytes())[0]
    if code == 0:
        return None
    if number < 0:
        said = (out / "stderr").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"the child for {target} did not start: {said}")
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return number, f"died: by {how} at {target}: {(out / 'stderr').read_text(errors='replace')[-200:]!r}"
