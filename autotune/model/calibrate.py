"""Constants of the cost model fitted to measured rows, and the user's file that keeps them by device_kind.

The file is calibration.json in the folder `autotune` of XDG_CONFIG_HOME (~/.config if that is not set). A
sweep for a generation uses the constants of its device_kind from there, and the built-in ones otherwise; its
rows name which, as `model`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autotune.errors import UsageError
from autotune.io.files import distrusted, own_folder, whole
from autotune.io.terminal import say, shown
from autotune.kernel import workload
from autotune.kernel.problem import Problem, Program
from autotune.kernel.workload import Workload
from autotune.model.cost import CALIBRATIONS, CONSTANTS, Calibration, Terms, seconds, stack, terms
from autotune.results import schema
from autotune.results.rows import program_of, rows_of
from autotune.tpu import generations
from autotune.tpu.generations import Generation

if TYPE_CHECKING:
    import pandas as pd

# Fewer rows or programs than this say nothing about four constants.
LEAST_ROWS, LEAST_PROGRAMS = 20, 8
# Seeds tried in finding the batch that a row was timed on again: a row keeps its fingerprint, not its seed.
SEEDS = range(16)
FOLDS = 5
# How far each constant may well be from the built-in one, and the noise that a row is expected to have: rows
# that say nothing of a constant leave it where it was.
_PRIOR = {
    "call_seconds": 20e-6,
    "copy_seconds": 1e-6,
    "bandwidth_fraction": 0.3,
    "stall": 0.5,
    "kv_block_seconds": 0.5e-6,
}
_LIMITS = {
    "call_seconds": (0.0, 1e-2),
    "copy_seconds": (0.0, 1e-4),
    "bandwidth_fraction": (0.05, 1.2),
    "stall": (0.2, 5.0),
    "kv_block_seconds": (0.0, 1e-4),
}
_NOISE = 0.02
MAX_FILE_BYTES = 1 << 20
MAX_ORIGIN_CHARS = 1000


class Sample(NamedTuple):
    """One measured row: its program, its seconds, and the model's terms of it."""

    program: Program
    measured: float
    terms: Terms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """A calibration with what is known of its worth.

    uncertainty: one standard deviation of each constant, in its own unit. error, error_p90: median and 90th
    percentile of |predicted / measured - 1| over rows of programs that were left out of the fit. before: the
    median error of the built-in constants on all rows.
    """

    calibration: Calibration
    uncertainty: Mapping[str, float]
    error: float
    error_p90: float
    before: float
    rows: int
    programs: int


def samples(frame: pd.DataFrame, device_kind: str) -> tuple[list[Sample], int]:
    """The measured rows of a device that the model can predict, and how many it cannot.

    frame: rows as `results.read` gives them. A row needs the schedule of its program, its own or another
    row's, and a batch that can be made again: a generated one, or a CSV file that is still there.
    """
    schedules: dict[Program, tuple[int, ...]] = {}
    measured = []
    generation = generations.by_device_kind(device_kind)
    lines = frame[(frame["target"] == generation.name) & (frame["status"] == "ok")]
    for line in rows_of(lines):
        if line["cycles"] is not None:
            schedules[program_of(line)] = tuple(line["cycles"])
        if line["source"] == schema.MEASURED and line["device_kind"] == device_kind and line["latency_us"]:
            measured.append(line)
    found = []
    batches: dict[tuple[Any, ...], Workload | None] = {}
    for line in measured:
        program = program_of(line)
        problem = _problem(line)
        named = (line["workload"], line["workload_fingerprint"], problem)
        if named not in batches:
            batches[named] = _batch(*named)
        batch, cycles = batches[named], schedules.get(program)
        if batch is not None and cycles is not None and len(cycles) == 4:
            made = terms(generation, problem, program.blocks, batch, cycles)
            found.append(Sample(program, line["latency_us"] * 1e-6, made))
    return found, len(measured) - len(found)


def _problem(line: Mapping[str, Any]) -> Problem:
    return Problem(**{f.name: line[f.name] for f in dataclasses.fields(Problem)})


def _batch(name: str, fingerprint: str, problem: Problem) -> Workload | None:
    try:
        if name in workload.GENERATORS:
            batches = (workload.generate(name, problem, seed) for seed in SEEDS)
        else:
            batches = (workload.from_csv(name) for _ in range(1))
        return next((batch for batch in batches if batch.fingerprint == fingerprint), None)
    except UsageError:  # the file is gone, or is another one now
        return None


def fit(found: list[Sample], origin: str, built_in: Calibration) -> Fitted:
    """The constants that predict the samples best, in the relative sense.

    built_in: of the samples' generation; constants of which they say nothing stay there.

    Raises:
      UsageError: there are too few samples or programs.
    """
    programs = sorted({s.program for s in found}, key=str)
    if len(found) < LEAST_ROWS or len(programs) < LEAST_PROGRAMS:
        raise UsageError(
            f"{len(found)} measured rows of {len(programs)} programs are too few to fit {len(CONSTANTS)} "
            f"constants: measure at least {LEAST_ROWS} rows of {LEAST_PROGRAMS} programs"
        )
    constants, uncertainty = _solve(found, built_in)
    fold = {program: number % FOLDS for number, program in enumerate(programs)}
    errors = []
    for left_out in range(FOLDS):
        kept = [s for s in found if fold[s.program] != left_out]
        errors.append(_errors([s for s in found if fold[s.program] == left_out], _solve(kept, built_in)[0]))
    held_out = np.concatenate(errors)
    return Fitted(
        calibration=Calibration(**dict(zip(CONSTANTS, map(float, constants), strict=True)), origin=origin),
        uncertainty=dict(zip(CONSTANTS, map(float, uncertainty), strict=True)),
        error=float(np.median(held_out)),
        error_p90=float(np.percentile(held_out, 90)),
        before=float(np.median(_errors(found, _values(built_in)))),
        rows=len(found),
        programs=len(programs),
    )


