"""Which look-up a module has, told by the text of its functions; nothing is run."""

from __future__ import annotations

import hashlib
import re

from autotune.tables.literal import STRING

# The functions that make a look-up, by the names that the public modules give them.
FUNCTIONS = (
    "get_device_name",
    "get_lookup_keys",
    "get_simplified_key",
    "get_simplified_raw_key",
    "get_tpu_version",
    "get_tuned_block_sizes",
    "simplify_key",
)
MAX_FUNCTION = 20_000  # characters; the longest public one has 2,500

_DEFINED = re.compile(rf"{STRING}|#[^\n]*|^def\s+(?P<name>{'|'.join(FUNCTIONS)})\s*\(", re.M | re.S)
# A line that neither is indented nor closes a bracket ends a function.
_ENDED = re.compile(rf"{STRING}|#[^\n]*|^(?P<end>[^\s)\]}}#'\"])", re.M | re.S)
_TOKENS = re.compile(
    rf"(?P<string>{STRING})|#[^\n]*|\n(?P<indent>[ \t]*)(?=[^\s#])|\s|(?P<other>.)",
    re.S,
)


def fingerprint(text: str) -> str | None:
    """The first 16 hex digits of the SHA-256 of a module's look-up functions; None if it has none.

    Comments, docstrings, the width of an indentation, other white space, the kind of quotation mark and
    commas before a closing bracket do not count, so that a formatter does not make another look-up.
    """
    found: list[tuple[str, str]] = []
    pos = 0
    while match := _DEFINED.search(text, pos):
        pos = match.end()
        if match["name"]:
            pos = _end_of(text, pos)
            if pos - match.start() > MAX_FUNCTION:
                return None
            found.append((match["name"], _normal(text[match.start() : pos])))
    if not found:
        return None
    return hashlib.sha256("\n".join(body for _, body in sorted(found)).encode()).hexdigest()[:16]


def _end_of(text: str, pos: int) -> int:
    while match := _ENDED.search(text, pos):
        if match["end"]:
            return match.start()
        pos = match.end()
    return len(text)


def _normal(body: str) -> str:
    """The text that counts: tokens without gaps, and each statement's depth of indentation before it."""
    parts: list[str] = []
    widths = [0]  # of the indentations around a statement
    open_brackets = 0
    for match in _TOKENS.finditer(body):
        if (other := match["other"]) is not None:
            open_brackets += (other in "([{") - (other in ")]}")
            parts.append(other)
        elif (string := match["string"]) is not None and not _stands_alone(body, match):
            parts.append('"' + string.strip(string[0]) + '"')
        elif (indent := match["indent"]) is not None and not open_brackets:
            while len(indent) < widths[-1]:
                widths.pop()
            if len(indent) > widths[-1]:
                widths.append(len(indent))
            parts.append(f"\n{len(widths)} ")
    lines = re.sub(r",(?=[)\]}])", "", "".join(parts)).split("\n")
    return "\n".join(line for line in lines if not re.fullmatch(r"\d+ ", line))


def _stands_alone(body: str, match: re.Match[str]) -> bool:
    """Whether a string is all there is in its lines, as a docstring is."""
    before = body[body.rfind("\n", 0, match.start()) + 1 : match.start()]
    line_end = body.find("\n", match.end())
    return not (before + body[match.end() : line_end if line_end >= 0 else len(body)]).strip()
