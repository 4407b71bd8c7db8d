"""Inputs made from sound ones: the same for the same target, seed and number."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

MAX_INPUT = 1 << 16
# One input in so many is long: what grows faster than its input shows there.
LONG_ONE_IN, LONG_BYTES = 500, 1 << 20

NUMBERS = tuple(
    text.encode()
    for text in (
        *(
            "0",
            "-1",
            "1",
            "2",
            "3",
            "255",
            "256",
            "4097",
            "65536",
            "65537",
            "1.5",
            "0.0",
            "-0.0",
            "1e5",
            "1.5e999",
        ),
        *("2147483647", "2147483648", "4294967296", "9223372036854775807", "9223372036854775808"),
        *("1e999", "-1e999", "NaN", "Infinity", "-Infinity", "1" + "0" * 20, "9" * 400, "9" * 5000),
        *(
            "0x10",
            "1_0",
            "1__0",
            "1_",
            "007",
            "\u0663",
            "\u00b2",
            "\uff11",
            "true",
            "null",
            "None",
            "True",
            '"1"',
        ),
    )
)
TEXT = (
    *(
        b"\x00",
        b"\n",
        b"\r",
        b"\t",
        b"\x0b",
        b"\x1b[31m",
        b"\xff",
        b"\xc3",
        b"\xef\xbb\xbf",
        b"\\",
        b"'",
        b'"',
    ),
    *(
        "\u2028".encode(),
        "\u202e".encode(),
        "\U0001f600".encode(),
        b"\xed\xa0\x80",
        b'"""',
        b"\\u0000",
        b"%s{}",
    ),
    *(b"__import__('os').system('touch executed')", b"eval(", b"../../", b"A" * 300),
)
BRACKETS = (b"[", b"{", b"(", b'{"a":', b"{1:", b"((", b"]", b"}", b")", b",", b"-", b">", b"#", b"1,")
_RUN_OF_DIGITS = re.compile(rb"\d+(?:\.\d+)?")
_WORD = re.compile(rb"\w+")
_INTERESTING = bytes((0, 1, 0x7F, 0x80, 0xFF, 0x20, 0x0A, 0x22, 0x27))


class Mutator:
    """Makes inputs of some sound ones. tokens: words of their format."""

    def __init__(self, seeds: Sequence[bytes], tokens: Sequence[bytes] = ()) -> None:
        self._seeds = seeds
        self._tokens = (*tokens, *TEXT)
        self._operations: tuple[Callable[[random.Random, bytes], bytes], ...] = (
            self._flip,
            self._byte,
            self._cut_out,
            self._truncate,
            self._double,
            self._insert,
            self._overwrite,
            self._splice,
            self._number,
            self._number,
            self._word,
            self._swap,
            self._nest,
        )

    def input(self, name: str, seed: int, number: int) -> bytes:
        """The input of a target with this number."""
        rng = random.Random(f"{name}:{seed}:{number}")
        data = rng.choice(self._seeds)
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4, 6, 10))):
            data = rng.choice(self._operations)(rng, data)[:MAX_INPUT]
        if rng.randrange(LONG_ONE_IN) == 0:
            start = rng.randrange(len(data) + 1)
            unit = data[start : start + rng.choice((1, 2, 5, 20, 200))] or b"("
            data = data[:start] + unit * (LONG_BYTES // len(unit)) + data[start:]
        return data

    def _flip(self, rng: random.Random, data: bytes) -> bytes:
        if not data:
            return b"\x00"
        out = bytearray(data)
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
        return bytes(out)

    def _byte(self, rng: random.Random, data: bytes) -> bytes:
        if not data:
            return b"\xff"
        out = bytearray(data)
        out[rng.randrange(len(out))] = rng.choice(_INTERESTING)
        return bytes(out)

    def _range(self, rng: random.Random, data: bytes) -> tuple[int, int]:
        start = rng.randrange(len(data) + 1)
        return start, min(len(data), start + rng.choice((1, 2, 4, 8, 32, 128, 1024)))

    def _cut_out(self, rng: random.Random, data: bytes) -> bytes:
        start, end = self._range(rng, data)
        return data[:start] + data[end:]

    def _truncate(self, rng: random.Random, data: bytes) -> bytes:
        at = rng.randrange(len(data) + 1)
        return data[:at] if rng.random() < 0.8 else data[at:]

    def _double(self, rng: random.Random, data: bytes) -> bytes:
        start, end = self._range(rng, data)
        return data[:start] + data[start:end] * rng.choice((2, 2, 3, 50)) + data[end:]

    def _insert(self, rng: random.Random, data: bytes) -> bytes:
        at = rng.randrange(len(data) + 1)
        return data[:at] + rng.choice(self._tokens) + data[at:]

    def _overwrite(self, rng: random.Random, data: bytes) -> bytes:
        at, token = rng.randrange(len(data) + 1), rng.choice(self._tokens)
        return data[:at] + token + data[at + len(token) :]

    def _splice(self, rng: random.Random, data: bytes) -> bytes:
        other = rng.choice(self._seeds)
        start, end = self._range(rng, other)
        at, until = self._range(rng, data)
        return data[:at] + other[start:end] + data[until:]

    def _in_place_of(self, rng: random.Random, data: bytes, pattern: re.Pattern[bytes], new: bytes) -> bytes:
        # From a place on, as all of a long input would take its time.
        match = pattern.search(data, rng.randrange(len(data) + 1)) or pattern.search(data)
        return data[: match.start()] + new + data[match.end() :] if match else data + new

    def _number(self, rng: random.Random, data: bytes) -> bytes:
        new = rng.choice(NUMBERS) if rng.random() < 0.7 else str(1 << rng.randrange(70)).encode()
        return self._in_place_of(rng, data, _RUN_OF_DIGITS, new)

    def _word(self, rng: random.Random, data: bytes) -> bytes:
        return self._in_place_of(rng, data, _WORD, rng.choice(self._tokens))

    def _swap(self, rng: random.Random, data: bytes) -> bytes:
        lines = data.split(b"\n", 64)
        if len(lines) < 3:
            return data[::-1] if rng.random() < 0.1 else self._flip(rng, data)
        a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[a], lines[b] = lines[b], lines[a]
        return b"\n".join(lines)

    def _nest(self, rng: random.Random, data: bytes) -> bytes:
        at = rng.randrange(len(data) + 1)
        deep = rng.choice(BRACKETS) * rng.choice((2, 5, 9, 20, 900, 950, 1000, 20000))
        return data[:at] + deep + data[at:]
