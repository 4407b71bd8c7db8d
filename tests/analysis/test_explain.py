"""`autotune lookup`: the key of real models step by step, and what runs."""

from __future__ import annotations

import json

import pytest

from autotune.analysis import explain
from autotune.cli.render import explain as explain_formats
from autotune.errors import UsageError
from autotune.kernel.problem import BlockSizes, Problem, TableKey
from autotune.results.scores import Score, Scoreboard
from autotune.tables import load, lookups
from autotune.tables.dialects import INFERENCE, JAX, SGLANG
from autotune.tables.keys import SglangKey
from autotune.tables.table import Table
from autotune.tpu import generations
from autotune.tpu.compiler import Compiled
from autotune.tpu.schedule import Schedule


def problem(q_heads, kv_heads, **sizes):
    sizes = {"page_size": 16, "max_num_batched_tokens": 2048, "pages_per_seq": 256} | sizes
    return Problem(num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=128, **sizes)


@pytest.mark.parametrize(
    ("heads", "key_heads"),
    [((28, 4), (32, 4)), ((32, 8), (32, 8)), ((12, 2), (16, 2))],
    ids=["Qwen", "Llama-3-8B", "Qwen2.5-1.5B"],
)
def test_real_models(heads, key_heads):
    call = problem(*heads)
    found = explain.explain(call, generations.V6E, [load("jax")])
    assert found.key == TableKey("bfloat16", "bfloat16", *key_heads, 128, 16, 2048, 4096)
    [said] = found.said
    listed = load("jax").devices["TPU v6"].get(found.key)
    assert said.answer.origin == ("exact" if listed else "default")
    assert said.answer.value == (listed or (128, 32))
    steps = {step.name: step.values for step in found.steps}
    assert steps["query heads"] == (heads[0], f"{heads[0]} a block", key_heads[0])
    text = explain_formats.render(found, "text")
    assert max(map(len, text.splitlines())) <= 80
    assert "MODELLED, not timed" in text


def test_split_heads_and_rounding_are_shown():
    found = explain.explain(problem(64, 32, page_size=60, pages_per_seq=20), generations.V6E, [load("jax")])
    steps = {step.name: step.values for step in found.steps}
    assert steps["KV heads"] == (32, "8 a block", 8)
    assert steps["page_size"] == (60, 64)
    assert steps["model length"] == ("60 x 20 pages", 1200, 2048)


def test_untileable_heads_are_refused_with_what_would_do():
    with pytest.raises(UsageError, match="lay the heads out as"):
        explain.explain(problem(15, 5), generations.V6E, [])


