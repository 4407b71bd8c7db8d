"""A table changed where it stands in its file: the rows that are to be others, and not a byte beside them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from autotune.errors import UsageError, first_line
from autotune.kernel.problem import BlockSizes
from autotune.tables import render as jax_module
from autotune.tables.dialects import JAX
from autotune.tables.keys import Key, Rows
from autotune.tables.literal import LiteralError
from autotune.tables.source import LIMIT_NAME, PROVENANCE_NAME, SOURCE_NAME, TABLE_NAME, read_text, render
from autotune.tables.table import Table

# What is said of the values, which is replaced with them: assignments, and the middle of the docstring.
_STATED = (PROVENANCE_NAME, SOURCE_NAME, "MODELLED", LIMIT_NAME)
# Its mark is missing in the headers of version 0.1.
_NOTE = re.compile(
    r'(?:(?<=TPU\.\n\n)|(?<=TPU\.\r\n\r\n))(?P<said>(?:(?!""").)*?)\r?\n\r?\n'
    r"Written by tpu-autotune(?: \((?P<mark>[0-9a-f]{8})\))?(?=; stands in for\r?\n)",
    re.DOTALL,
)
_TITLE = re.compile(r'\A"""(?:Tuned block sizes for ragged paged|Block sizes of JAX\'s) .*"""')


class _Edit(NamedTuple):
    """What takes the place of the bytes from start to end of a file."""

    start: int
    end: int
    text: str


class _Source:
    """A module's bytes, and where its nodes are in them."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._lines = [0]
        self._lines += [match.end() for match in re.finditer(rb"\r\n|\r|\n", data)]
        self.newline = "\r\n" if b"\r\n" in data else "\n"
        body = ast.parse(data).body
        targets = ((node, node.targets) for node in body if isinstance(node, ast.Assign))
        self.values = {
            each.id: node.value for node, names in targets for each in names if isinstance(each, ast.Name)
        }

    def span(self, node: ast.expr) -> tuple[int, int]:
        """From which byte to which a node is."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self.data[start:end].decode()


def table_alone(data: bytes) -> bool:
    """Whether a file is a table as this version of autotune writes them, and nothing was added by hand."""
    nothing = Table(dialect=JAX, devices={}, provenance={SOURCE_NAME: ""})
    rows = render(nothing, "Block sizes of JAX's own.").encode()
    try:
        return _beside_table(data) in map(_beside_table, (jax_module.render({}, "", [""]).encode(), rows))
    except (SyntaxError, ValueError, RecursionError, MemoryError, KeyError):
        return False


def _beside_table(data: bytes) -> str:
    """What there is in a file beside a table and what is said of it; comments in the table are."""
    source = _Source(data)
    edits = [
        _Edit(*source.span(value), _comments(source.text(value)))
        for name, value in source.values.items()
        if name in (TABLE_NAME, *_STATED)
    ]
    rest = _edited(data, edits).decode("utf-8-sig").replace("\r\n", "\n")
    note = _NOTE.search(rest)
    if note and not _added_to(note):
        rest = rest[: note.start()] + rest[note.end() :]
    return _TITLE.sub("", rest)


def _added_to(note: re.Match[str]) -> bool:
    """Whether a header's lines are not those that autotune wrote."""
    return note["mark"] not in (None, jax_module.header_mark(note["said"].replace("\r\n", "\n")))


def _comments(text: str) -> str:
    return "".join(re.findall(r"#[^\n]*", re.sub(r"'[^'\n]*'|\"[^\"\n]*\"", "", text)))


def patched(data: bytes, origin: str, written: str) -> bytes:
    """A file with the rows of another, and what that says of them, where it says something of that kind.

    data: the file, a table of the jax dialect. origin: its name, for messages. written: the text of the
    module whose rows it is to have; rows that this does not have stay.

    Raises:
      UsageError: the file is not written in a way that its rows can be changed in, or has one name for
        several generations that now differ.
    """
    refused = f"{origin!r} holds more than a table, and its rows cannot be changed in place"
    wanted = read_text(written, origin)
    try:
        held = read_text(data.decode("utf-8-sig"), origin)
        source, other = _Source(data), _Source(written.encode())
        table = source.values[TABLE_NAME]
        if not isinstance(table, ast.Dict):
            raise UsageError(f"{refused}: name another file with -o")
        devices = _renamed(held, wanted, refused)
        edits = [*_stated(source, other, refused), *_table_edits(source, table, devices)]
        done = _edited(data, edits)
        found = read_text(done.decode("utf-8-sig"), origin)
    except (SyntaxError, ValueError, RecursionError, MemoryError, KeyError, LiteralError) as error:
        raise UsageError(f"{refused} ({first_line(error)}): name another file with -o") from None
    expected = {name: dict(rows) for name, rows in held.devices.items()}
    for name, rows in devices.items():
        expected.setdefault(name, {}).update(rows)
    if found.devices != expected:
        raise UsageError(f"{refused}: name another file with -o")
    return done


