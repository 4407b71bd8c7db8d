"""Keys: of models and shapes, padded where heads do not tile, written to files and read back."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.cli.main import cli
from autotune.compile.cache import Store
from autotune.errors import UsageError
from autotune.kernel.jax_rpa import call
from autotune.kernel.jax_rpa.tiling import canonical_key, heads_per_blk, is_canonical
from autotune.kernel.problem import BlockSizes, Problem, Program, Settings, TableKey
from autotune.keys import feasibility, files
from autotune.keys.builtin_models import KNOWN, known
from autotune.keys.estimates import Estimates
from autotune.keys.hf_config import parse_config, read_config
from autotune.keys.padding import options
from autotune.keys.resolve import Asked, Serving, canonical, listing, merged, of_model, resolve
from autotune.results import scores
from autotune.results.schema import Tools
from autotune.tpu import generations
from autotune.tpu.compiler import Compiled
from autotune.tpu.schedule import Schedule
from tests.keys.test_models import CONFIGS

Run = Callable[..., subprocess.CompletedProcess[str]]


def problem(q_heads: int, kv_heads: int, **changes: Any) -> Problem:
    fields = {
        "head_dim": 128,
        "page_size": 128,
        "max_num_batched_tokens": 2048,
        "pages_per_seq": 16,
        **changes,
    }
    return Problem(num_q_heads=q_heads, num_kv_heads=kv_heads, **fields)


def keys_of(name: str, **serving: Any) -> list[TableKey]:
    return [entry.key for entry in resolve(of_model(known(name), Serving(**serving)))]


def test_a_model_stands_for_the_keys_of_its_heads_on_a_chip() -> None:
    """By hand: 32 query and 8 KV heads, by four chips and by sixteen."""
    found = keys_of("llama-3.1-8b", tps=(4, 16), tokens=(512, 1024), lengths=(2048, 4000))
    bf16 = ("bfloat16", "bfloat16")
    assert found == [
        TableKey(*bf16, 8, 2, 128, 128, 512, 2048),
        TableKey(*bf16, 8, 2, 128, 128, 1024, 2048),
        TableKey(*bf16, 8, 2, 128, 256, 512, 4096),
        TableKey(*bf16, 8, 2, 128, 256, 1024, 4096),
        TableKey(*bf16, 2, 1, 128, 128, 512, 2048),
        TableKey(*bf16, 2, 1, 128, 128, 1024, 2048),
        TableKey(*bf16, 2, 1, 128, 256, 512, 4096),
        TableKey(*bf16, 2, 1, 128, 256, 1024, 4096),
    ]
    assert keys_of("llama-3.1-8b", lengths=(2048,), page_sizes=(16,), kv_dtype="float8_e5m2") == [
        TableKey("bfloat16", "float8_e5m2", 32, 8, 128, 16, tokens, 2048)
        for tokens in (2048, 1024, 512, 256, 128, 64, 32, 16)
    ]


def test_tokens_that_nobody_names_are_the_sizes_that_vllm_pads_to_and_that_is_said(tmp_path: Path) -> None:
    def keys(*asked: str) -> tuple[list[str], str]:
        done = CliRunner().invoke(cli, ["keys", "--model", "llama-3.1-8b", "--max-model-len", "2048", *asked])
        lines = csv.DictReader(io.StringIO(done.stdout))
        return [line["max_num_batched_tokens"] for line in lines], done.stderr

    found, said = keys()
    assert sorted(map(int, found)) == [16, 32, 64, 128, 256, 512, 1024, 2048]
    assert "  tokens: as vLLM pads batches on TPUs, doubling from 16 to 2048;" in said
    named, said = keys("--max-num-batched-tokens", "512")
    assert named == ["512"] and "vLLM pads" not in said


def test_fp8_is_what_vllm_means_by_it() -> None:
    def dtypes(name: str) -> set[str]:
        asked = ["keys", "--model", "llama-3.1-8b", "--kv-dtype", name]
        return {
            line["kv_dtype"] for line in csv.DictReader(io.StringIO(CliRunner().invoke(cli, asked).stdout))
        }

    assert dtypes("fp8") == dtypes("fp8_e4m3") == {"float8_e4m3fn"}
    assert dtypes("fp8_e5m2") == {"float8_e5m2"}


def test_a_tp_of_several_that_does_not_divide_the_heads_is_skipped_with_a_warning() -> None:
    def keys(tps: str) -> Any:
        return CliRunner().invoke(
            cli,
            ["keys", "--model", "qwen2.5-7b", "--tp", tps, "--max-num-batched-tokens", "512", "--pad-heads"],
        )

    done = keys("2,8,4")
    heads = [line["num_q_heads_per_blk"] for line in csv.DictReader(io.StringIO(done.stdout))]
    assert heads == ["16", "8"]
    [skipped] = [line for line in done.stderr.splitlines() if "skipped" in line]
    assert skipped.startswith("--tp 8 is skipped: qwen2.5-7b: 28 query heads cannot be divided among --tp 8")
    refused = keys("8,16")
    assert isinstance(refused.exception, UsageError) and "--tp 8 chips" in str(refused.exception)


def test_head_dim_64_is_looked_up_as_128_and_said_to_cost_twice_the_cache() -> None:
    model = read_config(CONFIGS / "gpt-oss-20b.json")
    entries = resolve(of_model(model, Serving(tps=(8,), lengths=(4096,), tokens=(2048,))))
    assert [entry.key[2:5] for entry in entries] == [(8, 1, 128)]
    said = "\n".join(listing(model, entries, recommended=True))
    assert "  tp=8: 8 query and 1 KV head of 64 on a chip" in said
    assert "head_dim 64: the kernel takes multiples of 128, so serving must pad q and KV pages to 128" in said
    assert "makes the KV cache 2 times as large" in said
    assert "page 256: key (bfloat16, bfloat16, 8, 1, 128, 256, 2048, 4096)" in said


def test_a_shape_whose_head_dim_is_padded_is_told_the_same() -> None:
    shape = "q_heads=8,kv_heads=2,head_dim=80,page_size=128,max_num_batched_tokens=512,max_model_len=2048"
    said = CliRunner().invoke(cli, ["keys", "--shape", shape], catch_exceptions=False)
    first, second = said.stderr.splitlines()
    assert first == (
        "head_dim 80: the kernel takes multiples of 128, so serving must pad q and KV pages to 128, which "
        "makes the KV cache 1.6 times as large"
    )
    assert "(bfloat16, bfloat16, 8, 2, 128, 128, 512, 2048), so it is swept" in second


def test_kv_heads_that_are_kept_on_several_chips_are_said_to_be() -> None:
    model = known("llama-3.1-8b")
    entries = resolve(of_model(model, Serving(tps=(8, 16))))
    said = [line for line in listing(model, entries, recommended=True) if "kept on" in line]
    assert said == ["    each KV head is kept on 2 chips, and so is its KV cache: 2 times the bytes in all"]


def test_a_page_size_that_is_rounded_up_says_what_becomes_of_the_length() -> None:
    model = known("llama-3.1-8b")
    entries = resolve(of_model(model, Serving(lengths=(4096,), page_sizes=(100,))))
    said = list(listing(model, entries, recommended=False))
    assert said[-1].strip() == (
        "page_size 100 is rounded up to 128, and max_model_len, which is 41 whole pages of 100 and so 4100, "
        "to 8192"
    )


def test_layers_with_other_heads_are_other_keys() -> None:
    model = read_config(CONFIGS / "gemma-4-31b.json")
    entries = resolve(of_model(model, Serving(tps=(4,), lengths=(4096,), tokens=(2048,))))
    assert [(entry.key[2:5], entry.origin) for entry in entries] == [
        ((8, 4, 256), "gemma-4-31b tp=4 windowed layers"),
        ((8, 1, 512), "gemma-4-31b tp=4 full-attention layers"),
    ]


@given(
    st.integers(1, 12),
    st.integers(1, 8),
    st.sampled_from([64, 80, 128, 256]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 2**31 - 1),
    st.sampled_from([None, (16,), (1000,)]),
    st.sampled_from([None, "float8_e5m2", "int8"]),
)
@settings(deadline=None)
def test_every_key_of_a_model_is_one_that_a_look_up_asks_for(
    kv: int, group: int, dim: int, tp: int, length: int, pages: tuple[int, ...] | None, kv_dtype: str | None
) -> None:
    config = {"num_attention_heads": kv * group, "num_key_value_heads": kv, "head_dim": dim}
    model = parse_config(config, "mine", "mine")
    serving = Serving(tps=(tp,), lengths=(length,), page_sizes=pages, kv_dtype=kv_dtype)
    try:
        asked = list(of_model(model, serving))
    except UsageError as error:
        assert "--tp" in str(error)
        return
    keys = merged(resolve(asked, pad_heads=True))
    assert all(is_canonical(key) for key in keys)
    written = files.render(keys, "json")
    assert [TableKey(**{n: row[n] for n in TableKey._fields}) for row in json.loads(written)] == list(keys)
    assert all(number <= 2**32 for key in keys for number in key[2:])


def test_models_of_one_key_share_it() -> None:
    entries = [
        e
        for n in ("llama-3.1-8b", "mixtral-8x7b")
        for e in resolve(of_model(known(n), Serving(lengths=(2048,), tokens=(2048,))))
    ]
    assert list(merged(entries).values()) == ["llama-3.1-8b tp=1; mixtral-8x7b tp=1"]


@pytest.mark.parametrize(
    ("tp", "said"),
    [(4, "--tp 5, 10, 20, 40 would do, and with --pad-heads 1, 2"), (3, "--tp 5, 10, 20, 40 would do")],
)
def test_numbers_of_chips_that_are_offered_are_not_refused_as_not_tiling(tp: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        keys_of("phi-4", tps=(tp,))
    assert keys_of("phi-4", tps=(5, 10, 20, 40))
    for padded in (1, 2):
        with pytest.raises(UsageError, match="can not be XLA fully tiled"):
            keys_of("phi-4", tps=(padded,))
        assert resolve(of_model(known("phi-4"), Serving(tps=(padded,))), pad_heads=True)
    with pytest.raises(UsageError, match=r"--tp 3 chips: --tp 1, 2, 4, 8, 16, 32 would do$"):
        keys_of("llama-3.1-8b", tps=(3,))


def test_no_longest_length_asks_for_one() -> None:
    model = read_config(CONFIGS / "falcon-7b.json")
    with pytest.raises(UsageError, match="names no longest length: give --max-model-len"):
        list(of_model(model, Serving()))


problems = st.builds(
    lambda kv, group, kv_dtype, q_dtype: problem(kv * group, kv, kv_dtype=kv_dtype, q_dtype=q_dtype),
    st.integers(1, 40),
    st.integers(1, 12),
    st.sampled_from(["bfloat16", "float32", "float8_e5m2"]),
    st.sampled_from(["bfloat16", "float32"]),
)


@given(problems)
@settings(deadline=None)
def test_whatever_the_heads_there_is_a_layout_that_can_be_swept(p: Problem) -> None:
    choices = options(p)
    assert choices
    assert [c.kv_ratio for c in choices] == sorted(c.kv_ratio for c in choices)
    for choice in choices:
        q, kv = choice.layout.num_q_heads, choice.layout.num_kv_heads
        assert heads_per_blk(q, kv, p.q_dtype, p.kv_dtype) is not None
        assert q >= p.num_q_heads
        assert kv >= p.num_kv_heads
        assert q % kv == 0
        assert is_canonical(choice.key)
        other = Problem(**{**p.__dict__, "num_q_heads": q, "num_kv_heads": kv})
        assert choice.kv_ratio == other.layout.kv_bytes_per_token / p.layout.kv_bytes_per_token


def test_twelve_and_six_heads_are_padded_to_sixteen_and_eight() -> None:
    asked = [Asked(problem(12, 6), "mine")]
    with pytest.raises(UsageError) as raised:
        resolve(asked)
    said = str(raised.value)
    assert "mine: q_heads=12, kv_heads=6" in said
    assert "num_combined_kv_heads=12 can not be XLA fully tiled" in said
    assert "8 KV and 16 query heads (padded: 1.33 times the KV cache, 1.33 times the query heads" in said
    assert said.splitlines()[1].endswith("; --pad-heads sweeps this")
    assert "--tp" not in said
    (entry,) = resolve(asked, pad_heads=True)
    assert entry.key[2:4] == (16, 8)
    assert entry.padded
    advice = entry.padded.advice(problem(12, 6))
    assert advice.startswith(
        "12 query and 6 KV heads do not tile; serving must pad q to 16 heads and KV pages to 8 KV heads, and "
        "drop the output of the added 4: 1.33 times the KV cache"
    )


def test_numbers_of_chips_at_which_nothing_is_padded_are_named() -> None:
    model = parse_config(
        {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 128}, "mine", "mine"
    )
    with pytest.raises(UsageError) as raised:
        resolve(of_model(model, Serving(tps=(1, 3), lengths=(4096,))))
    cause, free, padded = str(raised.value).splitlines()
    assert cause.startswith("mine tp=1: q_heads=12, kv_heads=6")
    assert free.startswith("  --tp 3,6,12, with nothing padded (--tp 3: 4 query and 2 KV heads on a chip)")
    assert padded.startswith("  8 KV and 16 query heads")
    assert resolve(of_model(model, Serving(tps=(3, 6, 12), lengths=(4096,))))


def test_a_single_fp8_head_is_kept_twice_which_pads_no_query_head() -> None:
    p = problem(4, 1, kv_dtype="float8_e5m2")
    (entry,) = resolve([Asked(p, "mine")], pad_heads=True)
    assert entry.padded
    assert (entry.padded.layout.num_q_heads, entry.padded.layout.num_kv_heads) == (4, 2)
    assert "keep each KV head 2 times, so 2 in all: 2 times the KV cache" in entry.padded.advice(p)


def test_heads_that_tile_under_a_key_of_no_padded_shape_get_wider_groups() -> None:
    (entry,) = resolve([Asked(problem(48, 16), "mine")], pad_heads=True)
    assert entry.key[2:4] == (32, 8)
    assert entry.padded
    advice = entry.padded.advice(problem(48, 16))
    assert advice.startswith(
        "48 query and 16 KV heads have a key that no padded shape has; serving must pad q to 64 heads and KV "
        "pages to 16 KV heads, 4 query heads for each KV head in place of 3"
    )
    assert "the same KV cache, 1.33 times the query heads" in advice


@pytest.fixture
def v6e(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Estimates:
    """Of the built-in calibration, whatever this user's is."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return Estimates(generations.by_name("v6e"))


