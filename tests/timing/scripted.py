"""Devices of known latencies: what the code that decides sees of a TPU, without one.

`Script` says what a device is like. `ScriptedDevice` is the device of one process: it makes real bytes of
profiles, which the real timer reads.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.kernel.jax_rpa.call import program_name
from autotune.kernel.problem import BlockSizes, Problem, Settings
from autotune.kernel.workload import Workload
from autotune.timing.device_process import DeviceDied
from autotune.timing.device_worker import Loaded, Timed, Turn
from autotune.timing.timer import Step, Timer, mark_name
from tests.timing.xspace import Event, xspace

KERNEL = "ragged_paged_attention_kernel"
GAP_US = 50.0  # between two calls: the host waits for one before it makes the next


@dataclasses.dataclass
class Script:
    """What a device is like.

    latency: seconds of a candidate's call, by its blocks and the workload's fingerprint. noise: of a sample,
    relative. drift: how much slower it has become after 1,000 calls, relative. lost: the share of a profile's
    events that are not there. profiles: whether there are any; else the timer falls back to the host's clock,
    which advances with the calls. starts: what each start does, raising DeviceDied or not; the last stands
    for all that follow. on_prepare, on_load: told of each, and may raise. traces: profiles taken so far.
    """

    latency: Callable[[BlockSizes, str], float]
    noise: float = 0.01
    drift: float = 0.0
    lost: float = 0.0
    profiles: bool = True
    seed: int = 0
    starts: Sequence[Callable[[], None]] = (lambda: None,)
    on_prepare: Callable[[Problem], None] = lambda problem: None
    on_load: Callable[[BlockSizes, bytes | None], Loaded | None] = lambda blocks, payload: None
    started: int = 0
    traces: int = 0
    calls: int = 0
    rounds: list[Counter[Turn]] = dataclasses.field(default_factory=list)
    loaded: list[tuple[BlockSizes, bytes | None]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def start(self) -> ScriptedDevice:
        """A new process, as a slot starts it."""
        action = self.starts[min(self.started, len(self.starts) - 1)]
        self.started += 1
        action()
        return ScriptedDevice(self)


def dies(blocks: BlockSizes | None = None, said: str = "Device or resource busy", **how: Any) -> DeviceDied:
    return DeviceDied(blocks, "crashed", said, **how)


def raises(error: Exception) -> Callable[[], None]:
    """A start that fails."""

    def start() -> None:
        raise error

    return start


class ScriptedDevice:
    """A Device (autotune.timing.device_process) that behaves as its script says."""

    chip = 0
    device_kind = "TPU v6 lite"

    def __init__(self, script: Script) -> None:
        self._script = script
        self._workloads: tuple[Workload, ...] = ()
        self._timer = Timer(
            KERNEL, self._mark, lambda result: result, self._profile, lambda: self._now * 1e-6
        )
        self._now = 0.0  # microseconds
        self._events: dict[str, list[Event]] = {}

    def prepare(
        self,
        problem: Problem,
        workloads: Sequence[Workload],
        settings: Settings,
        seed: int,
        target: str | None,
    ) -> None:
        self._script.on_prepare(problem)
        self._workloads = tuple(workloads)

    def load(self, blocks: BlockSizes, payload: bytes | None) -> Loaded:
        self._script.loaded.append((blocks, payload))
        said = self._script.on_load(blocks, payload)
        return said or Loaded("ok", None, compiled=payload is None)

    def time(self, order: Sequence[Turn]) -> Timed:
        turns = {Step(turn.workload, program_name(turn.blocks)): turn for turn in order}

        def call(step: Step) -> None:
            turn = turns[step]
            exact = self._script.latency(turn.blocks, self._workloads[turn.workload].fingerprint)
            slow = 1 + self._script.drift * self._script.calls / 1000
            self._run(step.name, exact * slow * max(0.1, self._script.rng.gauss(1.0, self._script.noise)))

        self._script.rounds.append(Counter(order))
        steps = [Step(turn.workload, program_name(turn.blocks)) for turn in order]
        found = self._timer.time(call, steps, lambda step: None)
        return Timed({turns[step]: seconds for step, seconds in found.seconds.items()}, *found[1:])

    def close(self) -> None:
        pass

    def _mark(self, section: int) -> None:
        self._run(mark_name(section), 2e-6, kernel=False)

    def _run(self, name: str, seconds: float, kernel: bool = True) -> None:
        self._script.calls += 1
        microseconds = seconds * 1e6
        self._event("XLA Modules", (f"jit_{name}(7)", self._now, microseconds + 2.0))
        if kernel:
            self._event("XLA Ops", (f"%{KERNEL}.1 = bf16[8] custom-call(%a)", self._now + 1.0, microseconds))
        self._now += microseconds + GAP_US

    def _event(self, line: str, event: Event) -> None:
        if self._script.rng.random() >= self._script.lost:
            self._events.setdefault(line, []).append(event)

    def _profile(self, run: Callable[[], None]) -> bytes:
        self._script.traces += 1
        self._events = {}
        run()
        return xspace([("/device:TPU:0", self._events)] if self._script.profiles else [])


def known(table: Mapping[BlockSizes, float]) -> Callable[[BlockSizes, str], float]:
    """The same on every workload."""
    return lambda blocks, workload: table[blocks]
