"""An explained look-up as text for a terminal of 80 columns, or as json."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap

from autotune.analysis.check import said as failure_text
from autotune.analysis.explain import Cost, Explanation, Said
from autotune.kernel.jax_rpa.tiling import heads_per_blk
from autotune.kernel.problem import BlockSizes
from autotune.results.schema import MODELLED
from autotune.results.scores import Failure, Score
from autotune.tables import lookups
from autotune.tables.lookup import DEFAULT, EXACT, NEAREST, Answer
from autotune.tables.lookups import Rule
from autotune.tpu.generations import MIB

WIDTH = 80


def render(explanation: Explanation, form: str) -> str:
    """The explanation in one of text and json; it ends with a newline."""
    return json.dumps(_json(explanation), indent=1) + "\n" if form == "json" else _text(explanation)


def _pair(blocks: BlockSizes) -> str:
    return f"({blocks[0]}, {blocks[1]})"


def mean_seconds(cost: Cost) -> float | None:
    """The geometric mean over the workloads."""
    if not cost.seconds:
        return None
    return math.exp(sum(map(math.log, cost.seconds.values())) / len(cost.seconds))


def _text(explanation: Explanation) -> str:
    key = explanation.key
    lines = [f"the key on {explanation.generation}, step by step"]
    for step in explanation.steps:
        values = [str(value) for value in step.values]
        shown = " -> ".join(values)
        lines.append(f"  {step.name:13} {shown:42} {step.rule}")
    lines += [f"  {tuple(key)}", "", "what each table says"]
    for said in explanation.said:
        lines += [f"  {line}" for line in _said(explanation, said)]
    lines += ["", *_running(explanation)]
    return "\n".join(lines) + "\n"


def _title(said: Said) -> str:
    source = str(said.table.provenance.get("source", ""))
    note = f" ({source.upper()})" if source and source != "published" else ""
    device = f" {said.device!r}" if said.device and said.device not in said.table.origin else ""
    return f"{said.table.origin}{device}{note}"


def _said(explanation: Explanation, said: Said) -> list[str]:
    title = _title(said)
    rule = said.table.look_up
    limit = said.table.provenance.get("vmem_limit_bytes")
    if said.answer is None:
        key = [f"  key {tuple(said.key)}"] if said.key else []
        return [f"{title}: {_other(said)}", *key, "  of another kernel than JAX's", *_by(said, rule)]
    answer = said.answer
    if answer.origin == EXACT:
        lines = [f"{title}: {_pair(answer.value)}, this key"]
    elif answer.origin == NEAREST:
        assert answer.found is not None
        lines = [
            f"{title}: {_pair(answer.value)}, {_doublings(answer.distance)} away",
            f"  nearest of this layout: {tuple(answer.found)}",
            f"  by {rule}; no other look-up tries the nearest",
            *_passed(answer),
        ]
    else:
        lines = [
            f"{title}: {_why_default(explanation, said)} {_pair(answer.value)}",
            *_passed(answer),
        ]
    if answer.key != explanation.key:
        lines.append(f"  its own key: {tuple(answer.key)}")
    if isinstance(limit, int) and answer.origin != DEFAULT:
        lines.append(f"  proven to compile at vmem_limit_bytes={limit} ({limit / MIB:g} MiB)")
    if answer.blocks != answer.value:
        lines.append(f"  cut to the call: {_pair(answer.blocks)}")
    return lines if rule.nearest else [*lines, *_by(said, rule)]


def _passed(answer: Answer) -> list[str]:
    """Of a nearer key whose value is as large as its own call, and so says little of a larger one."""
    if answer.passed is None:
        return []
    if answer.passed == answer.found:
        return ["  only a lower bound, as it is as large as its own key's call: sweep this one"]
    return [f"  passed over: {tuple(answer.passed)},", "  whose value is as large as its own key's call"]


def _other(said: Said) -> str:
    if said.value is None:
        return "its look-up refuses the call"
    return f"{_pair(said.value)}, {'this key' if said.row else 'by default, as there is no such row'}"


def _by(said: Said, rule: Rule) -> list[str]:
    """By which look-up, where that is known, and whether anything reads the table."""
    if said.table.rule is None:
        newest = f", taken as {rule}" if rule.name else ""
        return [f"  by its keys: its own look-up is not known{newest}"]
    lines = [f"  by its own look-up, {rule}"]
    if rule.unread:
        lines.append(f"  which nothing reads since {rule.unread}")
    return lines


def _why_default(explanation: Explanation, said: Said) -> str:
    generation, rule = explanation.generation.name, said.table.look_up
    if generation in rule.skips:
        why = f"never consulted on {generation}"
    elif said.device is not None:
        why = "no such key"
    elif there := said.table.device_of(generation):
        asked = " or ".join(map(repr, rule.asks.get(generation, ()))) or "nothing"
        why = f"its rows are under {there!r}, and it asks for {asked}"
    else:
        why = f"no rows for {generation}"
    whose = "JAX's" if rule.default is lookups.AUTOTUNE.default else "its own"
    return f"{why}, so {whose} default"


def _running(explanation: Explanation) -> list[str]:
    limit = explanation.settings.vmem_limit_bytes
    at = f"vmem_limit_bytes={limit} ({limit / MIB:g} MiB)" if limit else "the compiler's own VMEM limit"
    costs = explanation.costs.values()
    sources = {c.row.source for c in costs if isinstance(c.row, Score)} or {MODELLED}
    how = "MODELLED, not timed" if sources == {MODELLED} else ", ".join(sorted(sources))
    lines = [f"what runs, and what it costs ({how})", f"  at {at}"]
    if any(cost.row for cost in costs):
        rows_at = explanation.rows_limit
        limit_text = f"{rows_at / MIB:g} MiB" if rows_at else "the compiler's own VMEM limit"
        lines[1] += f"; rows: of the key, at {limit_text}"
    best = _best_mean(explanation)
    rows = [(said, said.answer.blocks) for said in explanation.said if said.answer]
    for said, blocks in rows:
        lines += _cost_lines(f"with {said.table.origin}", explanation, blocks, best)
    if explanation.best:
        pair, source = explanation.best
        lines += _cost_lines(f"best known ({source})", explanation, pair, best)
        lines += _why_not_fastest(explanation, best)
    else:
        lines.append("  best known: no rows for this key")
    if any(cost.seconds for cost in costs):
        lines.append("  us: geometric mean over the workloads " + ", ".join(_workloads(explanation)))
    if any(cost is None or cost.verdict is None for cost in map(explanation.costs.get, explanation.pairs())):
        lines.append("  --compile finds out what the compiler says of this very call")
    return lines


def _why_not_fastest(explanation: Explanation, best: float | None) -> list[str]:
    """Where the best known pair is slower than another for this very call: of what it is the best."""
    means = [mean for cost in explanation.costs.values() if (mean := mean_seconds(cost))]
    if best is None or not means or min(means) / best > 0.9995:
        return []
    problem, key = explanation.problem, explanation.key
    heads = heads_per_blk(problem.num_q_heads, problem.num_kv_heads, problem.q_dtype, problem.kv_dtype)
    padded = (key.num_q_heads_per_blk, key.num_kv_heads_per_blk)
    if heads and heads != padded:
        what = f"the key's {padded[0]}/{padded[1]} heads; at this call's {heads[0]}/{heads[1]}"
    else:
        what = "the key's padded shape; for this call"
    return textwrap.wrap(
        f"tuned at {what} another is faster",
        WIDTH,
        initial_indent="      ",
        subsequent_indent="      ",
    )


def _doublings(distance: float | None) -> str:
    return f"{distance or 0:g} doubling{'' if distance == 1 else 's'}"


def _workloads(explanation: Explanation) -> list[str]:
    return next(list(cost.seconds) for cost in explanation.costs.values() if cost.seconds)


def _best_mean(explanation: Explanation) -> float | None:
    """The latency to compare with: the best known pair's, or else the best of what runs."""
    if explanation.best and (cost := explanation.costs.get(explanation.best[0])):
        return mean_seconds(cost)
    means = [mean for cost in explanation.costs.values() if (mean := mean_seconds(cost))]
    return min(means, default=None)


