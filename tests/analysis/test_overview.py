"""What `show` says of rows, in each of its formats."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune import emit
from autotune.analysis import overview
from autotune.cli.main import cli
from autotune.cli.next_step import committable
from autotune.cli.render.overview import FORMATS, record, render
from autotune.errors import UsageError
from autotune.io.terminal import WIDTH
from autotune.kernel.jax_rpa.call import published_table
from autotune.kernel.jax_rpa.tiling import is_canonical
from autotune.kernel.problem import BlockSizes
from autotune.results import dataset, scores, unfinished
from autotune.results.baselines import incumbent
from autotune.results.schema import Tools
from autotune.tpu.generations import GENERATIONS
from tests.factories import KEY, TOOLS, make_row

NEWER = Tools("0.12.0", "0.12.0", "0.0.50", "def")
V6E = scores.COMMITTED_ROWS / "v6e"


@pytest.fixture(scope="module")
def committed() -> overview.Overview:
    return overview.overview(V6E)


def test_csv_and_json_hold_every_winner_in_full(committed: overview.Overview) -> None:
    lines = list(csv.DictReader(io.StringIO(render(committed, "csv"))))
    held = json.loads(render(committed, "json"))
    assert len(lines) == len(held["winners"]) == len(committed.lines) > 400
    for line, text, value in zip(committed.lines, lines, held["winners"], strict=True):
        full = record(line)
        assert value == full
        assert text == {name: "" if cell is None else str(cell) for name, cell in full.items()}
        assert float(text["latency_us"]) == line.latency_us and text["source"] == "modelled"
        assert value["latency_low_us"] is None, "a model has no interval"
    assert held["candidates"] == committed.statuses and held["unfinished"] == []


def test_text_and_markdown_fit_and_name_every_winner(committed: overview.Overview) -> None:
    text, markdown = render(committed, "text"), render(committed, "markdown")
    assert max(map(len, text.splitlines())) <= WIDTH
    rows = [line for line in markdown.splitlines() if line.startswith("|") and "queries" not in line]
    assert len([line for line in rows if "---" not in line]) == len(committed.lines)
    assert all(line.count("|") == rows[0].count("|") for line in rows)
    for said in (text, markdown):
        assert "vmem_limit 100 MiB" in said and "not timed on a TPU" in " ".join(said.split())


def test_sources_are_kept_apart(tmp_path: Path) -> None:
    timed = {"latency_low_us": 9.0, "latency_high_us": 12.0}
    other = KEY._replace(max_model_len=KEY.max_model_len * 2)
    dataset.append(
        tmp_path,
        [
            make_row(4, 32, latency_us=20.0),
            make_row(8, 32, latency_us=10.0, source="measured", **timed),
            make_row(4, 32, latency_us=30.0, key=other),
            make_row(8, 32, latency_us=5e6, source="interpreted", key=other),
        ],
    )
    seen = overview.overview(tmp_path)
    assert seen.statuses == {"modelled": {"ok": 2}, "measured": {"ok": 1}, "interpreted": {"ok": 1}}
    text = render(seen, "text")
    modelled, measured = text.split("target v6e")[1:]
    assert "source MEASURED" in " ".join(measured.split()) and "MEASURED" not in modelled
    assert "8,32" in measured and "4,32" in modelled, "an interpreter has no say"
    assert "a test of the path, interpreted on a CPU, of no say in the winners: 1 ok" in text
    found = {line.source: (line.low_us, line.latency_us, line.high_us) for line in seen.lines}
    assert found["measured"] == pytest.approx((9.0, 10.0, 12.0)) and found["modelled"][::2] == (None, None)


def test_a_sweep_that_has_not_ended_is_told(tmp_path: Path) -> None:
    other = KEY._replace(max_model_len=KEY.max_model_len * 2)

    def begin(keys: tuple, fails: bool, asked: str = "a") -> None:
        with unfinished.noted(tmp_path, "v6e", keys, asked):
            dataset.append(tmp_path, [make_row(4, 32, latency_us=20.0)])
            assert len(overview.overview(tmp_path).unfinished) >= 1
            if fails:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin((KEY, other), fails=True)
    assert "UNFINISHED: a sweep of 2 keys" in emit.emit(emit.read(tmp_path), allow_modelled=True).text
    [(sweep, missing)] = overview.overview(tmp_path).unfinished
    assert sweep.keys == (KEY, other) and missing == 1
    said = " ".join(render(overview.overview(tmp_path), "text").split())
    assert "unfinished: a sweep of 2 keys for v6e" in said and "; 1 key without rows yet. If" in said
    assert overview.overview(tmp_path, "v5e").unfinished == []
    begin((KEY,), fails=False)  # fewer keys, and then other candidates: it is still not done
    begin((KEY, other), fails=False, asked="b")
    assert len(overview.overview(tmp_path).unfinished) == 1
    begin((KEY, other), fails=False)
    assert overview.overview(tmp_path).unfinished == []
    assert not list(tmp_path.glob(".sweep-*"))
    assert "UNFINISHED" not in emit.emit(emit.read(tmp_path), allow_modelled=True).text


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        (["sweep", "--out", "a b; rm"], True),
        (["rm", "-r"], False),
        (["sweep", "\x1b[31m"], False),
        (["sweep", 1], False),
        (["sweep", "x" * unfinished.MAX_COMMAND], False),
        ("sweep", False),
    ],
)
def test_the_command_that_goes_on_is_told_if_it_is_one(
    tmp_path: Path, command: list[str], kept: bool
) -> None:
    folder = tmp_path / "rows"
    dataset.append(folder, [make_row(4, 32, latency_us=20.0)])
    note = {"target": "v6e", "time": "2026-01-01 00:00", "keys": [KEY], "command": command}
    (folder / ".sweep-x.json").write_text(json.dumps(note))
    told = "autotune sweep --out 'a b; rm'" if kept else "the command of the sweep again"
    for wanted in (["show", folder], ["emit", folder, "--allow-modelled", "-o", tmp_path / "t.py"]):
        done = CliRunner().invoke(cli, list(map(str, wanted)))
        assert done.exit_code == 0 and "\x1b" not in done.output
        [line] = [line for line in done.stderr.splitlines() if line.startswith("Next")]
        assert told in line
    assert "unfinished: a sweep of 1 key for v6e" in done.stderr
    listed = CliRunner().invoke(cli, ["results", "ls", str(folder)])
    assert "unfinished:         a sweep of 1 key for v6e" in listed.stdout


def test_a_winner_without_todays_pair_says_so(tmp_path: Path) -> None:
    dataset.append(tmp_path, [make_row(8, 64, latency_us=20.0)])
    seen = overview.overview(tmp_path)
    today = incumbent(GENERATIONS["v6e"], KEY)
    pair = today.published or today.default
    assert seen.uncompared == [pair] == list(emit.read(tmp_path).uncompared)
    said = " ".join(render(seen, "text").split())
    assert "1 of 1 winner was not compared" in said
    assert f"--kv-pages {pair[0]} --queries {pair[1]} adds it" in said
    for status, latency in (("vmem_oom", None), ("ok", 21.0)):  # what fails is no rival
        dataset.append(tmp_path, [make_row(*pair, status=status, latency_us=latency)])
        assert overview.overview(tmp_path).uncompared == []


def test_a_default_that_fails_is_not_one_that_was_not_tried(tmp_path: Path) -> None:
    """Three keys: JAX's default overflows, times out, and has no row; nothing is published for any."""
    keys = [KEY._replace(head_dim=256, max_model_len=length) for length in (2048, 4096, 8192)]
    defaults = [incumbent(GENERATIONS["v6e"], key).default for key in keys]
    assert [incumbent(GENERATIONS["v6e"], key).published for key in keys] == [None] * 3
    dataset.append(
        tmp_path,
        [
            *(make_row(4, 64, key=key, latency_us=20.0) for key in keys),
            make_row(*defaults[0], key=keys[0], status="vmem_oom", needed_bytes=9, limit_bytes=8),
            make_row(*defaults[1], key=keys[1], status="timeout"),
        ],
    )
    seen = overview.overview(tmp_path)
    assert [line.default.status for line in seen.lines] == ["vmem_oom", "timeout", None]
    assert seen.failing == {"default": ({"vmem_oom": 1, "timeout": 1}, 3), "published": ({}, 0)}
    for form in ("text", "markdown"):
        said = render(seen, form)
        shown = [f"{pair[0]},{pair[1]} {mark}" for pair, mark in zip(defaults, "!!?", strict=True)]
        assert all(text in said for text in shown)
        joined = " ".join(said.split())
        assert "JAX's default does not fit 1 of 3 keys: 1 vmem_oom" in joined
        assert "JAX's default fails on 1 of 3 keys: 1 timeout" in joined
        assert "published value" not in joined
    lines = list(csv.DictReader(io.StringIO(render(seen, "csv"))))
    assert [line["default_status"] for line in lines] == ["vmem_oom", "timeout", ""]
    held = json.loads(render(seen, "json"))
    assert [line["default_status"] for line in held["winners"]] == ["vmem_oom", "timeout", None]
    assert held["failing"]["default"] == {"keys": 3, "statuses": {"vmem_oom": 1, "timeout": 1}}


