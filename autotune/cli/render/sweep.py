"""What a sweep says before and after it: what it is going to do, and what became of every candidate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autotune.analysis.overview import Overview
from autotune.cli.eta import seconds_left
from autotune.cli.progress import between
from autotune.io.terminal import counted, printable
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.search.plan import Plan, Request
from autotune.search.shard import Shard
from autotune.search.strategy import Search
from autotune.sweep import Summary
from autotune.tpu.generations import MIB, hardware, vmem_limit


def announcement(request: Request, plan: Plan, search: Search, jobs: int, part: Shard | None) -> str:
    """What a sweep is going to do, and how long that will take."""
    parts = [f"{counted(len(plan.incumbents), 'key')}, {counted(plan.candidates, 'candidate')}"]
    if plan.recorded:
        parts.append(f"{plan.recorded} recorded before")
    if plan.reused:
        parts.append(f"{plan.reused} compiled before")
    if plan.ruled_out:
        parts.append(f"{plan.ruled_out} ruled out without a compile")
    programs = counted(len(plan.waiting), "program")
    outlook = search.outlook()
    if outlook.programs < len(plan.waiting):  # the others cannot win, or will probably turn out not to
        programs = f"about {outlook.programs} of {programs}" if outlook.programs else f"none of {programs}"
    parts.append(f"{programs} to compile for {request.generation}")
    if outlook.programs:
        parts.append(f"{between(seconds_left(0.0, 0.0, outlook.seconds, jobs))} with --jobs {jobs}")
    return (f"shard {part}: " if part else "") + "; ".join(parts)


def timings(summary: Summary, source: str) -> list[str]:
    """What was timed, by which clock, and whether devices took the executables compiled for them."""
    counts = ", ".join(f"{count} {status}" for status, count in summary.timings.most_common()) or "none"
    clocks = f"; by {' and '.join(summary.clocks)}" if summary.clocks else ""
    lines = [f"newly {source} (a candidate on a workload each): {counts}{clocks}"]
    if summary.compiled_here:
        why = f" ({printable(summary.refused)})" if summary.refused else ""
        lines.append(
            f"{summary.compiled_here} of them with an executable that the device compiled itself, as the one "
            f"compiled ahead did not load{why}"
        )
    return lines


def accounts(summary: Summary, plan: Plan) -> list[str]:
    """What became of every candidate, in sums that a person can check."""

    statuses = ", ".join(f"{number} {status}" for status, number in summary.statuses.most_common())
    newly = summary.statuses.total()
    fates = [f"{newly} newly recorded"]
    if plan.recorded:
        fates.append(f"{plan.recorded} recorded before")
    if summary.left_out:
        fates.append(f"{summary.left_out} that could not win (--exhaustive compiles them)")
    ways = [f"{counted(summary.compiled, 'program')} compiled"]
    # Said also where it is nothing: it is what a sweep of several keys is for.
    ways.append(f"{summary.shared} of a program that keys share")
    for number, way in (
        (summary.implied, "overflow as smaller ones"),
        (plan.ruled_out, "ruled out by size alone"),
        (plan.reused, "compiled before"),
    ):
        if number:
            ways.append(f"{number} {way}")
    return [
        f"{counted(plan.candidates, 'candidate')} = {' + '.join(fates)}",
        f"newly recorded candidates: {statuses or 'none'}",
        *([f"{newly} newly recorded = {' + '.join(ways)}"] if newly else []),
    ]


def at_the_ends(request: Request, won: Mapping[TableKey, BlockSizes]) -> list[str]:
    """For each list of block sizes that the user named, the winners at one of its ends, beyond which the
    kernel takes more values that were not tried."""
    said = []
    for number, (option, named) in enumerate(
        (("--kv-pages", request.kv_pages), ("--queries", request.queries))
    ):
        beyond: Counter[int] = Counter()
        for key, blocks in won.items():
            most = (key.pages_per_seq, key.max_num_batched_tokens)[number]
            value = blocks[number]
            if named and value == min(named) and value > 1:
                beyond[value // 2] += 1
            if named and value == max(named) and value < most:
                beyond[min(2 * value, most)] += 1
        said += [
            f"{count} of {counted(len(won), 'winner')} {'is' if count == 1 else 'are'} at the end of "
            f"{option} {','.join(map(str, named or ()))}: {value} may be faster, and was not tried"
            for value, count in sorted(beyond.items())
        ]
    return said


def after_failures(seen: Overview, request: Request) -> str | None:
    """What to try where no candidate is ok, by what fails most; None where nothing is known to help."""
    counts = sum((Counter(by_status) for by_status in seen.statuses.values()), Counter[str]())
    if counts["compile_error"]:
        of = f"{counts['compile_error']} of {counted(counts.total(), 'candidate')}"
        return (
            f"other heads or pages: the compiler refuses {of}, and another --vmem-limit changes nothing of "
            "that (-v says why, in full)"
        )
    if counts["smem_oom"] > counts["vmem_oom"]:
        return "a larger page size, a shorter --max-model-len or a smaller --max-num-seqs"
    if not counts["vmem_oom"]:
        return None
    most = hardware(request.generation).vmem_bytes
    limited = vmem_limit(request.generation, request.settings.vmem_limit_bytes) < most
    larger = f", or a larger --vmem-limit, up to {most // MIB}MiB" if limited else ""
    return f"try smaller --kv-pages and --queries{larger}"
