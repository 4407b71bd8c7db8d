"""Look-ups as data: what each public version asks a table for, and what it answers without a row.

Read in the history of the repositories that are named; commits are theirs. A file's own look-up is told by
the text of its functions (`fingerprint`), or by what its PROVENANCE says under "lookup".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from autotune.errors import UsageError
from autotune.kernel.jax_rpa.call import default_blocks
from autotune.kernel.problem import BlockSizes, next_power_of_2
from autotune.tables import render
from autotune.tables.dialects import INFERENCE, JAX, SGLANG, Dialect
from autotune.tables.fingerprint import fingerprint
from autotune.tables.keys import (
    DTYPE_BITS,
    Call,
    InferenceKey,
    Key,
    Rows,
    call_of,
    half_rounded,
    head_part,
    inference,
    least_length,
    rounded,
    sglang,
    some_call_pads_to,
)
from autotune.tpu.generations import GENERATIONS, MIB

Names = Mapping[str, tuple[str, ...]]


class Found(NamedTuple):
    """What a look-up answers. row: whether the table has the key. value: before it is cut to the call."""

    blocks: BlockSizes
    key: Key
    device: str | None
    row: bool
    value: BlockSizes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """One version of a look-up.

    name: what --lookup takes. whose: the projects that have or had it.
    since, until: the commit or release that brought it and the one that replaced it; until is None where it
    is the newest.
    unread: since when nothing in its project reads the table any more; None where something does.
    key: the key of a call; None where the look-up refuses the call.
    asks: generation to the device names that are asked there, the first that the table has; none for a
    generation on which the look-up fails.
    skips: generations on which rows are never consulted.
    default: (pages, queries) of a call without a row, by the TPU's version.
    cuts_rows: whether a row's value is cut down to the call, as defaults always are.
    nearest: whether a missing key is answered with the nearest of its layout.
    narrow: of tpu-inference's kernel for a head_dim of 64.
    prints: fingerprints of the functions.
    """

    name: str
    dialect: Dialect
    whose: str
    since: str
    until: str | None = None
    unread: str | None = None
    key: Callable[[Call], Key | None]
    asks: Names
    skips: frozenset[str] = frozenset()
    default: Callable[[int, Call], tuple[int, int]]
    cuts_rows: bool = True
    nearest: bool = False
    narrow: bool = False
    prints: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def history(self) -> str:
        """Whose it is, and from when to when."""
        until = f", until {self.until}" if self.until else ""
        return f"{self.whose}, since {self.since}{until}"

    def owners(self, device: str) -> tuple[str, ...]:
        """The generations on which a device name is asked for."""
        return tuple(generation for generation, names in self.asks.items() if device in names)

    def asked(self, key: Key) -> Key | None:
        """The key that a call with a key's own numbers asks for; None where there is no such call."""
        call = call_of(key)
        if call is None or (own := self.key(call)) is None:
            return None
        asked = call_of(own)
        assert asked is not None
        length = least_length(asked.page_size, asked.max_model_len)
        return own if length == asked.max_model_len else self.key(asked._replace(max_model_len=length))

    def simplify(self, key: Key) -> Key | None:
        """The key itself if some call asks for it, else as `asked`."""
        asked = self.asked(key)
        if asked == key or not isinstance(asked, InferenceKey):
            return asked
        call, other = call_of(key), call_of(asked)
        assert call and other
        heads = (call.num_q_heads, call.num_kv_heads)
        if some_call_pads_to(heads, self.narrow, call.q_dtype, call.kv_dtype):
            return asked._replace(heads=head_part(*heads, other.head_dim))
        return asked

    def rows(self, devices: Mapping[str, Rows], generation: str) -> tuple[str | None, Rows]:
        """The device name that is asked on a generation and that the table has, and the rows consulted."""
        device = next((name for name in self.asks.get(generation, ()) if name in devices), None)
        return device, {} if device is None or generation in self.skips else devices[device]

    def find(self, devices: Mapping[str, Rows], generation: str, call: Call) -> Found | None:
        """What it answers to a call on a generation, the nearest left out; None where it fails."""
        key = self.key(call)
        if key is None or generation not in self.asks:
            return None
        device, rows = self.rows(devices, generation)
        row = rows.get(key)
        value = row or BlockSizes(*self.default(GENERATIONS[generation].version, call))
        cut = value.clamped(call.pages_per_seq, call.max_num_tokens)
        return Found(value if row and not self.cuts_rows else cut, key, device, row is not None, value)


