"""What a server would run for each case of its attention, as text of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from autotune.analysis.server_start import Case, Server, Tried
from autotune.kernel.rpa_v3.blocks import VARIABLES
from autotune.keys.models import Attention, Model
from autotune.tpu.compiler import Compiled
from autotune.tpu.generations import MIB

WIDTH = 80


def heading(model: Model, attention: Attention, server: Server) -> str:
    """The call that is checked."""
    problem, window = server.problem, server.settings.sliding_window
    layers = f" {attention.layers}" if attention.layers else ""
    lines = [
        f"{model.name}{layers} on {server.generation}: {problem.num_q_heads} query heads, "
        f"{problem.num_kv_heads} KV heads a chip, head_dim {problem.head_dim}, {problem.kv_dtype} KV",
        f"{problem.max_num_batched_tokens} tokens a batch, {problem.max_num_seqs} sequences of "
        f"{problem.pages_per_seq} pages of {problem.page_size} tokens"
        + (f", window {window}" if window else ""),
    ]
    return "\n".join(line for text in lines for line in textwrap.wrap(text, WIDTH))


def cases(server: Server, several: tuple[Case, ...]) -> str:
    """A paragraph a case, the lines that mend what fails, and what it amounts to."""
    lines = [line for case in several for line in _case(server, case)]
    failing = [case for case in several if not case.starts]
    exports = [f"export {VARIABLES[case.name]}={case.best.blocks}" for case in failing if case.best]
    if exports:
        lines += ["To start with blocks that fit, set before the server:", *(f"  {line}" for line in exports)]
    if not failing:
        lines.append("Both cases compile: the attention kernel starts.")
    return "\n".join(lines) + "\n"


def _case(server: Server, case: Case) -> Iterator[str]:
    if case.own is None:
        yield from _wrapped(f"{case.name:6}  FAILS  no default on {server.generation}: {case.refusal.error}")
    else:
        state = "ok   " if case.starts else "FAILS"
        yield from _wrapped(
            f"{case.name:6}  {state}  {case.own.blocks} (bq,bkv,bq_csz,bkv_csz), from {case.set_by}"
        )
        yield from _wrapped(f"               {_outcome(server, case.own)}")
        if case.broken:
            yield from _wrapped(
                f"               breaks the kernel's rule: {case.broken}; it reads past its buffer, silently"
            )
    for tried in case.instead:
        mark = "best " if tried is case.best else "     "
        yield from _wrapped(f"        {mark}  {tried.blocks}  {_outcome(server, tried)}")
    if case.refusal.status == "smem_oom":
        yield from _wrapped("               no block sizes change that: use a larger page or fewer sequences")
    elif not case.starts and not case.best:
        yield from _wrapped("               no smaller block sizes that were tried fit")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * 15, break_on_hyphens=False)


def _outcome(server: Server, tried: Tried) -> str:
    answer = tried.answer
    if answer.verdict.status != "ok":
        return _failure(answer.verdict)
    assert answer.vmem_bytes is not None
    cost = f", {tried.seconds * 1e6:.0f} us modelled" if tried.seconds is not None else ""
    return f"compiles, {answer.vmem_bytes / MIB:.1f} MiB of VMEM{cost}"


def _failure(verdict: Compiled) -> str:
    memory = {"vmem_oom": "VMEM", "smem_oom": "SMEM"}.get(verdict.status)
    if memory and verdict.needed_bytes and verdict.limit_bytes:
        needed, limit = verdict.needed_bytes / MIB, verdict.limit_bytes / MIB
        return f"needs {needed:.2f} MiB of {memory}, {limit:.2f} MiB allowed"
    return f"{verdict.status}: {verdict.error}"
