"""Where a sweep's processes run: on this machine, or on the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Protocol

from autotune.compile.local_pool import CompilePool
from autotune.compile.pool import StartPool
from autotune.errors import MachineError
from autotune.executors import ray_cluster, ray_devices
from autotune.executors.ray_pool import RayPool
from autotune.timing.devices import Devices, Limits, of_this_host
from autotune.tpu.attached import Attached, attached
from autotune.tpu.generations import Generation


class Executor(Protocol):
    """jobs: how many compile at once, unless the user says otherwise."""

    jobs: int
    start_pool: StartPool

    def tpu(self) -> Generation:
        """The generation of the TPU that is there to be timed on; MachineError or UsageError without one."""

    def devices(self, generation: Generation, measured: bool, limits: Limits) -> Devices:
        """What to time on; measured: False for the interpreter in the TPU's place."""


class Local:
    """This machine."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.start_pool: StartPool = CompilePool
        self._found: Attached | None = None

    def tpu(self) -> Generation:
        self._found = attached()
        return self._found.generation

    def devices(self, generation: Generation, measured: bool, limits: Limits) -> Devices:
        return of_this_host(self._found if measured else None, limits)


class OnRay:
    """The Ray cluster that this process has joined. generation: of those it offers, the one to time on."""

    def __init__(self, jobs: int, say: Callable[[str], None], generation: str | None) -> None:
        self.jobs = jobs
        self.start_pool: StartPool = functools.partial(RayPool, say=say)
        self._generation = generation

    def tpu(self) -> Generation:
        return ray_devices.generation_of(ray_devices.offered(), self._generation)

    def devices(self, generation: Generation, measured: bool, limits: Limits) -> Devices:
        return ray_devices.of_cluster(generation, measured, limits)


@contextlib.contextmanager
def on_ray(address: str, say: Callable[[str], None], generation: str | None) -> Iterator[Executor]:
    """Join a cluster, and leave it again; say: told of nodes that are refused.

    Raises:
      MachineError, UsageError: as cluster.connected; or the cluster has no CPUs.
    """
    with ray_cluster.connected(address) as joined:
        cpus = ray_cluster.cpus()
        if not cpus:
            raise MachineError(f"the Ray cluster at {joined} has no CPUs: add a node that has")
        yield OnRay(cpus, say, generation)
