"""Timings on the chips of a Ray cluster: an owner of a chip on the chip's node, told from here what to run.

Of a v7x chip, which is two devices, one times keys.

An actor a chip, which holds `owner`'s process. Ray names a node's chips by the resource TPU and their
generation by one such as accelerator_type:TPU-V6E (docs.ray.io, "Accelerator types"; a node's own is found by
TPUAcceleratorManager of ray/_private/accelerators/tpu.py, from the host's metadata).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from autotune.errors import MachineError, UsageError
from autotune.executors.ray_pool import PLACE_SECONDS, POLL_SECONDS, STOP_SECONDS, difference, reason
from autotune.kernel.problem import BlockSizes, Problem, Settings
from autotune.kernel.workload import Workload
from autotune.results.schema import Tools
from autotune.timing import device_worker
from autotune.timing.device_process import Chip, Device, DeviceDied, Owner, PrepareFailed
from autotune.timing.devices import Devices, Limits
from autotune.timing.slot import Slot
from autotune.tpu import attached, generations

ACCELERATOR_TYPES = {
    "v4": "TPU-V4",
    "v5e": "TPU-V5LITEPOD",
    "v5p": "TPU-V5P",
    "v6e": "TPU-V6E",
    "v7x": "TPU-V7X",
}


def resource(generation: generations.Generation) -> str:
    """The resource by which Ray tells a node's generation."""
    return f"accelerator_type:{ACCELERATOR_TYPES[generation.name]}"


def offered() -> dict[str, int]:
    """The chips of the cluster that this process has joined, by generation."""
    import ray

    found: Counter[str] = Counter()
    for node in ray.nodes():
        for generation in generations.GENERATIONS.values():
            if node["Alive"] and resource(generation) in node["Resources"]:
                found[generation.name] += int(node["Resources"].get("TPU", 0))
    return dict(+found)


def generation_of(offers: dict[str, int], wanted: str | None) -> generations.Generation:
    """The generation to time on. wanted: which of those that the cluster offers; None for the only one.

    Raises:
      MachineError: the cluster offers none, or not that one.
      UsageError: it offers several.
    """
    if not offers:
        raise MachineError(
            "no node of the Ray cluster offers a TPU: name a generation to compile for, such as "
            "--target v6e, or start Ray on a TPU host"
        )
    if wanted is None and len(offers) > 1:
        raise UsageError(
            f"the Ray cluster offers {' and '.join(offers)}: say which, such as --ray-tpu {min(offers)}"
        )
    if wanted is not None and wanted not in offers:
        raise MachineError(f"no node of the Ray cluster offers {wanted}: it has {', '.join(offers)}")
    return generations.by_name(wanted or next(iter(offers)))


class Place(NamedTuple):
    """Where an actor is: the node's name, the number of its chip there, and what is installed."""

    host: str
    chip: int
    tools: Tools


class ChipHost:
    """The actor: an owner of the chip that Ray gave it."""

    def __init__(self, platform: str, run_timeout: float, compile_timeout: float) -> None:
        self._platform = platform
        self._limits = run_timeout, compile_timeout
        self._owner: Owner | None = None

    def place(self) -> Place:
        return Place(socket.gethostname(), self._chip(), Tools.installed())

    def start(self) -> str:
        """Take the chip; its device_kind."""
        self._owner = Owner(Chip(self._platform, self._chip()), 0, *self._limits)
        return self._owner.device_kind

    def ask(self, method: str, *told: Any) -> Any:
        """What a method of the owner gives or raises."""
        return getattr(self._owner, method)(*told)

    def close(self) -> None:
        if self._owner:
            self._owner.close()

    def _chip(self) -> int:
        import ray

        if self._platform == "tpu" and (visible := attached.visible_chips(os.environ)):
            return visible[0]  # Ray's ids can be of the parts of a chip
        given = ray.get_runtime_context().get_accelerator_ids().get("TPU", [])
        return int(given[0]) if given else 0


@dataclasses.dataclass
class _Chips:
    """The chips that slots share: how many have one, and how many wait; since when none has."""

    held: int = 0
    waiting: int = 0
    since: float = dataclasses.field(default_factory=time.monotonic)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        with self.lock:
            self.waiting += 1
        try:
            yield
        finally:
            with self.lock:
                self.waiting -= 1

    def add(self, number: int) -> None:
        with self.lock:
            self.held += number
            self.since = time.monotonic()

    def hopeless(self) -> bool:
        """Whether for long no slot had a chip."""
        return not self.held and time.monotonic() - self.since > PLACE_SECONDS


