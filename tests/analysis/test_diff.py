"""Differences of tables: counts, the dimension, and what choices cost."""

from __future__ import annotations

import csv
import io
import json

import pytest
from click.testing import CliRunner
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes

from autotune.analysis import diff
from autotune.cli.main import cli
from autotune.cli.render.diff import Comparison, render
from autotune.errors import UsageError
from autotune.kernel.jax_rpa.tiling import is_canonical
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results import dataset
from autotune.results.baselines import incumbent
from autotune.results.scores import Failure, Score, Scoreboard
from autotune.tables import load
from autotune.tables.dialects import JAX, SGLANG
from autotune.tables.table import Table
from autotune.tpu.generations import GENERATIONS
from tests.factories import make_row

KEY = TableKey("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 2048)


def table(rows, device="TPU v6e", origin="t"):
    return Table(dialect=JAX, devices={device: {k: BlockSizes(*b) for k, b in rows.items()}}, origin=origin)


def test_v5_and_v6_of_jax_counted_once_more():
    published = tuned_block_sizes.TUNED_BLOCK_SIZES
    v5, v6 = published["TPU v5"], published["TPU v6"]
    added = sum(1 for key in v6 if key not in v5)
    removed = sum(1 for key in v5 if key not in v6)
    changed = sum(1 for key in v5 if key in v6 and v5[key] != v6[key])
    same = sum(1 for key in v5 if v6.get(key) == v5[key])
    [device] = diff.compare(load("jax:TPU v5"), load("jax:TPU v6"))
    mine = (len(device.added), len(device.removed), len(device.changed), device.same)
    assert mine == (added, removed, changed, same)
    assert changed == 237, "the figure of jax 0.10.2"
    up = sum(1 for key in v5 if key in v6 and v6[key][1] > v5[key][1])
    assert diff.directions(device.changed)["num_queries_per_blk"][0] == up


def test_devices_are_paired_by_name_and_by_generation():
    both = Table(dialect=JAX, devices={"TPU v5": {}, "TPU v6": {KEY: BlockSizes(8, 32)}})
    ours = Table(
        dialect=JAX, devices={"TPU v6e": {KEY: BlockSizes(8, 64)}, "TPU v4": {KEY: BlockSizes(1, 1)}}
    )
    found = {(d.before, d.after): (len(d.added), len(d.changed)) for d in diff.compare(both, ours)}
    assert found == {("TPU v5", None): (0, 0), ("TPU v6", "TPU v6e"): (0, 1), (None, "TPU v4"): (1, 0)}
    [one] = diff.compare(table({KEY: (8, 32)}), table({}, "TPU v5e"))
    assert one.removed and not one.added


def test_dialects_are_not_compared():
    with pytest.raises(UsageError, match=r"sglang-jax dialect and .* of jax"):
        diff.compare(Table(dialect=SGLANG, devices={}), load("jax"))


def test_the_telling_dimension_comes_first():
    keys = [
        KEY._replace(page_size=page, max_model_len=length, max_num_batched_tokens=tokens)
        for page in (64, 128)
        for length in (1024, 2048)
        for tokens in (512, 1024)
    ]
    before = table(dict.fromkeys(keys, (8, 32)))
    after = table({key: (16 if key.page_size == 64 or key.max_model_len == 1024 else 8, 32) for key in keys})
    [device] = diff.compare(before, after)
    found = {d.name: d for d in diff.dimensions(before, device)}
    assert set(found) == {"page_size", "max_num_batched_tokens", "max_model_len"}
    assert found["page_size"].shares == {64: (4, 4), 128: (2, 4)}
    assert found["max_num_batched_tokens"].bits == pytest.approx(0)
    assert found["page_size"].bits == pytest.approx(found["max_model_len"].bits)
    assert found["page_size"].bits > 0.3
    assert diff.dimensions(before, diff.compare(before, before)[0]) == []


def test_regret_is_relative_to_the_best_on_the_same_keys():
    other = KEY._replace(max_model_len=4096)
    board = Scoreboard(
        {
            ("v6e", KEY): {
                BlockSizes(8, 32): Score(1.0, 100, "modelled"),
                BlockSizes(4, 32): Score(1.21, 121, "modelled"),
            },
            ("v6e", other): {BlockSizes(8, 32): Score(1.0, 100, "modelled")},
            ("v5e", KEY): {BlockSizes(4, 32): Score(1.1, 300, "modelled")},
        },
        {("v5e", KEY): {BlockSizes(8, 32): Failure("vmem_oom", 2, 1, None)}},
        "rows",
    )
    tables = [
        table({KEY: (8, 32), other: (8, 32)}, origin="six"),
        table({KEY: (4, 32), other: (4, 32)}, "TPU v5e", origin="five"),
    ]
    matrix = diff.regret_matrix(tables, board)
    assert matrix[0, "v6e"] == diff.Regret(mean=1.0, worst=1.0, keys=2, failed=0, unknown=0)
    five = matrix[1, "v6e"]
    assert (five.mean, five.keys, five.unknown) == (pytest.approx(1.21), 1, 1)
    assert matrix[0, "v5e"] == diff.Regret(mean=None, worst=None, keys=0, failed=1, unknown=1)
    assert matrix[1, "v5e"].mean == pytest.approx(1.0)
    comparison = Comparison(tables, {(0, 1): diff.compare(*tables)}, matrix, "rows", board.sources())
    text = render(comparison, "text")
    assert "rows (MODELLED, at the compiler's own VMEM limit)" in " ".join(text.split())
    limited = Comparison(tables, {(0, 1): diff.compare(*tables)}, matrix, "rows", board.sources(), 100 << 20)
    assert "(MODELLED, at a VMEM limit of 100 MiB)" in " ".join(render(limited, "text").split())
    assert json.loads(render(limited, "json"))["vmem_limit_bytes"] == 100 << 20
    assert next(line.split() for line in text.splitlines() if line.startswith("  five ")) == [
        "five",
        "+0.0%",
        "+21.0%",
    ]
    assert "six on v5e: mean over 0 keys; 1 do not run, 1 are not in the rows" in text


def test_tables_of_only_three_are_counted():
    tables = [load("jax:TPU v5"), load("jax:TPU v6"), load("jax:TPU v6")]
    pairs = {(i, j): diff.compare(tables[i], tables[j]) for i, j in ((0, 1), (0, 2), (1, 2))}
    text = render(Comparison(tables, pairs, {}), "text")
    assert [line.split()[-4:] for line in text.splitlines() if "->" in line] == [
        ["0", "0", "237", "431"],
        ["0", "0", "237", "431"],
        ["0", "0", "0", "668"],
    ]


def test_the_command(autotune):
    same = autotune("diff", "jax", "jax", "--exit-code")
    assert same.returncode == 0
    assert autotune("diff", "jax:TPU v5", "jax:TPU v6").returncode == 0
    different = autotune("diff", "jax:TPU v5", "jax:TPU v6", "--exit-code", "--format", "json")
    assert different.returncode == 1
    data = json.loads(different.stdout)["comparisons"][0]["devices"][0]
    assert (len(data["changed"]), data["same"]) == (237, 431)
    text = autotune("diff", "jax:TPU v5", "jax:TPU v6").stdout
    assert max(map(len, text.splitlines())) <= 80
    markdown = autotune("diff", "jax:TPU v5", "jax:TPU v6", "--format", "markdown").stdout
    assert markdown.startswith("### jax:TPU v5 -> jax:TPU v6\n")
    assert markdown.count("```") == 2
    alone = autotune("diff", "jax")
    assert (alone.returncode, alone.stderr.count("\n")) == (2, 1)


def test_csv_has_a_line_for_each_key_that_differs():
    other = KEY._replace(max_model_len=4096)
    before, after = table({KEY: (8, 32)}, origin="a"), table({KEY: (8, 64), other: (4, 32)}, origin="b")
    [device] = diff.compare(before, after)
    lines = list(
        csv.DictReader(io.StringIO(render(Comparison([before, after], {(0, 1): [device]}, {}), "csv")))
    )
    found = {(line["change"], line["max_model_len"]): line for line in lines}
    assert set(found) == {("changed", "2048"), ("added", "4096")}
    changed = found["changed", "2048"]
    assert (changed["before"], changed["after"], changed["q_dtype"]) == ("a", "b", "bfloat16")
    assert (changed["before_num_queries_per_blk"], changed["after_num_queries_per_blk"]) == ("32", "64")
    assert found["added", "4096"]["before_num_kv_pages_per_blk"] == ""


def test_jax_beside_a_results_folder_is_what_it_answers_for_the_folders_keys(tmp_path):
    """Of one key JAX publishes a value, of the other it has its default; the rest of its table is no row."""
    listed = next(
        key
        for key in tuned_block_sizes.TUNED_BLOCK_SIZES["TPU v6"]
        if key[5] == 128 and is_canonical(TableKey(*key))
    )
    listed, other = TableKey(*listed), KEY._replace(head_dim=256, num_kv_heads_per_blk=1)
    now = {key: incumbent(GENERATIONS["v6e"], key) for key in (listed, other)}
    assert now[listed].published and now[other].published is None
    dataset.append(
        tmp_path,
        [
            make_row(*now[listed].published, key=listed, latency_us=9.0),
            make_row(1, 64, key=other, latency_us=9.0),
        ],
    )
    done = CliRunner().invoke(cli, ["diff", "jax", str(tmp_path), "--format", "json"], catch_exceptions=False)
    [compared] = json.loads(done.stdout)["comparisons"]
    [device] = compared["devices"]
    assert (device["before"], device["added"], device["removed"], device["same"]) == ("TPU v6e", [], [], 1)
    assert device["changed"] == [[list(other), list(now[other].default), [1, 64]]]
    lines = CliRunner().invoke(cli, ["diff", "jax", str(tmp_path)], catch_exceptions=False).stdout
    assert "0 added, 0 removed, 1 changed, 1 the same" in lines
