"""Look-ups as data: the answers of every version, whose text it is, and what is unreachable by which."""

from __future__ import annotations

import random
import re

import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes

from autotune.errors import UsageError
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.tables import load, lookups
from autotune.tables import render as jax_module
from autotune.tables.dialects import DIALECTS, INFERENCE, JAX, SGLANG
from autotune.tables.fingerprint import fingerprint
from autotune.tables.keys import Call, SglangKey, inference_key
from autotune.tables.lookup import LookUp
from autotune.tables.source import read_text, render
from autotune.tables.table import Table
from autotune.tpu.generations import GENERATIONS
from tests.factories import published_rows
from tests.tables import second_lookups

LOOK_UPS = 1500
JAX_TEXT = open(tuned_block_sizes.__file__, encoding="utf-8").read()  # noqa: PTH123, SIM115


def calls(rng: random.Random, names: dict[str, str]):
    """Calls as servers make them, round and not."""
    for _ in range(LOOK_UPS):
        kv = rng.choice([1, 2, 3, 4, 5, 8, 16])
        page = rng.choice([16, 32, 64, 128, 256, 20, 100, 3000])
        yield (
            rng.choice([*names, "v7x", "v6e"]),
            {
                "q_dtype": rng.choice(["bfloat16", "float32", "float8_e5m2"]),
                "kv_dtype": rng.choice(["bfloat16", "float8_e4m3fn", "int8", "float4_e2m1fn"]),
                "q": kv * rng.choice([1, 2, 3, 4, 7, 8]),
                "kv": kv,
                "dim": rng.choice([64, 64, 128, 128, 80, 192, 256]),
                "page": page,
                "pages": rng.randint(1, 2000) if page < 64 else rng.randint(1, 40),
                "tokens": rng.choice([1, 7, 64, 512, 1000, 2048]),
                "window": rng.choice([None, None, 128]),
            },
        )


@pytest.mark.parametrize("name", second_lookups.SECOND)
def test_each_version_answers_as_a_second_implementation(name):
    """Half of the keys that the calls ask for have a row; values are larger and smaller than the calls."""
    rng = random.Random(name)
    rule = lookups.RULES[name]
    second, names, _ = second_lookups.SECOND[name]
    asked = list(calls(rng, names))
    devices = {device: {} for device in [*names.values(), "TPU v9"]}
    for generation, c in asked:
        said = second(c, "v6e")
        if said and said[0] and rng.random() < 0.5:
            devices[names.get(generation, "TPU v9")][said[0]] = (
                rng.choice([1, 8, 64]),
                rng.choice([1, 32, 512]),
            )
    make = rule.dialect.key_type
    table = Table(
        dialect=rule.dialect,
        devices={d: {make(*k): BlockSizes(*v) for k, v in rows.items()} for d, rows in devices.items()},
        rule=rule,
    )
    origins = []
    for generation, c in asked:
        call = Call(
            *(c[n] for n in ("q_dtype", "kv_dtype", "q", "kv", "dim", "page", "tokens")),
            c["page"] * c["pages"],
            c["window"],
        )
        found = rule.find(table.devices, generation, call)
        expected = second_lookups.answer(name, devices, generation, c)
        assert (found and (tuple(found.blocks), found.row)) == expected, (generation, c)
        origins.append(expected and expected[1])
        if rule.dialect is JAX and found:
            look_up = LookUp(table, generation, GENERATIONS[generation].version)
            assert look_up.answer(call).blocks == found.blocks
    assert origins.count(False) > 100
    assert origins.count(True) > 100 or name == "sglang-jax-2025-09-17"


def test_every_public_version_is_compared():
    assert set(second_lookups.SECOND) == set(lookups.RULES) - {"autotune.tables"}


@pytest.mark.parametrize("rule", lookups.RULES.values(), ids=str)
def test_what_a_look_up_asks_for_is_reachable(rule):
    rng = random.Random(2)
    for _, c in calls(rng, GENERATIONS):
        call = Call(
            *(c[n] for n in ("q_dtype", "kv_dtype", "q", "kv", "dim", "page", "tokens")),
            c["page"] * c["pages"],
            c["window"],
        )
        key = rule.key(call)
        if key is not None:
            assert rule.simplify(key) == key


