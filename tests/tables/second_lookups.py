"""The public look-ups a second time, from descriptions of their rules, for a comparison with `tables.rules`.

Nothing of the product is used here, and numbers are found by counting up, not by its arithmetic. Each rule is
a function of a call to (key or None, default pages, default queries), or None where the look-up fails.
"""

from __future__ import annotations

from typing import Any

BITS = {"float32": 32, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8, "int8": 8, "int4": 4}
BITS["float4_e2m1fn"] = 4


def power(x: int) -> int:
    """Doubles 1 until it is no less."""
    found = 1
    while found < x:
        found += found
    return found


def upto(x: int, step: int) -> int:
    """The first multiple of a step that is no less."""
    found = 0
    while found < x:
        found += step
    return found


def jax(c: dict[str, Any], generation: str) -> Any:
    key = (c["q_dtype"], c["kv_dtype"], power(c["q"]), power(c["kv"]), upto(c["dim"], 128))
    key += (power(c["page"]), power(c["tokens"]), power(c["page"] * c["pages"]))
    pages = 32 if generation == "v4" else 128
    return None if generation == "v4" else key, pages, 32


def xla(c: dict[str, Any], generation: str, version: int) -> Any:
    key, pages, queries = jax(c, generation)
    if generation == "v4":
        return key, pages, queries
    if version == 9497:
        key = (*key[:2], c["q"], c["kv"], *key[4:7], c["page"] * c["pages"])
    q_size, kv_size = BITS[c["q_dtype"]] / 8, BITS[c["kv_dtype"]] / 8

    def vmem(pages: int) -> float:
        block_of_queries = 32 * c["q"] * c["dim"] * q_size
        block_of_kv = 2 * pages * c["page"] * (2 * c["kv"]) * c["dim"] * kv_size
        in_a_group = c["kv"] if version == 9346 else c["q"] // c["kv"]
        maximum = c["kv"] * 32 * 2 * in_a_group * 128 * 4
        total = maximum
        accumulator = 32 * c["q"] * c["dim"] * 4
        return 4 * block_of_queries + block_of_kv + maximum + total + accumulator

    while pages and vmem(pages) >= 2**26:
        pages //= 2
    return key, pages or 1, queries


def inference(
    c: dict[str, Any],
    generation: str,
    *,
    text: bool,
    narrow: bool = False,
    aligned: bool = True,
    v7_tokens: int = 4096,
    tokens: int = 2048,
    own_page: bool = False,
    never: str = "",
) -> Any:
    if narrow and c["dim"] != 64:
        return None
    in_a_word, kv_in_a_word = 32 // BITS[c["q_dtype"]], 32 // BITS[c["kv_dtype"]]
    q = power(upto(c["q"] // c["kv"], in_a_word) * c["kv"])
    kv = power(upto(c["kv"], kv_in_a_word)) if narrow else power(upto(c["kv"] * 2, kv_in_a_word)) // 2
    dim = upto(c["dim"], 128) if aligned and not narrow else c["dim"]
    length: Any = power(c["page"] * c["pages"])
    if text:
        length = "max_model_len-" + str(length) + "-sw-" + str(c["window"])
    page = power(c["page"])
    key = (
        page,
        "q_" + c["q_dtype"] + "_kv_" + c["kv_dtype"],
        "q_head-" + str(q) + "_kv_head-" + str(kv) + "_head-" + str(dim),
        length,
    )
    of_tokens = {"v4": 512, "v7x": v7_tokens}.get(generation, tokens)
    return None if generation == never else key, of_tokens // (c["page"] if own_page else page), 32


def sglang(c: dict[str, Any], generation: str, *, finds: bool = True) -> Any:
    key = (c["q_dtype"], c["kv_dtype"], power(c["q"]), power(c["kv"]), upto(c["dim"], 128))
    key += (power(c["page"]), power(c["tokens"]))
    consulted = finds and generation != "v4"
    return key if consulted else None, (512 if generation == "v4" else 1024) // c["page"], 32


FIRST_WORDS = {"v4": "TPU v4", "v5e": "TPU v5", "v5p": "TPU v5", "v6e": "TPU v6"}
STACKS = {"v4": "TPU v4", "v5e": "TPU v5e", "v5p": "TPU v5", "v6e": "TPU v6e", "v7x": "TPU v7"}
_INT = {"text": False}

# Name to (the rule, which device name a generation asks for, whether a row's value is cut to the call).
SECOND: dict[str, tuple[Any, dict[str, str], bool]] = {
    "jax-2025-04": (jax, FIRST_WORDS, True),
    "jax-0.10": (jax, {**FIRST_WORDS, "v7x": "TPU7x"}, True),
    "jax-0.12": (jax, {**FIRST_WORDS, "v7x": "TPU v7"}, True),
    "pytorch-xla-9346": (lambda c, g: xla(c, g, 9346), FIRST_WORDS, True),
    "pytorch-xla-9372": (lambda c, g: xla(c, g, 9372), FIRST_WORDS, True),
    "pytorch-xla-9497": (lambda c, g: xla(c, g, 9497), FIRST_WORDS, True),
    "stand-in": (
        lambda c, g: ((jax(c, "v6e")[0]), *jax(c, g)[1:]),
        {g: f"TPU {g}" for g in STACKS},
        True,
    ),
    "tpu-commons-2025-08": (
        lambda c, g: inference(c, g, **_INT, aligned=False, never="v4"),
        FIRST_WORDS,
        True,
    ),
    "sglang-jax-2025-09-16": (
        lambda c, g: inference(c, g, **_INT, aligned=False, never="v4", tokens=1024),
        FIRST_WORDS,
        True,
    ),
    "tpu-commons-2025-09-10": (lambda c, g: inference(c, g, **_INT, never="v7x"), STACKS, True),
    "tpu-commons-2025-09-22": (lambda c, g: inference(c, g, **_INT), STACKS, True),
    "tpu-inference-2025-09": (lambda c, g: inference(c, g, **_INT, own_page=True), STACKS, True),
    "tpu-inference-2025-12": (lambda c, g: inference(c, g, text=True), STACKS, False),
    "tpu-inference-2026-01": (lambda c, g: inference(c, g, text=True), STACKS, True),
    "tpu-inference-hd64-2025-10": (
        lambda c, g: inference(c, g, **_INT, narrow=True, own_page=True),
        STACKS,
        True,
    ),
    "tpu-inference-hd64-2025-12": (lambda c, g: inference(c, g, text=True, narrow=True), STACKS, False),
    "tpu-inference-hd64-2026-01": (lambda c, g: inference(c, g, text=True, narrow=True), STACKS, True),
    "sglang-jax-2025-09-17": (lambda c, g: sglang(c, g, finds=False), FIRST_WORDS, True),
    "sglang-jax-2025-10": (sglang, {**FIRST_WORDS, "v7x": "TPU7x"}, True),
    "sglang-jax-2026-01": (sglang, STACKS, True),
}


def answer(name: str, devices: dict[str, dict[Any, Any]], generation: str, c: dict[str, Any]) -> Any:
    """((pages, queries), whether a row has it) of a call, or None where the look-up fails."""
    rule, names, cut = SECOND[name]
    if generation not in names or (said := rule(c, generation)) is None:
        return None
    key, pages, queries = said
    row = devices.get(names[generation], {}).get(key) if key else None
    if row:
        pages, queries = row
        if not cut:
            return (pages, queries), True
    return (min(pages, c["pages"]), min(queries, c["tokens"])), row is not None
