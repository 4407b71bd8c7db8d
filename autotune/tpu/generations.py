"""TPU generations: every name they go by, how to compile for them, and what one TensorCore has."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from autotune.errors import UsageError

MIB = 1 << 20

# The words with which JAX's look-up refuses; users search for them.
TOO_OLD = "TPU version must be 4 or higher."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """One TPU generation, as the compiler, JAX and JAX's table name it.

    topology_name, chip_config_name: libtpu's names of a topology of one chip, as a process has it that owns
    one, and of the chip's configuration, None for the default one; MaxText's map of topologies has the same
    configurations. In "megacore" the two cores of a chip are one device, as JAX lists them on hosts with v4
    and v5p (jax issue 19493: four devices on a v5p-8). On v7x each core is a device.
    device_kinds: the spellings that JAX's chip_version_from_device_kind knows, plus that of the compile
    target's device where it differs.
    published_name: the first two words of the device_kind, under which JAX's table of jax 0.10 keeps it.
    clock_hz: cycles a second of a TensorCore, from the published peak and the compiler's own cycle count of
    a 4096^3 bfloat16 matmul; v7x's 2.2 GHz is not confirmed by that check.
    scoped_vmem_bytes: the compiler's limit for one kernel when vmem_limit_bytes is not given, as its own
    overflow message states it (libtpu 0.0.42).
    """

    name: str
    version: int
    device_kinds: tuple[str, ...]
    topology_name: str
    chip_config_name: str | None = None
    chip_version: str
    published_name: str
    clock_hz: float
    scoped_vmem_bytes: int

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """What one TensorCore has, from JAX's get_tpu_info_for_chip: bytes, and bytes a second."""

    vmem_bytes: int
    smem_bytes: int
    hbm_bytes_per_second: float


V4 = Generation(
    name="v4",
    version=4,
    device_kinds=("TPU v4",),
    topology_name="v4:1x1x1",
    chip_config_name="megacore",
    chip_version="TPU_V4",
    published_name="TPU v4",
    clock_hz=1.05e9,
    scoped_vmem_bytes=16 * MIB,
)
V5E = Generation(
    name="v5e",
    version=5,
    device_kinds=("TPU v5 lite", "TPU v5e"),
    topology_name="v5e:1x1",
    chip_version="TPU_V5E",
    published_name="TPU v5",
    clock_hz=1.50e9,
    scoped_vmem_bytes=16 * MIB,
)
V5P = Generation(
    name="v5p",
    version=5,
    device_kinds=("TPU v5", "TPU v5p"),
    topology_name="v5p:1x1x1",
    chip_config_name="megacore",
    chip_version="TPU_V5P",
    published_name="TPU v5",
    clock_hz=1.75e9,
    scoped_vmem_bytes=16 * MIB,
)
V6E = Generation(
    name="v6e",
    version=6,
    device_kinds=("TPU v6 lite", "TPU v6e"),
    topology_name="v6e:1x1",
    chip_version="TPU_V6E",
    published_name="TPU v6",
    clock_hz=1.75e9,
    scoped_vmem_bytes=32 * MIB,
)
V7X = Generation(
    name="v7x",
    version=7,
    device_kinds=("TPU7x",),
    topology_name="tpu7x:1x1x1",
    chip_version="TPU_7X",
    published_name="TPU7x",
    clock_hz=2.2e9,
    scoped_vmem_bytes=32 * MIB,
)

GENERATIONS: dict[str, Generation] = {g.name: g for g in (V4, V5E, V5P, V6E, V7X)}


def by_name(name: str) -> Generation:
    """The generation of this name.

    Raises:
      UsageError: no generation has it; the message lists those that have one.
    """
    if name not in GENERATIONS:
        raise UsageError(f"target {name!r} is unknown: use {', '.join(GENERATIONS)}")
    return GENERATIONS[name]


def by_device_kind(device_kind: str) -> Generation:
    """The generation of a device_kind as `jax.devices()[0].device_kind` spells it.

    Raises:
      UsageError: the kernel does not run there (before v4), or the spelling is unknown.
    """
    for generation in GENERATIONS.values():
        if device_kind in generation.device_kinds:
            return generation
    if device_kind in ("TPU v2", "TPU v3"):
        raise UsageError(f"device_kind {device_kind!r}: {TOO_OLD} The kernel needs a v4 or newer")
    known = ", ".join(kind for g in GENERATIONS.values() for kind in g.device_kinds)
    raise UsageError(f"device_kind {device_kind!r} is unknown: known are {known}")


@functools.cache
def hardware(generation: Generation) -> Hardware:
    """What one TensorCore of a generation has, from JAX's own get_tpu_info_for_chip."""
    info = tpu_info(generation)
    return Hardware(
        vmem_bytes=info.vmem_capacity_bytes,
        smem_bytes=info.smem_capacity_bytes,
        hbm_bytes_per_second=float(info.mem_bw_bytes_per_second),
    )


def tpu_info(generation: Generation) -> Any:
    """JAX's own TpuInfo of a generation, one TensorCore a device."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.get_tpu_info_for_chip(pltpu.ChipVersion[generation.chip_version], 1)


def vmem_limit(generation: Generation, vmem_limit_bytes: int | None) -> int:
    """Bytes of VMEM that one kernel may take: the limit asked for, within what the core has."""
    if vmem_limit_bytes is None:
        return generation.scoped_vmem_bytes
    return min(vmem_limit_bytes, hardware(generation).vmem_bytes)


def beyond_vmem(generation: Generation, vmem_limit_bytes: int | None) -> str:
    """What to say of a limit of which a core has not that much; '' where it has.

    Stacks pass such a limit, the same to every generation, and the core's own VMEM is what counts.

    Raises:
      UsageError: no generation has as much.
    """
    most = max(hardware(any_of_them).vmem_bytes for any_of_them in GENERATIONS.values())
    has = hardware(generation).vmem_bytes
    if vmem_limit_bytes is None or vmem_limit_bytes <= has:
        return ""
    limit = f"{vmem_limit_bytes / MIB:.10g} MiB"
    if vmem_limit_bytes > most:
        raise UsageError(
            f"--vmem-limit of {limit} is more VMEM than any TPU has: {generation} has {has // MIB} MiB"
        )
    return f"{generation} has {has // MIB} MiB of VMEM, so --vmem-limit of {limit} is as {has // MIB} MiB"
