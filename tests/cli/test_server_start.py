"""`autotune check --kernel` on the wheel of tpu-inference that `make kernels` unpacks, and on none."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autotune.analysis.server_start import Case, Server, Tried
from autotune.cli.main import cli
from autotune.cli.render.server_start import text
from autotune.compile.rpa_v3 import Answer
from autotune.errors import EXIT_MACHINE, EXIT_USAGE, AutotuneError
from autotune.kernel.problem import Problem, Settings
from autotune.kernel.rpa_v3.blocks import DECODE, MIXED, Blocks, broken_rule
from autotune.tpu.compiler import Compiled
from autotune.tpu.generations import V7X
from tests.conftest import ROOT

SOURCE = ROOT / "build" / "kernels"
WHEEL = pytest.mark.skipif(
    not (SOURCE / "tpu_inference").is_dir(), reason="tpu-inference is not unpacked: type `make kernels`"
)


@pytest.fixture(autouse=True)
def a_user_who_set_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And compiled nothing before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("RPA_V3_", "USE_BATCHED_RPA"))]:
        monkeypatch.delenv(name)


def check(*arguments: str, model: str = "qwen3-8b", source: Path | None = SOURCE) -> Result:
    """One of eight chips: 4 query heads and 1 KV head, which compile in seconds."""
    folder = ["--kernel-source", str(source)] if source else []
    command = ["check", "--kernel", "tpu-inference-v3", "--model", model, "--tp", "8", *folder, *arguments]
    return CliRunner().invoke(cli, command)


def plain(result: Result) -> str:
    return " ".join(result.stdout.split())


@WHEEL
def test_a_generation_without_a_default_starts_with_the_lines_that_are_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = ("--target", "v4", "--max-model-len", "2048", "--page-size", "128")
    refused = check(*asked)
    assert refused.exit_code == 1, refused.output
    assert "no default on v4: Unsupported tpu_version=4" in plain(refused)
    lines = re.findall(r"export (RPA_V3_\w+)=(\S+)", refused.stdout)
    assert [name for name, _ in lines] == ["RPA_V3_DECODE_BLOCK_SIZES", "RPA_V3_MIXED_BLOCK_SIZES"]
    for name, value in lines:
        monkeypatch.setenv(name, value)
    started = check(*asked)
    assert started.exit_code == 0, started.output
    assert "Both cases compile" in started.stdout
    assert "asks for jax 0.11.2, libtpu 0.0.48" in plain(started)
    both = r"compiles, \d\.\d of 16\.0 MiB VMEM, \d+ of 1024 KiB SMEM, \d+ us modelled"
    assert len(re.findall(both, plain(started))) == 2
    assert all(value in started.stdout for _, value in lines)
    assert max(map(len, refused.stdout.splitlines())) <= 80
    assert "compiling" in refused.stderr
    assert "compiling" not in started.stderr, "all of it was compiled before"


@WHEEL
def test_a_page_table_beyond_smem_is_told_and_no_block_sizes_are_tried() -> None:
    result = check(
        "--target", "v6e", "--page-size", "16", "--max-num-seqs", "512", "--max-model-len", "10240"
    )
    assert result.exit_code == 1, result.output
    assert plain(result).count("needs 1.25 MiB of SMEM, 1.00 MiB allowed") == 2
    assert "use a larger page or fewer sequences" in plain(result)
    assert "export" not in result.stdout


@WHEEL
def test_a_default_that_reads_past_its_buffer_fails_though_it_compiles() -> None:
    result = check("--target", "v6e", "--page-size", "128", "--max-model-len", "384", "--kv-dtype", "fp8")
    assert result.exit_code == 1, result.output
    assert "bkv_sz=384 is not a multiple of bkv_csz=256" in plain(result)
    assert "decode ok 1,384,1,384" in plain(result)
    assert re.search(r"best\s+128,256,128,256\s+compiles", result.stdout)


@WHEEL
@pytest.mark.slow
def test_vmem_of_a_limit_is_the_compilers_figure() -> None:
    result = check("--target", "v6e", "--page-size", "128", "--max-model-len", "1024", "--vmem-limit", "4MiB")
    assert result.exit_code == 1, result.output
    assert re.search(r"mixed FAILS 256,1024,128,512 .* needs \d+\.\d\d MiB of VMEM, 4\.00 MiB", plain(result))
    assert "export RPA_V3_MIXED_BLOCK_SIZES=" in result.stdout


def refusal(result: Result) -> tuple[int, str]:
    """The exit code and the line of a mistake; nothing was printed before it."""
    assert isinstance(result.exception, AutotuneError)
    assert not result.stdout
    return result.exception.exit_code, str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--target", "v6e"), "--kernel-source 'elsewhere' does not hold tpu_inference/kernels"),
        ((), "--target is missing"),
        (("jax", "--target", "v6e"), "'jax' is a table"),
        (("--target", "v6e", "--format", "json"), "--format is for a TABLE"),
        (("--target", "v6e", "--compile"), "--compile is for a TABLE"),
        (("--target", "v6e", "--vmem-limit", "1GiB"), "more VMEM than any TPU has"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], said: str) -> None:
    code, line = refusal(check(*arguments, source=Path("elsewhere")))
    assert code == EXIT_USAGE
    assert said in line
    assert "\n" not in line


def test_a_server_with_another_kernel_is_not_answered_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_BATCHED_RPA_KERNEL", "True")
    code, line = refusal(check("--target", "v6e", source=None))
    assert code == EXIT_USAGE
    assert "`unset USE_BATCHED_RPA_KERNEL`" in line


def test_only_a_default_that_breaks_a_rule_is_said_to_read_past_its_buffer() -> None:
    """The kernel refuses block sizes that are given and break one."""
    problem = Problem(
        num_q_heads=4, num_kv_heads=1, head_dim=128, page_size=128, max_num_batched_tokens=64, pages_per_seq=3
    )
    server = Server(
        layers="", generation=V7X, problem=problem, settings=Settings(), given={}, folder=Path("nowhere")
    )
    blocks = Blocks(256, 384, 128, 256)
    refused = Compiled(status="invalid", error="bkv_csz must divide bkv_sz")
    for verdict, said in ((refused, False), (Compiled(status="ok"), True)):
        answer = Answer(blocks=blocks, verdict=verdict, vmem_bytes=1 << 20, smem_bytes=1 << 10)
        case = Case(
            name=MIXED,
            set_by="somebody",
            own=Tried(blocks=blocks, answer=answer),
            refusal=verdict,
            broken=broken_rule(blocks, 128),
        )
        shown = text("a model", [(server, (case,))], {})
        assert ("reads past its buffer" in " ".join(shown.split())) == said
        assert "No block sizes that were tried let mixed compile." in shown
    assert DECODE not in shown


def test_heads_of_64_are_of_another_kernel() -> None:
    code, line = refusal(check("--target", "v6e", model="gpt-oss-20b", source=None))
    assert code == EXIT_USAGE
    assert "tpu-inference runs another kernel" in line


def test_without_the_stack_there_is_a_way_to_get_its_kernel() -> None:
    code, line = refusal(check("--target", "v6e", source=None))
    assert code == EXIT_MACHINE
    assert "pip download --no-deps tpu-inference==" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kernel", "tpu-inference-v3"], "--model is missing"),
        (["--model", "qwen3-8b"], "--kernel is missing"),
        ([], "name a TABLE"),
    ],
)
def test_half_of_the_options_name_the_other_half(arguments: list[str], said: str) -> None:
    code, line = refusal(CliRunner().invoke(cli, ["check", *arguments]))
    assert code == EXIT_USAGE
    assert said in line
