"""What the doctor found, for people and for programs."""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any

import autotune
from autotune.doctor.checks import FAILURE, WARNING, Check
from autotune.doctor.examine import Report
from autotune.errors import EXIT_MACHINE

SCHEMA = 1
WIDTH = 80
INDENT = 19  # the longest state and the longest name, with two spaces after each


def line(check: Check) -> str:
    """A check in lines of at most 80 columns, but for what is to be typed, which is never broken."""
    lines = _wrapped(check.text, f"{check.state:<7}  {check.name:<8}  ")
    if check.advice:
        lines += _wrapped(check.advice, " " * INDENT)
    if check.command:
        lines.append(f"{'':{INDENT}}type: {check.command}")
    return "\n".join(lines)


def _wrapped(text: str, first: str) -> list[str]:
    # What is quoted stays in one line, so that it can be searched for: textwrap breaks at no such space.
    quoted = re.sub(r"`[^`]*`", lambda match: match[0].replace(" ", "\xa0"), text)
    lines = textwrap.wrap(
        quoted,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\xa0", " ") for line in lines]


def end(report: Report, command: str, out: str) -> str:
    """The last lines: whether a sweep can run, and what to type next."""
    counts = ", ".join(
        f"{number} {word}{'s' if number > 1 else ''}"
        for word in (FAILURE, WARNING)
        if (number := sum(check.state == word for check in report.checks))
    )
    if not report.ready:
        said = "A sweep cannot run here"
    elif report.attached:
        said = f"A sweep can run here, on the attached {report.attached.generation}"
    else:
        said = "A sweep can run here, for a TPU that is not: its latencies are modelled, not measured"
    lines = textwrap.wrap(f"{said}. {counts or 'No failures, no warnings'}.", WIDTH)
    return "\n".join([*lines, "Next:", *(f"  {text}" for text in report.next(command, out))])


def as_json(report: Report, command: str, out: str) -> str:
    """The report as one object; keys are only ever added while `schema` stays the same."""
    found = report.attached
    tpu: dict[str, Any] | None = None
    if found:
        tpu = {
            "generation": found.generation.name,
            "version": found.generation.version,
            "device_kind": found.device_kind,
            "chips": found.num_chips,
            "usable": list(found.usable),
        }
    return json.dumps(
        {
            "schema": SCHEMA,
            "autotune": autotune.__version__,
            "ready": report.ready,
            "exit_code": 0 if report.ready else EXIT_MACHINE,
            "tpu": tpu,
            "checks": [
                {
                    "name": check.name,
                    "state": check.state,
                    "text": check.text,
                    "advice": check.advice or None,
                    "command": check.command or None,
                    "vital": check.vital,
                }
                for check in report.checks
            ],
            "next": report.next(command, out),
        },
        indent=2,
    )
