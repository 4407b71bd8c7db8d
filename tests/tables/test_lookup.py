"""Look-ups: the same answers as JAX's own, the nearest key, and where an answer came from."""

from __future__ import annotations

import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes

from autotune.kernel.problem import BlockSizes, TableKey
from autotune.tables import explain, get_tuned_block_sizes, load, lookup, lookups
from autotune.tables.dialects import JAX
from autotune.tables.keys import Call
from autotune.tables.table import Table

PUBLISHED = load("jax")
DEVICES = {"v5e": (5, "TPU v5"), "v5p": (5, "TPU v5"), "v6e": (6, "TPU v6")}


@given(
    st.sampled_from(sorted(DEVICES)),
    st.sampled_from(["bfloat16", "float32", jnp.bfloat16, np.dtype("float32"), jnp.dtype("bfloat16")]),
    st.tuples(st.integers(1, 40), st.integers(1, 9), st.sampled_from([64, 128, 200, 256])),
    st.sampled_from([16, 32, 60, 64, 128, 256]),
    st.integers(1, 5000),
    st.integers(1, 300),
)
def test_jaxs_own_table_answers_as_jax(generation, dtype, heads, page_size, tokens, pages):
    version, name = DEVICES[generation]
    mine = lookup.LookUp(PUBLISHED, generation, version)
    call = (dtype, dtype, *heads, page_size, tokens, pages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned_block_sizes, "get_tpu_version", lambda: version)
        patch.setattr(tuned_block_sizes, "get_device_name", lambda: name)
        theirs = tuned_block_sizes.get_tuned_block_sizes(*call)
    assert mine.blocks(*call) == theirs
    assert mine.blocks(*call) == theirs, "the remembered answer"


def test_the_signature_is_jaxs():
    own = inspect.signature(tuned_block_sizes.get_tuned_block_sizes).parameters
    assert list(inspect.signature(get_tuned_block_sizes).parameters) == list(own)


