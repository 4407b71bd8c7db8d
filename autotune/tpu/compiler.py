"""Compile a program ahead of time for a generation, with libtpu's own compiler and no TPU.

The environment of a compiling process is set before it starts (`environment`), and one process compiles for
every generation in turn. A fault in the compiler may abort the process: run this in one that may die.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import time
from pathlib import Path
from typing import Any

from autotune.errors import first_line
from autotune.kernel.jax_rpa.call import abstract_arguments, compile_problem, compile_total_pages, kernel_call
from autotune.kernel.problem import LOOP_DEPTHS, Program
from autotune.tpu import environment as chip_process
from autotune.tpu.generations import Generation
from autotune.tpu.schedule import ListingError, ListingLost, Schedule, dump_flags, read_schedule

KERNEL_NAME = "ragged_paged_attention_kernel"

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Three ways in which the compiler says that something does not fit, each with the bytes it needs and has.
_OVERFLOWS = (
    ("vmem_oom", re.compile(r"Scoped allocation with size ([\d.]+)([BKMG]?) and limit ([\d.]+)([BKMG]?)")),
    ("vmem_oom", re.compile(r"memory space vmem\. Used ([\d.]+)([BKMG]?) of ([\d.]+)([BKMG]?) vmem")),
    ("smem_oom", re.compile(r"Allocation \(size=(\d+)()\) would exceed memory \(size=(\d+)()\).*=smem")),
    ("smem_oom", re.compile(r"memory space smem\. Used ([\d.]+)([BKMG]?) of ([\d.]+)([BKMG]?) smem")),
)  # fmt: skip
MAX_SAID_CHARS = 20_000

# The compiler's last word on a program; whatever else comes of a compile may come out otherwise next time.
LASTING = frozenset({"ok", "vmem_oom", "smem_oom", "invalid"})


class MachineFault(Exception):
    """Something of this machine failed, and says nothing about the program; the message says what."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """The compiler's verdict on one program.

    status: ok, vmem_oom, smem_oom, compile_error, invalid, timeout or crashed.
    schedule: of an ok program.
    needed_bytes, limit_bytes: of an overflow, as the compiler states them.
    error: the first line of what it said, for everything that is not ok.
    said: all that it said, at most MAX_SAID_CHARS of it; for the screen, and kept nowhere.
    seconds: wall time of tracing, lowering and compiling; None where nothing was compiled.
    """

    status: str
    schedule: Schedule | None = None
    needed_bytes: int | None = None
    limit_bytes: int | None = None
    error: str | None = None
    seconds: float | None = None
    said: str | None = dataclasses.field(default=None, compare=False, repr=False)


def environment(dump_folder: Path) -> dict[str, str]:
    """Variables that a compiling process needs, beside `chip_process.passed_on`, before it imports jax.

    dump_folder: "." for the folder that the process is started in, or a path without white space: libtpu
    splits its arguments there.
    """
    return {
        "JAX_PLATFORMS": "cpu",  # the host stays a CPU host; the TPU is only a compile target
        "TPU_SKIP_MDS_QUERY": "1",  # do not ask a cloud metadata server who we are
        "TPU_WORKER_HOSTNAMES": "localhost",  # else libtpu warns at length that it is not set
        "TPU_ACCELERATOR_TYPE": "v6e-4",  # the same; the topology named below decides what is compiled for
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process aborts on libtpu's lockfile
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "LIBTPU_INIT_ARGS": dump_flags(dump_folder),
    }


def take_environment(dump_folder: Path) -> None:
    """Make this process's environment that of a compiling one; before it imports jax."""
    variables = {**chip_process.passed_on(os.environ), **environment(dump_folder)}
    os.environ.clear()
    os.environ.update(variables)


@functools.cache
def target_device(generation: Generation, index: int = 0) -> Any:
    """A device of a generation's chip that is not attached: of the topology of a process that owns one chip.

    index: of the device among the chip's; 1 only on v7x. Programs of both have the same code, and each names
    the one that it is for.

    Raises:
      RuntimeError or ValueError, from jax: there is no libtpu, or it does not know the topology.
      IndexError: the chip has fewer devices.
    """
    from jax.experimental import topologies

    options: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)}  # libtpu's default is 2x2x1
    if generation.chip_config_name:
        options["chip_config_name"] = generation.chip_config_name
    topology = topologies.get_topology_desc(platform="tpu", topology_name=generation.topology_name, **options)
    return topology.devices[index]


