"""The options that say where a sweep's processes run: on this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from autotune.commands.options import cores
from autotune.errors import UsageError

if TYPE_CHECKING:
    from autotune.pool import StartPool

_executor = click.option(
    "--executor",
    type=click.Choice(("local", "ray")),
    default="local",
    show_default=True,
    help="Where to compile: on this machine, or on the nodes of a Ray cluster, which needs the extra "
    "tpu-autotune[ray].",
)
_ray_address = click.option(
    "--ray-address",
    metavar="auto|local|HOST:PORT",
    help="Which Ray cluster: the one that this machine is a node of, one that is started here and ends with "
    "the sweep, or that of a head. [default: auto]",
)


class Executor(NamedTuple):
    """start_pool: makes what compiles. jobs: how many compile at once, unless the user says otherwise."""

    start_pool: StartPool
    jobs: int


class ExecutorOptions(NamedTuple):
    """What was typed of --executor and --ray-address."""

    executor: str
    ray_address: str | None

    @property
    def ray(self) -> bool:
        return self.executor == "ray"

    def check(self) -> None:
        """Raises UsageError or MachineError for what can be told before anything heavy is imported."""
        if self.ray:
            from autotune import cluster

            cluster.require_ray()
        elif self.ray_address is not None:
            raise UsageError(f"--ray-address {self.ray_address} goes with --executor ray")

    @contextlib.contextmanager
    def opened(self) -> Iterator[Executor]:
        """The executor, left again at the end; the errors of cluster.connected."""
        if not self.ray:
            from autotune.workers import CompilePool

            yield Executor(CompilePool, cores())
            return
        from autotune import cluster
        from autotune.errors import MachineError
        from autotune.ray_pool import RayPool

        with cluster.connected(self.ray_address or "auto") as address:
            cpus = cluster.cpus()
            if not cpus:
                raise MachineError(f"the Ray cluster at {address} has no CPUs: add a node that has")
            yield Executor(functools.partial(RayPool, say=_say), cpus)


def executor_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, which gets them as one argument, `executor`: an ExecutorOptions."""

    @functools.wraps(command)
    def call(**values: Any) -> Any:
        chosen = ExecutorOptions(values.pop("executor"), values.pop("ray_address"))
        return command(executor=chosen, **values)

    return _executor(_ray_address(call))


def _say(text: str) -> None:
    from autotune.terminal import printable, say

    say(printable(text))  # nodes have a say in it
