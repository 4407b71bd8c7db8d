"""What the installed JAX says of itself, asked in a process that may crash or hang.

An import of a broken jax or libtpu can do either. The child says each stage as it has it; the parent, which
imports nothing of it, reads how far it came.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.errors import first_line
from autotune.tpu import environment as chip_process
from autotune.tpu.compiler import environment

SECONDS = 120.0  # all of it takes 1.6 s on two cores; a cold disk or a network one takes longer
MARK = "autotune-probe "
# In the order in which they are said; each needs those before it.
STAGES = ("jax", "kernel", "heads", "tables", "vmem", "generations")

_CHILD = "from autotune.doctor.probe import answer; answer()"


@dataclasses.dataclass(frozen=True)
class Probe:
    """answers: by stage, what it said. errors: by stage, why it said nothing; one line each."""

    answers: dict[str, Any]
    errors: dict[str, str]


def ask(seconds: float = SECONDS, path: list[str] | None = None) -> Probe:
    """Probe the installed JAX. path: where the child looks for modules; by default as this process does."""
    # As for a compile, but that none is made, and so no listing is to be written.
    variables = {**chip_process.passed_on(os.environ), **environment(Path())}
    del variables["LIBTPU_INIT_ARGS"]
    how = None
    try:
        done = subprocess.run(
            chip_process.python(_CHILD, path=path),
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
        out, err = done.stdout, done.stderr
        if done.returncode:
            how = f"ended {ended(done.returncode)}"
    except subprocess.TimeoutExpired as expired:
        out, err = expired.stdout or b"", expired.stderr or b""
        how = f"was not done after {seconds:g} s"
    answers: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for line in out.decode(errors="replace").splitlines():
        if line.startswith(MARK):
            with contextlib.suppress(ValueError, KeyError):
                said = json.loads(line.removeprefix(MARK))
                (errors if "error" in said else answers)[said["stage"]] = said.get(
                    "error", said.get("answer")
                )
    if how:
        lines = [line.strip() for line in err.decode(errors="replace").splitlines() if line.strip()]
        stage = next((s for s in STAGES if s not in answers and s not in errors), STAGES[-1])
        errors[stage] = f"a process that asked it {how}" + (f": {lines[-1][:200]}" if lines else "")
    return Probe(answers, errors)


def ended(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"with exit code {returncode}"
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-returncode).name}"
    return f"by signal {-returncode}"


def answer() -> None:
    """The child's side: say every stage, until one fails that the others need."""
    for stage in STAGES:
        say: Callable[[], Any] = globals()[f"_{stage}"]
        try:
            said = {"answer": say()}
        except Exception as error:  # whatever a broken installation raises
            said = {"error": first_line(error)[:300]}
        print(MARK + json.dumps({"stage": stage, **said}), flush=True)
        if "error" in said and stage in ("jax", "kernel"):
            return


def _jax() -> dict[str, str]:
    import jax

    return {"version": jax.__version__, "path": str(jax.__file__)}


def _kernel() -> dict[str, Any]:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel, tuned_block_sizes

    from autotune.kernel.jax_rpa import call
    from autotune.kernel.problem import BlockSizes, Settings

    known = inspect.signature(kernel.ragged_paged_attention).parameters
    return {
        "module": kernel.__name__.rpartition(".")[0],
        "path": str(kernel.__file__),
        "fingerprint": call.fingerprint(),
        "missing": [
            name for name in call.static_arguments(BlockSizes(1, 1), Settings()) if name not in known
        ],
        "entries": sum(map(len, tuned_block_sizes.TUNED_BLOCK_SIZES.values())),
    }


def _heads() -> dict[str, Any]:
    """The numbers of KV heads up to 16 that the kernel refuses in bfloat16, and its words for the first."""
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    refused: dict[int, str] = {}
    for heads in range(1, 17):
        try:
            kernel.get_min_heads_per_blk(heads, 2 * heads, jnp.dtype("bfloat16"), jnp.dtype("bfloat16"))
        except ValueError as error:
            refused[heads] = str(error)
    return {"refused": list(refused), "words": next(iter(refused.values()), "")}


def _tables() -> dict[str, str | None]:
    """The kernel's fingerprint that each committed table was made with."""
    from autotune.tables.load import committed, committed_path
    from autotune.tpu import generations

    return {
        name: committed(name).provenance.get("kernel_fingerprint")
        for name in generations.GENERATIONS
        if committed_path(name).is_file()
    }


def _vmem() -> dict[str, int]:
    from autotune.tpu import generations

    return {g.name: generations.hardware(g).vmem_bytes for g in generations.GENERATIONS.values()}


def _generations() -> dict[str, dict[str, str]]:
    """By generation, the device_kind of its compile target, or why libtpu has none."""
    from autotune.tpu import generations
    from autotune.tpu.compiler import target_device

    found = {}
    for generation in generations.GENERATIONS.values():
        try:
            found[generation.name] = {"device_kind": target_device(generation).device_kind}
        except Exception as error:
            found[generation.name] = {"error": first_line(error)[:300]}
    return found