KEY = TableKey("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 2048)


def table(rule=lookups.AUTOTUNE, **rows):
    held = {KEY: BlockSizes(16, 64)} | rows.pop("more", {})
    return Table(dialect=JAX, devices={"TPU v6": held}, rule=rule)


def call(key, pages=None, tokens=None):
    """A call with a key's numbers, with so many pages and tokens."""
    length = key.max_model_len if pages is None else pages * key.page_size
    return Call(*key[:6], tokens or key.max_num_batched_tokens, length)


def test_the_nearest_of_the_same_layout_answers():
    look_up = lookup.LookUp(table(), "v6e", 6)
    longer = KEY._replace(max_num_batched_tokens=4096, max_model_len=16384)
    answer = look_up.answer(call(longer))
    assert (answer.origin, answer.found, answer.distance) == ("nearest", KEY, 5.0)
    assert answer.blocks == (16, 64)
    other = KEY._replace(page_size=64)
    assert look_up.answer(call(other)).origin == "default"
    assert look_up.answer(call(KEY))._replace(value=None) == ((16, 64), "exact", KEY, KEY, 0.0, None, None)
    short = KEY._replace(max_num_batched_tokens=16, max_model_len=512)
    assert look_up.answer(call(short)).blocks == (4, 16)


def test_a_value_as_large_as_its_own_call_is_only_a_lower_bound_for_longer_calls():
    """KEY has 16 pages, and its winner takes all of them."""
    longer = KEY._replace(max_model_len=16384)
    free = KEY._replace(max_model_len=262144), BlockSizes(32, 64)
    answer = lookup.LookUp(table(more=dict([free])), "v6e", 6).answer(call(longer))
    assert (answer.origin, answer.found, answer.passed) == ("nearest", free[0], KEY)
    assert answer.blocks == (32, 64)
    # Nothing better is known: the bound, and that it is one.
    answer = lookup.LookUp(table(), "v6e", 6).answer(call(longer))
    assert (answer.blocks, answer.found, answer.passed) == ((16, 64), KEY, KEY)
    # For calls of its own length or shorter it is the answer, whatever their tokens.
    fewer = lookup.LookUp(table(), "v6e", 6).answer(call(KEY._replace(max_num_batched_tokens=4096)))
    assert (fewer.found, fewer.passed) == (KEY, None)


def test_jaxs_default_answers_where_a_lower_bound_is_all_there_is_and_the_table_shows_that_it_fits():
    longer = KEY._replace(max_model_len=32768)  # of 256 pages
    proof = KEY._replace(max_num_batched_tokens=16384, max_model_len=16384), BlockSizes(128, 128)
    answer = lookup.LookUp(table(more=dict([proof])), "v6e", 6).answer(call(longer))
    assert (answer.origin, answer.blocks, answer.passed) == ("default", (128, 32), KEY)
    elsewhere = proof[0]._replace(num_q_heads_per_blk=16), proof[1]
    answer = lookup.LookUp(table(more=dict([elsewhere])), "v6e", 6).answer(call(longer))
    assert answer.found == KEY, "another layout is another program, and shows nothing"


def test_a_value_with_as_many_queries_as_its_key_has_tokens_is_only_a_lower_bound_for_more():
    small = KEY._replace(max_num_batched_tokens=16)
    rows = {small: BlockSizes(8, 16), KEY._replace(max_num_batched_tokens=256): BlockSizes(8, 64)}
    own = Table(dialect=JAX, devices={"TPU v6": rows}, rule=lookups.AUTOTUNE)
    answer = lookup.LookUp(own, "v6e", 6).answer(call(KEY._replace(max_num_batched_tokens=32)))
    assert (answer.blocks, answer.passed) == ((8, 32), small)


@pytest.mark.parametrize("rule", [None, *(r for r in lookups.RULES.values() if r.dialect is JAX)], ids=str)
def test_only_autotunes_own_look_up_tries_the_nearest(rule):
    longer = KEY._replace(max_model_len=16384)
    answer = lookup.LookUp(table(rule), "v6e", 6).answer(call(longer))
    assert answer.origin == ("nearest" if rule is lookups.AUTOTUNE else "default")


def test_committed_tables_and_results_are_looked_up_by_autotune_and_files_are_not(tmp_path):
    assert load("v6e").rule is lookups.AUTOTUNE
    path = lookup.lookups.__file__.replace("lookups.py", "tpu_v6e.py")
    assert load(path).rule is lookups.AUTOTUNE, "as its PROVENANCE says"
    bare = tmp_path / "bare.py"
    bare.write_text("".join(line for line in open(path) if '"lookup"' not in line))  # noqa: PTH123, SIM115
    assert load(str(bare)).rule is None


def test_names_that_a_look_up_never_asks_for_have_no_rows():
    rows = {KEY: BlockSizes(16, 64)}
    for name in ("TPU v6 lite", "v6e", "TPU v6e"):
        own = Table(dialect=JAX, devices={name: rows}, rule=lookups.RULES["jax-0.10"])
        assert lookup.LookUp(own, "v6e", 6).answer(call(KEY)).origin == "default"
        bare = Table(dialect=JAX, devices={name: rows})
        assert lookup.LookUp(bare, "v6e", 6).answer(call(KEY)).origin == "exact"


def test_of_two_as_near_the_longer_answers():
    more = {KEY._replace(max_model_len=8192): BlockSizes(32, 32)}
    look_up = lookup.LookUp(table(more=more), "v6e", 6)
    between = KEY._replace(max_model_len=4096)
    assert look_up.answer(call(between)).found.max_model_len == 8192


def test_v4_has_its_own_default_and_may_have_a_table():
    v4 = Table(dialect=JAX, devices={"TPU v4": {KEY: BlockSizes(2, 16)}}, rule=lookups.AUTOTUNE)
    assert lookup.LookUp(v4, "v4", 4).answer(call(KEY)).blocks == (2, 16)
    own = Table(dialect=JAX, devices=v4.devices, rule=lookups.RULES["jax-0.10"])
    assert lookup.LookUp(own, "v4", 4).answer(call(KEY)).origin == "default"
    assert lookup.LookUp(None, "v4", 4).answer(call(KEY, pages=64)).blocks == (32, 32)


def test_no_tpu_is_said_in_jaxs_words():
    for kind in ("cpu", "TPU v3", "NVIDIA"):
        with pytest.raises(NotImplementedError, match=r"^TPU version must be 4 or higher\.$"):
            explain("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 16, device_kind=kind)
    with pytest.raises(NotImplementedError):  # these tests have no TPU
        get_tuned_block_sizes("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 16)
    unknown = explain("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 200, device_kind="TPU v9 mega")
    assert (unknown.origin, unknown.blocks) == ("default", (128, 32))


def test_explain_names_the_simplified_key():
    answer = explain(
        jnp.bfloat16, "bfloat16", 28, 4, 100, 16, 2000, 250, table=PUBLISHED, device_kind="TPU v6 lite"
    )
    assert answer.key == ("bfloat16", "bfloat16", 32, 4, 128, 16, 2048, 4096)


def test_a_call_that_the_table_does_not_have_is_told_once_a_key(caplog: pytest.LogCaptureFixture) -> None:
    own = lookup.LookUp(table(), "v6e", 6)
    parts = KEY[:6]
    with caplog.at_level("WARNING", logger="autotune.tables"):
        assert own.answer(call(KEY)).origin == "exact"
        own.blocks(*KEY[:7], KEY.pages_per_seq)
        assert caplog.messages == []
        for _ in range(2):
            own.blocks(*parts, 8 * KEY.max_num_batched_tokens, KEY.pages_per_seq)
            own.blocks(*parts[:4], 256, *parts[5:], KEY.max_num_batched_tokens, KEY.pages_per_seq)
    near, default = caplog.messages
    assert near.startswith("no tuned block sizes for v6e and the key ('bfloat16', ")
    assert f"using those of the nearest key {tuple(KEY)}, " in near
    assert default.endswith("using the default, (128, 32)")