def _meant() -> Names:
    """For each generation the jax dialect's names that mean it, those that mean it alone first."""
    return {
        generation: tuple(
            sorted((n for n, of in JAX.names.items() if generation in of), key=lambda n: len(JAX.names[n]))
        )
        for generation in GENERATIONS
    }


def _jax_default(version: int, call: Call) -> tuple[int, int]:
    return default_blocks(version)


def _halved_default(version: int, call: Call, *, by_group: bool) -> tuple[int, int]:
    """pytorch/xla's: pages halved until its estimate of VMEM is below 64 MiB.

    by_group: the running maximum and sum counted with the query heads of a KV head, or, as first written,
    with the KV heads.
    """
    pages, queries = default_blocks(version)
    if version == 4:
        return pages, queries
    q_heads, kv_heads, dim = call.num_q_heads, call.num_kv_heads, call.head_dim
    kept = kv_heads * queries * 2 * (q_heads // kv_heads if by_group else kv_heads) * 128 * 4
    of_queries = queries * q_heads * dim * (4 * DTYPE_BITS[call.q_dtype] // 8 + 4)
    page = 4 * call.page_size * kv_heads * dim * DTYPE_BITS[call.kv_dtype] // 8
    while of_queries + 2 * kept + pages * page >= 64 * MIB:
        pages //= 2
    return max(pages, 1), queries


def _tokens_default(
    version: int, call: Call, *, tokens: int, v7_tokens: int | None = None, rounded_page: bool = True
) -> tuple[int, int]:
    """The stacks': so many tokens' pages, 512 on v4. rounded_page: of the key's page_size, not the call's."""
    tokens = 512 if version == 4 else v7_tokens if version == 7 and v7_tokens else tokens
    return tokens // (next_power_of_2(call.page_size) if rounded_page else call.page_size), 32


_FIRST_WORDS: Names = {
    "v4": ("TPU v4",),
    "v5e": ("TPU v5",),
    "v5p": ("TPU v5",),
    "v6e": ("TPU v6",),
}
_WITH_V7X: Names = {**_FIRST_WORDS, "v7x": ("TPU7x",)}
_STACK: Names = {
    "v4": ("TPU v4",),
    "v5e": ("TPU v5e",),
    "v5p": ("TPU v5", "TPU v5p"),
    "v6e": ("TPU v6e",),
    "v7x": ("TPU v7",),
}
_V4 = frozenset({"v4"})
_jax = partial(Rule, dialect=JAX, key=rounded, skips=_V4, default=_jax_default)
_xla = partial(Rule, dialect=JAX, whose="pytorch/xla", asks=_FIRST_WORDS, skips=_V4)
_inference = partial(
    Rule,
    dialect=INFERENCE,
    asks=_STACK,
    default=partial(_tokens_default, tokens=2048, v7_tokens=4096),
)
_sglang = partial(
    Rule,
    dialect=SGLANG,
    whose="sglang-jax",
    key=sglang,
    skips=_V4,
    default=partial(_tokens_default, tokens=1024, rounded_page=False),
)

AUTOTUNE = Rule(
    name="autotune.tables",
    dialect=JAX,
    whose="tpu-autotune",
    since="its first release",
    key=rounded,
    asks=_meant(),
    default=_jax_default,
    nearest=True,
)
# A file without a look-up that is known: by its keys, under whatever names, and nothing more.
_BARE = dataclasses.replace(AUTOTUNE, name="", nearest=False)

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        AUTOTUNE,
        Rule(
            name="stand-in",
            dialect=JAX,
            whose="modules that `autotune emit` writes",
            since="its first release",
            key=rounded,
            asks={g: (render.device_name(g),) for g in GENERATIONS},
            default=_jax_default,
            prints=("86f40f471b397ebd",),
        ),
        _jax(
            name="jax-2025-04",
            whose="JAX; pytorch/xla until bea86eec2 (2025-06-13); tpu-inference's v2; ejkernel",
            since="JAX's 4adeec0fee (2025-04-22)",
            until="the jax that knows TPU7x",
            asks=_FIRST_WORDS,
            prints=("7257c7e0e198fbe2",),
        ),
        _jax(
            name="jax-0.10",
            whose="JAX",
            since="jax 0.10 or before",
            until="jax 0.12",
            asks=_WITH_V7X,
            prints=("c569f7c83612c529",),
        ),
        _jax(
            name="jax-0.12",
            whose="JAX",
            since="jax 0.12",
            asks={**_FIRST_WORDS, "v7x": ("TPU v7",)},
            prints=("f54671334084909a",),
        ),
        _xla(
            name="pytorch-xla-9346",
            since="bea86eec2 (2025-06-13)",
            until="77c40f3fb (2025-06-16)",
            key=rounded,
            default=partial(_halved_default, by_group=False),
            prints=("17e9768abcf300ae",),
        ),
        _xla(
            name="pytorch-xla-9372",
            since="77c40f3fb (2025-06-16)",
            until="31c4c2f23 (2025-07-23)",
            key=rounded,
            default=partial(_halved_default, by_group=True),
            prints=("9b6de2391f9127c3",),
        ),
        _xla(
            name="pytorch-xla-9497",
            since="31c4c2f23 (2025-07-23)",
            key=half_rounded,
            default=partial(_halved_default, by_group=True),
            prints=("4d52d49163f0afee",),
        ),
        _inference(
            name="tpu-commons-2025-08",
            whose="tpu_commons; sglang-jax from e67429ea (2025-09-11) to 131a7c8c (2025-09-16)",
            since="c2779e2a4 (2025-08-11)",
            until="9a980f60a (2025-09-10)",
            key=partial(inference, align=False, text=False),
            asks=_FIRST_WORDS,
            skips=_V4,
            default=partial(_tokens_default, tokens=2048),
            prints=("f5580e109e27ee57",),
        ),
        _inference(
            name="sglang-jax-2025-09-16",
            whose="sglang-jax",
            since="131a7c8c (2025-09-16)",
            until="a398921b (2025-09-17)",
            key=partial(inference, align=False, text=False),
            asks=_FIRST_WORDS,
            skips=_V4,
            default=partial(_tokens_default, tokens=1024),
            prints=("3ab8f945d46f67f6",),
        ),
        _inference(
            # For hours its names were refused, until 8f82e8105 of the same day.
            name="tpu-commons-2025-09-10",
            whose="tpu_commons",
            since="9a980f60a (2025-09-10)",
            until="2646d66f7 (2025-09-22)",
            key=partial(inference, text=False),
            skips=frozenset({"v7x"}),
            prints=("18584b437970c807",),
        ),
        _inference(
            name="tpu-commons-2025-09-22",
            whose="tpu_commons",
            since="2646d66f7 (2025-09-22)",
            until="a4aaaf120 (2025-09-23)",
            key=partial(inference, text=False),
            prints=("e52a43b17729565a",),
        ),
        _inference(
            name="tpu-inference-2025-09",
            whose="tpu_commons; tpu-inference v0.11.1 and v0.12.0; ejkernel's v3",
            since="a4aaaf120 (2025-09-23)",
            until="32c7601de (2025-12-17)",
            key=partial(inference, text=False),
            default=partial(_tokens_default, tokens=2048, v7_tokens=4096, rounded_page=False),
            prints=("7a06562775e06059", "984d4a682e6552c6"),
        ),
        _inference(
            name="tpu-inference-2025-12",
            whose="tpu-inference v0.13.2",
            since="32c7601de (2025-12-17)",
            until="baa70aa91 (2026-01-06)",
            key=inference,
            cuts_rows=False,
            prints=("1c179d338cf798ba",),
        ),
        _inference(
            name="tpu-inference-2026-01",
            whose="tpu-inference",
            since="baa70aa91 (2026-01-06)",
            unread="b2e416f06 (2026-03-19)",
            key=inference,
            prints=("37743ec9c7ae0c98",),
        ),
        _inference(
            name="tpu-inference-hd64-2025-10",
            whose="tpu-inference's kernel for a head_dim of 64",
            since="38a84e804 (2025-10-16)",
            until="32c7601de (2025-12-17)",
            key=partial(inference, narrow=True, text=False),
            default=partial(_tokens_default, tokens=2048, v7_tokens=4096, rounded_page=False),
            narrow=True,
            prints=("916f9981e9ac0132", "112e2ab7d658f0ca"),
        ),
        _inference(
            name="tpu-inference-hd64-2025-12",
            whose="tpu-inference's kernel for a head_dim of 64",
            since="32c7601de (2025-12-17)",
            until="baa70aa91 (2026-01-06)",
            key=partial(inference, narrow=True),
            cuts_rows=False,
            narrow=True,
            prints=("f99752c34415ec62",),
        ),
        _inference(
            name="tpu-inference-hd64-2026-01",
            whose="tpu-inference's kernel for a head_dim of 64",
            since="baa70aa91 (2026-01-06)",
            key=partial(inference, narrow=True),
            narrow=True,
            prints=("3c1d040f1f9f5c9f",),
        ),
        _sglang(
            # It puts the device's name into the key, which no row has.
            name="sglang-jax-2025-09-17",
            since="a398921b (2025-09-17)",
            until="af32f095 (2025-10-24)",
            asks=_FIRST_WORDS,
            skips=frozenset(GENERATIONS),
            prints=("9b8c817ed3b29a0e", "f2d490b55d9a1619"),
        ),
        _sglang(
            name="sglang-jax-2025-10",
            since="af32f095 (2025-10-24)",
            until="87cd71a8 (2026-01-14)",
            asks=_WITH_V7X,  # v7x since 153d9cdc (2025-11-24)
            prints=("011420dd4c0ac5a8", "ffe616a6796536a7"),
        ),
        _sglang(
            name="sglang-jax-2026-01",
            since="87cd71a8 (2026-01-14)",
            unread="da29e8bd (2026-04-17)",
            asks=_STACK,
            prints=("d45a897026d4cd2f", "825044e98d8b95b2"),
        ),
    )
}

