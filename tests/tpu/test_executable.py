"""Programs compiled for a TPU at a key's own shape, as a profile of them will name them."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

from autotune.kernel.problem import NO_SETTINGS, BlockSizes, Problem
from autotune.tpu.compiler import KERNEL_NAME, environment
from autotune.tpu.executable import Call, compile_ahead, load
from tests.conftest import ROOT
from tests.tpu.xspace import xspace

PROBLEM = Problem(
    num_q_heads=4, num_kv_heads=1, head_dim=128, page_size=16, max_num_batched_tokens=64, pages_per_seq=8
)

_COMPILE = """
import sys
from autotune.kernel.problem import NO_SETTINGS, BlockSizes
from autotune.tpu import executable
from autotune.tpu.compiler import target_device
from tests.tpu.test_executable import PROBLEM

call = executable.Call(
    target="v6e", problem=PROBLEM, total_num_pages=32, blocks=BlockSizes(4, 32), settings=NO_SETTINGS
)
print(executable.compile_here(call, target_device("v6e:2x2")).as_text())
made = executable.compile_ahead(call)
assert made.verdict.status == "ok", made.verdict
open(sys.argv[1], "wb").write(made.payload)
"""


@pytest.fixture(scope="module")
def for_v6e(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """The HLO text and the executable of a program compiled for v6e."""
    dump, out = tmp_path_factory.mktemp("dump"), tmp_path_factory.mktemp("out") / "payload"
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, str(out)],
        env={**os.environ, **environment(dump), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout, out.read_bytes()


def test_the_program_and_the_kernel_have_the_names_that_profiles_are_read_by(
    for_v6e: tuple[str, bytes],
) -> None:
    """XLA's own name of the operation, put into a profile, is taken for the kernel; no other one is."""
    from autotune.tpu.trace import module_times

    text, _ = for_v6e
    assert text.startswith("HloModule jit_rpa_p4_q32,")
    entry = text[text.index("ENTRY ") :].splitlines()[1:]
    names = [line.strip().removeprefix("ROOT ") for line in entry if " = " in line]
    events = [(name, 10.0 * i, 1.0 + i) for i, name in enumerate(names)]
    lines = {"XLA Modules": [("jit_rpa_p4_q32(7)", 0.0, 1000.0)], "XLA Ops": events}
    times = module_times(xspace([("/device:TPU:0", lines)]), KERNEL_NAME)[0]["rpa_p4_q32"]
    (kernel,) = [seconds for name, _, seconds in events if "custom-call(" in name]
    assert times.kernel == (pytest.approx(kernel * 1e-6),)


def test_an_executable_for_another_device_does_not_load(for_v6e: tuple[str, bytes]) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError):
        load(for_v6e[1], jax.devices("cpu")[0])


def test_block_sizes_that_the_kernel_refuses() -> None:
    call = Call(
        target=None,
        problem=PROBLEM,
        total_num_pages=32,
        blocks=BlockSizes(16, 32),
        settings=NO_SETTINGS,
    )
    made = compile_ahead(call)
    assert made.verdict.status == "invalid" and made.payload is None
    assert "must be in range" in (made.verdict.error or "")