def _cost_lines(name: str, explanation: Explanation, blocks: BlockSizes, best: float | None) -> list[str]:
    start = f"  {name:22} {_pair(blocks):11}"
    cost = explanation.costs.get(blocks)
    if cost is None or cost.verdict is None:
        return [f"{start} {_by_rows(explanation, cost)}"]
    mean = mean_seconds(cost)
    if mean is None and cost.verdict.status in ("timeout", "crashed"):  # of which nothing follows
        lines = [f"{start} not known:", f"      {failure_text(cost.verdict)}"]
        if cost.verdict.status == "timeout":
            lines.append(f"      type --compile-timeout {4 * (cost.verdict.seconds or 300):g}")
        return lines
    if mean is None:
        return [f"{start} does not run:", f"      {failure_text(cost.verdict)}"]
    assert cost.verdict.schedule is not None
    used = cost.verdict.schedule.vmem_bytes / MIB
    beside = ""
    if best is not None and abs(mean / best - 1) >= 0.0005:
        beside = f", {(mean / best - 1) * 100:+.1f}%"
    return [f"{start} fits, {used:.2f} MiB of VMEM; {mean * 1e6:.4g} us{beside}"]


def _by_rows(explanation: Explanation, cost: Cost | None) -> str:
    """What rows say of a pair whose program was not compiled."""
    row = cost.row if cost else None
    if row is None:
        return "not known"
    if isinstance(row, Failure):
        return f"does not run, by the rows: {row.status}"
    known = [c.row.latency_us for c in explanation.costs.values() if isinstance(c.row, Score)]
    beyond = (row.latency_us / min(known) - 1) * 100
    return f"{row.latency_us:.4g} us by the rows" + (f", {beyond:+.1f}%" if beyond >= 0.05 else "")


