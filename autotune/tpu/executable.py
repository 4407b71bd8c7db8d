"""Programs to run, compiled at the very shape of a problem: ahead of time by any process, loaded by another.

What `compiler` compiles says what a program costs; what this compiles is timed. Executables are pickles,
which can run any code when they are loaded: only those that this run's own workers made are.
"""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from autotune.errors import first_line
from autotune.kernel.jax_rpa.call import abstract_arguments, kernel_call, named, program_name
from autotune.kernel.jax_rpa.interpret import lower_interpreted
from autotune.kernel.problem import BlockSizes, Problem, Settings
from autotune.tpu import generations
from autotune.tpu.compiler import Compiled, failed, prepared_device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One candidate at the shape at which it is run.

    total_num_pages: of the pool. target: name of the generation; None for the CPU, interpreted.
    device: index of the device among those of the process that will run it, which holds one chip; 1 on the
    second of v7x's two.
    """

    target: str | None
    problem: Problem
    total_num_pages: int
    blocks: BlockSizes
    settings: Settings
    device: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executable:
    """verdict: the compiler's; its schedule is None. payload: of an ok one, what `load` takes."""

    verdict: Compiled
    payload: bytes | None = None


def compile_ahead(call: Call) -> Executable:
    """Compile a candidate in a process that does not hold the device it is for.

    The process has the environment of `compiler.environment`. For the CPU any will do that has the device.

    Raises:
      MachineFault, OSError, ImportError: what they say is not about the program.
    """
    import jax
    from jax.experimental import serialize_executable

    start = time.perf_counter()
    if call.target:
        device = prepared_device(generations.by_name(call.target), call.device)
    else:
        device = jax.devices("cpu")[call.device]
    try:
        compiled = _lower(call, device).compile()
        payload = pickle.dumps((_place(device), serialize_executable.serialize(compiled)))
    except (ValueError, AssertionError) as error:  # how the kernel refuses static arguments
        verdict = Compiled(status="invalid", error=first_line(error), seconds=time.perf_counter() - start)
        return Executable(verdict=verdict)
    except Exception as error:
        return Executable(verdict=failed(error, time.perf_counter() - start))
    return Executable(verdict=Compiled(status="ok", seconds=time.perf_counter() - start), payload=payload)


def compile_here(call: Call, device: Any) -> Callable[..., Any]:
    """Compile a candidate for a device of this process; raises what jax raises."""
    compiled: Callable[..., Any] = _lower(call, device).compile()
    return compiled


def _lower(call: Call, device: Any) -> Any:
    import jax
    from jax.sharding import SingleDeviceSharding

    arguments = abstract_arguments(call.problem, call.total_num_pages, SingleDeviceSharding(device))
    name = program_name(call.blocks)
    if call.target is None:
        return lower_interpreted(name, call.blocks, call.settings, arguments)
    # Without the default device, tracing asks the CPU which TPU it is and fails.
    with jax.default_device(device):
        return jax.jit(named(kernel_call(call.blocks, call.settings), name)).trace(*arguments).lower()


class Place(NamedTuple):
    """A device and the topology that it is part of, as far as executables for it differ.

    kind: the generation's name, or "cpu". devices: of the topology.
    cores: of each device, its num_cores on a TPU. number: the device's id.
    """

    kind: str
    devices: int
    cores: int
    number: int

    def __str__(self) -> str:
        return f"{self.kind} (devices {self.devices}, cores of each {self.cores}), id {self.number}"


def _place(device: Any) -> Place:
    """Where a device is, attached or not."""
    if device.platform != "tpu":
        return Place(device.platform, 1, 1, device.id)  # a CPU's program is the same however it is split
    kind = generations.by_device_kind(device.device_kind).name
    return Place(kind, device.client.device_count(), device.num_cores, device.id)


def load(payload: bytes, device: Any) -> Callable[..., Any]:
    """An executable of `compile_ahead`, ready to be called on a device of this process.

    The places are compared here because libtpu does not: it takes one of another topology, which then fails
    when it runs, or ends the process.

    Raises:
      ValueError: it was made for another place.
      Exception, from jax: it was made by another version of the runtime.
    """
    from jax.experimental import serialize_executable

    made_for, (serialized, in_tree, out_tree) = pickle.loads(payload)
    if made_for != (here := _place(device)):
        raise ValueError(f"the executable is for {made_for}; this device is {here}")
    loaded: Callable[..., Any] = serialize_executable.deserialize_and_load(
        serialized, in_tree, out_tree, backend=device.client, execution_devices=[device]
    )
    return loaded
