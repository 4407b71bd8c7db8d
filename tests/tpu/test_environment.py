"""What a process that owns one chip is started with, on each kind of host, and what libtpu makes of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from autotune.doctor.checks import has_libtpu_wheels
from autotune.tpu import attached, environment, generations
from tests.tpu.test_attached import Host

# What a process has on any of these hosts, and keeps.
USER = {"HOME": "/root", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "PYTHONSAFEPATH": "1"}
# What every process is started with that owns a chip of a TPU, but for the two ports and the chip.
OWNER = {
    **USER,
    "CLOUD_TPU_TASK_ID": "0",
    "JAX_PLATFORMS": "tpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
    "TPU_MIN_LOG_LEVEL": "1",
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "TPU_STDERR_LOG_LEVEL": "1",
}
# Of GKE, on a host of a slice of two hosts with four chips each.
SLICE = {
    "TPU_ACCELERATOR_TYPE": "v5p-16",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
    "TPU_HOST_BOUNDS": "1,1,2",
    "TPU_NAME": "pool-0",
    "TPU_RUNTIME_METRICS_PORTS": "8431,8432,8433,8434",
    "TPU_SKIP_MDS_QUERY": "true",
    "TPU_TOPOLOGY": "2x2x2",
    "TPU_TOPOLOGY_ALT": "false",
    "TPU_TOPOLOGY_WRAP": "false,false,false",
    "TPU_WORKER_HOSTNAMES": "h0,h1",
    "TPU_WORKER_ID": "1",
}
TWO_SLICES = {
    "MEGASCALE_COORDINATOR_ADDRESS": "h0:8080",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
}
LINUX = pytest.mark.skipif(not has_libtpu_wheels(), reason="libtpu is for Linux x86_64")


class Machine(NamedTuple):
    """A kind of host: PCI functions (address, device, node) that sysfs lists, nodes that are given to this
    process, its variables; the chips to be found, and what JAX says of one, and the variables that stay."""

    functions: Sequence[tuple[str, str, str]]
    given: Sequence[str]
    variables: dict[str, str]
    found: attached.Attached
    kept: dict[str, str]


def row(device: str, nodes: Sequence[str]) -> list[tuple[str, str, str]]:
    return [(f"0000:00:{slot + 4:02x}.0", device, node) for slot, node in enumerate(nodes)]


def found(
    generation: generations.Generation, num_chips: int, usable: Sequence[int], devices: int = 1
) -> attached.Attached:
    return attached.Attached(
        generation=generation,
        device_kind=generation.device_kinds[0],
        num_chips=num_chips,
        usable=tuple(usable),
        devices_per_chip=devices,
    )


VFIO4 = [f"vfio/{number}" for number in range(4)]
VFIO8 = [f"vfio/{number}" for number in range(8)]
ACCEL4 = [f"accel{number}" for number in range(4)]
ONE_OF_V6E = {"TPU_ACCELERATOR_TYPE": "v6e-4", "TPU_SKIP_MDS_QUERY": "true"}
OF_SLICE = {"TPU_ACCELERATOR_TYPE": "v5p-16", "TPU_SKIP_MDS_QUERY": "true"}
MACHINES = {
    # sysfs as ray-project/ray #65105 lists it; such a pod's environment was not seen.
    "GKE pod with one of a v6e's four chips": Machine(
        row("0x006f", VFIO4),
        ["vfio/2"],
        {**SLICE, "TPU_ACCELERATOR_TYPE": "v6e-4", "TPU_HOST_BOUNDS": "1,1,1", "TPU_WORKER_ID": "0"},
        found(generations.V6E, 1, [0]),
        ONE_OF_V6E,
    ),
    "the same, whose chip was numbered by whoever gave it": Machine(
        row("0x006f", VFIO4),
        ["vfio/2"],
        {**ONE_OF_V6E, "TPU_VISIBLE_CHIPS": "2"},
        found(generations.V6E, 1, [2]),
        ONE_OF_V6E,
    ),
    "v5p host of a slice": Machine(
        row("0x0062", VFIO4), VFIO4, {**SLICE, **TWO_SLICES}, found(generations.V5P, 4, range(4)), OF_SLICE
    ),
    "v5p host of a slice on which the user leaves two chips to others": Machine(
        row("0x0062", VFIO4),
        VFIO4,
        {**SLICE, "TPU_VISIBLE_CHIPS": "1,3", "TPU_PROCESS_ADDRESSES": "h0:8476,h1:8476"},
        found(generations.V5P, 4, [1, 3]),
        OF_SLICE,
    ),
    "v4": Machine(row("0x005e", ACCEL4), ACCEL4, {}, found(generations.V4, 4, range(4)), {}),
    "v4 in a container that hides PCI": Machine(
        [], ["accel0", "accel1"], {}, found(generations.V4, 2, range(2)), {}
    ),
    "v5e with eight chips": Machine(
        row("0x0063", VFIO8),
        VFIO8,
        {
            "LIBTPU_INIT_ARGS": "--xla_x",
            "XLA_FLAGS": "--xla_y",
            "JAX_ENABLE_X64": "1",
            "TPU_LOAD_LIBRARY": "0",
        },
        found(generations.V5E, 8, range(8)),
        {},
    ),
    "a host with one chip, of a v5e": Machine(
        row("0x0063", ["vfio/0"]), ["vfio/0"], {"TPU_WORKER_ID": "0"}, found(generations.V5E, 1, [0]), {}
    ),
    "v7x": Machine(
        [(f"0000:00:{n // 2 + 4:02x}.{n % 2}", "0x0076", f"vfio/{n}") for n in range(8)],
        VFIO8,
        {},
        found(generations.V7X, 4, range(4), devices=2),
        {},
    ),
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_the_whole_environment_of_every_process(tmp_path: Path, machine: Machine) -> None:
    host = Host(tmp_path)
    for address, device, node in machine.functions:
        host.pci(address, "0x1ae0", device, node)
    host.give(*machine.given)
    kinds = [machine.found.device_kind] * machine.found.devices_per_chip
    seen = tmp_path / "environment"
    code = (
        f"import json, os, pathlib; pathlib.Path({str(seen)!r}).write_text(json.dumps(dict(os.environ))); "
        f"print(json.dumps({{'kinds': {kinds!r}}}))"
    )
    variables = {**USER, **machine.variables}
    assert host.ask(sys.executable, "-c", code, environment=variables) == machine.found

    detection = json.loads(seen.read_text())
    ports = [int(detection["TPU_PROCESS_PORT"])] + [8476 + chip for chip in machine.found.usable]
    owners = [environment.environment("tpu", chip, 8476 + chip, variables) for chip in machine.found.usable]
    for started, port, chip in zip(
        [detection, *owners], ports, [machine.found.usable[0], *machine.found.usable], strict=True
    ):
        assert started == {
            **OWNER,
            **machine.kept,
            "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
            "TPU_PROCESS_PORT": str(port),
            "TPU_VISIBLE_CHIPS": str(chip),
        }


def test_the_cpu_in_a_chips_place_has_nothing_of_the_tpu() -> None:
    variables = {**USER, **SLICE, "XLA_FLAGS": "--xla_y", "JAX_COMPILATION_CACHE_DIR": "/tmp/c"}
    assert environment.environment("cpu", 0, 8476, variables) == {
        **USER,
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TPU_ACCELERATOR_TYPE": "v5p-16",
        "TPU_MIN_LOG_LEVEL": "1",
        "TPU_SKIP_MDS_QUERY": "true",
        "TPU_STDERR_LOG_LEVEL": "1",
    }


def flags(variables: dict[str, str]) -> dict[str, str]:
    """The flags that libtpu makes of an environment, as it logs them; it then finds no TPU."""
    done = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        # JAX loads libtpu on hosts with a TPU alone, unless forced.
        env={**variables, "JAX_FORCE_TPU_INIT": "1", "TPU_MIN_LOG_LEVEL": "0", "TPU_STDERR_LOG_LEVEL": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return dict(re.findall(r"argv\[\d+\]: '--(\w+)=([^']*)'", done.stderr))


@LINUX
@pytest.mark.skipif(attached.pci_chips() > 0, reason="would take the TPU, or wait for other hosts")
def test_libtpu_takes_the_environment_for_a_slice_of_one_chip() -> None:
    variables = {**USER, **SLICE, **TWO_SLICES}
    theirs = flags({**variables, "JAX_PLATFORMS": "tpu"})
    assert theirs["deepsea_slice_builder_worker_addresses"] == "h0:8471,h1:8471"
    assert theirs["megascale_coordinator_address"] == "h0:8080"
    ours = flags(environment.environment("tpu", 1, 9123, variables))
    assert ours["deepsea_slice_builder_worker_addresses"] == "localhost:9123"
    assert ours["deepsea_slice_builder_worker_port"] == "9123"
    assert ours["deepsea_host_bounds"] == ours["deepsea_chips_per_host_bounds"] == "1,1,1"
    assert not any(name.startswith("megascale") for name in ours)
    # Two cores of a v5p are one device, as on the whole host; libtpu knows it from the accelerator type.
    assert ours["deepsea_chip_config_name"] == theirs["deepsea_chip_config_name"]


def test_ports_are_free() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("", environment.free_port()))
        assert environment.free_port() != taken.getsockname()[1]


def test_what_changes_programs_and_is_dropped_is_told() -> None:
    assert environment.told(USER) == environment.told(SLICE) == ""
    environ = {
        "JAX_COMPILATION_CACHE_DIR": "/tmp/c",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "JAX_PLATFORMS": "tpu",
        "LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=65536",
        "XLA_FLAGS": "",
    }
    names = ("JAX_DEFAULT_MATMUL_PRECISION", "LIBTPU_INIT_ARGS")
    assert environment.dropped(environ) == names
    said = f"not passed on to the processes that compile and time: {', '.join(names)}"
    assert environment.told(environ) == said
    # JAX sets a flag of its own in a process that imports it on a TPU host.
    assert environment.told({"LIBTPU_INIT_ARGS": " --xla_tpu_use_enhanced_launch_barrier=true"}) == ""


def test_what_a_process_is_given_is_what_is_listed_and_no_more() -> None:
    """Names of today's JAX and of none: nobody need know them for them to be left out."""
    environ = {
        **USER,
        "LC_ALL": "C",
        "LD_PRELOAD": "/usr/lib/libtcmalloc.so",
        "TPU_LIBRARY_PATH": "mine/libtpu.so",
        "ABSL_FLAGS": "--x",
        "JAX_OPTIMIZATION_LEVEL": "O0",
        "LIBTPU_NEW": "1",
        "NVIDIA_TF32_OVERRIDE": "1",
        "PYTHONOPTIMIZE": "2",
        "PYTHONWARNINGS": "error",
        "XLA_FLAGS_OF_TOMORROW": "1",
        "http_proxy": "http://x",
    }
    assert environment.passed_on(environ) == {
        **USER,
        "LC_ALL": "C",
        "LD_PRELOAD": "/usr/lib/libtcmalloc.so",
        "TPU_LIBRARY_PATH": str(Path("mine/libtpu.so").absolute()),
    }
    names = ("JAX_OPTIMIZATION_LEVEL", "LIBTPU_NEW", "PYTHONOPTIMIZE", "XLA_FLAGS_OF_TOMORROW")
    assert environment.dropped(environ) == names