def test_a_published_value_that_fails_is_told(tmp_path: Path) -> None:
    now = {key: incumbent(GENERATIONS["v6e"], key) for key in published_table()["TPU v6"]}
    key = next(key for key, pairs in now.items() if pairs.published != pairs.default and is_canonical(key))
    pair = now[key].published
    assert pair is not None
    dataset.append(
        tmp_path,
        [
            make_row(1, 16, key=key, latency_us=20.0),
            make_row(*pair, key=key, status="compile_error"),
            make_row(*now[key].default, key=key, latency_us=40.0),
        ],
    )
    seen = overview.overview(tmp_path)
    [line] = seen.lines
    assert line.default == (line.default.blocks, pytest.approx(2.0), "ok")
    assert line.published == (pair, None, "compile_error")
    said = " ".join(render(seen, "text").split())
    assert "JAX's published value fails on 1 of 1 key: 1 compile_error" in said
    assert "JAX's default does not" not in said


@pytest.mark.parametrize(
    ("tools", "model"), [(NEWER, "1"), (TOOLS, "2")], ids=["another libtpu", "another model"]
)
def test_a_failure_of_another_version_is_none_of_the_deciding_one(
    tmp_path: Path, tools: Tools, model: str
) -> None:
    """An older compiler refused JAX's pair and every pair of another key; the newer has not tried JAX's."""
    today, lost = incumbent(GENERATIONS["v6e"], KEY).default, KEY._replace(max_model_len=4096)
    older = [
        make_row(*today, status="vmem_oom", model="1"),
        make_row(8, key=lost, status="vmem_oom", model="1"),
        make_row(4, key=lost, status="vmem_oom", model="1"),
    ]
    newer = {"minute": 1, "tools": tools, "model": model}
    dataset.append(tmp_path, [*older, make_row(4, 64, **newer), make_row(2, 64, latency_us=2.0, **newer)])
    dataset.append(tmp_path, [make_row(4, key=lost, status="compile_error", error="no", **newer)])
    seen = overview.overview(tmp_path)
    assert [line.default.status for line in seen.lines] == [None]
    assert seen.failing["default"] == ({}, 2)
    assert seen.uncompared == [today] == list(emit.read(tmp_path).uncompared)
    assert seen.without_winner == [("v6e", lost, "4,32 is compile_error: no")]
    board = scores.read([tmp_path])
    assert board.failure("v6e", KEY, today) is None and board.failure("v6e", lost, BlockSizes(8, 32)) is None
    refused = board.failure("v6e", lost, BlockSizes(4, 32))
    assert refused and refused.status == "compile_error"
    dataset.append(tmp_path, [make_row(*today, status="vmem_oom", **newer)])
    seen = overview.overview(tmp_path)
    assert [line.default.status for line in seen.lines] == ["vmem_oom"] and not seen.uncompared


