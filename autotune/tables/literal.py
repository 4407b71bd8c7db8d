"""Reads one assignment of a literal from Python source, without running or even compiling the source.

A scanner of its own rather than `ast`, by measurement: 4 MiB of lines `a` take `ast.parse` 27 s and 3.7 GB, a
table of 56,000 rows takes it 5 s and 0.7 GB, so no cap on bytes is high enough for tables and low enough for
hostile files. This one holds no more than the rows, and stops at the first thing that is no literal. Around
the assignment, the module may hold anything.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_BYTES = 32 << 20
MAX_DEPTH = 8  # the deepest dialect nests five dicts around a pair
MAX_ENTRIES = 1_000_000
MAX_TUPLE = 16
MAX_DIGITS = 18

# Strings and comments are matched so that what they hold is passed over. Every repeated part is a run or has
# a bound, so that no source makes the matcher's memory grow with it.
STRING = (
    r"'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''"
    r'|"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|'[^'\\\n]*(?:\\.[^'\\\n]*)*'"
    r'|"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
)
_GAP = re.compile(r"(?:\s+|#[^\n]*)*")
_PLAIN_STRING = re.compile(r"'([^'\\\n]*)'|\"([^\"\\\n]*)\"")
_NUMBER = re.compile(r"[0-9][0-9_]*(?:\.[0-9]+(?:e[+-]?[0-9]+)?)?(?![\w.])")
_NAME = re.compile(r"[^\W\d]\w*")
_FLAT_TUPLE = re.compile(
    r"""\(\s*(?:(?:'[^'\\\n,]*'|"[^"\\\n,]*"|[0-9]{1,18})\s*(?:,\s*(?=[)'"0-9])|(?=\)))){0,16}\)"""
)
_CONSTANTS: dict[str, Any] = {"None": None, "True": True, "False": False}
_SHOWN = 40  # characters of an offending text that a message repeats


class LiteralError(ValueError):
    """What the source holds in place of a literal: one line, with its line number."""


@dataclasses.dataclass
class Entries:
    """The entries of one dict literal, in their order, repeated keys included, each with its line."""

    items: list[tuple[Any, Any, int]]
    line: int


def assigned(text: str, name: str, others: Sequence[str] = ()) -> dict[str, Any]:
    """The literals that a module assigns to some names at its top level.

    A dict is returned as Entries, tuples and constants as themselves; a name not assigned is left out, and so
    is one of the others whose value is no literal, or that is assigned twice.

    Raises:
      LiteralError: the value of name is no literal, is nested deeper than 8 or has over a million entries; it
        is assigned twice, or changed by a statement anywhere.
    """
    mentions = re.compile(rf"{STRING}|#[^\n]*|\b(?P<name>{'|'.join((name, *others))})\b", re.S)
    values: dict[str, Any] = {}
    aliases: dict[str, int] = {}  # to where they are bound
    first_line = mentioned = 0
    pos, line_pos, line = 0, 0, 1
    while match := mentions.search(text, pos):
        pos, found = match.end(), match["name"]
        if found is None:
            continue
        line += text.count("\n", line_pos, match.start())
        line_pos = match.start()
        at_top = match.start() == 0 or text[match.start() - 1] == "\n"
        equals = _EQUALS.match(text, pos) if at_top else None
        if equals is None or found in values:
            mentioned += 1
            if mentioned > _MOST_MENTIONS:
                raise LiteralError(f"line {line}: {name} is mentioned more than {_MOST_MENTIONS:,} times")
            if found == name and (equals or _changes(text, match.start(), pos)):
                after = f"after its literal in line {first_line}" if name in values else "with no literal"
                raise LiteralError(f"line {line}: {_shown(text, match.start())} changes {name} {after}")
            if equals:
                values[found] = None
            elif found == name and len(aliases) < _MOST_ALIASES:
                aliases |= {alias: pos for alias in _bound(text, match.start()) if alias not in aliases}
            continue
        scanner = _Scanner(text, equals.end(), line + text.count("\n", match.start(), equals.end()))
        try:
            values[found] = scanner.value(0)
            scanner.finish()
        except LiteralError:
            if found == name:
                raise
            values[found] = None
        else:
            pos = scanner.pos
        if found == name:
            first_line = line
    if change := _through(text, aliases):
        line = text.count("\n", 0, change) + 1
        raise LiteralError(f"line {line}: {_shown(text, change)} changes {name}, of which it is a part")
    return {found: value for found, value in values.items() if found == name or value is not None}


def names_assigned(text: str) -> list[str]:
    """The names that a module assigns at its top level, in their order."""
    pattern = re.compile(rf"{STRING}|#[^\n]*|^(?P<name>[^\W\d]\w*)\s*(?::[^=\n]*)?=(?!=)", re.M | re.S)
    return list(dict.fromkeys(match["name"] for match in pattern.finditer(text) if match["name"]))


_EQUALS = re.compile(r"\s*(?::[^=\n]*)?=(?!=)")
_CHANGED = re.compile(
    r"[ \t]*(?::[^=\n]*)?(?:[-+*/|&^@%]|//|\*\*|<<|>>)?=(?!=)"
    r"|[ \t]*\.[ \t]*(?:update|setdefault|pop|popitem|clear|__\w+__)[ \t]*\("
)
_CALLED = re.compile(r"(?:^|[;:])\s*(?!(?:p?print|len|assert|log\w*)\b)[\w.]+\($")
_ALIAS = re.compile(r"(?:^|[;:])\s*(\w+)\s*=\s*$")
_LOOP = re.compile(r"\bfor\b([\w\s,()]+)\bin\b[\s\w(]*$")
_SUBSCRIPT = re.compile(rf"(?:{STRING}|[^\[\]'\"#])*", re.S)
_MOST_ALIASES = 16
_MOST_MENTIONS = 1000  # of the table, or of parts of it, in a module's code
_MOST_SUBSCRIPTS = 8
_SEEN = 500  # characters that are looked at around a name


def _before(text: str, start: int) -> str:
    """The line before a position."""
    return text[max(text.rfind("\n", max(0, start - _SEEN), start) + 1, start - _SEEN) : start]


def _changes(text: str, start: int, pos: int, *, rebinding: bool = True) -> bool:
    """Whether what begins at start with a name, which ends at pos, assigns to it, into it, or deletes of it.

    rebinding: whether an assignment to the name itself counts.
    """
    before = _before(text, start)
    if rebinding and _CALLED.search(before):  # for nothing but its effect
        return True
    if re.search(r"[(\[{,.=]\s*$|\bdef\s*$", before):  # an argument or a part of an expression
        return False
    if re.search(r"(?:^|[;:])\s*del\s+$", before):
        return rebinding or text[pos : pos + 1] == "["
    for depth in range(_MOST_SUBSCRIPTS + 1):
        if not (opened := re.compile(r"[ \t]*\[").match(text, pos)):
            changed = _CHANGED.match(text, pos)
            return changed is not None and (rebinding or depth > 0 or changed[0][-1] == "(")
        inside = _SUBSCRIPT.match(text, opened.end(), opened.end() + _SEEN)
        assert inside is not None
        if text[inside.end() : inside.end() + 1] != "]":
            return False
        pos = inside.end() + 1
    return False


def _bound(text: str, start: int) -> list[str]:
    """The names that get a part of what begins at start: of an assignment or a loop."""
    before = _before(text, start)
    if alias := _ALIAS.search(before):
        return [alias[1]]
    loop = _LOOP.search(before)
    return re.findall(r"\w+", loop[1])[:_MOST_ALIASES] if loop else []


def _through(text: str, aliases: Mapping[str, int]) -> int | None:
    """Where a part of the table is changed through another name; None if nowhere."""
    if not aliases:
        return None
    mentions = re.compile(rf"{STRING}|#[^\n]*|\b(?P<name>{'|'.join(aliases)})\b", re.S)
    mentioned = 0
    for match in mentions.finditer(text, min(aliases.values())):
        found = match["name"]
        mentioned += found is not None
        if mentioned > _MOST_MENTIONS:
            return match.start()  # more than can be looked at
        later = found is not None and match.start() > aliases[found]
        if later and _changes(text, match.start(), match.end(), rebinding=False):
            return match.start()
    return None


class _Scanner:
    def __init__(self, text: str, pos: int, line: int) -> None:
        self.text = text
        self.pos = pos
        self._line = line
        self._line_pos = pos
        self._entries = 0
        self._memo: dict[str, Any] = {}

    def line(self) -> int:
        """The line of the position; asked for in order, so that each newline is counted once."""
        self._line += self.text.count("\n", self._line_pos, self.pos)
        self._line_pos = self.pos
        return self._line

    def fail(self, problem: str) -> LiteralError:
        return LiteralError(f"line {self.line()}: {problem}")

    def skip(self) -> str:
        """Passes over white space and comments; the next character, or '' at the end."""
        match = _GAP.match(self.text, self.pos)
        assert match is not None
        self.pos = match.end()
        return self.text[self.pos : self.pos + 1]

    def value(self, depth: int) -> Any:
        next_char = self.skip()
        if next_char == "(" and (flat := _FLAT_TUPLE.match(self.text, self.pos)):
            self.pos = flat.end()
            if "," in flat[0] or flat[0][1:-1].strip() == "":
                return self._flat(flat[0])
            return self._flat(flat[0])[0]  # parentheses around a value
        if next_char in ("{", "("):
            if depth >= MAX_DEPTH:
                raise self.fail(f"nested deeper than {MAX_DEPTH}")
            return self._dict(depth) if next_char == "{" else self._tuple(depth)
        if string := _PLAIN_STRING.match(self.text, self.pos):
            self.pos = string.end()
            return string[0][1:-1]
        if number := _NUMBER.match(self.text, self.pos):
            return self._number(number[0])
        if (name := _NAME.match(self.text, self.pos)) and name[0] in _CONSTANTS:
            self.pos = name.end()
            return _CONSTANTS[name[0]]
        raise self.fail(f"{_shown(self.text, self.pos)} is no literal: {_kind(self.text, self.pos)}")

    def _number(self, text: str) -> int | float:
        if len(text) > MAX_DIGITS:
            raise self.fail(f"a number of {len(text)} characters")
        try:
            value = float(text) if "." in text else int(text)
            if value == math.inf:  # which no literal stands for when it is written back
                raise ValueError
        except ValueError:  # or underscores where Python has none
            raise self.fail(f"{text!r} is no number") from None
        self.pos += len(text)
        return value

    def _flat(self, text: str) -> tuple[Any, ...]:
        memo = self._memo
        pieces = text[1:-1].split(",")
        try:
            return tuple([memo[piece] for piece in pieces])
        except KeyError:
            pass
        if not pieces[-1].strip():  # after a last comma, or in an empty tuple
            pieces.pop()
        for piece in pieces:
            inside = piece.strip()
            memo[piece] = inside[1:-1] if inside[0] in "'\"" else int(inside)
        return tuple([memo[piece] for piece in pieces])

    def _tuple(self, depth: int) -> Any:
        self.pos += 1
        values: list[Any] = []
        comma = True
        while self.skip() != ")":
            if len(values) == MAX_TUPLE:
                raise self.fail(f"a tuple of more than {MAX_TUPLE}")
            values.append(self.value(depth + 1))
            comma = self._separator(")")
        self.pos += 1
        return tuple(values) if comma or len(values) > 1 else values[0]

    def _dict(self, depth: int) -> Entries:
        entries = Entries([], self.line())
        self.pos += 1
        while self.skip() != "}":
            line = self.line()
            key = self.value(depth + 1)
            if isinstance(key, Entries):
                raise LiteralError(f"line {line}: a dict cannot be a key")
            if self.skip() != ":":
                raise self.fail(f"expected ':' after a key, found {_shown(self.text, self.pos)}")
            self.pos += 1
            entries.items.append((key, self.value(depth + 1), line))
            self._entries += 1
            if self._entries > MAX_ENTRIES:
                raise self.fail(f"more than {MAX_ENTRIES:,} entries")
            self._separator("}")
        self.pos += 1
        return entries

    def _separator(self, closing: str) -> bool:
        """Passes over a comma; whether there was one. Only the closing bracket may stand in its place."""
        next_char = self.skip()
        if next_char == ",":
            self.pos += 1
        elif next_char != closing:
            raise self.fail(f"expected ',' or '{closing}', found {_shown(self.text, self.pos)}")
        return next_char == ","

    def finish(self) -> None:
        """Refuses what is left of the line: `{...} | more`, `{...}.copy()`."""
        rest = re.compile(r"[ \t]*(?:#[^\n]*)?(?:;|\r?\n|\Z)").match(self.text, self.pos)
        if rest is None:
            raise self.fail(f"{_shown(self.text, self.pos)} after the literal: {_kind(self.text, self.pos)}")


def _shown(text: str, pos: int) -> str:
    """The rest of the line from a position, quoted and cut short."""
    if pos >= len(text):
        return "the end of the file"
    rest = text[pos : pos + _SHOWN + 1].split("\n")[0].strip()
    return repr(rest if len(rest) <= _SHOWN else rest[: _SHOWN - 3] + "...")


def _kind(text: str, pos: int) -> str:
    """A word for what stands where a literal should."""
    if pos >= len(text):
        return "the literal is not closed"
    if re.compile(r"[\w.]+\s*\(").match(text, pos):
        return "a function call, and a table file is never run"
    if re.compile(r"[bBrRuUfF]{1,2}['\"]|['\"]").match(text, pos):
        return "a string with a prefix, an escape or no end"
    if text[pos] == "[":
        return "a list or an index; block sizes and keys are tuples"
    if _NAME.match(text, pos):
        return "a name or a keyword, and a table file is never run"
    return "only dicts, tuples, strings, whole numbers and None are read"