def test_pythons_own_modules_come_before_those_of_a_folder_that_comes_first(tmp_path: Path) -> None:
    """Ray puts the folder that a command was typed in first."""
    for name in ("pickle", "socket", "mine"):
        (tmp_path / f"{name}.py").write_text("")
    code = "import mine, pickle, socket; print([m.__file__ for m in (mine, pickle, socket)])"
    done = subprocess.run(
        environment.python(code, path=["", *sys.path]),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No module named 'mine'" in done.stderr, "the empty place is the parent's folder, not the child's"
    done = subprocess.run(
        environment.python(code, path=[str(tmp_path), *sys.path]), capture_output=True, text=True, check=True
    )
    assert done.stdout.count(str(tmp_path)) == 1


def test_everything_that_is_told_is_dropped() -> None:
    environ = {
        **os.environ,
        "JAX_ENABLE_X64": "1",
        "LIBTPU_INIT_ARGS": "--x",
        "XLA_FLAGS": "--y",
        "TPU_MEGACORE": "0",
    }
    names = environment.dropped(environ)
    assert {"JAX_ENABLE_X64", "LIBTPU_INIT_ARGS", "TPU_MEGACORE", "XLA_FLAGS"} <= set(names)
    assert not set(names) & set(environment.passed_on(environ))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("", ""),
        ("one\n\n two \n", "two"),
        ("RuntimeError: no TPU\nI1201 01:42:28.478786    4585 init.cc:78] bye", "RuntimeError: no TPU"),
        ("E1201 01:42:51.522315    5066 devices.cc:69] path not found\n  @ 0x7f00 main", "path not found"),
        ("jax.errors.JaxRuntimeError: first\n\nRuntimeError: last", "RuntimeError: last"),
    ],
)  # fmt: skip
def test_the_line_that_tells_most(said: str, told: str) -> None:
    assert environment.last_words(said) == told
