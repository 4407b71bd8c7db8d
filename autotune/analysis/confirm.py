"""What has never run on a TPU, tried on one: a finding for each part of the way, as soon as it is known."""

from __future__ import annotations

import dataclasses
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import autotune
from autotune import sweep
from autotune.analysis.candidate import BLOCKS, PROFILE_REPEATS, Tried, try_candidate
from autotune.compile.cache import Store
from autotune.errors import MachineError
from autotune.io import installed
from autotune.io.folders import Folder
from autotune.io.terminal import counted
from autotune.keys import presets
from autotune.model.calibrate import current
from autotune.results import dataset, schema
from autotune.results.rows import rows_of
from autotune.results.schema import KERNEL_EVENTS
from autotune.search.plan import Plan, Request, workload_of
from autotune.search.strategy import Search
from autotune.sweep import Summary
from autotune.timing.devices import Devices
from autotune.timing.history import Known
from autotune.timing.shortlist import LEAST_AGREEMENT, agreement, geometric_mean
from autotune.timing.slot import Slot
from autotune.tpu.attached import Attached
from autotune.tpu.generations import Generation

OK, FAILED, NOT_APPLICABLE = "ok", "failed", "not applicable"
NAMES = ("detection", "chips", "executables", "results", "profile", "sweep", "clock", "ranking")

LARGEST_CHANGE = 0.02  # of a median, from one process to the next: twice a sweep's default --precision
# Statuses of a candidate that are no fault of what is checked here.
EXPECTED_STATUSES = ("ok", "vmem_oom", "smem_oom")


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding. name: of NAMES. state: ok, failed or not applicable. seen: what was found, a sentence."""

    name: str
    state: str
    seen: str


def head(interpreted: bool, generation: Generation | None, device_kind: str | None) -> dict[str, Any]:
    """What the findings are of, with the versions of this environment.

    interpreted: the CPU stands in for a TPU of the generation. device_kind: as the device spells it; None
    where it did not get so far.
    """
    return {
        "autotune": autotune.__version__,
        "interpreted": interpreted,
        "generation": generation.name if generation else None,
        "device_kind": device_kind,
        **{name: installed.version(name) for name in ("jax", "jaxlib", "libtpu")},
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What is tried. folder: gets the folders `first` and `second`, one a sweep. timeout: seconds that a
    compile may take. progress: of a sweep."""

    request: Request
    folder: Folder
    store: Store | None
    jobs: int
    timeout: float
    progress: Callable[[Plan, Search], sweep.Progress]


def request(generation: Generation, interpreted: bool) -> Request:
    """The smoke keys; for the interpreter one a layout, two candidates and one workload."""
    keys = presets.keys("smoke")
    if not interpreted:
        return Request(generation=generation, keys=keys)
    by_layout = {key.page_size: key for key in reversed(keys)}
    return Request(
        generation=generation,
        keys=tuple(sorted(by_layout.values())),
        kv_pages=(2, 4),
        queries=(32,),
        workloads=("mixed",),
    )


def detection(find: Callable[[], Attached]) -> tuple[Check, Attached | None]:
    """Whether the TPU is found, and the TPU; find: as attached.attached."""
    start = time.monotonic()
    try:
        found = find()
    except MachineError as error:
        return Check("detection", FAILED, str(error)), None
    seconds = time.monotonic() - start
    free = "" if len(found.usable) == found.num_chips else f" ({len(found.usable)} of them free)"
    return Check(
        "detection",
        OK,
        f"{found.generation}, {found.device_kind!r}, {counted(found.num_chips, 'chip')}{free}, "
        f"{counted(found.devices_per_chip, 'device')} a chip; JAX started on one in {seconds:.1f} s",
    ), found


def skipped(done: str, why: str) -> Iterator[Check]:
    """Not applicable, for every check after the one called `done`."""
    for name in NAMES[NAMES.index(done) + 1 :]:
        yield Check(name, NOT_APPLICABLE, why)