def test_an_estimate_is_what_the_committed_rows_say(v6e: Estimates) -> None:
    board = scores.committed(["v6e"])
    assert board
    key = TableKey("bfloat16", "bfloat16", 32, 8, 128, 128, 2048, 2048)
    best = board.best("v6e", key)
    estimate = v6e.best(key)
    assert best
    assert estimate
    assert estimate.seconds * 1e6 == pytest.approx(best[1].latency_us, rel=1e-6)
    assert estimate.origin == "the committed rows"
    # Forty query and ten KV heads are padded to two blocks of such heads.
    (padded, *_) = options(problem(40, 10), v6e)
    assert padded.turns == 2
    assert padded.estimate == estimate
    assert f"modelled {2e6 * estimate.seconds:.4g} us a call on v6e" in padded.time()


def test_a_length_that_no_row_has_is_modelled_from_the_same_programs(v6e: Estimates) -> None:
    short, long = (
        v6e.best(TableKey("bfloat16", "bfloat16", 32, 8, 128, 128, 2048, length))
        for length in (2048, 1 << 20)
    )
    assert short
    assert long
    assert long.seconds > 100 * short.seconds


def test_compiles_of_earlier_sweeps_count_and_what_nobody_compiled_is_unknown(
    v6e: Estimates, tmp_path: Path
) -> None:
    key = TableKey("bfloat16", "bfloat16", 16, 8, 128, 128, 2048, 2048)
    assert v6e.best(key) is None
    assert "its time on v6e is not known" in options(problem(12, 6), v6e)[0].time()
    store = Store(tmp_path / "compiles.sqlite")
    program = Program(layout=key.canonical_problem().layout, blocks=BlockSizes(8, 32))
    schedule = Schedule((1000, 1000, 1000, 5000), 1 << 20, 1 << 10)
    store.put("v6e", Tools.installed(), program, Compiled(status="ok", schedule=schedule, seconds=1.0))
    estimate = Estimates(generations.by_name("v6e"), store).best(key)
    assert estimate
    assert estimate.blocks == BlockSizes(8, 32)
    assert estimate.origin == "compiles of earlier sweeps"


