"""A check's report as text for a terminal, markdown for a pull request, json, or GitHub annotations."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from pathlib import Path

from autotune.analysis.check import KINDS, Finding, Report
from autotune.io.terminal import counted, printable
from autotune.tables.dialects import JAX
from autotune.tables.lookups import Rule

WIDTH = 80
EXAMPLES = 5  # findings that text and markdown show of a kind and device, unless all are wanted
ANNOTATIONS = 50  # of a kind; a pull request with more is not read


def render(report: Report, form: str, *, show_all: bool = False) -> str:
    """The report in one of text, markdown, json and github; it ends with a newline."""
    return {"text": _text, "markdown": _markdown, "json": _json, "github": _github}[form](report, show_all)


def heading(report: Report) -> str:
    """One line: what was looked at."""
    table = report.table
    devices = ", ".join(f"{device!r} {len(rows)}" for device, rows in table.devices.items()) or "no device"
    source = table.provenance.get("source")
    values = f", values {str(source).upper()}" if source else ""
    return f"{table.shown}: {table.dialect} dialect, {counted(len(table), 'key')} ({devices}){values}"


def look_up(report: Report) -> str:
    """One line: whose look-up the keys were judged by."""
    rule = report.table.rule
    if rule is None and report.table.dialect is JAX:
        return (
            "it holds no look-up: keys are judged as JAX rounds them, names of devices are not; --lookup "
            "jax-0.10 judges both"
        )
    if rule is None:
        return (
            "its look-up is not known, so keys that no call finds are not reported: name one, such as "
            "--lookup jax-0.10"
        )
    return f"judged by the look-up {rule}: of {rule.history}"


def verdicts(report: Report) -> list[str]:
    """A line for each generation that was compiled for, and one on entries without a known latency."""
    lines = []
    for generation, counts in report.compiled.items():
        total, done = report.programs[generation], sum(counts.values())
        words = ", ".join(f"{count} {status}" for status, count in counts.most_common()) or "none"
        lines.append(f"compiled for {generation}: {done} of {total} distinct programs: {words}")
    if report.unscored:
        lines.append(f"{report.unscored} entries have no latency in the rows, and were not compared")
    return lines


def conclusion(report: Report) -> str:
    """One line: how many findings, and of what kinds."""
    if not report.findings:
        return "no findings"
    kinds = ", ".join(f"{len(found)} {kind}" for kind, found in report.by_kind().items())
    return f"{counted(len(report.findings), 'finding')}: {kinds}"


def _by_device(found: list[Finding]) -> dict[str | None, list[Finding]]:
    devices: dict[str | None, list[Finding]] = {}
    for finding in found:
        devices.setdefault(finding.device, []).append(finding)
    return devices


def _text(report: Report, show_all: bool) -> str:
    lines = [*_wrapped(heading(report), ""), *_wrapped(look_up(report), "")]
    for kind, found in report.by_kind().items():
        lines += ["", *_wrapped(f"{len(found)} {kind}: {KINDS[kind]}", "")]
        for device, some in _by_device(found).items():
            shown = some if show_all else some[:EXAMPLES]
            if device is not None and some[0].key is not None:
                rows = len(report.table.devices[device])
                lines.append(f"  {printable(device)}: {len(some)} of {rows}")
            for finding in shown:
                where = f"line {finding.line}: " if finding.line else ""
                lines += _wrapped(where + finding.message, "    ")
            if len(shown) < len(some):
                lines.append(f"    ... and {len(some) - len(shown)} more: --all shows them")
    lines += ["", *verdicts(report), *_wrapped(conclusion(report), "")]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _markdown(report: Report, show_all: bool) -> str:
    lines = [f"**{_escaped(heading(report))}**", "", _escaped(look_up(report)), "", conclusion(report), ""]
    for kind, found in report.by_kind().items():
        lines += [f"### {len(found)} {kind}", "", f"{KINDS[kind].capitalize()}.", ""]
        for some in _by_device(found).values():
            shown = some if show_all else some[:EXAMPLES]
            for finding in shown:
                where = f"line {finding.line}: " if finding.line else ""
                lines.append(f"- {where}{_escaped(finding.message)}")
            if len(shown) < len(some):
                lines.append(f"- ... and {len(some) - len(shown)} more")
        lines.append("")
    lines += [f"- {line}" for line in verdicts(report)]
    return "\n".join(lines).rstrip() + "\n"


def _escaped(text: str) -> str:
    return "".join("\\" + c if c in "\\`*_<>|[]#" else c for c in text)


def _json(report: Report, show_all: bool) -> str:
    table = report.table
    findings = [
        {
            "kind": f.kind,
            "device": f.device,
            "key": None if f.key is None else list(f.key),
            "replacement": None if f.replacement is None else list(f.replacement),
            "line": f.line,
            "message": f.message,
            **f.detail,
        }
        for f in report.findings
    ]
    out = {
        "table": table.origin,
        "dialect": str(table.dialect),
        "lookup": _rule(table.rule),
        "provenance": dict(table.provenance),
        "rows": {device: len(rows) for device, rows in table.devices.items()},
        "counts": dict(Counter(f.kind for f in report.findings)),
        "compiled": {generation: dict(counts) for generation, counts in report.compiled.items()},
        "programs": report.programs,
        "unscored": report.unscored,
        "findings": findings,
    }
    return json.dumps(out, indent=1) + "\n"


def _rule(rule: Rule | None) -> dict[str, str | None] | None:
    if rule is None:
        return None
    names = ("name", "whose", "since", "until", "unread")
    return {name: getattr(rule, name) for name in names}


def _github(report: Report, show_all: bool) -> str:
    """Workflow commands: an annotation for each finding, at its line where the table is a file."""
    lines = []
    origin = report.table.origin
    file = origin if origin.isprintable() and Path(origin).is_file() else None
    for kind, found in report.by_kind().items():
        shown = found if show_all else found[:ANNOTATIONS]
        for finding in shown:
            properties = [f"title={_property(kind)}"]
            if file:
                properties.insert(0, f"file={_property(file)}")
                if finding.line:
                    properties.insert(1, f"line={finding.line}")
            lines.append(f"::error {','.join(properties)}::{_data(finding.message)}")
        if len(shown) < len(found):
            lines.append(f"::warning ::{len(found) - len(shown)} more {kind} findings are not shown")
    lines.append(f"::notice ::{_data('; '.join((heading(report), look_up(report), conclusion(report))))}")
    return "\n".join(lines) + "\n"


def _data(text: str) -> str:
    return printable(text).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