def lower(generation: Generation, program: Program) -> Any:
    """The program, traced and lowered for a generation at its compile shape."""
    import jax
    from jax.sharding import SingleDeviceSharding

    device = target_device(generation)
    problem = compile_problem(program.layout, program.blocks)
    arguments = abstract_arguments(problem, compile_total_pages(program.layout), SingleDeviceSharding(device))
    # Without the default device, tracing asks the CPU which TPU it is and fails.
    with jax.default_device(device):
        return jax.jit(kernel_call(program.blocks, program.settings)).trace(*arguments).lower()


def prepared_device(generation: Generation, index: int = 0) -> Any:
    """`target_device`; raises MachineFault where jax or libtpu is not as it should be."""
    try:
        return target_device(generation, index)
    except Exception as error:
        raise MachineFault(f"libtpu cannot compile for {generation.name}: {first_line(error)}") from error


def compile_program(generation: Generation, program: Program, dump_folder: Path) -> Compiled:
    """The compiler's verdict on a program; its listings are read from the dump folder, then removed.

    Raises:
      MachineFault: jax or libtpu does not start, or a listing is lost.
      OSError: the listings cannot be written or read.
    """
    clear(dump_folder)
    start = time.perf_counter()
    prepared_device(generation)
    try:
        lowered = lower(generation, program)
    except (ValueError, AssertionError) as error:  # how the kernel refuses static arguments
        return Compiled(status="invalid", error=first_line(error), seconds=time.perf_counter() - start)
    except Exception as error:
        return failed(error, time.perf_counter() - start)
    try:
        lowered.compile()
        seconds = time.perf_counter() - start
        return judged(read_schedule(dump_folder, KERNEL_NAME), seconds)
    except ListingLost as error:
        raise MachineFault(f"{first_line(error)}: was it removed, or is the disk full?") from error
    except ListingError as error:
        return Compiled(status="compile_error", error=first_line(error), seconds=time.perf_counter() - start)
    except Exception as error:  # XlaRuntimeError, MosaicError: jax has no public class over all of them
        return failed(error, time.perf_counter() - start)
    finally:
        clear(dump_folder)


def judged(schedule: Schedule, seconds: float) -> Compiled:
    """The verdict that a schedule amounts to: one that the cost model does not know has no latency."""
    if (depths := len(schedule.cycles)) != LOOP_DEPTHS:
        said = f"the schedule has {depths} loop depths, not {LOOP_DEPTHS}: the cost model does not know it"
        return Compiled(status="compile_error", error=said, seconds=seconds)
    return Compiled(status="ok", schedule=schedule, seconds=seconds)


def failed(error: Exception, seconds: float) -> Compiled:
    """The verdict that an exception of the compiler amounts to; raises it again if it is the machine's."""
    if isinstance(error, OSError | ImportError):
        raise error
    message = str(error)
    if isinstance(error, MemoryError) or "bad_alloc" in message:
        # The machine's memory, which is no fault of the program: it may well go better another time.
        said = f"the compiling process ran out of memory: {first_line(error)}"
        return Compiled(status="crashed", error=said, seconds=seconds)
    for status, pattern in _OVERFLOWS:
        if match := pattern.search(message):
            needed, needed_unit, limit, limit_unit = match.groups()
            return Compiled(
                status=status,
                needed_bytes=round(float(needed) * _UNITS[needed_unit]),
                limit_bytes=round(float(limit) * _UNITS[limit_unit]),
                error=first_line(error),
                seconds=seconds,
                said=message[:MAX_SAID_CHARS],
            )
    said = message[:MAX_SAID_CHARS]
    return Compiled(status="compile_error", error=first_line(error), seconds=seconds, said=said)


def clear(folder: Path) -> None:
    """Remove the listings that a compile left in its folder."""
    for path in folder.iterdir():
        path.unlink()
