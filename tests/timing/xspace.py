"""Bytes of an XSpace, encoded to the documented xplane.proto, so that tests can say what a profile holds.

Field numbers: XSpace.planes 1, XPlane.name 2, .lines 3, .event_metadata 4 (a map of key 1 to value 2),
XLine.name 2, .timestamp_ns 3, .events 4, XEvent.metadata_id 1, .offset_ps 2, .duration_ps 3,
XEventMetadata.id 1, .name 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# (name, start in microseconds after the line's start, duration in microseconds)
Event = tuple[str, float, float]
Lines = Mapping[str, Sequence[Event]]

LINE_START_NS = 1_700_000_000_000_000_000


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    payload = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def plane(name: str, lines: Lines) -> bytes:
    ids = {event: i for i, event in enumerate({e[0]: None for events in lines.values() for e in events}, 1)}
    out = field(2, name)
    for line, events in lines.items():
        body = field(2, line) + field(3, LINE_START_NS)
        for event, start, duration in events:
            picoseconds = field(2, round(start * 1e6)) + field(3, round(duration * 1e6))
            body += field(4, field(1, ids[event]) + picoseconds)
        out += field(3, body)
    for event, number in ids.items():
        out += field(4, field(1, number) + field(2, field(1, number) + field(2, event)))
    return out


def xspace(planes: Sequence[tuple[str, Lines]]) -> bytes:
    return b"".join(field(1, plane(name, lines)) for name, lines in planes)
