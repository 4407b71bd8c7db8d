"""The options that say where a sweep's processes run: on this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from autotune.cli.options import TARGET, cores
from autotune.errors import UsageError

if TYPE_CHECKING:
    from autotune.executors.places import Executor

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
_ray_tpu = click.option(
    "--ray-tpu",
    type=TARGET,
    help="Without --target, on a Ray cluster with several TPU generations: the one to time on.",
)


class ExecutorOptions(NamedTuple):
    """What was typed of --executor, --ray-address and --ray-tpu."""

    executor: str
    ray_address: str | None
    ray_tpu: str | None

    @property
    def ray(self) -> bool:
        return self.executor == "ray"

    def check(self) -> None:
        """Raises UsageError or MachineError for what can be told before anything heavy is imported."""
        if self.ray:
            from autotune.executors import ray_cluster

            ray_cluster.require_ray()
            # The threads of numpy must not get a signal while Ray starts: see there.
            with ray_cluster.signals_held():
                import numpy  # noqa: F401
        for name, value in (("--ray-address", self.ray_address), ("--ray-tpu", self.ray_tpu)):
            if value is not None and not self.ray:
                raise UsageError(f"{name} {value} goes with --executor ray")

    def opened(self) -> contextlib.AbstractContextManager[Executor]:
        """The executor, left again at the end; the errors of executors.on_ray."""
        from autotune.executors import places

        if not self.ray:
            return contextlib.nullcontext(places.Local(cores()))
        return places.on_ray(self.ray_address or "auto", _say, self.ray_tpu)


def executor_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, which gets them as one argument, `executor`: an ExecutorOptions."""

    @functools.wraps(command)
    def call(**values: Any) -> Any:
        chosen = ExecutorOptions(*(values.pop(name) for name in ExecutorOptions._fields))
        return command(executor=chosen, **values)

    return _executor(_ray_address(_ray_tpu(call)))


def _say(text: str) -> None:
    from autotune.io.terminal import printable, say

    say(printable(text))  # nodes have a say in it