def test_the_installed_jax_is_recognised_by_its_functions():
    assert load("jax").rule is lookups.RULES["jax-0.10"] or load("jax").rule is lookups.RULES["jax-0.12"]


def test_a_formatter_and_comments_do_not_make_another_look_up():
    functions = JAX_TEXT[JAX_TEXT.index("def next_power_of_2") :]
    wide = re.sub(r"^( +)", r"\1\1", functions, flags=re.M).replace("'", '"')
    other = "# first\n" + wide.replace("  # OOM", "  # out of memory in").replace(
        "pages_per_seq,\n  ) = key", "pages_per_seq\n  ) = key"
    )
    assert other != functions
    assert fingerprint(other) == fingerprint(functions) == fingerprint(JAX_TEXT) is not None
    one = functions.replace(
        '"""Simplify the key to reduce the number of combinations."""', "'''Otherwise.'''"
    )
    assert fingerprint(one) == fingerprint(functions)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("next_power_of_2(num_kv_heads_per_blk)", "num_kv_heads_per_blk"),
        ("(128, 32)", "(64, 32)"),
        ("split()[:2]", "split()[:3]"),
        ("  return (min(pages_per_seq, bkv)", "    return (min(pages_per_seq, bkv)"),
    ],
)
def test_another_rule_is_not_taken_for_it(old, new):
    changed = JAX_TEXT.replace(old, new)
    assert changed != JAX_TEXT
    assert read_text(changed, "x").rule is None


def test_functions_in_strings_and_of_other_names_are_none():
    assert fingerprint('"""\ndef simplify_key(key):\n  return key\n"""\n') is None
    assert fingerprint("def simplify(key):\n  return key\n  def simplify_key(key): ...\n") is None
    assert fingerprint("def simplify_key(key):\n" + "  key = key\n" * 5000) is None


