from __future__ import annotations

import pytest
from jax.experimental.pallas import tpu as pltpu

from autotune.errors import UsageError
from autotune.tpu import generations
from autotune.tpu.compiler import target_device


def test_every_spelling_that_jax_knows_of_a_generation_is_known() -> None:
    from jax._src.pallas.mosaic.tpu_info import chip_version_from_device_kind

    for generation in generations.GENERATIONS.values():
        for kind in generation.device_kinds:
            assert chip_version_from_device_kind(kind) == pltpu.ChipVersion[generation.chip_version]
            assert generations.by_device_kind(kind) is generation


# Devices of a chip, and cores of each, as JAX lists them in a process that owns one.
@pytest.mark.parametrize(
    ("generation", "devices", "cores"),
    [
        (generations.V4, 1, 2),
        (generations.V5E, 1, 1),
        (generations.V5P, 1, 2),
        (generations.V6E, 1, 1),
        (generations.V7X, 2, 1),
    ],
    ids=str,
)
def test_programs_are_compiled_for_one_chip(
    generation: generations.Generation, devices: int, cores: int
) -> None:
    for index in range(devices):
        device = target_device(generation, index)
        assert device.device_kind == generation.device_kinds[0]
        assert device.client.device_count() == devices and device.num_cores == cores
        assert (device.id, device.core_on_chip, list(device.coords)) == (index, index, [0, 0, 0])
    with pytest.raises(IndexError):
        target_device(generation, devices)


def test_hardware_is_jaxs_own() -> None:
    for generation in generations.GENERATIONS.values():
        info = generations.tpu_info(generation)
        assert info.generation == generation.version
        assert generations.hardware(generation).vmem_bytes == info.vmem_capacity_bytes
        assert generation.scoped_vmem_bytes <= info.vmem_capacity_bytes


@pytest.mark.parametrize("kind", ["TPU v2", "TPU v3"])
def test_a_tpu_before_v4_is_refused_in_jaxs_words(kind: str) -> None:
    with pytest.raises(UsageError, match=r"TPU version must be 4 or higher\."):
        generations.by_device_kind(kind)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'v8' is unknown: use v4, v5e, v5p, v6e, v7x"):
        generations.by_name("v8")
    with pytest.raises(UsageError, match="known are TPU v4"):
        generations.by_device_kind("cpu")