def test_what_the_compiler_of_a_timed_winner_refuses_counts(tmp_path: Path) -> None:
    today = incumbent(GENERATIONS["v6e"], KEY).default
    timed = {"source": "measured", "latency_low_us": 1.0, "latency_high_us": 1.0}
    dataset.append(tmp_path, [make_row(4, 64, **timed), make_row(2, 64, **timed)])
    dataset.append(tmp_path, [make_row(*today, status="vmem_oom", model="1")])
    [line] = overview.overview(tmp_path).lines
    assert (line.source, line.default.status) == ("measured", "vmem_oom")


def test_a_cost_is_never_nothing(tmp_path: Path) -> None:
    pair = incumbent(GENERATIONS["v6e"], KEY).default
    dataset.append(tmp_path, [make_row(8, 64, latency_us=1000.0), make_row(*pair, latency_us=1001.0)])
    text = render(overview.overview(tmp_path), "text")
    assert f"{pair[0]},{pair[1]} <1%" in text and "+0%" not in text


def test_a_folder_without_rows_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no rows: `autotune sweep --out` makes some"):
        overview.overview(tmp_path, empty=False)
    dataset.append(tmp_path, [make_row(4, 32, latency_us=20.0)])
    with pytest.raises(UsageError, match="no rows for v5e, but for v6e"):
        overview.overview(tmp_path, "v5e", empty=False)
    with pytest.raises(UsageError, match="no rows for v5e, but for v6e"):
        emit.read(tmp_path, target="v5e")