def test_one_program_is_compiled_where_none_is_known(v6e: Estimates) -> None:
    asked: list[Program] = []

    def refused(programs: list[Program]) -> dict[Program, Compiled]:
        asked.extend(programs)
        return {program: Compiled(status="compile_error", error="no compiler") for program in programs}

    estimates = Estimates(generations.by_name("v6e"), None, compile=refused)
    # Two lengths of one layout: the same program.
    for pages in (16, 32):
        assert "not known" in options(problem(12, 6, pages_per_seq=pages), estimates)[0].time()
    assert [(p.layout.num_q_heads, p.layout.num_kv_heads, *p.blocks) for p in asked] == [(16, 8, 8, 32)]
    estimates.best(TableKey("bfloat16", "bfloat16", 32, 8, 128, 128, 2048, 2048))
    assert len(asked) == 1, "of this layout there are rows"


def test_too_many_keys_are_refused_before_they_are_made() -> None:
    many = tuple(range(1, 1001))
    with pytest.raises(UsageError, match="more than 100000 keys"):
        next(of_model(known("phi-4"), Serving(tokens=many, lengths=many)))


table_keys = st.builds(
    TableKey,
    st.sampled_from(["bfloat16", "float32"]),
    st.sampled_from(["bfloat16", "float32", "float8_e4m3fn", "int4"]),
    *[st.integers(1, 2**32)] * 6,
)
# As of a model's name; a file's own may hold anything, and what is no text to print is a ? there.
origins = st.text(st.characters(exclude_categories=("C", "Z")), max_size=30).map(str.strip)


