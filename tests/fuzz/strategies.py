"""Inputs made from sound ones, by hypothesis: it chooses the changes, and shortens what finds something."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from tests.timing.xspace import field, varint, xspace

MAX_INPUT = 1 << 16
# Now and then an input is long: what grows faster than its input shows there.
LONG_ONE_IN, LONG_BYTES = 300, 1 << 20

_NUMBERS = (
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
_TEXTS = (
    *("\x00", "\n", "\r", "\t", "\x0b", "\x1b[31m", "\ufeff", "\\", "'", '"', "\u2028", "\u202e"),
    *("\U0001f600", '"""', "\\u0000", "%s{}", "__import__('os').system('touch executed')", "eval("),
    *("../../", "A" * 300),
)
_NO_TEXTS = (b"\xff", b"\xc3", b"\xed\xa0\x80")  # that are UTF-8
_BRACKETS = (b"[", b"{", b"(", b'{"a":', b"{1:", b"((", b"]", b"}", b")", b",", b"-", b">", b"#", b"1,")
_DEPTHS = (2, 5, 20, 950, 1000, 20_000)
_WORDS = re.compile(rb"\d+(?:\.\d+)?|\w+|\W")


class Change(NamedTuple):
    """at: where, modulo the input's length. length: bytes that go; None for the next number or word."""

    at: int
    length: int | None
    new: bytes

    def apply(self, data: bytes) -> bytes:
        start = self.at % (len(data) + 1)
        if self.length is not None:
            end = start + self.length
        elif match := _WORDS.search(data, start):
            start, end = match.span()
        else:
            end = start
        return data[:start] + self.new + data[end:]


_PLACES = st.integers(0, MAX_INPUT)


def mutated(seeds: Sequence[bytes], tokens: Sequence[bytes] = ()) -> st.SearchStrategy[bytes]:
    """Sound inputs with some changes. tokens: words of their format."""
    lengths = st.sampled_from((None, None, 0, 1, 2, 8, 32, 128, 1024, MAX_INPUT))
    changes = st.lists(st.builds(Change, _PLACES, lengths, _new(seeds, tokens)), min_size=1, max_size=4)
    long = st.integers(1, LONG_ONE_IN).map(lambda number: number == LONG_ONE_IN)
    return st.builds(_changed, st.sampled_from(seeds), changes, long, _PLACES)


def _changed(data: bytes, changes: Sequence[Change], long: bool, at: int) -> bytes:
    for change in changes:
        data = change.apply(data)[:MAX_INPUT]
    if long:
        start = at % (len(data) + 1)
        unit = data[start : start + 1 + at % 100] or b"("
        data = data[:start] + unit * (LONG_BYTES // len(unit)) + data[start:]
    return data


def _new(seeds: Sequence[bytes], tokens: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """What comes in place of what goes."""
    words = [*tokens, *(text.encode() for text in (*_TEXTS, *_NUMBERS)), *_NO_TEXTS]
    deep = st.builds(
        lambda bracket, times: bracket * times, st.sampled_from(_BRACKETS), st.sampled_from(_DEPTHS)
    )
    parts = st.builds(
        lambda seed, at, length, times: seed[at % len(seed) :][:length] * times,
        st.sampled_from(seeds),
        _PLACES,
        st.sampled_from((1, 2, 8, 32, 128, 1024)),
        st.sampled_from((1, 1, 2, 50)),
    )
    powers = st.integers(0, 70).map(lambda bits: str(1 << bits).encode())
    return st.one_of(st.binary(max_size=8), st.sampled_from(words), powers, deep, parts)


def made(make: Callable[[random.Random], bytes]) -> st.SearchStrategy[bytes]:
    """Inputs of a function that chooses by a generator of random numbers."""
    return st.randoms(use_true_random=False).map(make)


# Profiles: bytes changed at random are seldom an XSpace, so most have wild fields in sound messages.

_MODULES = [("jit_rpa_p8_q32(123)", 0.0, 90.0), ("jit_rpa_p16_q32(45)", 100.0, 80.0)]
_OPERATIONS = [
    ("%kernel.1 = bf16[8] custom-call(x)", 1.0, 70.0),
    ("fusion", 2.0, 1.0),
    ("kernel.2", 101.0, 60.0),
]
_PLANES = ("/device:TPU:0", "/device:TPU:" + "9" * 5000, "/device:TPU:\u0663", "/device:TPU:-1", "/host:CPU")
_LINES = ("XLA Modules", "XLA Ops", "jit_rpa_p8_q32(1)", "%kernel.1 = x", "kernel")
_NAMES = (*_PLANES, *_LINES, "", "(", "\x1b[31m", "\x00", "%", "x" * 9999)
_FIELDS = (0, 1, 2, 3, 127, 128, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
_BYTES = (b"\xff\xfe", b"\x80", b"", b"\x00" * 40)


def sound_profiles() -> list[bytes]:
    tpu = {"XLA Modules": _MODULES, "XLA Ops": _OPERATIONS, "Steps": [("0", 0.0, 1.0)]}
    return [
        xspace([("/device:TPU:0", tpu), ("/host:CPU", {"python": [("call", 0.0, 1.0)]})]),
        xspace([("/device:TPU:1", {"XLA Modules": _MODULES[:1]})]),
        xspace([]) + b"\n\x00",
    ]


def profiles() -> st.SearchStrategy[bytes]:
    tokens = (b"/device:TPU:", b"XLA Modules", b"XLA Ops", b"\n\x00")
    return st.one_of(made(_wild_profile), mutated(sound_profiles(), tokens))


def _wild_profile(rng: random.Random) -> bytes:
    out = b""
    for _ in range(rng.choice((1, 1, 2, 5))):
        plane = field(2, _name(rng, "/device:TPU:0")) + _noise(rng)
        for _ in range(rng.choice((0, 1, 2, 3))):
            name = _name(rng, rng.choice(("XLA Modules", "XLA Ops")))
            line = field(2, name) + field(3, rng.choice(_FIELDS))
            for _ in range(rng.choice((0, 1, 2, 30))):
                fields = [field(number, rng.choice(_FIELDS)) for number in (1, 2, 3) if rng.random() < 0.9]
                line += field(4, b"".join(fields) + _noise(rng))
            plane += field(3, line + _noise(rng))
        for _ in range(rng.choice((0, 2, 3, 5))):
            known = rng.choice(_FIELDS)
            inside = field(1, rng.choice((known, rng.choice(_FIELDS)))) + field(2, _name(rng, "kernel.1"))
            plane += field(4, field(1, known) + field(2, inside))
        out += field(1, plane + _noise(rng))
    return out


def _name(rng: random.Random, usual: str) -> str | bytes:
    if rng.random() < 0.5:
        return usual
    return rng.choice(_NAMES) if rng.random() < 0.9 else rng.choice(_BYTES)


def _noise(rng: random.Random) -> bytes:
    """A field that the message may not have, or a part of one."""
    if rng.random() < 0.85:
        return b""
    number = rng.choice((1, 2, 3, 4, 5, 6, 7, 99, 2**29 - 1))
    return rng.choice(
        (
            field(number, rng.choice(_FIELDS)),
            field(number, b"\x08\x01" * 3),
            varint(number << 3 | 5) + b"1234",
        )
    )