def test_a_commit_is_advised_only_where_git_takes_it(tmp_path: Path) -> None:
    table = tmp_path / "t.py"
    assert not committable(table)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert committable(table)
    (tmp_path / ".gitignore").write_text("t.py\n")
    assert not committable(table) and committable(tmp_path / "other.py")


def test_nothing_is_left_of_a_sweep_that_could_not_begin(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), unfinished.noted(tmp_path / "new", "v6e", (KEY,), "a"):
        assert (tmp_path / "new").is_dir()
        raise RuntimeError
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"target": "v6e", "time": "x", "keys": []}',
        '{"target": "v9", "time": "2026-01-01 00:00", "keys": []}',
        '{"target": "v6e", "time": "2026-01-01 00:00", "keys": [[1, 2]]}',
        "[" * 100_000,
    ],
)
def test_a_note_that_is_none_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / ".sweep-x.json").write_text(text)
    dataset.append(tmp_path, [make_row(4, 32, latency_us=20.0)])
    assert overview.overview(tmp_path).unfinished == []


def test_no_winner_has_each_format(tmp_path: Path) -> None:
    dataset.append(tmp_path, [make_row(4, 32, status="compile_error", error="\x1b[31mred")])
    for form in FORMATS:
        said = render(overview.overview(tmp_path), form)
        assert "\x1b" not in said
    assert "nothing can win yet" in render(overview.overview(tmp_path), "text")
    assert "compile_error: ?[31mred" in render(overview.overview(tmp_path), "markdown")


def test_several_folders_are_told_of_merge(tmp_path: Path) -> None:
    for name in ("r5", "r6"):
        dataset.append(tmp_path / name, [make_row(8, latency_us=1.0)])
    names = [str(tmp_path / name) for name in ("r5", "r6")]
    refused = CliRunner().invoke(cli, ["show", *names]).exception
    assert isinstance(refused, UsageError)
    assert f"results merge {' '.join(names)} -o results/all` makes" in str(refused)
    assert CliRunner().invoke(cli, ["show"]).exit_code == 2


def test_what_a_winner_was_compared_with_is_told(tmp_path: Path) -> None:
    dataset.append(tmp_path, [make_row(pages, latency_us=float(pages)) for pages in (1, 2, 4)])
    dataset.append(tmp_path, [make_row(16, status="vmem_oom")])
    assert "each winner is among 3 of 4 candidates of its key; passed over: 1 failed" in " ".join(
        render(overview.overview(tmp_path), "text").split()
    )
    dataset.append(tmp_path, [make_row(8, latency_us=9.0, minute=9, tools=NEWER)])
    seen = overview.overview(tmp_path)
    said = "among 3 of 5 candidates of its key; passed over: 1 failed, 1 with rows of other versions only"
    for form in ("text", "markdown"):
        text = render(seen, form)
        assert (
            f"not all rows count on v6e for ({', '.join(map(str, KEY))}): each winner is {said}"
            in " ".join(text.split())
        )
    assert max(map(len, render(seen, "text").splitlines())) <= 80
    [line] = json.loads(render(seen, "json"))["winners"]
    assert (line["compared"], line["candidates"], line["failed"], line["other_version"]) == (3, 5, 1, 1)
    assert next(csv.DictReader(io.StringIO(render(seen, "csv"))))["compared"] == "3"
    won = emit.read(tmp_path)
    assert won.narrowed == f"1 of 1 winner: each winner is {said}"
    header = emit.emit(won, allow_modelled=True).text.split('"""')[1]
    assert f"compared: each winner is {said}" in " ".join(header.split())