@given(st.dictionaries(table_keys, origins, min_size=1, max_size=5), st.sampled_from(["csv", "json"]))
@settings(deadline=None)
def test_what_is_written_is_read_back(keys: dict[TableKey, str], form: str) -> None:
    sys.stdin, kept = io.TextIOWrapper(io.BytesIO(files.render(keys, form).encode())), sys.stdin
    try:
        read = files.read("-")
    finally:
        sys.stdin = kept
    assert {key: origin for key, origin, _ in read} == keys


def test_a_key_that_is_not_canonical_is_swept_as_the_one_that_is() -> None:
    odd = TableKey("bfloat16", "bfloat16", 28, 4, 128, 128, 2000, 3000)
    own = canonical_key(odd)
    entries, notes = canonical([(odd, "mine", "line 2"), (own, "mine", "line 3")])  # type: ignore[list-item]
    assert [entry.key for entry in entries] == [own, own]
    assert notes == [
        "line 2: (bfloat16, bfloat16, 28, 4, 128, 128, 2000, 3000) is looked up as "
        "(bfloat16, bfloat16, 32, 4, 128, 128, 2048, 4096), so it is swept as that"
    ]
    with pytest.raises(UsageError, match="is a key that no call has: the kernel does not tile 12 query"):
        canonical([(odd._replace(num_q_heads_per_blk=12, num_kv_heads_per_blk=5), "", "line 2")])