KEY = TableKey("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 2048)
CALL = problem(8, 2, page_size=128, max_num_batched_tokens=1000, pages_per_seq=10)


def test_nearest_default_and_another_kernels_table():
    near = Table(
        dialect=JAX,
        devices={"TPU v6e": {KEY._replace(max_model_len=8192): BlockSizes(16, 64)}},
        origin="near",
        provenance={"source": "modelled", "vmem_limit_bytes": 100 << 20},
        rule=lookups.AUTOTUNE,
    )
    sglang = Table(
        dialect=SGLANG,
        devices={"TPU v6e": {SglangKey(*KEY[:6], 1024): BlockSizes(4, 128)}},
        origin="sglang",
        rule=lookups.RULES["sglang-jax-2026-01"],
    )
    found = explain.explain(CALL, generations.V6E, [near, sglang, load("jax:TPU v5")])
    assert [said.answer.origin if said.answer else None for said in found.said] == [
        "nearest",
        None,
        "default",
    ]
    assert found.said[0].answer.blocks == (10, 64)
    assert found.said[1].value == (4, 128)
    text = explain_formats.render(found, "text")
    assert "near 'TPU v6e' (MODELLED): (16, 64), 2 doublings away\n" in text
    assert "proven to compile at vmem_limit_bytes=104857600 (100 MiB)" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "cut to the call: (10, 64)" in text
    assert "no rows for v6e, so JAX's default (128, 32)" in text
    assert "of another kernel than JAX's" in text
    assert "    by autotune.tables; no other look-up tries the nearest\n" in text
    assert "by its own look-up, sglang-jax-2026-01" in text
    assert "which nothing reads since da29e8bd (2026-04-17)" in text


def test_a_file_answers_as_its_own_look_up_does():
    """No nearest, its own key and default, and only the names that it asks for."""
    far = {KEY._replace(max_model_len=8192): BlockSizes(16, 64)}
    own = KEY._replace(max_model_len=1280)
    tables = [
        Table(dialect=JAX, devices={"TPU v6": far}, rule=lookups.RULES["jax-0.10"]),
        Table(dialect=JAX, devices={"TPU v6": {own: BlockSizes(2, 64)}}, rule=lookups.UNROUNDED),
        Table(dialect=JAX, devices={"TPU v6 lite": {KEY: BlockSizes(2, 64)}}, rule=lookups.RULES["jax-0.10"]),
        Table(dialect=JAX, devices={"TPU v6 lite": {KEY: BlockSizes(2, 64)}}),
        Table(dialect=SGLANG, devices={"TPU v6e": {}}),
    ]
    found = explain.explain(CALL, generations.V6E, tables)
    assert [said.value for said in found.said] == [(128, 32), (2, 64), (128, 32), (2, 64), (8, 32)]
    assert [said.row for said in found.said] == [False, True, False, True, False]
    assert found.said[1].answer.key == own != found.key
    text = explain_formats.render(found, "text")
    assert f"its own key: {tuple(own)}" in text
    assert "its rows are under 'TPU v6 lite', and it asks for 'TPU v6', so JAX's default" in text
    assert "by its keys: its own look-up is not known" in text
    assert "its own look-up is not known, taken as sglang-jax-2026-01" in text
    data = json.loads(explain_formats.render(found, "json"))["tables"]
    assert [said["origin"] for said in data] == ["default", "exact", "default", "exact", "default"]
    assert [said["lookup"] for said in data] == ["jax-0.10", "pytorch-xla-9497", "jax-0.10", None, None]


def test_a_call_that_a_look_up_refuses():
    narrow = lookups.RULES["tpu-inference-hd64-2026-01"]
    found = explain.explain(CALL, generations.V6E, [Table(dialect=INFERENCE, devices={}, rule=narrow)])
    assert "its look-up refuses the call" in explain_formats.render(found, "text")
    assert json.loads(explain_formats.render(found, "json"))["tables"][0]["key"] is None


def test_jax_never_consults_its_table_on_v4():
    rows = {KEY: BlockSizes(2, 2)}
    table = Table(dialect=JAX, devices={"TPU v4": rows}, rule=lookups.RULES["jax-0.10"])
    [said] = explain.explain(CALL, generations.V4, [table]).said
    assert (said.answer.origin, said.answer.value) == ("default", (32, 32))


def test_the_command_compiles_what_runs_and_the_best_known(autotune, tmp_path):
    call = ["--q-heads", 4, "--kv-heads", 1, "--page-size", 64, "--max-num-batched-tokens", 1024]
    call += ["--max-model-len", 1024, "--target", "v6e"]
    quick = autotune("lookup", *call, "--table", "jax")
    assert "us by the rows" in quick.stdout and "--compile finds out" in quick.stdout
    done = autotune("lookup", *call, "--table", "jax", "--format", "json", "--compile")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    [cost] = data["costs"]
    assert data["tables"][0]["runs"] == cost["blocks"]
    assert (cost["status"], cost["source"]) == ("ok", "modelled")
    assert 0 < cost["vmem_bytes"] < 32 << 20
    assert 1 < cost["latency_us"] < 1e6
    assert "v6e" in autotune("cache").stdout, "what was compiled is not kept for the next call"
    again = autotune("lookup", *call, "--table", "jax")
    assert "fits, " in again.stdout, "what the cache knows is told"
    wrong = autotune("lookup", *call[:2], "--kv-heads", 3, *call[4:])
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


def costing(verdicts: dict[tuple[int, int], Compiled], heads: tuple[int, int]) -> str:
    """What is said of a call whose best known pair is (8, 32), with the compiler's verdicts given."""
    call = problem(*heads)
    key = explain.explain(call, generations.V6E, []).key
    board = Scoreboard({("v6e", key): {BlockSizes(8, 32): Score(1.0, 9.0, "modelled")}}, {}, "rows")
    table = Table(dialect=JAX, devices={"TPU v6e": {key: BlockSizes(16, 32)}}, origin="jax")
    found = explain.explain(call, generations.V6E, [table], board=board)
    for blocks in found.pairs():
        found.costs[blocks] = explain.cost(found, blocks, verdicts[tuple(blocks)])
    text = explain_formats.render(found, "text")
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_a_best_known_pair_that_is_slower_for_the_call_says_of_what_it_is_the_best():
    slow, quick = (
        Compiled(status="ok", schedule=Schedule((900, 4000, 1000, c), 1 << 20, 1 << 10)) for c in (2000, 50)
    )
    said = costing({(8, 32): slow, (16, 32): quick}, (28, 4))
    assert "best known (modelled)" in said
    assert "      tuned at the key's 32/4 heads; at this call's 28/4 another is faster" in said
    assert "tuned at the key's padded shape; for this call another is faster" in costing(
        {(8, 32): slow, (16, 32): quick}, (32, 4)
    )
    assert "another is faster" not in costing({(8, 32): quick, (16, 32): slow}, (28, 4))


def test_a_timeout_is_not_said_to_be_a_pair_that_does_not_run():
    quick = Compiled(status="ok", schedule=Schedule((900, 4000, 1000, 50), 1 << 20, 1 << 10))
    late = Compiled(
        status="timeout", error="the compile took more than --compile-timeout 300 s", seconds=300.0
    )
    said = costing({(8, 32): quick, (16, 32): late}, (28, 4))
    assert "does not run" not in said
    assert "(16, 32)    not known:\n      timeout, the compile took more than --compile-timeout 300 s" in said
    assert "      type --compile-timeout 1200\n" in said
    refused = Compiled(status="compile_error", error="no")
    assert "does not run:\n      compile_error, no" in costing({(8, 32): quick, (16, 32): refused}, (28, 4))


def test_the_best_known_pair_stands_beside():
    board = Scoreboard({("v6e", KEY): {BlockSizes(16, 64): Score(1.0, 9.0, "modelled")}}, {}, "rows")
    found = explain.explain(CALL, generations.V6E, [load("jax")], board=board)
    assert found.best == ((10, 64), "modelled")
    assert (10, 64) in found.pairs()