UNROUNDED = RULES["pytorch-xla-9497"]  # the one whose keys have the heads of the call
_BY_PRINT = {printed: rule for rule in RULES.values() for printed in rule.prints}
# What a bare table of a dialect is looked up by, where something has to be said of it.
_NEWEST = {
    JAX.name: _BARE,
    INFERENCE.name: RULES["tpu-inference-2026-01"],
    SGLANG.name: RULES["sglang-jax-2026-01"],
}


def by_name(name: str, dialect: Dialect) -> Rule:
    """The look-up of this name.

    Raises:
      UsageError: there is none, or it is of another dialect than the table.
    """
    fitting = [rule.name for rule in RULES.values() if rule.dialect is dialect]
    if name not in fitting:
        what = f"is of the {RULES[name].dialect} dialect" if name in RULES else "is unknown"
        raise UsageError(
            f"look-up {name!r} {what}: for a table of the {dialect} dialect use {', '.join(fitting)}"
        )
    return RULES[name]


def recognised(text: str, stated: object, dialect: Dialect) -> Rule | None:
    """The look-up of a module: by its functions, else the one that its PROVENANCE states; None if unknown."""
    printed = fingerprint(text)
    if printed is None:
        rule = RULES.get(stated) if isinstance(stated, str) else None
    elif printed == fingerprint(render.FUNCTIONS):
        rule = RULES["stand-in"]
    else:
        rule = _BY_PRINT.get(printed)
    return rule if rule and rule.dialect is dialect else None


def newest(dialect: Dialect) -> Rule:
    """What tables of a dialect are answered by whose own look-up is not known.

    A table of the jax dialect is answered by its keys, under any name of the device, and with JAX's default.
    """
    return _NEWEST[dialect.name]
