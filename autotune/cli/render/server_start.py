"""What a server would run for each case of its attention, as text of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from autotune.analysis.server_start import Case, Server, Tried
from autotune.io import installed
from autotune.kernel.rpa_v3 import source
from autotune.kernel.rpa_v3.blocks import VARIABLES, Blocks
from autotune.tpu.compiler import Compiled
from autotune.tpu.generations import MIB, hardware

WIDTH = 80


def text(model: str, kinds: Sequence[tuple[Server, tuple[Case, ...]]], fitting: Mapping[str, Blocks]) -> str:
    """A heading a kind of layers, a paragraph a case, and the lines that mend what fails.

    fitting: block sizes that fit all kinds, by the case that fails.
    """
    lines = _versions(kinds[0][0])
    for server, cases in kinds:
        lines += _heading(model, server)
        for case in cases:
            lines += _case(server, case, fitting.get(case.name))
    failing = [case for _, cases in kinds for case in cases if not case.starts]
    if fitting:
        lines.append("To start with blocks that fit, set before the server:")
        lines += [f"  export {VARIABLES[name]}={blocks}" for name, blocks in fitting.items()]
    tried = dict.fromkeys(case.name for case in failing if case.refusal.status != "smem_oom")
    lines += [f"No block sizes that were tried let {name} compile." for name in tried if name not in fitting]
    if not failing:
        lines.append("Both cases compile: the attention kernel starts.")
    return "\n".join(lines) + "\n"


def _versions(server: Server) -> list[str]:
    """What compiled, and what the stack asks for where that is something else."""
    used = {"jax": installed.version("jax"), "libtpu": installed.libtpu_version()}
    wanted = source.pinned(server.folder)
    line = "Compiled by " + ", ".join(f"{name} {version}" for name, version in used.items())
    if any(used[name] != version for name, version in wanted.items()):
        asked = ", ".join(f"{name} {version}" for name, version in wanted.items())
        line += f"; this source asks for {asked}, which may need other amounts"
    return textwrap.wrap(line, WIDTH)


def _heading(model: str, server: Server) -> list[str]:
    """The call that is checked."""
    problem, settings = server.problem, server.settings
    layers = f", {server.layers}" if server.layers else ""
    heads = f"{problem.num_kv_heads} KV head{'s' if problem.num_kv_heads > 1 else ''}"
    extra = (f", window {settings.sliding_window}" if settings.sliding_window else "") + (
        f", soft cap {settings.soft_cap:g}" if settings.soft_cap else ""
    )
    both = (
        f"{model} on {server.generation}{layers}: {problem.num_q_heads} query and {heads} on a device, "
        f"head_dim {problem.head_dim}, {problem.kv_dtype} KV{extra}",
        f"{problem.max_num_batched_tokens} tokens a batch, {problem.max_num_seqs} sequences of "
        f"{problem.pages_per_seq} pages of {problem.page_size} tokens",
    )
    return [line for one in both for line in textwrap.wrap(one, WIDTH)]


def _case(server: Server, case: Case, fitting: Blocks | None) -> Iterator[str]:
    if case.own is None:
        yield from _wrapped(f"{case.name:6}  FAILS  no default on {server.generation}: {case.refusal.error}")
    else:
        state = "ok   " if case.starts else "FAILS"
        yield from _wrapped(
            f"{case.name:6}  {state}  {case.own.blocks} (bq,bkv,bq_csz,bkv_csz), from {case.set_by}"
        )
        yield from _wrapped(f"               {_outcome(server, case.own, smem=True)}")
        if case.broken and case.own.fits:
            yield from _wrapped(
                f"               breaks the kernel's rule: {case.broken}; it reads past its buffer, silently"
            )
    for tried in case.instead:
        mark = "best " if tried.blocks == fitting else "     "
        yield from _wrapped(f"        {mark}  {tried.blocks}  {_outcome(server, tried)}")
    if case.refusal.status == "smem_oom":
        yield from _wrapped("               no block sizes change that: use a larger page or fewer sequences")


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * 15, break_on_hyphens=False)


def _outcome(server: Server, tried: Tried, *, smem: bool = False) -> str:
    """smem: whether to tell what the page table and the scalars take, which no block sizes change."""
    answer = tried.answer
    if answer.verdict.status != "ok":
        return _failure(answer.verdict)
    assert answer.vmem_bytes is not None and answer.smem_bytes is not None
    parts = ["compiles", f"{answer.vmem_bytes / MIB:.1f} of {server.vmem_limit_bytes / MIB:.1f} MiB VMEM"]
    if smem:
        limit = hardware(server.generation).smem_bytes
        parts.append(f"{answer.smem_bytes / 1024:.0f} of {limit / 1024:.0f} KiB SMEM")
    parts.append(f"{tried.seconds * 1e6:.0f} us modelled" if tried.seconds is not None else "not modelled")
    return ", ".join(parts)


def _failure(verdict: Compiled) -> str:
    memory = {"vmem_oom": "VMEM", "smem_oom": "SMEM"}.get(verdict.status)
    if memory and verdict.needed_bytes and verdict.limit_bytes:
        needed, limit = verdict.needed_bytes / MIB, verdict.limit_bytes / MIB
        return f"needs {needed:.2f} MiB of {memory}, {limit:.2f} MiB allowed"
    return f"{verdict.status}: {verdict.error}"
