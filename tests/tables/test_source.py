"""Tables as files: what is read of them, what is refused, and that writing and reading lose nothing."""

from __future__ import annotations

import pytest

from autotune.errors import UsageError
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.tables import source
from autotune.tables.dialects import INFERENCE, JAX, SGLANG
from autotune.tables.table import Table
from tests.factories import published_rows

KEY = "('bfloat16', 'bfloat16', 8, 2, 128, 128, 1024, 2048)"


@pytest.mark.parametrize(
    ("name", "dialect"), [("tpu_inference_v3", INFERENCE), ("sglang_jax_v1", SGLANG)], ids=str
)
def test_public_tables_survive_writing_and_reading(name, dialect, tmp_path):
    devices, count = published_rows(name, dialect)
    provenance = {"source": "public", "rows": count, "limit": None}
    first = source.render(Table(dialect=dialect, devices=devices, provenance=provenance))
    path = tmp_path / "table.py"
    path.write_text(first)
    table = source.read_file(path)
    assert table.dialect is dialect
    assert len(table) == count
    assert {device: list(rows.items()) for device, rows in table.devices.items()} == {
        device: list(rows.items()) for device, rows in devices.items()
    }
    assert table.provenance == provenance
    assert source.render(table).encode() == first.encode()
    module = {}
    exec(compile(first, "table", "exec"), module)  # what Python makes of it, asked of Python
    level = module["TUNED_BLOCK_SIZES"]
    device, key, blocks = next(iter(table))
    for part in (device, *(key if dialect is INFERENCE else [tuple(key)])):
        level = level[part]
    assert level == tuple(blocks)


