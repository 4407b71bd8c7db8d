"""The committed tables: how they are made of rows, and those that are there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from autotune import tables
from autotune.analysis import check, explain
from autotune.cli.progress import of_batch
from autotune.cli.render import explain as explain_formats
from autotune.compile.batch import compile_all
from autotune.errors import UsageError
from autotune.kernel.problem import Problem, Settings
from autotune.keys import presets
from autotune.model.calibrate import current
from autotune.results import dataset, scores, winners
from autotune.search.space import expected_compile_seconds
from autotune.tables import load, source
from autotune.tpu.generations import GENERATIONS
from tests.factories import make_row
from tools import make_tables

LIMIT = Settings(vmem_limit_bytes=100 << 20)


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    """A row for each key, and nothing that fits for the first one."""
    keys = make_tables.keys()
    own = {"settings": LIMIT, "model": current(GENERATIONS["v6e"]).version}
    rows = [make_row(1, 16, key=keys[0], status="vmem_oom", **own)]
    rows += [make_row(1, 16, key=key, latency_us=5.0, **own) for key in keys[1:]]
    dataset.append(tmp_path / "swept", rows)
    return tmp_path / "swept"


def test_a_table_of_every_key_and_what_is_lost(swept: Path) -> None:
    keys = make_tables.keys()
    table, lost = make_tables.table_of(swept, "v6e")
    assert lost == [keys[0]]
    assert list(table.rows_of("v6e")) == keys[1:]
    assert table.modelled
    assert table.provenance["vmem_limit_bytes"] == 100 << 20
    assert table.provenance["workloads"] == "mixed"
    text = source.render(table, "x", quote='"')
    assert source.read_text(text, "x").devices == table.devices
    assert "'" not in text.replace("own table", "").replace("jax's", "").split("TUNED_BLOCK_SIZES")[1]


def test_an_unfinished_sweep_is_not_committed(swept: Path) -> None:
    with pytest.raises(UsageError, match="no rows for v5e, but for v6e"):
        make_tables.table_of(swept, "v5e")
    few = swept.parent / "few"
    dataset.append(few, [make_row(1, 32, latency_us=5.0, settings=LIMIT)])
    with pytest.raises(UsageError, match=r"475 of 476 published keys have no row for v6e .* not done"):
        make_tables.table_of(few, "v6e")


def test_committed_rows_are_one_file_without_a_host(swept: Path, tmp_path: Path) -> None:
    assert make_tables.write_rows(swept, "v6e", tmp_path / "rows") == len(make_tables.keys())
    [path] = (tmp_path / "rows").iterdir()
    again = dataset.read(tmp_path / "rows")
    assert again["host"].isna().all()
    first, second = (winners.scores(frame).drop(columns="time") for frame in (dataset.read(swept), again))
    assert first.equals(second)
    # Rows of an earlier cost model stay out.
    dataset.append(swept, [make_row(2, 16, latency_us=1.0, settings=LIMIT, model="schedule2-b535bf9f")])
    make_tables.write_rows(swept, "v6e", tmp_path / "twice")
    assert (tmp_path / "twice" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("generation", GENERATIONS)
def test_each_committed_table_covers_its_keys_with_the_best_of_its_rows(generation: str) -> None:
    table = load(generation)
    wanted = make_tables.keys()
    rows = table.rows_of(generation)
    board = scores.committed([generation])
    assert board is not None
    # From four KV heads on the programs of long calls take hours to compile, and are not all swept yet.
    published = presets.keys("published")
    due = [key for key in wanted if key in published or key.num_kv_heads_per_blk < 4]
    lost = [key for key in due if key not in rows]
    assert all(board.best(generation, key) is None for key in lost)
    assert set(rows) <= set(wanted)
    assert len(lost) <= 40, lost
    assert table.provenance["keys"] == len(rows)
    assert table.modelled
    assert not list(check.static_findings(table))
    found, unscored = check.slow_findings(table, [generation], board, 1e-6)
    assert (found, unscored) == ([], 0)


@pytest.fixture
def no_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What an earlier run compiled proves nothing of this one's compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def compile_some(generation: str, count: int, most_seconds: float) -> None:
    table = load(generation)
    settings = Settings(vmem_limit_bytes=table.provenance["vmem_limit_bytes"])
    programs = [
        program
        for program in check.programs_of(table, generation, settings)
        if expected_compile_seconds(program) < most_seconds
    ]
    chosen = random.Random(generation).sample(programs, count)
    verdicts = compile_all(
        GENERATIONS[generation], chosen, named=True, jobs=2, timeout=900, start_progress=of_batch
    )
    assert {program: v.status for program, v in verdicts.items()} == dict.fromkeys(chosen, "ok")


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.usefixtures("no_store")
def test_a_quick_entry_compiles(generation: str) -> None:
    compile_some(generation, 1, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.usefixtures("no_store")
def test_a_dozen_entries_compile(generation: str) -> None:
    compile_some(generation, 12, float("inf"))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_look_ups_of_a_committed_key_are_exact_and_say_modelled(generation: str) -> None:
    kind = GENERATIONS[generation].device_kinds[0]
    for key, blocks in list(load(generation).rows_of(generation).items())[::40]:
        call = (*key[:7], key.pages_per_seq)
        answer = tables.explain(*call, device_kind=kind)
        assert (answer.origin, answer.value, answer.key) == ("exact", blocks, key)
    longer = tables.explain(*call[:7], 1 << 16, device_kind=kind)
    assert longer.origin == "nearest"
    assert longer.distance > 0


@pytest.mark.parametrize("generation", ["v4", "v5e", "v5p", "v6e"])  # long keys of v7x are not swept yet
def test_no_long_call_gets_what_only_a_short_one_is_limited_to(generation: str) -> None:
    """On v5e this call got (16, 32), of a key of 16 pages, and ran for 1.7 times as long as it could."""
    kind = GENERATIONS[generation].device_kinds[0]
    answer = tables.explain("bfloat16", "bfloat16", 8, 2, 128, 16, 2048, 1024, device_kind=kind)
    assert answer.origin == "exact" and answer.blocks.num_kv_pages_per_blk > 16
    beyond = tables.explain("bfloat16", "bfloat16", 8, 2, 128, 16, 2048, 8192, device_kind=kind)
    assert beyond.origin == "nearest" and beyond.blocks.num_kv_pages_per_blk > 16


@pytest.mark.parametrize("heads", [(28, 4), (32, 8), (12, 2)], ids=["Qwen", "Llama-3-8B", "Qwen2.5-1.5B"])
def test_real_models_are_explained_against_the_committed_table(heads: tuple[int, int]) -> None:
    problem = Problem(
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=128,
        page_size=128,
        max_num_batched_tokens=2048,
        pages_per_seq=16,
    )
    found = explain.explain(
        problem, GENERATIONS["v6e"], [load("jax"), load("v6e")], board=scores.committed(["v6e"])
    )
    assert [said.answer.origin for said in found.said if said.answer][1] in ("exact", "nearest")
    assert found.said[1].table.modelled
    assert "MODELLED" in explain_formats.render(found, "text")