def _values(calibration: Calibration) -> np.ndarray:
    return np.array([getattr(calibration, name) for name in CONSTANTS])


def _predict(found: Terms, constants: np.ndarray) -> np.ndarray:
    return np.asarray(seconds(found, Calibration(**dict(zip(CONSTANTS, constants, strict=True)), origin="")))


def _errors(found: list[Sample], constants: np.ndarray) -> np.ndarray:
    measured = np.array([s.measured for s in found])
    return np.abs(_predict(stack([s.terms for s in found]), constants) / measured - 1)


def _solve(found: list[Sample], built_in: Calibration) -> tuple[np.ndarray, np.ndarray]:
    """Robust least squares of log(predicted / measured), with a weak pull to the built-in constants."""
    from scipy.optimize import least_squares  # jax depends on scipy

    stacked, measured = stack([s.terms for s in found]), np.array([s.measured for s in found])
    unit = np.array([_PRIOR[name] for name in CONSTANTS])
    start = _values(built_in)
    low, high = np.array([_LIMITS[name] for name in CONSTANTS]).T

    def residuals(x: np.ndarray) -> np.ndarray:
        off = np.log(_predict(stacked, x * unit) / measured) / _NOISE
        return np.concatenate([off, x - start / unit])

    solved = least_squares(
        residuals,
        np.clip(start, low + 1e-3 * unit, high) / unit,
        bounds=(low / unit, high / unit),
        loss="soft_l1",
        f_scale=3.0,
    )
    # The scatter that is left, where it is more than the expected noise, widens the uncertainty.
    scatter = max(1.0, float(np.median(np.abs(residuals(solved.x)[: len(found)]))) / 0.6745)
    covariance = np.linalg.inv(solved.jac.T @ solved.jac)
    return solved.x * unit, np.sqrt(np.diag(covariance)) * unit * scatter


_PLACE = "XDG_CONFIG_HOME", ".config"


def path() -> Path:
    """The user's file of calibrations."""
    return own_folder(*_PLACE)[0] / "calibration.json"


def _distrusted() -> str | None:
    """Why the file may be another user's work; None if it cannot be."""
    return own_folder(*_PLACE)[1] or distrusted(path())


def store(device_kind: str, fitted: Fitted) -> None:
    """Keep a calibration for a device_kind, in place of an earlier one.

    Raises:
      UsageError: the file cannot be read or written, or may be another user's work.
    """
    if why := _distrusted():
        raise UsageError(f"{str(path())!r} is not written, as {why}")
    held = _read()
    held[device_kind] = {
        **dataclasses.asdict(fitted.calibration),
        "uncertainty": dict(fitted.uncertainty),
        "error": fitted.error,
        "error_p90": fitted.error_p90,
        "rows": fitted.rows,
        "programs": fitted.programs,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    with contextlib.suppress(OSError):  # which the next line tells of
        path().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with whole(path()) as file:
        file.write((json.dumps(held, indent=2, sort_keys=True) + "\n").encode())


def current(generation: Generation) -> Calibration:
    """What a sweep predicts a generation with: the user's calibration of its device_kind, or the built-in.

    Raises:
      UsageError: the user's file is there and cannot be understood.
    """
    held = _read()
    for device_kind in generation.device_kinds:
        if entry := held.get(device_kind):
            try:
                # A calibration of version 0.1 has no such term, which is as if it took no time.
                constants = {name: float({"kv_block_seconds": 0.0, **entry}[name]) for name in CONSTANTS}
                if not all(low <= constants[name] <= high for name, (low, high) in _LIMITS.items()):
                    raise ValueError
                origin = str(entry["origin"])
                if not origin.isprintable() or len(origin) > MAX_ORIGIN_CHARS:
                    raise ValueError
                return Calibration(**constants, origin=origin)
            except (KeyError, TypeError, ValueError, OverflowError):
                raise UsageError(
                    f"{str(path())!r} has no calibration of {device_kind!r} that can be used: make it anew "
                    "with `autotune calibrate`, or remove the file"
                ) from None
    return CALIBRATIONS[generation.name]


@functools.cache
def _passed_over(file: Path, why: str) -> None:
    say(f"{shown(file)} is passed over, and the built-in constants predict: {why}")


def _read() -> dict[str, Any]:
    if not path().exists():
        return {}
    if why := _distrusted():
        _passed_over(path(), why)
        return {}
    try:
        if not path().is_file() or path().stat().st_size > MAX_FILE_BYTES:
            raise ValueError("it is not a file, or is too large")
        held = json.loads(path().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{str(path())!r} cannot be read ({error}): remove it") from None
    if not isinstance(held, dict):
        raise UsageError(f"{str(path())!r} holds no calibrations by device_kind: remove it")
    return held