GOOD = "bfloat16,bfloat16,4,1,128,16,512,512"
HEADER = ",".join(TableKey._fields)
BAD_FILES = [
    ("", "its first line has no q_dtype"),
    ("a,b\n1,2\n", "its first line has no q_dtype: it must name q_dtype, kv_dtype"),
    (HEADER + "\n", "holds no key"),
    (f"{HEADER}\n{GOOD}\nbf16{GOOD[8:]}\n", "line 3: q_dtype='bf16' is unknown: use float32, bfloat16"),
    (f"{HEADER}\n{GOOD.replace('128', 'x')}\n", "line 2: head_dim='x' must be a whole number"),
    (f"{HEADER}\n{GOOD.replace('128', '0')}\n", "line 2: head_dim=0 must be a whole number within 1 and"),
    (f"{HEADER}\n{GOOD.replace('128', '9' * 5000)}\n", "line 2: head_dim='999999"),
    (f"{HEADER}\nbfloat16\n", "line 2: kv_dtype=nothing is unknown"),
    (f"{HEADER}\n\"{'x' * 200_000}\n", "line 2: field larger than field limit"),
    ("{}", "json of keys is a list of objects"),
    ("[1]", "key 1: 1 is no object"),
    ("[{]", "is not JSON, line 1"),
    ("[" * 200_000, "is nested too deeply"),
    (json.dumps([{"q_dtype": ["bfloat16"]}]), "key 1: q_dtype=['bfloat16'] is unknown"),
    ('[{"q_dtype": "int8", "kv_dtype": "int8", "num_q_heads_per_blk": true}]', "_blk=True must be"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), BAD_FILES, ids=[said for _, said in BAD_FILES])
