"""`autotune results`, and what it stands on."""

from __future__ import annotations

import csv
import datetime
import json
import re
import subprocess
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune import emit
from autotune.analysis import overview
from autotune.cli.commands.results import command
from autotune.cli.main import cli
from autotune.errors import UsageError
from autotune.io import folders
from autotune.results import dataset, maintenance, schema
from autotune.tables.load import load
from tests.factories import TOOLS, make_row

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run `autotune results` in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(command, list(arguments))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def raw(folder: Path) -> set[str]:
    """Every row of every file, as text."""
    found = [row for table in dataset.tables(folder, schema.arrow()) for row in table.to_pylist()]
    texts = [json.dumps(row, default=str) for row in found]
    assert len(texts) == len(set(texts)), "a row is there twice"
    return set(texts)


# Few values, so that identities, times and whole rows coincide often.
ROWS = st.lists(
    st.builds(
        lambda pages, target, minute, latency, host, samples: make_row(
            pages,
            target=target,
            minute=minute,
            latency_us=latency,
            host=host,
            **({"source": "measured", "samples_us": [latency] * samples} if samples else {}),
        ),
        st.sampled_from([4, 8]),
        st.sampled_from(["v5e", "v6e"]),
        st.integers(0, 1),
        st.sampled_from([1.0, 2.0]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 2),
    ),
    max_size=8,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(ROWS, min_size=2, max_size=3), cuts=st.integers(1, 3), data=st.data())
def test_merging_is_order_free_idempotent_and_loses_nothing(
    parts: list[list[dict[str, Any]]], cuts: int, data: st.DataObject, tmp_path: Path
) -> None:
    base = tmp_path / uuid.uuid4().hex
    sources = []
    for number, rows in enumerate(parts):
        (base / f"{number}").mkdir(parents=True)
        sources.append(base / f"{number}")
        for start in range(cuts):
            dataset.append(sources[-1], rows[start::cuts])
    shuffled = data.draw(st.permutations(sources))
    first = maintenance.merge(sources, base / "first")
    second = maintenance.merge(shuffled, base / "second")
    assert first == second
    if first.rows:
        assert content(base / "first") == content(base / "second")
        again = maintenance.merge([*shuffled, base / "first"], base / "first")
        assert again == first._replace(new=0)
        assert raw(base / "first") == {
            json.dumps(row, default=str)
            for rows in parts
            for table in [schema.arrow().empty_table().from_pylist(rows, schema=schema.arrow())]
            for row in table.to_pylist()
        }
        # One after the other into an old folder: the same rows, and compacted the same bytes.
        for source in shuffled:
            maintenance.merge([source], base / "third")
        assert maintenance.compact(base / "third").rows == first.rows
        assert content(base / "third") == content(base / "first")
        assert dataset.read(base / "third").equals(dataset.read(base / "second"))


def test_rows_that_disagree_are_kept_and_counted(run: Callable[..., Result], tmp_path: Path) -> None:
    dataset.append(tmp_path / "a", [make_row(8, minute=1, latency_us=1.0, host="a"), make_row(4)])
    dataset.append(tmp_path / "b", [make_row(8, minute=2, latency_us=2.0, host="b"), make_row(4, host="b")])
    for order in ("a", "b"), ("b", "a"):
        done = run("merge", *order, "-o", "".join(order))
        assert done.exit_code == 0, done.stderr
        assert done.stdout == f"{''.join(order)}: 4 rows, 4 of them new, in 1 file\n"
        assert "1 candidate on a workload with rows that disagree: all are kept, the newest" in done.stderr
        assert f"show {''.join(order)}\n" in done.stderr
    assert content(tmp_path / "ab") == content(tmp_path / "ba")
    frame = dataset.read(tmp_path / "ab").set_index("num_kv_pages_per_blk")
    assert frame.loc[8, "latency_us"] == 2.0
    again = run("merge", "a", "-o", "ab")
    assert again.stdout == "ab: 4 rows, 0 of them new, in 1 file\n"


def test_of_one_moment_the_same_row_counts_whatever_the_files(tmp_path: Path) -> None:
    rows = [make_row(latency_us=latency, host=f"{latency}") for latency in (1.0, 2.0, 3.0)]
    for name, order in (("a", rows), ("b", rows[::-1])):
        for number, row in enumerate(order):
            folders.publish(
                tmp_path / name,
                f"{number}.parquet",
                dataset.parquet(schema.arrow().empty_table().from_pylist([row], schema=schema.arrow())),
            )
    assert dataset.read(tmp_path / "a")["host"].tolist() == dataset.read(tmp_path / "b")["host"].tolist()


