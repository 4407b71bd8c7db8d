"""From the jax dialect into the two others."""

from __future__ import annotations

import pytest

from autotune.kernel.problem import BlockSizes, TableKey
from autotune.tables import load
from autotune.tables.convert import convert
from autotune.tables.dialects import INFERENCE, JAX, SGLANG
from autotune.tables.keys import SglangKey, inference_key
from autotune.tables.source import read_text, render

KEY = TableKey("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 2048)


def test_the_longest_goes_first_and_the_others_are_counted():
    rows = {
        KEY: BlockSizes(8, 32),
        KEY._replace(max_model_len=8192): BlockSizes(16, 64),
        KEY._replace(max_model_len=1024): BlockSizes(16, 64),
        KEY._replace(max_num_batched_tokens=4096): BlockSizes(4, 128),
    }
    done = convert({"v5p": rows, "v6e": rows}, SGLANG, {"source": "modelled"})
    assert done.table.devices["TPU v6e"] == {
        SglangKey(*KEY[:6], 1024): BlockSizes(16, 64),
        SglangKey(*KEY[:6], 4096): BlockSizes(4, 128),
    }
    assert list(done.table.devices) == ["TPU v5", "TPU v6e"]
    assert (done.merged, done.disagreeing, done.refused) == (4, 2, 0)
    assert "4 more were merged, as it has no max_model_len" in str(done)


def test_the_most_tokens_go_first():
    rows = {
        KEY: BlockSizes(8, 32),
        KEY._replace(max_num_batched_tokens=4096): BlockSizes(4, 128),
        KEY._replace(max_model_len=128): BlockSizes(1, 32),
    }
    done = convert({"v7x": rows}, INFERENCE, {})
    longer, shorter = (inference_key(*KEY[:6], length, None) for length in (2048, 128))
    assert list(done.table.devices["TPU v7"].items()) == [
        (shorter, BlockSizes(1, 32)),
        (longer, BlockSizes(4, 128)),
    ]
    assert (done.merged, done.disagreeing) == (1, 1)


def test_keys_that_the_stack_rounds_are_refused():
    rows = {
        KEY._replace(num_q_heads_per_blk=2): BlockSizes(8, 32),  # tpu-inference pads a KV head's queries to 2
        KEY._replace(page_size=100): BlockSizes(8, 32),
    }
    assert convert({"v6e": rows}, INFERENCE, {}).refused == 2
    assert convert({"v6e": rows}, SGLANG, {}).refused == 1


@pytest.mark.parametrize("dialect", [INFERENCE, SGLANG], ids=str)
def test_jaxs_whole_table(dialect):
    rows = load("jax").devices["TPU v6"]
    done = convert({"v6e": rows}, dialect, {"source": "published"})
    assert len(done.table) + done.merged + done.refused == 668
    assert all(dialect.simplify(key) == key for _, key, _ in done.table)
    assert read_text(render(done.table), "x").devices == done.table.devices
    assert JAX.missing is None