def _renamed(held: Table, wanted: Table, refused: str) -> dict[str, Rows]:
    """The wanted rows by the device names that a file has for them."""
    devices: dict[str, Rows] = {}
    for name, rows in wanted.devices.items():
        own = {name} & held.devices.keys() or {held.device_of(g) for g in JAX.generations(name)} - {None}
        for shared in own - {name}:
            if len({*JAX.generations(shared or ""), *JAX.generations(name)}) > 1:
                raise UsageError(f"{refused}: its {shared!r} and {name!r} stand for different generations")
        devices[min(map(str, own), default=name)] = rows
    return devices


def _stated(source: _Source, other: _Source, refused: str) -> Iterator[_Edit]:
    """Edits of what is said of the values."""
    for name in _STATED:
        if name in source.values:
            if name not in other.values:
                raise UsageError(f"{refused}: it says {name}, and other --names would not")
            yield _Edit(*source.span(source.values[name]), other.text(other.values[name]))
    text = source.data.decode()
    note, instead = _NOTE.search(text), _NOTE.search(other.data.decode())
    if note and instead:
        if _added_to(note):
            raise UsageError(
                f"{refused}: lines of its header, above 'Written by', were changed by hand: put them below "
                "the docstring as comments, and the header as it was"
            )
        start, end = (len(text[:at].encode()) for at in note.span())
        yield _Edit(start, end, instead[0].replace("\n", source.newline))
        text = text[: note.start()] + text[note.end() :]
    # A word of the old values that stays would be said of the new ones.
    if stays := _claims(text) - _claims(other.data.decode()):
        raise UsageError(f"{refused}: it says {min(stays)} in words that are not autotune's")


def _claims(text: str) -> set[str]:
    """The words by which a module says where its values come from."""
    return set(re.findall(r"\b(MEASURED|MODELLED|INTERPRETED)\b:", text.partition(f"\n{TABLE_NAME}")[0]))


def _table_edits(source: _Source, table: ast.Dict, devices: Mapping[str, Rows]) -> Iterator[_Edit]:
    """Edits of the rows: other values where they stand, new ones after the last of their device."""
    held = {ast.literal_eval(k): v for k, v in zip(table.keys, table.values, strict=True) if k is not None}
    new: list[str] = []
    for name, rows in devices.items():
        inside = held.get(name)
        if inside is None:
            lines = [f"        {tuple(key)!r}: {tuple(blocks)!r}," for key, blocks in rows.items()]
            new += [f"    {name!r}: {{", *lines, "    },"]
        elif isinstance(inside, ast.Dict):
            yield from _row_edits(source, inside, dict(rows))
    if new:
        yield from _appended(source, table, new)


def _row_edits(source: _Source, device: ast.Dict, rows: dict[Key, BlockSizes]) -> Iterator[_Edit]:
    known = set()
    for key, value in zip(device.keys, device.values, strict=True):
        at = ast.literal_eval(key) if key is not None else None
        known.add(at)
        if at in rows and tuple(rows[at]) != ast.literal_eval(value):
            yield _Edit(*source.span(value), repr(tuple(rows[at])))
    if new := {key: blocks for key, blocks in rows.items() if tuple(key) not in known}:
        first = next((key for key in device.keys if key is not None), None)
        indent = " " * (first.col_offset if first is not None else 8)
        quote = '"' if first is not None and '"' in source.text(first) else "'"
        texts = [f"{tuple(key)!r}: {tuple(blocks)!r}".replace("'", quote) for key, blocks in new.items()]
        yield from _appended(source, device, [f"{indent}{text}," for text in texts])


def _appended(source: _Source, inside: ast.Dict, lines: list[str]) -> Iterator[_Edit]:
    """Edits that add lines before the closing brace of a dict."""
    closing = source.span(inside)[1] - 1
    if inside.values:
        end = source.span(inside.values[-1])[1]
        if b"," not in re.sub(rb"#[^\r\n]*", b"", source.data[end:closing]):
            yield _Edit(end, end, ",")
    before = source.data[:closing]
    indent = len(before) - len(before.rstrip(b" \t"))
    at_start = closing - indent == 0 or before[: closing - indent][-1:] in (b"\n", b"\r")
    at = closing - indent if at_start else closing
    text = source.newline.join(lines) + source.newline
    yield _Edit(at, at, text if at_start else source.newline + text)


def _edited(data: bytes, edits: list[_Edit]) -> bytes:
    parts, at = [], 0
    for edit in sorted(edits, key=lambda edit: edit[:2]):
        parts += [data[at : edit.start], edit.text.encode()]
        at = edit.end
    return b"".join([*parts, data[at:]])