def test_compacting_while_others_read_and_append(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    for queries in range(1, 9):
        dataset.append(folder, [make_row(queries=queries)])
    stop, seen = threading.Event(), []

    def reading() -> None:
        while not stop.is_set():
            seen.append(len(dataset.read(folder)))

    thread = threading.Thread(target=reading)
    thread.start()
    try:
        for queries in range(9, 25):
            dataset.append(folder, [make_row(queries=queries)])
            maintenance.compact(folder)
    finally:
        stop.set()
        thread.join()
    assert seen
    assert seen == sorted(seen), "rows were gone for a while"
    assert seen[0] >= 8
    assert len(dataset.names(folder)) == 1
    assert len(dataset.read(folder)) == 24


@pytest.mark.parametrize("moment", ["before", "after", "midst"])
def test_a_folder_compacted_around_its_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The listing shows the old files, gone by the time they are read, or some of them, or none."""
    folder = tmp_path / "r"
    for pages in range(1, 9):
        dataset.append(folder, [make_row(pages)])
    listing, old = folders.entries, list(folders.entries(folder))
    shown = iter([{"before": old, "midst": old[:3], "after": []}[moment]])

    def entries(of: folders.Folder) -> list[folders.Entry]:
        if (first := next(shown, None)) is None:
            return list(listing(of))
        monkeypatch.setattr(folders, "entries", listing)
        maintenance.compact(folder)
        return first

    monkeypatch.setattr(folders, "entries", entries)
    assert len(dataset.read(folder)) == 8


def test_compacting_again_changes_nothing_and_copies_are_harmless(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    for pages in (4, 8):
        for target in ("v5e", "v6e"):
            dataset.append(folder, [make_row(pages, target=target)])
    before, old = dataset.read(folder), content(folder)
    assert maintenance.compact(folder) == maintenance.Gathered(4, 0, 0, 2)
    done = content(folder)
    assert maintenance.compact(folder) == maintenance.Gathered(4, 0, 0, 2)
    assert content(folder) == done
    # Stopped after the new files were there, and before the old ones were deleted.
    for name, data in old.items():
        folders.publish(folder, name, data)
    assert dataset.read(folder).equals(before)
    maintenance.compact(folder)
    assert content(folder) == done


def test_a_file_that_cannot_be_read_stops_both_before_anything_is_written(tmp_path: Path) -> None:
    dataset.append(tmp_path / "a", [make_row(4)])
    dataset.append(tmp_path / "a", [make_row(8)])
    (tmp_path / "a" / "rows-broken.parquet").write_bytes(b"PAR1")
    before = content(tmp_path / "a")
    with pytest.raises(UsageError, match="rows-broken"):
        maintenance.compact(tmp_path / "a")
    with pytest.raises(UsageError, match="rows-broken"):
        maintenance.merge([tmp_path / "a"], tmp_path / "c")
    assert content(tmp_path / "a") == before
    assert not (tmp_path / "c").exists()


def test_a_folder_without_rows_is_told_as_everywhere(run: Callable[..., Result], tmp_path: Path) -> None:
    dataset.append(tmp_path / "r" / "demo", [make_row(8, latency_us=1.0)])
    said = str(run("ls", "r").exception)
    assert said == "'r': no rows in the folder itself: name those in it: r/demo"
    with pytest.raises(UsageError, match=said):
        overview.overview(Path("r"), empty=False)
    with pytest.raises(UsageError, match=r"no rows in the folder itself: name those in it: r/demo"):
        load("r")
    assert run("ls", "r/demo").exit_code == 0


def test_ls(run: Callable[..., Result], tmp_path: Path) -> None:
    dataset.append(tmp_path / "r", [make_row(4, minute=1), make_row(8, status="vmem_oom"), make_row(4)])
    dataset.append(tmp_path / "r", [make_row(4, target="v5e", source="measured", minute=5, workload="x")])
    done = run("ls", "r", "--format", "json")
    assert done.exit_code == 0, done.stderr
    held = json.loads(done.stdout)
    size = sum(path.stat().st_size for path in (tmp_path / "r").iterdir())
    assert (held["files"], held["bytes"], held["rows"], held["superseded"]) == (2, size, 3, 1)
    assert (held["keys"], held["candidates"]) == (2, 3)
    assert held["target"] == {"v5e": 1, "v6e": 2}
    assert held["source"] == {"measured": 1, "modelled": 2}
    assert held["status"] == {"ok": 2, "vmem_oom": 1}
    assert held["jax"] == {TOOLS.jax: 3}
    assert held["workload"] == {"mixed": 2, "x": 1}
    assert (held["first"], held["last"]) == ("2026-01-01T00:00:00+00:00", "2026-01-01T00:05:00+00:00")
    text = run("ls", "r").stdout
    assert "rows:               3\n" in text
    assert "target:             v5e 1, v6e 2\n" in text


def test_export(run: Callable[..., Result], tmp_path: Path) -> None:
    row = make_row(latency_us=1.5, cycles=[1, 2, 3, 4])
    dataset.append(
        tmp_path / "r",
        [make_row(latency_us=9.0, minute=-1), row, make_row(4, status="crashed", error='a "b",\nc')],
    )
    for name in ("x.csv", "x.json", "x.parquet"):
        done = run("export", "r", "-o", name)
        assert (done.exit_code, done.stdout) == (0, ""), done.stderr
    with (tmp_path / "x.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    loaded = json.loads((tmp_path / "x.json").read_text())
    frame = pq.ParquetFile(tmp_path / "x.parquet").read().to_pylist()
    assert len(lines) == len(loaded) == len(frame) == 2
    assert list(lines[0]) == list(loaded[0]) == schema.arrow().names
    assert lines[0]["error"] == loaded[0]["error"] == 'a "b",\nc'
    assert (lines[1]["cycles"], lines[1]["latency_us"]) == ("[1, 2, 3, 4]", "1.5")
    assert lines[1]["chip"] == "" and loaded[1]["chip"] is None
    assert loaded[1]["time"] == lines[1]["time"] == "2026-01-01T00:00:00+00:00"
    assert frame[1] == row
    assert pd.read_csv(tmp_path / "x.csv")["latency_us"].tolist()[1] == 1.5
    wrong = run("export", "r", "-o", "x.xls").exception
    assert str(wrong) == "-o 'x.xls' ends with none of .csv, .json, .parquet, which say what to write"


@pytest.mark.parametrize("arguments", [["results", "export", "r"], ["report", "r"], ["emit", "r"]], ids=str)
@pytest.mark.parametrize("url", ["s3://bucket/x.csv", "https://host/x.csv"])
def test_a_file_is_not_written_to_a_url(tmp_path: Path, arguments: list[str], url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        done = CliRunner().invoke(cli, [*arguments, "-o", url])
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert f"'{url}' is a URL: name a file of this machine" in done.output


def test_in_a_bucket(autotune: Run, tmp_path: Path, s3: Callable[[str], str]) -> None:
    dataset.append(tmp_path / "a", [make_row(4, latency_us=1.0), make_row(8, latency_us=2.0)])
    uri = s3(uuid.uuid4().hex)
    done = autotune("results", "merge", "a", "-o", uri)
    assert done.stdout == f"{uri}: 2 rows, 2 of them new, in 1 file\n", done.stderr
    assert dataset.read(folders.parse(uri)).equals(dataset.read(tmp_path / "a"))
    assert maintenance.compact(folders.parse(uri)).files == 1
    assert maintenance.inventory(folders.parse(uri))["rows"] == 2
    assert (
        autotune("emit", uri, "--allow-modelled").stdout
        == emit.emit(emit.read(tmp_path / "a"), allow_modelled=True).text
    )
    assert overview.overview(folders.parse(uri)).lines == overview.overview(tmp_path / "a").lines
    for name in (uri, f"{uri}:v6e"):
        assert load(name).devices == load(str(tmp_path / "a")).devices
    assert "no measured rows" in autotune("calibrate", uri).stderr
    with pytest.raises(UsageError, match=r"nothing\S* does not exist"):
        dataset.read(folders.parse(s3("nothing")))
    absent = autotune("show", uri.replace("//bucket", "//none"))
    assert absent.returncode == 3
    assert absent.stderr == "Error: bucket 'none' does not exist: make it first, or correct the name\n"


def test_every_command_inside_has_help_with_an_example() -> None:
    assert set(command.commands) == {"ls", "export", "merge", "compact"}
    for name, inner in command.commands.items():
        assert inner.help
        assert inner.epilog
        assert inner.epilog.startswith(f"Example: autotune results {name} ")


LATER = {
    "number": pa.array([1], pa.int16()),
    "word": pa.array(["x"]),
    "kind": pa.array(["x"]).dictionary_encode(),
    "list": pa.array([[None, 1.5]]),
    "nested": pa.array([{"a": [1], "b": None}]),
    "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
    "bytes": pa.array([b"\xff"]),
    "day": pa.array([datetime.date(2027, 1, 1)]),
    "odd": pa.array([float("nan")]),
    "a.b": pa.array([True]),
}


def put(folder: Path, name: str, row: dict[str, Any], **columns: pa.Array) -> None:
    """A file as a later version writes it."""
    folder.mkdir(exist_ok=True)
    table = pa.Table.from_pylist([row], schema=schema.arrow())
    for column, values in columns.items():
        table = table.append_column(column, values)
    pq.write_table(table, folder / f"rows-{name}.parquet")


def held(folder: Path) -> list[str]:
    """Every row of a folder with every column, and every column's type, but for the order of both."""
    tables = [pq.ParquetFile(path).read() for path in folder.iterdir()]
    types = {field.name: str(field.type) for table in tables for field in table.schema}
    rows = [
        sorted((k, repr(v)) for k, v in row.items() if v is not None) for t in tables for row in t.to_pylist()
    ]
    return [*sorted(map(str, rows)), str(sorted(types.items()))]


def test_columns_of_a_later_version_are_carried_along(run: Callable[..., Result], tmp_path: Path) -> None:
    put(tmp_path / "a", "1", make_row(4), **LATER)
    put(tmp_path / "a", "2", make_row(8), other=pa.array([7]))
    put(tmp_path / "b", "1", make_row(16))
    before = held(tmp_path / "a")
    assert run("merge", "a", "b", "-o", "all").exit_code == 0
    assert run("merge", "b", "a", "-o", "lla").exit_code == 0
    assert content(tmp_path / "all") == content(tmp_path / "lla")
    assert run("merge", "a", "-o", "all").stdout == "all: 3 rows, 0 of them new, in 1 file\n"
    assert run("compact", "a").exit_code == 0
    assert len(dataset.names(tmp_path / "a")) == 1
    assert held(tmp_path / "a") == before
    for form in ("csv", "json", "parquet"):
        done = run("export", "a", "-o", f"x.{form}")
        assert done.exit_code == 0, done.exception
    back = pq.ParquetFile(tmp_path / "x.parquet").read()
    assert {name: back.schema.field(name).type for name in LATER} == {n: v.type for n, v in LATER.items()}
    [row] = [row for row in json.loads((tmp_path / "x.json").read_text()) if row["word"]]
    assert row["nested"] == {"a": [1], "b": None} and row["day"] == "2027-01-01" and row["odd"] == "nan"
    with (tmp_path / "x.csv").open(newline="") as file:
        [row] = [row for row in csv.DictReader(file) if row["word"]]
    assert (row["number"], row["list"], row["other"]) == ("1", "[null, 1.5]", "")


ODD: dict[str, pa.Array] = {
    "null": pa.array([None]),
    "float16": pa.array([1.5], pa.float16()),
    "string_view": pa.array(["a"], pa.string_view()),
    "binary_view": pa.array([b"a"], pa.binary_view()),
    "list of views": pa.array([["a"]], pa.list_(pa.string_view())),
    "list_view": pa.array([[1]], pa.list_view(pa.int64())),
    "duration": pa.array([datetime.timedelta(1)]),
    "dictionary": pa.array(["a"]).dictionary_encode(),
}


@pytest.mark.parametrize("values", ODD.values(), ids=ODD)
def test_a_later_column_of_any_type_is_kept_or_refused_in_a_line(tmp_path: Path, values: pa.Array) -> None:
    for name, pages in (("1", 4), ("2", 8)):
        put(tmp_path / "a", name, make_row(pages), later=values)
    before = content(tmp_path / "a")
    try:
        assert maintenance.merge([tmp_path / "a"], tmp_path / "b").rows == 2
        assert maintenance.compact(tmp_path / "a").rows == 2
        for form in maintenance.FORMATS:
            assert maintenance.exported(tmp_path / "a", form)
    except UsageError as error:
        assert re.search(r"the column 'later'.* use the version that wrote", str(error))
        assert content(tmp_path / "a") == before
        return
    for folder in ("a", "b"):
        tables = [pq.ParquetFile(path).read() for path in (tmp_path / folder).iterdir()]
        assert [v for t in tables for v in t["later"].to_pylist()] == values.to_pylist() * 2


def test_rows_that_differ_in_a_later_column_alone_are_both_kept(tmp_path: Path) -> None:
    for number in (1, 2, 2):
        put(tmp_path / "a", uuid.uuid4().hex, make_row(), later=pa.array([[number, None]]))
    assert maintenance.compact(tmp_path / "a").rows == 2


def test_compact_deletes_nothing_that_it_cannot_keep(tmp_path: Path) -> None:
    put(tmp_path / "a", "1", make_row(4), later=pa.array([1]))
    put(tmp_path / "a", "2", make_row(8), later=pa.array(["x"]))
    before = content(tmp_path / "a")
    for reads in (maintenance.compact, lambda folder: maintenance.merge([folder], tmp_path / "b")):
        with pytest.raises(
            UsageError, match="differ in the type of a column that this autotune does not know"
        ):
            reads(tmp_path / "a")
    assert content(tmp_path / "a") == before
    assert not (tmp_path / "b").exists()
