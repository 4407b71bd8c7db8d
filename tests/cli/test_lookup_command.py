"""What `autotune lookup` takes, and what it says on standard error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from autotune.analysis import explain
from autotune.cli.commands import lookup
from autotune.cli.main import cli
from autotune.kernel.problem import BlockSizes, Problem, Settings
from autotune.results import dataset
from autotune.tables import load
from autotune.tpu import generations
from autotune.tpu.compiler import Compiled
from tests.factories import KEY, make_row


def looked_up(*changes: object, compiling: bool = False, **values: object) -> Result:
    """A look-up on v6e of KEY's own call, with other values by name."""
    call: dict[str, object] = {
        "q_heads": KEY.num_q_heads_per_blk,
        "kv_heads": KEY.num_kv_heads_per_blk,
        "page_size": KEY.page_size,
        "max_num_batched_tokens": KEY.max_num_batched_tokens,
        "max_model_len": KEY.max_model_len,
        **values,
    }
    options = [text for name, value in call.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    asked = ["lookup", "--target", "v6e", *options, *map(str, changes)]
    return CliRunner().invoke(cli, [*asked, *(["--compile"] if compiling else [])], catch_exceptions=False)


def test_a_call_that_smem_cannot_hold_is_told_with_the_page_that_it_can() -> None:
    """Nothing is compiled: no pair of block sizes changes that."""
    call = {"page_size": 16, "max_model_len": 16384}
    done = looked_up(**call, max_num_seqs=256, compiling=True)
    assert done.exit_code == 0
    assert done.stderr == (
        "nothing can run on v6e: the page table, 256 rows of 1024 pages, needs 1.01 MiB of SMEM, and there "
        "is 1.00 MiB; type --page-size 32\n"
    )
    assert "smem_oom" in done.stdout
    assert looked_up(**call, max_num_seqs=248).stderr == ""
    assert looked_up(**call).stderr == ""


def test_a_head_dim_that_is_no_multiple_of_128_has_the_answer_of_a_sweep() -> None:
    shape = "q_heads=8,kv_heads=2,head_dim=64,page_size=128,max_num_batched_tokens=1024,max_model_len=2048"
    keys = CliRunner().invoke(cli, ["keys", "--shape", shape], catch_exceptions=False)
    said = looked_up(head_dim=64).stderr
    assert said.startswith(keys.stderr.splitlines()[0])
    assert "the kernel takes multiples of 128" in said and "2 times as large" in said
    assert looked_up(head_dim=128).stderr == ""


def test_a_head_dim_that_is_padded_is_compiled_as_padded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = {"q_heads": 4, "kv_heads": 1, "page_size": 16, "max_model_len": 64, "max_num_batched_tokens": 64}
    done = looked_up("--table", "jax", "--format", "json", head_dim=80, compiling=True, **small)
    data = json.loads(done.stdout)
    assert data["problem"]["head_dim"] == 80
    [cost] = data["costs"]
    assert (cost["blocks"], cost["status"]) == ([4, 32], "ok")


def test_heads_that_the_compiler_refuses_are_told() -> None:
    said = looked_up(head_dim=256, q_heads=16, kv_heads=8).stderr
    assert said.endswith("whatever the block sizes and the VMEM limit; type --kv-heads 1\n")
    assert looked_up(head_dim=256, q_heads=16, kv_heads=1).stderr == ""


def test_a_sliding_window_and_vllms_dtype_are_of_the_call() -> None:
    data = json.loads(looked_up("--format", "json", sliding_window=512, kv_dtype="fp8").stdout)
    assert data["settings"]["sliding_window"] == 512
    assert data["key"][1] == "float8_e4m3fn"


def test_a_results_folder_as_the_table_has_the_rows(tmp_path: Path) -> None:
    dataset.append(tmp_path, [make_row(4, 64, latency_us=20.0), make_row(8, 32, latency_us=30.0)])

    def best(*changes: object) -> Any:
        return json.loads(looked_up("--format", "json", *changes).stdout)["best_known"]

    assert best("--table", tmp_path) == {"blocks": [4, 64], "source": "modelled"}
    other = best()
    assert other is not None and other != best("--table", tmp_path)
    assert best("--table", "jax", "--results", tmp_path) == best("--table", tmp_path)


def test_an_entry_of_a_larger_vmem_limit_is_not_only_said_to_fail(capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem(
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=128,
        page_size=128,
        max_num_batched_tokens=1024,
        pages_per_seq=16,
    )
    explanation = explain.explain(problem, generations.V6E, [load("v6e"), load("jax")])
    [pair, _] = [said.answer.blocks for said in explanation.said if said.answer]
    for status, said in (
        ("vmem_oom", "the entry of v6e was made for a VMEM limit of 100 MiB: type --vmem-limit 100MiB\n"),
        ("compile_error", ""),
    ):
        explanation.costs[BlockSizes(*pair)] = explain.cost(explanation, pair, Compiled(status=status))
        lookup._say_proven_limit(explanation)
        assert capsys.readouterr().err == said
    enough = explain.explain(problem, generations.V6E, [load("v6e")], Settings(vmem_limit_bytes=100 << 20))
    enough.costs[pair] = explain.cost(enough, pair, Compiled(status="vmem_oom"))
    lookup._say_proven_limit(enough)
    assert capsys.readouterr().err == ""


def test_what_rows_know_is_told_without_a_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [make_row(8, 32, latency_us=2.0), make_row(16, 32, latency_us=3.0)]
    rows += [make_row(4, 32, status="vmem_oom")]
    dataset.append(tmp_path / "r", rows)
    table = tmp_path / "mine.py"
    key = ("bfloat16", "bfloat16", *KEY[2:])
    table.write_text(f"TUNED_BLOCK_SIZES = {{'TPU v6': {{{key}: (4, 32)}}}}\n")
    done = looked_up("--table", "jax", "--table", str(table), "--results", str(tmp_path / "r"))
    assert done.exit_code == 0
    told = " ".join(done.stdout.split())
    assert "(4, 32) does not run, by the rows: vmem_oom" in told
    assert "best known (modelled) (8, 32) 2 us by the rows" in told
    assert "(16, 32) 3 us by the rows, +50.0%" in told
    assert "--compile finds out" in done.stdout
    assert not (tmp_path / "cache").exists() and "compil" not in done.stderr
