"""Programs compiled for a TPU at a key's own shape, as a profile of them will name them."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from autotune.kernel.problem import NO_SETTINGS, BlockSizes, Problem
from autotune.tpu.compiler import KERNEL_NAME, environment
from autotune.tpu.executable import Call, Place, compile_ahead, load
from tests.conftest import ROOT
from tests.timing.xspace import xspace

PROBLEM = Problem(
    num_q_heads=4, num_kv_heads=1, head_dim=128, page_size=16, max_num_batched_tokens=64, pages_per_seq=8
)

_COMPILE = """
import sys
from pathlib import Path
from autotune.tpu import executable, generations
from autotune.tpu.compiler import target_device
from tests.tpu.test_executable import PLACES, call

print(executable.compile_here(call("v6e", 0), target_device(generations.V6E)).as_text())
for target, device in PLACES:
    made = executable.compile_ahead(call(target, device))
    assert made.verdict.status == "ok", made.verdict
    (Path(sys.argv[1]) / f"{target}-{device}").write_bytes(made.payload)
"""
# By generation and index of the device, where libtpu's topology of one chip has it.
PLACES = {
    ("v6e", 0): Place("v6e", 1, 1, 0),
    ("v4", 0): Place("v4", 1, 2, 0),
    ("v7x", 1): Place("v7x", 2, 1, 1),
}


def call(target: str | None, device: int) -> Call:
    return Call(
        target=target,
        problem=PROBLEM,
        total_num_pages=32,
        blocks=BlockSizes(4, 32),
        settings=NO_SETTINGS,
        device=device,
    )


def run(code: str, folder: Path, **variables: str) -> str:
    """What a process of its own prints, which may set up jax as it likes."""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, **variables, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The HLO text of a program compiled for v6e, and the folder of its executables for PLACES."""
    folder = tmp_path_factory.mktemp("executables")
    return run(_COMPILE, folder, **environment(tmp_path_factory.mktemp("dump"))), folder


def test_the_program_and_the_kernel_have_the_names_that_profiles_are_read_by(
    compiled: tuple[str, Path],
) -> None:
    """XLA's own name of the operation, put into a profile, is taken for the kernel; no other one is."""
    from autotune.timing.profile import runs

    text, _ = compiled
    assert text.startswith("HloModule jit_rpa_p4_q32,")
    entry = text[text.index("ENTRY ") :].splitlines()[1:]
    names = [line.strip().removeprefix("ROOT ") for line in entry if " = " in line]
    events = [(name, 10.0 * i, 1.0 + i) for i, name in enumerate(names)]
    lines = {"XLA Modules": [("jit_rpa_p4_q32(7)", 0.0, 1000.0)], "XLA Ops": events}
    [found] = runs(xspace([("/device:TPU:0", lines)]), KERNEL_NAME, ["rpa_p4_q32"])
    (kernel,) = [seconds for name, _, seconds in events if "custom-call(" in name]
    assert found.kernel_seconds == pytest.approx(kernel * 1e-6)


@pytest.mark.parametrize(("target", "device"), PLACES)
def test_an_executable_is_for_a_device_of_one_chip(
    compiled: tuple[str, Path], target: str, device: int
) -> None:
    payload = (compiled[1] / f"{target}-{device}").read_bytes()
    assert pickle.loads(payload)[0] == PLACES[target, device]


def test_an_executable_for_another_device_does_not_load(compiled: tuple[str, Path]) -> None:
    wanted = (
        "is for v7x (devices 2, cores of each 1), id 1; this device is cpu (devices 1, cores of each 1), id 0"
    )
    with pytest.raises(ValueError, match=re.escape(wanted)):
        load((compiled[1] / "v7x-1").read_bytes(), jax.devices("cpu")[0])


_COMPILE_FOR_THE_SECOND = """
import sys
from pathlib import Path
from autotune.tpu import executable
from tests.tpu.test_executable import call

made = executable.compile_ahead(call(None, 1))
assert made.verdict.status == "ok", made.verdict
(Path(sys.argv[1]) / "second").write_bytes(made.payload)
"""

_RUN_ON_THE_SECOND = """
import sys
from pathlib import Path
import jax, numpy
from autotune.kernel.jax_rpa.call import abstract_arguments
from autotune.tpu import executable
from tests.tpu.test_executable import PROBLEM, call

payload = (Path(sys.argv[1]) / "second").read_bytes()
first, second = jax.devices()
rng = numpy.random.default_rng(0)
shapes = abstract_arguments(PROBLEM, 32, jax.sharding.SingleDeviceSharding(first))
q, pages = (rng.standard_normal(shape.shape).astype(shape.dtype) for shape in shapes[:2])
kv_lens, table, ends, number = (numpy.zeros(shape.shape, shape.dtype) for shape in shapes[2:])
kv_lens[0], table[0], ends[1:], number[0] = 100, range(8), 20, 1

def output(program, device):
    given = [jax.device_put(array, device) for array in (q, pages, kv_lens, table, ends, number)]
    made = program(*given)
    assert made.devices() == {device}
    return numpy.asarray(made[:20], numpy.float32)

here = output(executable.compile_here(call(None, 0), first), first)
assert abs(here).max() > 0.1
assert (output(executable.load(payload, second), second) == here).all()
try:
    executable.load(payload, first)
except ValueError as error:
    print(error)
"""


def test_an_executable_for_the_second_device_runs_there_and_nowhere_else(tmp_path: Path) -> None:
    """The CPU split in two stands for a v7x chip: compiled in one process, loaded and run in another."""
    run(_COMPILE_FOR_THE_SECOND, tmp_path, JAX_NUM_CPU_DEVICES="2")
    said = run(_RUN_ON_THE_SECOND, tmp_path, JAX_NUM_CPU_DEVICES="2")
    assert re.fullmatch(r"the executable is for cpu .*, id 1; this device is cpu .*, id 0\n", said)


def test_block_sizes_that_the_kernel_refuses() -> None:
    made = compile_ahead(dataclasses.replace(call(None, 0), blocks=BlockSizes(16, 32)))
    assert made.verdict.status == "invalid" and made.payload is None
    assert "must be in range" in (made.verdict.error or "")
