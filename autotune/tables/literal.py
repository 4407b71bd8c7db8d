"""Reads one assignment of a literal from Python source, without running or even compiling the source.

A scanner of its own rather than `ast`: Python's documentation warns that a hostile source can crash its
parser, and a table of 100,000 rows took it 5 seconds and 1.3 GB. This one holds no more than the rows, and
stops at the first thing that is no literal. Around the assignment, the module may hold anything.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

MAX_BYTES = 32 << 20
MAX_DEPTH = 8  # the deepest dialect nests five dicts around a pair
MAX_ENTRIES = 1_000_000
MAX_TUPLE = 16
MAX_DIGITS = 18

# Strings and comments are matched so that what they hold is passed over. Every repeated part is a run or has
# a bound, so that no source makes the matcher's memory grow with it.
_STRING = (
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


def assigned(text: str, *names: str) -> dict[str, Any]:
    """The literals that a module assigns to some names at its top level.

    A dict is returned as Entries, tuples and constants as themselves; a name not assigned is left out.

    Raises:
      LiteralError: a value is no literal, is nested deeper than 8 or has over a million entries; a name is
        assigned twice, or changed by another statement.
    """
    mentions = re.compile(rf"{_STRING}|#[^\n]*|^(?P<name>{'|'.join(names)})\b", re.M | re.S)
    values: dict[str, Any] = {}
    first_lines: dict[str, int] = {}
    pos, line_pos, line = 0, 0, 1
    while match := mentions.search(text, pos):
        pos, name = match.end(), match["name"]
        if name is None:
            continue
        line += text.count("\n", line_pos, match.start())
        line_pos = match.start()
        equals = re.compile(r"\s*(?::[^=\n]*)?=(?!=)").match(text, pos)
        if name in values or equals is None:
            after = f"after its literal in line {first_lines[name]}" if name in values else "with no literal"
            raise LiteralError(f"line {line}: {_shown(text, match.start())} changes {name} {after}")
        scanner = _Scanner(text, equals.end(), line + text.count("\n", match.start(), equals.end()))
        values[name] = scanner.value(0)
        scanner.finish()
        first_lines[name], pos = line, scanner.pos
    return values


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