def _json(explanation: Explanation) -> dict[str, object]:
    return {
        "generation": explanation.generation.name,
        "problem": dataclasses.asdict(explanation.problem),
        "settings": dataclasses.asdict(explanation.settings),
        "steps": [{"name": s.name, "values": list(s.values), "rule": s.rule} for s in explanation.steps],
        "key": list(explanation.key),
        "tables": [
            {
                "table": said.table.origin,
                "dialect": str(said.table.dialect),
                "provenance": dict(said.table.provenance),
                "device": said.device,
                "lookup": said.table.rule.name if said.table.rule else None,
                "key": list(said.key) if said.key else None,
                "origin": said.answer.origin if said.answer else _origin(said),
                "found": list(said.answer.found) if said.answer and said.answer.found else None,
                "distance": said.answer.distance if said.answer and said.answer.origin != DEFAULT else None,
                "value": list(said.value) if said.value and said.row else None,
                "runs": list(said.answer.blocks) if said.answer else None,
            }
            for said in explanation.said
        ],
        "best_known": {"blocks": list(explanation.best[0]), "source": explanation.best[1]}
        if explanation.best
        else None,
        "costs": [_json_cost(cost) for cost in explanation.costs.values()],
    }


def _origin(said: Said) -> str | None:
    return None if said.value is None else EXACT if said.row else DEFAULT


def _json_cost(cost: Cost) -> dict[str, object]:
    mean = mean_seconds(cost)
    verdict = cost.verdict
    return {
        "blocks": list(cost.blocks),
        "status": verdict.status if verdict else None,
        "vmem_bytes": verdict.schedule.vmem_bytes if verdict and verdict.schedule else None,
        "needed_bytes": verdict.needed_bytes if verdict else None,
        "limit_bytes": verdict.limit_bytes if verdict else None,
        "source": "modelled",
        "latency_us": mean * 1e6 if mean else None,
        "row": cost.row._asdict() if cost.row else None,
        "workloads_us": {n: s * 1e6 for n, s in cost.seconds.items()} if cost.seconds else None,
    }