class RayDevice:
    """A device on a node of the cluster; see Device."""

    def __init__(self, actor: Any, place: Place, device_kind: str, shared: _Chips) -> None:
        self.host = place.host
        self.chip = place.chip
        self.device_kind = device_kind
        self._actor = actor
        self._shared = shared
        self._open = True
        shared.add(1)

    def prepare(
        self,
        problem: Problem,
        workloads: Sequence[Workload],
        settings: Settings,
        seed: int,
        target: str | None,
    ) -> None:
        self._ask("prepare", problem, tuple(workloads), settings, seed, target)

    def load(self, blocks: BlockSizes, payload: bytes | None) -> device_worker.Loaded:
        return cast(device_worker.Loaded, self._ask("load", blocks, payload))

    def time(self, order: Sequence[device_worker.Turn]) -> device_worker.Timed:
        return cast(device_worker.Timed, self._ask("time", tuple(order)))

    def close(self) -> None:
        if self._open:
            self._open = False
            self._shared.add(-1)
            _end(self._actor)

    def _ask(self, method: str, *told: Any) -> Any:
        try:
            return _answer(self._actor.ask, method, *told)
        except DeviceDied:
            self.close()
            raise


def _answer(method: Any, *told: Any) -> Any:
    """What an actor gives or raises; DeviceDied where its node is gone: no candidate is to blame."""
    import ray

    try:
        return ray.get(method.remote(*told))
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, MachineError | DeviceDied | PrepareFailed):
            raise cause from None
        raise DeviceDied(None, "crashed", f"the Ray node of the device was lost: {reason(error)}") from None


def _end(actor: Any) -> None:
    """End an actor, and before it the process that holds its chip."""
    import ray

    with contextlib.suppress(Exception):
        ray.wait([actor.close.remote()], timeout=STOP_SECONDS)
        ray.kill(actor)


class RaySlot(Slot):
    """The place of one chip of the cluster, whichever it is: Ray gives out those that are free.

    More slots than chips, as after a node has left, share: one with nothing to time gives its chip back.
    """

    def __init__(
        self,
        generation: generations.Generation | None,
        options: dict[str, Any],
        limits: Limits,
        shared: _Chips,
    ) -> None:
        super().__init__(0, self._take)
        self._generation = generation
        self._options = options
        self._timeouts = limits.run_timeout, limits.compile_timeout
        self._shared = shared
        self._tools = Tools.installed()

    def device(self) -> Device:
        device = super().device()
        self.chip = device.chip
        self.host = cast(RayDevice, device).host
        return device

    def idle(self) -> None:
        if self._device is not None and self._shared.waiting:
            self._device.close()
            self.drop()

    def _take(self) -> Device:
        import ray

        platform = "tpu" if self._generation else "cpu"
        # Two calls at once, so that `close` is heard during a run.
        options = {"num_cpus": 0, "max_concurrency": 2, **self._options}
        actor = ray.remote(ChipHost).options(**options).remote(platform, *self._timeouts)
        try:
            place = self._placed(actor)
        except BaseException:
            with contextlib.suppress(Exception):
                ray.kill(actor)
            raise
        try:
            return RayDevice(actor, place, self._started(actor, place), self._shared)
        except BaseException:
            _end(actor)
            raise

    def _placed(self, actor: Any) -> Place:
        import ray

        asked = actor.place.remote()
        with self._shared.wait():
            while not ray.wait([asked], timeout=POLL_SECONDS)[0]:
                if self._closed:
                    raise MachineError("the chip is not needed any more")
                if self._shared.hopeless():
                    raise MachineError(
                        f"no node of the Ray cluster had a free chip for {PLACE_SECONDS / 60:.0f} minutes; "
                        "what is recorded so far is kept: free or add nodes, then run the same command again"
                    )
        try:
            return cast(Place, ray.get(asked))
        except ray.exceptions.RayError as error:
            raise DeviceDied(None, "crashed", reason(error)) from None

    def _started(self, actor: Any, place: Place) -> str:
        """Have the chip taken; its device_kind."""
        if place.tools != self._tools:
            raise MachineError(f"the Ray node {place.host} {difference(place.tools, self._tools)}")
        kind: str = _answer(actor.start)
        if self._generation and kind not in self._generation.device_kinds:
            raise MachineError(
                f"the Ray node {place.host} offers {resource(self._generation)}, and its device is {kind!r}: "
                "start Ray there with the right resource"
            )
        return kind


def of_cluster(generation: generations.Generation, measured: bool, limits: Limits) -> Devices:
    """The chips of a generation that the cluster offers.

    measured: False for the interpreter in the chips' place, on the same nodes, or on any where there is none.
    """
    number = offered().get(generation.name, 0)
    # An accelerator type is there once a node, to be asked for in small parts.
    options = {"resources": {"TPU": 1, resource(generation): 0.001}} if number else {}
    shared = _Chips()
    slots = (
        RaySlot(generation if measured else None, options, limits, shared) for _ in range(max(1, number))
    )
    return Devices(limits.timing(generation.device_kinds[0] if measured else None), tuple(slots))
