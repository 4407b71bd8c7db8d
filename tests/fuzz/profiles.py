"""Bytes of profiles: sound ones, ones with wild fields in sound messages, and bytes changed at random."""

from __future__ import annotations

import random

from tests.fuzz.mutate import Mutator
from tests.timing.xspace import field, varint, xspace

_MODULES = [("jit_rpa_p8_q32(123)", 0.0, 90.0), ("jit_rpa_p16_q32(45)", 100.0, 80.0)]
_OPERATIONS = [
    ("%kernel.1 = bf16[8] custom-call(x)", 1.0, 70.0),
    ("fusion", 2.0, 1.0),
    ("kernel.2", 101.0, 60.0),
]
_PLANES = ("/device:TPU:0", "/device:TPU:" + "9" * 5000, "/device:TPU:\u0663", "/device:TPU:-1", "/host:CPU")
_LINES = ("XLA Modules", "XLA Ops", "jit_rpa_p8_q32(1)", "%kernel.1 = x", "kernel")
_NAMES = (*_PLANES, *_LINES, "", "(", "\x1b[31m", "\x00", "%", "x" * 9999)
_NUMBERS = (0, 1, 2, 3, 127, 128, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
_BYTES = (b"\xff\xfe", b"\x80", b"", b"\x00" * 40)


def sound() -> list[bytes]:
    tpu = {"XLA Modules": _MODULES, "XLA Ops": _OPERATIONS, "Steps": [("0", 0.0, 1.0)]}
    return [
        xspace([("/device:TPU:0", tpu), ("/host:CPU", {"python": [("call", 0.0, 1.0)]})]),
        xspace([("/device:TPU:1", {"XLA Modules": _MODULES[:1]})]),
        xspace([]) + b"\n\x00",
    ]


_MUTATOR = Mutator(sound(), (b"/device:TPU:", b"XLA Modules", b"XLA Ops", b"\n\x00"))


def profile(name: str, seed: int, number: int) -> bytes:
    """A profile for an input's number: most have wild fields, as changed bytes seldom are an XSpace."""
    if number % 4 == 0:
        return _MUTATOR.input(name, seed, number)
    rng = random.Random(f"{name}:{seed}:{number}")
    out = b""
    for _ in range(rng.choice((1, 1, 2, 5))):
        plane = field(2, _name(rng, "/device:TPU:0")) + _noise(rng)
        for _ in range(rng.choice((0, 1, 2, 3))):
            line = field(2, _name(rng, rng.choice(("XLA Modules", "XLA Ops")))) + field(
                3, rng.choice(_NUMBERS)
            )
            for _ in range(rng.choice((0, 1, 2, 30))):
                fields = [field(number, rng.choice(_NUMBERS)) for number in (1, 2, 3) if rng.random() < 0.9]
                line += field(4, b"".join(fields) + _noise(rng))
            plane += field(3, line + _noise(rng))
        for _ in range(rng.choice((0, 2, 3, 5))):
            known = rng.choice(_NUMBERS)
            inside = field(1, rng.choice((known, rng.choice(_NUMBERS)))) + field(2, _name(rng, "kernel.1"))
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
            field(number, rng.choice(_NUMBERS)),
            field(number, b"\x08\x01" * 3),
            varint(number << 3 | 5) + b"1234",
        )
    )