def test_a_broken_file_of_keys_is_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        files.read(str(path))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_files_of_keys_are_bounded_and_name_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_KEYS", 10)
    (tmp_path / "many").write_text(f"{HEADER}\n" + f"{GOOD}\n" * 11)
    with pytest.raises(UsageError, match="holds more than 10 keys"):
        files.read(str(tmp_path / "many"))
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(100 << 20)
    for name, said in (("huge", "larger than 16 MiB"), ("none", "does not exist"), (".", "is no file")):
        with pytest.raises(UsageError, match=said):
            files.read(str(tmp_path / name))
    (tmp_path / "latin").write_bytes(b"\xff\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        files.read(str(tmp_path / "latin"))


def test_keys_go_from_one_command_to_the_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In this process, which has jax imported already."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runner = CliRunner()
    config = str(CONFIGS / "llama-3.1-8b.json")
    asked = ["keys", "--model", "phi-4", "--model", config, "--max-model-len", "2048"]
    asked += ["--target", "v6e", "--no-compile", "--max-num-batched-tokens", "2048"]
    refused = runner.invoke(cli, asked)
    assert isinstance(refused.exception, UsageError)
    assert "phi-4 tp=1: q_heads=40, kv_heads=10" in str(refused.exception)
    assert "us a call on v6e with (" in str(refused.exception)
    printed = runner.invoke(cli, [*asked, "--pad-heads", "--format", "json"], catch_exceptions=False)
    assert printed.exit_code == 0
    assert "serving must pad q to 64 heads and KV pages to 16 KV heads" in printed.stderr
    # Two blocks of padded heads each, and the same key as that of the other model's one block.
    (line,) = json.loads(printed.stdout)
    assert line == {
        **dict(zip(TableKey._fields, ("bfloat16", "bfloat16", 32, 8, 128, 128, 2048, 2048), strict=True)),
        "origin": "phi-4 tp=1; llama-3.1-8b tp=1",
    }
    table = runner.invoke(cli, [*asked, "--pad-heads", "--format", "table"], catch_exceptions=False)
    assert table.stdout.splitlines()[1].split()[:8] == [str(value) for value in list(line.values())[:8]]
    sweep = ["sweep", "--target", "v6e", "--keys", "-", "--dry-run", "--no-cache"]
    swept = runner.invoke(cli, sweep, input=printed.stdout, catch_exceptions=False)
    assert swept.exit_code == 0
    assert swept.stderr.startswith("1 key, ")
    assert not list(tmp_path.iterdir())


def test_keys_that_nothing_can_fit_are_told_with_what_would(tmp_path: Path) -> None:
    """A length of ten million tokens has pages of which not one fits in VMEM twice."""
    long = {"num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 128}
    (tmp_path / "long.json").write_text(json.dumps({**long, "max_position_embeddings": 10485760}))
    model = ("--target", "v6e", "--model", str(tmp_path / "long.json"), "--max-num-batched-tokens", "2048")
    runner = CliRunner()
    listed = runner.invoke(cli, ["keys", *model], catch_exceptions=False)
    ways = "--max-model-len 4194304 or less with --page-size 4096, or a larger --vmem-limit, up to 128MiB"
    said = "one page of 16384 tokens and one query need 32.02 MiB of VMEM, and the limit is 32.00 MiB; type "
    said += ways
    assert f"nothing can run on v6e: {said}\n" in listed.stderr
    dry = runner.invoke(cli, ["sweep", *model, "--no-cache", "--dry-run"], catch_exceptions=False)
    assert f"nothing can run on v6e: {said}\n" in dry.stderr
    swept = runner.invoke(cli, ["sweep", *model, "--no-cache", "--out", str(tmp_path / "r")])
    assert swept.exit_code == 0
    assert swept.stdout.splitlines()[-1] == f"Next: the same with {ways}"
    typed = ["--max-model-len", "4194304", "--page-size", "4096"]
    assert (
        "nothing can run" not in runner.invoke(cli, ["keys", *model, *typed], catch_exceptions=False).stderr
    )
    enough = ["sweep", *model, "--dry-run", "--vmem-limit", "64MiB"]
    assert "nothing can run" not in runner.invoke(cli, enough, catch_exceptions=False).stderr


def test_a_page_table_that_nothing_can_fit_is_told_with_the_page_that_would() -> None:
    shape = "q_heads=8,kv_heads=1,head_dim=128,max_num_batched_tokens=1024,max_model_len=1048576"
    asked = [
        "keys",
        "--target",
        "v6e",
        "--shape",
        f"{shape},page_size=128",
        "--shape",
        f"{shape},page_size=512",
        "--shape",
        f"{shape},page_size=1024",
    ]
    said = CliRunner().invoke(cli, asked, catch_exceptions=False).stderr
    assert "nothing can run on v6e for 2 of 3 keys, such as ('bfloat16', 'bfloat16', 8, 1, 128, 128," in said
    assert said.endswith(
        "128 rows of 8192 pages, needs 4.01 MiB of SMEM, and there is 1.00 MiB; type page_size=1024\n"
    )


def test_the_border_of_smem_is_told_before_the_sweep_with_figures_that_differ() -> None:
    """256 rows of 1,024 pages are 1 MiB by themselves; what goes with them is over it."""
    model = ["keys", "--target", "v6e", "--model", "llama-3.1-8b", "--max-model-len", "16384"]
    asked = [*model, "--max-num-batched-tokens", "2048", "--page-size", "16", "--max-num-seqs"]

    def said(seqs: int) -> str:
        return CliRunner().invoke(cli, [*asked, str(seqs)], catch_exceptions=False).stderr

    assert said(256).splitlines()[-1] == (
        "nothing can run on v6e: the page table, 256 rows of 1024 pages, needs 1.01 MiB of SMEM, and there "
        "is 1.00 MiB; type --page-size 32"
    )
    assert "nothing can run" in said(249) and "nothing can run" not in said(248)
    assert feasibility.told_apart(1_048_720, 1_048_576) == ("1,048,720 bytes", "1,048,576 bytes")


def test_heads_of_256_that_the_compiler_refuses_are_told_before_the_sweep(tmp_path: Path) -> None:
    def stderr(*asked: str) -> str:
        return CliRunner().invoke(cli, ["keys", "--target", "v6e", *asked], catch_exceptions=False).stderr

    model = ("--model", "gemma-3-12b", "--max-model-len", "4096", "--max-num-batched-tokens", "2048")
    refused = "refuses 8 KV heads of 256 with bfloat16 KV, whatever the block sizes and the VMEM limit"
    assert stderr(*model).splitlines()[-1] == (
        f"nothing can run on v6e: the compiler (libtpu 0.0.42) {refused}; type --tp 8, which leaves at most "
        "1 KV head on a chip"
    )
    assert "nothing can run" not in stderr(*model, "--tp", "8")
    halved = stderr(*model, "--kv-dtype", "float8_e4m3fn")
    assert "type --tp 4, which leaves at most 2 KV heads on a chip" in halved
    shape = "q_heads=16,kv_heads=8,page_size=128,max_num_batched_tokens=512,max_model_len=2048,head_dim="
    windowed = stderr("--model", "gemma-3-12b", "--tp", "8").splitlines()[1]
    assert windowed.endswith(
        "sweep these layers with --sliding-window 1024 into another --out than the others"
    )
    assert "type kv_heads=1, those of one of several chips" in stderr("--shape", f"{shape}256")
    assert "nothing can run" not in stderr("--shape", f"{shape}128")


def test_a_sweep_lists_a_models_keys_and_sweeps_padded_heads(autotune: Run, tmp_path: Path) -> None:
    """Three heads of each kind, padded to four: a small program."""
    fields = {"num_attention_heads": 3, "head_dim": 128, "sliding_window": 64, "max_position_embeddings": 512}
    (tmp_path / "tiny.json").write_text(json.dumps(fields))
    done = autotune(
        *("sweep", "--target", "v6e", "--model", "tiny.json", "--pad-heads", "--page-size", "16"),
        *("--max-num-batched-tokens", "512", "--kv-pages", "8", "--queries", "32", "--out", "r"),
    )
    assert done.returncode == 0, done.stderr
    assert "tp=1: 3 query and 3 KV heads of 128 on a chip" in done.stderr
    assert "pad q to 4 heads and KV pages to 4 KV heads" in done.stderr
    assert "tokens 512, length 512, page 16: key (bfloat16, bfloat16, 4, 4, 128, 16, 512, 512)" in done.stderr
    assert "all layers see a window of 64 tokens" in done.stderr
    assert "newly recorded candidates: 1 ok" in done.stderr


MISTAKES: list[tuple[list[Any], str]] = [
    (["keys"], "no keys are named: give --preset smoke"),
    (["keys", "--preset", "smoke", "--tp", "4"], "--tp needs a --model"),
    (["keys", "--model", "llama-3.1-8b", "--tp", "3"], "cannot be divided among --tp 3"),
    (["keys", "--model", "llama-3.1-8b", "--tp", "0"], "is not a list of positive whole numbers"),
    (["keys", "--model", "llama-3.1-8b", "--kv-dtype", "fp4"], "'fp4' is not one of"),
    (["keys", "--model", "llama-3"], "near it: llama-3-"),
    (["sweep", "--target", "v6e", "--model", CONFIGS / "deepseek-v3.json", "--dry-run"], "latent attention"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_a_users_mistake_is_one_clear_line(autotune: Run, arguments: list[Any], said: str) -> None:
    done = autotune(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_built_in_models_are_listed_with_their_source(autotune: Run) -> None:
    listed = list(csv.DictReader(autotune("keys", "--list-models", "--format", "csv").stdout.splitlines()))
    assert listed == [
        {"name": name, **{n: "" if v is None else str(v) for n, v in line._asdict().items()}}
        for name, line in KNOWN.items()
    ]
    done = autotune("keys", "--list-models")
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("gemma-3-12b ")]
    assert line.split() == [
        "gemma-3-12b",
        "16",
        "8",
        "256",
        "131072",
        "1024",
        "(some)",
        "google/gemma-3-12b-it",
    ]


@pytest.mark.parametrize(
    ("own", "other"),
    [((4, 1), (4, 2)), ((6, 3), (16, 4))],
    ids=["kept twice", "padded, with wider groups"],
)
def test_what_serving_is_told_gives_the_same_output(own: tuple[int, int], other: tuple[int, int]) -> None:
    """By JAX's reference: heads are laid out anew, and the heads that were there before answer as before."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    q = rng.standard_normal((8, own[0], 16), np.float32)
    pages = rng.standard_normal((3, 4, 2 * own[1], 16), np.float32)
    # One sequence: 3 queries, 11 tokens in the 3 pages.
    ragged = [np.array(v, np.int32) for v in ([11], [[2, 0, 1]], [0, 3], [1])]
    (group, kv), (wide, more) = (own[0] // own[1], own[1]), (other[0] // other[1], other[1])
    grouped = q.reshape(8, kv, group, 16)
    heads = pages.reshape(-1, 4, kv, 2, 16)  # a head's keys, then its values
    if other[0] == own[0]:
        grouped = grouped.reshape(8, more, wide, 16)
        heads = np.repeat(heads, more // kv, axis=2)
    else:
        grouped = np.pad(grouped, ((0, 0), (0, more - kv), (0, wide - group), (0, 0)))
        heads = np.pad(heads, ((0, 0), (0, 0), (0, more - kv), (0, 0), (0, 0)))
    laid_out = (grouped.reshape(8, other[0], 16), heads.reshape(-1, 4, 2 * more, 16), *ragged)
    wanted = np.asarray(call.reference(tuple(map(jnp.asarray, (q, pages, *ragged))), Settings()))
    given = np.asarray(call.reference(tuple(map(jnp.asarray, laid_out)), Settings()))
    if other[0] != own[0]:
        given = given.reshape(-1, more, wide, 16)[:, :kv, :group].reshape(-1, own[0], 16)
    assert np.allclose(given, wanted, atol=1e-5)
    assert np.abs(given).max() > 0.1