KEY = TableKey("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 2048)


def test_an_emitted_module_is_looked_up_by_its_own_functions():
    text = jax_module.render({"v6e": {KEY: BlockSizes(8, 32)}}, "measured", ["x"])
    table = read_text(text, "x")
    assert table.rule is lookups.RULES["stand-in"]
    near = KEY._replace(max_model_len=4096)
    look_up = LookUp(table, "v6e", 6)
    assert look_up.answer(Call(*near)).origin == "default", "the module itself has no nearest"
    assert look_up.answer(Call(*KEY)).blocks == (8, 32)


def test_rows_without_functions_may_state_their_look_up():
    bare = Table(dialect=JAX, devices={"TPU v6": {KEY: BlockSizes(8, 32)}})
    assert read_text(render(bare), "x").rule is None
    stated = Table(dialect=JAX, devices=bare.devices, provenance={"lookup": "jax-0.10"})
    assert read_text(render(stated), "x").rule is lookups.RULES["jax-0.10"]
    for wrong in ("tpu-inference-2026-01", "nothing", 5):
        other = Table(dialect=JAX, devices=bare.devices, provenance={"lookup": wrong})
        assert read_text(render(other), "x").rule is None


def test_a_look_up_is_chosen_by_name_within_the_dialect(tmp_path):
    (tmp_path / "t.py").write_text(render(Table(dialect=JAX, devices={"TPU v6": {KEY: BlockSizes(8, 32)}})))
    path = str(tmp_path / "t.py")
    assert load(path, "pytorch-xla-9497").rule is lookups.UNROUNDED
    with pytest.raises(UsageError, match="'jax' is unknown: for a table of the jax dialect use autotune"):
        load(path, "jax")
    with pytest.raises(UsageError, match="'sglang-jax-2026-01' is of the sglang-jax dialect"):
        load(path, "sglang-jax-2026-01")


def test_what_pytorch_xla_no_longer_rounds_it_finds():
    key = KEY._replace(num_q_heads_per_blk=12, max_model_len=1280)
    assert lookups.UNROUNDED.simplify(key) == key
    assert lookups.RULES["pytorch-xla-9372"].simplify(key) == key._replace(
        num_q_heads_per_blk=16, max_model_len=2048
    )


@pytest.mark.parametrize(
    ("length", "wanted"),
    [(64, 128), (100, 100), (128, 128), (130, 130), (127, 127), (131, 256), (2048, 2048)],
)
def test_lengths_that_some_number_of_pages_makes(length, wanted):
    """A key with pages of 128 is that of calls with pages of 65 to 128: 130 is two of 65, 131 is a prime."""
    key = KEY._replace(max_model_len=length)
    assert lookups.UNROUNDED.simplify(key).max_model_len == wanted


def test_numbers_as_lengths_are_those_of_the_look_ups_before_2025_12_17():
    old, new = lookups.RULES["tpu-inference-2025-09"], lookups.RULES["tpu-inference-2026-01"]
    key = inference_key("bfloat16", "bfloat16", 16, 1, 128, 128, 512, None)
    assert old.simplify(key._replace(length=512)) == key._replace(length=512)
    assert old.simplify(key) == new.simplify(key)._replace(length=512)
    assert new.simplify(key._replace(length=512)) == key


@pytest.mark.parametrize(
    ("name", "dialect", "rule"),
    [
        ("tpu_inference_v3", INFERENCE, "tpu-inference-2026-01"),
        ("sglang_jax_v1", SGLANG, "sglang-jax-2026-01"),
    ],
)
def test_public_tables_are_reachable_by_their_own_look_up(name, dialect, rule):
    devices, count = published_rows(name, dialect)
    chosen = lookups.RULES[rule]
    lost = [key for rows in devices.values() for key in rows if chosen.simplify(key) != key]
    assert (count, len(lost)) in ((3256, 2), (1373, 0))
    assert all(isinstance(key.length, int) for key in lost)


@pytest.mark.parametrize("rule", lookups.RULES.values(), ids=str)
def test_names_are_known_to_the_dialect(rule):
    assert rule.dialect in DIALECTS.values()
    for generation, names in rule.asks.items():
        for name in names:
            meant = rule.dialect.generations(name)
            assert generation in meant or name == "TPU v5", (generation, name)
    assert lookups.RULES["jax-0.10"].owners("TPU v5") == ("v5e", "v5p")


def test_heads_that_only_a_call_with_fewer_asks_for():
    """With 8-bit KV a call of 2 query heads and 1 KV head asks for 2 and 2; one of 2 and 2 for 4 and 2."""
    rule = lookups.RULES["tpu-inference-2026-01"]
    two = inference_key("bfloat16", "float8_e4m3fn", 2, 2, 128, 128, 2048, None)
    one = inference_key("bfloat16", "float8_e4m3fn", 2, 1, 128, 128, 2048, None)
    assert rule.asked(one) == two
    assert rule.asked(two) == two._replace(heads="q_head-4_kv_head-2_head-128")
    assert rule.simplify(two) == two
    wide = two._replace(dtypes="q_bfloat16_kv_bfloat16")
    assert rule.simplify(wide) == wide._replace(heads="q_head-4_kv_head-2_head-128")
    assert (
        lookups.RULES["sglang-jax-2026-01"].simplify(SglangKey("bfloat16", "bfloat16", 2, 4, 128, 128, 64))
        is None
    )


def test_the_kernel_for_a_head_dim_of_64_takes_no_other():
    main, narrow = lookups.RULES["tpu-inference-2026-01"], lookups.RULES["tpu-inference-hd64-2026-01"]
    key = inference_key("bfloat16", "bfloat16", 16, 2, 64, 256, 2048, 128)
    assert narrow.simplify(key) == key
    assert main.simplify(key) == key._replace(heads="q_head-16_kv_head-2_head-128")
    assert narrow.simplify(key._replace(heads="q_head-16_kv_head-2_head-128")) is None


def test_keys_that_no_look_up_builds():
    rule = lookups.RULES["tpu-inference-2026-01"]
    key = inference_key("bfloat16", "float4_e2m1fn", 16, 4, 128, 128, 512, None)
    assert rule.simplify(key) == key
    assert rule.simplify(key._replace(heads="q_head-16")) is None
    assert rule.simplify(key._replace(dtypes="q_bfloat16_kv_float7")) is None
    assert lookups.RULES["jax-0.10"].simplify(KEY._replace(page_size=0)) is None
    assert lookups.RULES["jax-0.10"].simplify(KEY._replace(kv_dtype="bf16")) is None
