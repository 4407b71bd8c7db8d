"""The compiler's schedules of the same programs for a whole host and for one chip of it.

    python -m bench.topologies [--programs 10] [--seed 0] [--target v4]

autotune compiles for one chip, which is what the process that times has. Earlier rows were compiled for a
whole host, v4's without `megacore`, which makes a chip's two cores one device. This compiles programs of
published layouts for each, every generation's in a process of its own, and prints their cycles by loop depth
and the VMEM that they take. Three minutes on one core.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from autotune.kernel.jax_rpa.call import (
    abstract_arguments,
    compile_problem,
    compile_total_pages,
    kernel_call,
    published_table,
)
from autotune.kernel.problem import BlockSizes, Layout, Program, Settings
from autotune.search.space import expected_compile_seconds, scratch_overflow
from autotune.tpu import generations
from autotune.tpu.compiler import KERNEL_NAME, Compiled, clear, failed, take_environment
from autotune.tpu.generations import MIB
from autotune.tpu.schedule import read_schedule

_ONE = {"chips_per_host_bounds": (1, 1, 1)}
_MEGACORE = {"chip_config_name": "megacore"}
# By generation: the whole host, then one chip, then both as one device of two cores where libtpu has that.
TOPOLOGIES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "v5e": [("v5e:2x2", {}), ("v5e:1x1", _ONE)],
    "v6e": [("v6e:2x2", {}), ("v6e:1x1", _ONE)],
    "v7x": [("tpu7x:2x2x1", {}), ("tpu7x:1x1x1", _ONE)],
    **{
        name: [
            (f"{name}:2x2x1", {}),
            (f"{name}:1x1x1", _ONE),
            (f"{name}:2x2x1", _MEGACORE),
            (f"{name}:1x1x1", _ONE | _MEGACORE),
        ]
        for name in ("v4", "v5p")
    },
}
PAGES, QUERIES = (1, 2, 4, 8), (32, 64)
MOST_SECONDS = 3.0  # expected of one compile
SAME, BUT_DEPTH_0 = "same", "but for depth 0"


def programs(generation: generations.Generation, number: int, seed: int) -> list[Program]:
    """A random sample of small programs of published layouts, which all fit and compile in seconds."""
    layouts = {
        Layout(
            q_dtype=k[0], kv_dtype=k[1], num_q_heads=k[2], num_kv_heads=k[3], head_dim=k[4], page_size=k[5]
        )
        for table in published_table().values()
        for k in table
    }
    found = [
        program
        for layout in sorted(layouts, key=str)
        for pages in PAGES
        for queries in QUERIES
        if _suits(
            generation,
            program := Program(
                layout=layout,
                blocks=BlockSizes(pages, queries),
                settings=Settings(vmem_limit_bytes=100 * MIB),
            ),
        )
    ]
    return random.Random(seed).sample(found, number)


def _suits(generation: generations.Generation, program: Program) -> bool:
    return expected_compile_seconds(program) <= MOST_SECONDS and not scratch_overflow(
        generation, program, named=False
    )


def compiled(device: Any, program: Program, dump: Path) -> Compiled:
    """The verdict on a program for a device of any topology; its seconds are not taken."""
    import jax
    from jax.sharding import SingleDeviceSharding

    problem = compile_problem(program.layout, program.blocks)
    arguments = abstract_arguments(problem, compile_total_pages(program.layout), SingleDeviceSharding(device))
    try:
        with jax.default_device(device):
            jax.jit(kernel_call(program.blocks, program.settings)).trace(*arguments).lower().compile()
        return Compiled(status="ok", schedule=read_schedule(dump, KERNEL_NAME))
    except jax.errors.JaxRuntimeError as error:
        return failed(error, 0.0)
    finally:
        clear(dump)


def cell(verdict: Compiled) -> str:
    """Cycles by loop depth and bytes of VMEM, or why there are none."""
    if not verdict.schedule:
        return f"{verdict.status}, needs {verdict.needed_bytes}"
    return f"{' '.join(map(str, verdict.schedule.cycles))}; {verdict.schedule.vmem_bytes:,}"


def verdict_on(verdicts: list[Compiled]) -> str:
    """How the verdicts on one program for several topologies compare."""
    if len({(v.status, v.schedule, v.needed_bytes) for v in verdicts}) == 1:
        return SAME
    rest = {(s.cycles[1:], s.vmem_bytes, s.smem_bytes) if (s := v.schedule) else v for v in verdicts}
    return BUT_DEPTH_0 if len(rest) == 1 else "differs"


def table(generation: generations.Generation, number: int, seed: int) -> None:
    """Print one generation's table."""
    from jax.experimental import topologies

    with tempfile.TemporaryDirectory() as folder:
        take_environment(Path(folder))
        devices = {
            f"{name} megacore" if "chip_config_name" in options else name: topologies.get_topology_desc(
                platform="tpu", topology_name=name, **options
            ).devices[0]
            for name, options in TOPOLOGIES[generation.name]
        }
        print(f"\n{generation}: cycles at loop depths 0 to 3; bytes of VMEM\n")
        print(f"| program | {' | '.join(devices)} | |\n|{' --- |' * (len(devices) + 2)}", flush=True)
        for program in programs(generation, number, seed):
            verdicts = [compiled(device, program, Path(folder)) for device in devices.values()]
            cells = [f"{program.layout} {tuple(program.blocks)}", *map(cell, verdicts), verdict_on(verdicts)]
            print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--programs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=list(generations.GENERATIONS), help="this generation only")
    arguments = parser.parse_args()
    if arguments.target:
        table(generations.by_name(arguments.target), arguments.programs, arguments.seed)
        return
    said = ""
    for name in generations.GENERATIONS:
        command = [sys.executable, "-m", "bench.topologies", "--target", name]
        command += ["--programs", str(arguments.programs), "--seed", str(arguments.seed)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(done.stdout, end="", flush=True)
        said += done.stdout
    total = arguments.programs * len(generations.GENERATIONS)
    same, but_depth_0 = said.count(f"| {SAME} |"), said.count(f"| {BUT_DEPTH_0} |")
    print(f"\n{same} of {total} programs are the same, {but_depth_0} more {BUT_DEPTH_0}")


if __name__ == "__main__":
    main()