def examine(study: Study, start: Callable[[], Devices]) -> Iterator[Check]:
    """All checks but detection, in the order of NAMES.

    start: gives devices of processes of their own; called once for each of the two sweeps.

    Raises:
      UsageError: the folder cannot be written.
    """
    devices = start()
    slots = devices.slots
    try:
        check, taken = chips(slots)
        yield check
        if not taken:
            yield from skipped("chips", "no chip could be taken")
            return
        devices = devices._replace(slots=taken)
        tried = try_candidate(study.request, devices, study.timeout)
        yield executables(tried)
        yield right(tried)
        if tried.error:
            yield from skipped("results", "the one candidate that was tried has no right result")
            return
        yield profile(tried, devices.timing.interpreted)
        yield from _swept(study, devices, tried, start)
    finally:
        for slot in slots:
            slot.close()


def _swept(study: Study, devices: Devices, tried: Tried, start: Callable[[], Devices]) -> Iterator[Check]:
    """What two sweeps show, the second by other processes than the first."""
    interpreted = devices.timing.interpreted
    first, second = study.folder / "first", study.folder / "second"
    try:
        summary = _sweep(study, first, devices)
    except MachineError as error:
        yield Check("sweep", FAILED, str(error))
        yield from skipped("sweep", "the sweep before it failed")
        return
    rows = timed_rows(study, first, devices.timing.source)
    yield whole(rows, summary, tried)
    places = {(slot.chip, slot.index) for slot in devices.slots}
    again = start()
    again = again._replace(slots=tuple(slot for slot in again.slots if (slot.chip, slot.index) in places))
    try:
        _sweep(study, second, again)
    except MachineError as error:
        yield Check("clock", FAILED, f"the second sweep: {error}")
    else:
        yield repeated(rows, timed_rows(study, second, devices.timing.source), interpreted)
    yield ranking(study, first, devices.timing.source)


def _sweep(study: Study, folder: Folder, devices: Devices) -> Summary:
    request = study.request
    prepared = sweep.prepare(request, folder, study.store)
    return sweep.sweep(
        request,
        folder,
        study.progress(*prepared),
        prepared=prepared,
        store=study.store,
        devices=devices,
        jobs=study.jobs,
        timeout=study.timeout,
    )


# Processes that hold chips.


class _Start(NamedTuple):
    """What came of taking a device. error: None if it was taken. seconds: that it took."""

    error: str | None
    kind: str | None
    seconds: float


def chips(slots: Sequence[Slot]) -> tuple[Check, tuple[Slot, ...]]:
    """Whether every device can be taken, all at once, and those that were; they stay taken."""
    pool = ThreadPoolExecutor(len(slots))
    try:
        starts = list(pool.map(_started, slots))
    finally:
        pool.shutdown(wait=False)  # after a Ctrl-C a start may take minutes
    taken = tuple(slot for slot, start in zip(slots, starts, strict=True) if start.error is None)
    number = len({slot.chip for slot in slots})
    if failed := [start.error for start in starts if start.error]:
        said = "; ".join(dict.fromkeys(failed))
        return Check("chips", FAILED, f"{len(failed)} of {counted(len(slots), 'device')}: {said}"), taken
    seconds = [start.seconds for start in starts]
    kinds = ", ".join(sorted({repr(start.kind) for start in starts}))
    took = f"{max(seconds):.1f} s" if len(seconds) == 1 else f"{min(seconds):.1f} to {max(seconds):.1f} s"
    together = f"{number} processes held {number} chips at once" if number > 1 else "a process held the chip"
    devices = counted(len(slots), "device")
    return Check("chips", OK, f"{together}; {devices}, {kinds}; started in {took}"), taken


def _started(slot: Slot) -> _Start:
    start = time.monotonic()
    try:
        kind = slot.device().device_kind
    except MachineError as error:
        return _Start(str(error), None, time.monotonic() - start)
    return _Start(None, kind, time.monotonic() - start)


