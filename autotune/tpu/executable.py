"""Programs to run, compiled at the very shape of a problem: ahead of time by any process, loaded by another.

What `compiler` compiles says what a program costs; what this compiles is timed. Executables are pickles,
which can run any code when they are loaded: only those that this run's own workers made are.
"""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Callable
from typing import Any

from autotune.kernel.interpret import lower_interpreted
from autotune.kernel.problem import BlockSizes, Problem, Settings
from autotune.kernel.rpa import abstract_arguments, kernel_call, named, program_name
from autotune.tpu import chips
from autotune.tpu.compiler import Compiled, failed, first_line, target_device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One candidate at the shape at which it is run.

    total_num_pages: of the pool. target: name of the generation; None for the CPU, interpreted.
    """

    target: str | None
    problem: Problem
    total_num_pages: int
    blocks: BlockSizes
    settings: Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executable:
    """verdict: the compiler's; its schedule is None. payload: of an ok one, what `load` takes."""

    verdict: Compiled
    payload: bytes | None = None


def compile_ahead(call: Call) -> Executable:
    """Compile a candidate in a process that does not hold the device it is for.

    For a TPU, the process has the environment of `compiler.environment`.
    """
    start = time.perf_counter()
    try:
        import jax
        from jax.experimental import serialize_executable

        device = (
            target_device(chips.by_name(call.target).topology_name) if call.target else jax.devices("cpu")[0]
        )
        compiled = _lower(call, device).compile()
        payload = pickle.dumps(serialize_executable.serialize(compiled))
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


def load(payload: bytes, device: Any) -> Callable[..., Any]:
    """An executable of `compile_ahead`, ready to be called on a device of this process.

    Raises:
      Exception, from jax: it was made for another device, or by another version of the runtime.
    """
    from jax.experimental import serialize_executable

    serialized, in_tree, out_tree = pickle.loads(payload)
    loaded: Callable[..., Any] = serialize_executable.deserialize_and_load(
        serialized, in_tree, out_tree, backend=device.client, execution_devices=[device]
    )
    return loaded