def test_a_module_of_ours_is_read_beside_its_functions():
    from autotune.tables import render

    key = TableKey("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 2048)
    rows = {"v5e": {key: BlockSizes(8, 32)}, "v5p": {key: BlockSizes(16, 64)}}
    text = render.render(rows, "modelled", ["MODELLED: TUNED_BLOCK_SIZES = {}"], 100 << 20)
    table = source.read_text(text, "x")
    assert table.dialect is JAX
    assert table.generations() == ["v5e", "v5p"]
    assert {g: table.rows_of(g) for g in rows} == rows
    assert table.modelled
    assert table.provenance["vmem_limit_bytes"] == 100 << 20


def test_the_same_row_twice_is_kept_once_and_told():
    text = f"TUNED_BLOCK_SIZES = {{'TPU v6': {{\n{KEY}: (8, 32),\n{KEY}: (8, 32),\n}}}}\n"
    table = source.read_text(text, "x")
    assert len(table) == 1
    assert [(repeat.first_line, repeat.line) for repeat in table.repeats] == [(2, 3)]


def write(tmp_path, content):
    path = tmp_path / "table.py"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


ROW = f"TUNED_BLOCK_SIZES = {{'TPU v6': {{{KEY}: "


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (ROW + "open('touched', 'w')}}", "line 1: .*function call"),
        (ROW + "(8, 32)}}\nTUNED_BLOCK_SIZES.update(f())", "line 2: .* changes TUNED_BLOCK_SIZES"),
        ("import os\nfrom os import environ as TUNED\n", "assigns no TUNED_BLOCK_SIZES"),
        ("from x import *\nTUNED_BLOCK_SIZES = sys.modules", "line 2: 'sys.modules' is no literal: a name"),
        ("TUNED_BLOCK_SIZES = " + "{1: " * 1000, "nested deeper than 8"),
        (ROW + "(8, 32)}} # caf\xe9".encode("latin-1").decode("latin-1"), None),
        ((ROW + "(8, 32)}} # caf\xe9").encode("latin-1"), "not UTF-8 text: byte 0xe9 in line 1"),
        (ROW + "(8, 32), " + KEY + ": (4, 32)}}", r"there twice: \(8, 32\) in line 1, \(4, 32\) here"),
        (ROW + "(8, 32)}, 'TPU v6': {}}", "device 'TPU v6' is there twice"),
        (ROW + "'8'}}", "'8' where a pair"),
        (ROW + "(8, 32, 1)}}", r"\(8, 32, 1\) where a pair"),
        (ROW + "(8, 0)}}", "must be from 1"),
        (ROW + "(8, True)}}", "where a pair"),
        (ROW + "(8, 32.5)}}", "where a pair"),
        ("TUNED_BLOCK_SIZES = 5", "5, not a dict"),
        ("TUNED_BLOCK_SIZES = {6: {}}", "a device name is a string, not 6"),
        ("TUNED_BLOCK_SIZES = {'TPU v6': 6}", "holds 6, not a dict of rows"),
        ("TUNED_BLOCK_SIZES = {'TPU v6': {(1, 2): (8, 32)}}", "is no key of a table"),
        ("TUNED_BLOCK_SIZES = {'TPU v6': {(1, 2, 3, 4, 5, 6, 7, 8): (8, 32)}}", "no key of the jax dialect"),
        ("TUNED_BLOCK_SIZES = {'TPU v6': {128: {'a': {'b': (8, 32)}}}}", "not a dict"),
        ("TUNED_BLOCK_SIZES = {'TPU v6': {128: {5: {}}}}", "5 where the tpu-inference dialect has a 'q_"),
        (ROW + "(8, 32), 128: {}}}", "128 is no key of the jax dialect"),
        (b"\x00" * 100, "assigns no TUNED"),
        (
            ROW + "(8, 32)}}\nfor k in more:\n    TUNED_BLOCK_SIZES['TPU v6'][k] = (8, 32)",
            "line 3: .* changes TUNED",
        ),
        ("logger = f()\n_x = 1\nBEST = {}\nsizes = {}\n", "assigns no TUNED_.*; it assigns BEST, sizes$"),
        ("TUNED_BLOCK_SIZES_V3 = {}\n", "another kernel: sglang-jax's ragged paged attention v3"),
        ("TUNED_BLOCK_SIZES_MLA: dict[str, dict] = {}\n", r"another kernel: .*\(MLA\)"),
        ("@dataclass\nclass TuningKey:\n  actual_lkv_dim: int\nparams = {}\n", r"another kernel: .*\(MLA\)"),
        ("class TuningKey:\n  num_page_indices: int\n", "another kernel: batched ragged paged attention"),
        ("class Params:\n  block_k_major: int\n", "another kernel: flash attention"),
        ("TUNED_BLOCK_CONFIGS = {'TPU v7': {}}\n", "another kernel: fused MoE"),
        (
            "TUNED_BLOCK_SIZES = {(8, 4): (256 * 6, 1)}\ndef get(top_k, ep_size): ...",
            "another kernel: fused MoE",
        ),
        (
            "TUNED_BLOCK_SIZES = {(8, 4): (1, 1)}\ndef get(num_current_groups): ...",
            "another kernel: megablox",
        ),
        (
            "TUNED_BLOCK_SIZES_RAW = {}\nTUNED_BLOCK_SIZES = {K(*k): v for k in x}",
            "another kernel: quantized matmul",
        ),
        ("# ep_size\nX = 'num_current_groups'\n", "it assigns X$"),
        (
            "TUNED_BLOCK_SIZES = f()\ndef get_tuned_block_sizes(\n    pages_per_seq,\n): q_len = 1\n",
            "line 1: 'f.*function call",
        ),
        ("", "assigns no TUNED"),
    ],
)
def test_refusals(content, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, content)
    if said is None:
        assert len(source.read_file(path)) == 1
        return
    with pytest.raises(UsageError, match=said) as caught:
        source.read_file(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert [p.name for p in tmp_path.iterdir()] == ["table.py"], "the file was run"


@pytest.mark.parametrize(
    "other", ["VMEM_LIMIT_BYTES = 100 * 1024 * 1024", "SOURCE = os.environ['S']", "PROVENANCE = dict(a=1)"]
)
def test_a_constant_that_is_not_the_tables_may_be_no_literal(other):
    table = source.read_text(f"{other}\n{ROW}(8, 32)}}}}\n", "x")
    assert (len(table), table.provenance) == (1, {})


def test_a_table_of_float4():
    text = (ROW + "(8, 32)}}").replace("'bfloat16', 8", "'float4_e2m1fn', 8")
    [(_, key, _)] = source.read_text(text, "x")
    assert key.kv_dtype == "float4_e2m1fn"


def test_a_huge_file_is_refused_by_its_size(tmp_path):
    path = tmp_path / "table.py"
    with path.open("wb") as file:
        file.write(ROW.encode())
        file.truncate(200_000_000)
    with pytest.raises(UsageError, match="larger than 32 MiB"):
        source.read_file(path)


def test_what_cannot_be_quoted_cannot_end_a_string():
    table = Table(dialect=SGLANG, devices={'TPU "v6"\n': {}}, provenance={"a\\": "b\"\n'''", "c": "d's"})
    again = source.read_text(source.render(table, 'x"""\nimport os\\'), "x")
    assert list(again.devices) == ['TPU "v6"?']
    assert again.provenance == {"a?": "b??'''", "c": "d's"}