# One candidate on one device.


def executables(tried: Tried) -> Check:
    """Whether what a worker compiled was loaded as it was."""
    pair = f"{BLOCKS[0]},{BLOCKS[1]}"
    if tried.verdict.status != "ok":
        seen = f"{pair} does not compile ahead: {tried.verdict.status}: {tried.verdict.error}"
        return Check("executables", FAILED, seen)
    if tried.refused:
        seen = f"{pair} did not load, and the device had to compile its own: {tried.refused}"
        return Check("executables", FAILED, seen)
    seconds = tried.verdict.seconds or 0.0
    return Check(
        "executables", OK, f"{pair}, compiled in {seconds:.1f} s by a process without the chip, was loaded"
    )


def right(tried: Tried) -> Check:
    """Whether the candidate's outputs are those of the reference."""
    if tried.error:
        return Check("results", FAILED, tried.error)
    outputs = len(tried.results)
    which = "its output agrees" if outputs == 1 else f"its {outputs} outputs, one a workload, agree"
    return Check("results", OK, f"{which} with the reference")


def profile(tried: Tried, interpreted: bool) -> Check:
    """Whether a profile holds the kernel's events, and the seconds that one takes."""
    last = tried.results[-1]
    clock = f"timed by the {last.timer}"
    if interpreted:
        return Check("profile", NOT_APPLICABLE, f"{clock}: a CPU's profile has no device events")
    costs = ""
    if tried.seconds:
        (few, short), (many, long) = tried.seconds.items()
        costs = (
            f"; a profile takes {short:.2f} s with {counted(few, 'call')} and {long:.2f} s with {many}, all "
            f"told (medians of {PROFILE_REPEATS}); {tried.found} of {tried.calls} calls are in them"
        )
    if last.timer == KERNEL_EVENTS:
        return Check("profile", OK, clock + costs)
    note = f" ({last.note})" if last.note else ""
    return Check("profile", FAILED, f"{clock}, not by the {KERNEL_EVENTS}{note}{costs}")


# Two sweeps.


def timed_rows(study: Study, folder: Folder, source: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The rows of a folder that this very request timed with the tools that are installed, by identity."""
    wanted = {"target": study.request.generation.name, **dataclasses.asdict(schema.Tools.installed())}
    keys = set(study.request.keys)
    frame = dataset.read(folder)
    return {
        schema.identity(row): row
        for row in rows_of(frame[frame["source"] == source])
        if all(row[name] == value for name, value in wanted.items())
        and tuple(row[name] for name in schema.KEY_COLUMNS) in keys
    }


def whole(rows: dict[tuple[Any, ...], dict[str, Any]], summary: Summary, tried: Tried) -> Check:
    """Whether a sweep timed all that it was to time.

    tried: what it shows is not held against the sweep again.
    """
    statuses = Counter(row["status"] for row in rows.values())
    counts = ", ".join(f"{number} {status}" for status, number in statuses.most_common()) or "nothing"
    before = max(0, len(rows) - summary.timings.total())
    seen = f"{counts} (a candidate on a workload each)" + (f"; {before} recorded before" if before else "")
    if clocks := sorted({row["timer"] for row in rows.values() if row["timer"]}):
        seen += f"; by {' and '.join(clocks)}"
    bad = [row for row in rows.values() if row["status"] not in EXPECTED_STATUSES]
    late = summary.compiled_here and not tried.refused
    if bad:
        seen += f"; the first that failed, {_which(bad[0])}: {bad[0]['error']}"
    if late:
        said = f": {summary.refused}" if summary.refused else ""
        seen += f"; {summary.compiled_here} with executables that the device had to compile itself{said}"
    return Check("sweep", FAILED if bad or late or not statuses["ok"] else OK, seen)


def _which(row: dict[str, Any]) -> str:
    """A row, in few words."""
    blocks = ",".join(str(row[name]) for name in schema.BLOCK_COLUMNS)
    key = ", ".join(str(row[name]) for name in schema.KEY_COLUMNS)
    return f"{blocks} on {row['workload']} of ({key})"


def repeated(
    first: dict[tuple[Any, ...], dict[str, Any]],
    second: dict[tuple[Any, ...], dict[str, Any]],
    interpreted: bool,
) -> Check:
    """Whether the medians of one sweep are those of another, by the same clock, to LARGEST_CHANGE."""
    if interpreted:
        return Check("clock", NOT_APPLICABLE, "the interpreter's times say nothing")
    pairs = [(row, second[name]) for name, row in first.items() if name in second]
    pairs = [(a, b) for a, b in pairs if a["status"] == b["status"] == "ok"]
    if not pairs:
        return Check("clock", FAILED, "no candidate was timed in both sweeps")
    changes = [max(_latencies(pair)) / min(_latencies(pair)) - 1.0 for pair in pairs]
    within = sum(change <= LARGEST_CHANGE for change in changes)
    worst = max(range(len(pairs)), key=changes.__getitem__)
    a, b = pairs[worst]
    chips = f"chip {a['chip']}" if a["chip"] == b["chip"] else f"chips {a['chip']} and {b['chip']}"
    seen = (
        f"{within} of {counted(len(pairs), 'median')} of two sweeps are within {LARGEST_CHANGE:.0%}; half of "
        f"them within {statistics.median(changes):.1%}, the worst {changes[worst]:.1%} apart ({chips}"
    )
    clocks = sum(a["timer"] != b["timer"] for a, b in pairs)
    good = within == len(pairs) and not clocks
    seen += ")" if good else f": {_which(a)}, {a['latency_us']:.4g} and {b['latency_us']:.4g} us)"
    if clocks:
        seen += f"; the clock was another one for {clocks}"
    return Check("clock", OK if good else FAILED, seen)


def _latencies(pair: tuple[dict[str, Any], dict[str, Any]]) -> tuple[float, float]:
    return pair[0]["latency_us"], pair[1]["latency_us"]


def ranking(study: Study, folder: Folder, source: str) -> Check:
    """Whether the model's order of each key's candidates is the clock's.

    ok where on every key at least LEAST_AGREEMENT of the pairs that the clock can tell apart are in it.
    """
    if source == schema.INTERPRETED:
        return Check("ranking", NOT_APPLICABLE, "the interpreter's times say nothing")
    request = study.request
    known = Known(request, source, schema.Tools.installed(), current(request.generation).version)
    known.read(dataset.read(folder))
    shares: list[float] = []
    places: Counter[int] = Counter()
    for key in request.keys:
        problem = key.canonical_problem(request.max_num_seqs)
        batches = {workload_of(w, key, problem, request.seed).fingerprint for w in request.workloads}
        timed = {
            blocks: geometric_mean(list(medians.values()))
            for blocks, medians in known.timed(key, batches)[1].items()
            if set(medians) == batches
        }
        order = [blocks for blocks in known.ranking(key, batches) if blocks in timed]
        if len(order) > 1:
            shares.append(agreement(order, timed))
            places[order.index(min(order, key=lambda blocks: timed[blocks].median)) + 1] += 1
    if not shares:
        return Check("ranking", NOT_APPLICABLE, "no key has two candidates that were timed")
    good = sum(share >= LEAST_AGREEMENT for share in shares)
    won = ", ".join(f"{place} on {counted(number, 'key')}" for place, number in sorted(places.items()))
    return Check(
        "ranking",
        OK if good == len(shares) else FAILED,
        f"on {good} of {counted(len(shares), 'key')} at least {LEAST_AGREEMENT:.0%} of the pairs that the "
        f"clock can tell apart are in the predicted order (least {min(shares):.0%}, mean "
        f"{statistics.mean(shares):.0%}); the predicted place of the clock's fastest: {won}",
    )
