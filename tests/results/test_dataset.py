from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autotune.errors import MachineError, UsageError
from autotune.kernel.problem import SETTING_RANGES, Settings, TableKey
from autotune.results import dataset, maintenance, schema, validate
from autotune.results.rows import rows_of
from autotune.results.scores import COMMITTED_ROWS
from autotune.results.spool import Outbox
from autotune.search import plan
from autotune.tpu.generations import GENERATIONS, V6E, hardware
from tests.factories import KEY, TOOLS, make_row


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    full = make_row(
        settings=Settings(sliding_window=128, soft_cap=0.5, vmem_limit_bytes=1 << 26),
        source="measured",
        latency_us=1.25,
        latency_low_us=1.0,
        latency_high_us=1.5,
        samples_us=[1.0, 1.5],
        cycles=[60, 280, 27, 1645],
        vmem_used_bytes=123,
        smem_used_bytes=45,
        compile_seconds=0.5,
    )
    failed = make_row(pages=16, status="vmem_oom", needed_bytes=5, limit_bytes=4, error="no room")
    dataset.append(tmp_path, [full, failed])
    assert rows_of(dataset.read(tmp_path)) == [full, failed]


def test_a_row_names_only_columns() -> None:
    assert list(make_row()) == schema.arrow().names
    with pytest.raises(KeyError, match="latency_ms"):
        make_row(latency_ms=1.0)


def test_the_newest_of_two_rows_with_one_identity_counts(tmp_path: Path) -> None:
    dataset.append(tmp_path, [make_row(minute=2, latency_us=2.0)])
    dataset.append(tmp_path, [make_row(minute=1, latency_us=1.0)])
    dataset.append(tmp_path, [make_row(minute=3, latency_us=3.0, source="measured")])
    frame = dataset.read(tmp_path)
    assert sorted(frame["latency_us"]) == [2.0, 3.0]


def test_reading_does_not_depend_on_the_files(tmp_path: Path) -> None:
    rows = [make_row(p, q, minute=p) for p in (4, 8, 16) for q in (32, 64)]
    for number, row in enumerate(rows):
        dataset.append(tmp_path / "many", [row])
        dataset.append(tmp_path / "other", [rows[-1 - number]])
    dataset.append(tmp_path / "one", rows)
    one = dataset.read(tmp_path / "one")
    assert one.equals(dataset.read(tmp_path / "many"))
    assert one.equals(dataset.read(tmp_path / "other"))


def test_readers_pass_over_a_file_that_is_being_written(tmp_path: Path) -> None:
    dataset.append(tmp_path, [make_row()])
    (tmp_path / ".rows-1.tmp").write_bytes(b"half a fi")
    (tmp_path / ".rows-2.parquet").write_bytes(b"half a fi")
    assert len(dataset.read(tmp_path)) == 1


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no parquet at all" * 50])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    dataset.append(tmp_path, [make_row()])
    (tmp_path / "rows-broken.parquet").write_bytes(content)
    with pytest.raises(UsageError, match=r"rows-broken\.parquet' cannot be read as parquet rows"):
        dataset.read(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    dataset.append(tmp_path, [make_row()])
    [path] = tmp_path.glob("*.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match="move it out of the folder"):
        dataset.read(tmp_path)


def test_other_parquet_is_refused_and_older_columns_are_filled(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    with pytest.raises(UsageError, match="holds no rows of a sweep"):
        dataset.read(tmp_path)
    older = pa.Table.from_pylist([make_row(latency_us=1.0)], schema=schema.arrow()).drop_columns(["chip"])
    pq.write_table(older.append_column("new", pa.array(["x"])), tmp_path / "other.parquet")
    frame = dataset.read(tmp_path)
    assert frame["chip"].isna().all()
    assert "new" not in frame.columns


BAD_ROWS = [
    ({"schema_version": 2}, "schema version 2, where this autotune reads 1"),
    ({"target": "v99"}, "target=v99"),
    ({"target": "v6e\x1b[2J\n"}, r"target=v6e\?\[2J\?"),
    ({"source": "guessed"}, "source=guessed"),
    ({"source": None}, "without source"),
    ({"q_dtype": '"""'}, 'q_dtype="""'),
    ({"page_size": 0}, "page_size=0"),
    ({"page_size": None}, "without page_size"),
    ({"num_kv_pages_per_blk": -4}, "num_kv_pages_per_blk=-4"),
    ({"max_num_seqs": 2**40}, "max_num_seqs=1099511627776"),
    ({"latency_us": float("nan")}, "latency_us=nan"),
    ({"latency_us": float("inf")}, "latency_us=inf"),
    ({"latency_us": -1.0}, "latency_us=-1.0"),
    ({"latency_us": None}, "status=ok and no latency_us"),
    ({"status": "vmem_oom"}, "status=vmem_oom and a latency_us"),
    ({"latency_high_us": 0.0}, "latency_high_us=0.0"),
    ({"soft_cap": 0.0}, "soft_cap=0"),
    ({"soft_cap": 1e308}, r"soft_cap=1e\+308"),
    ({"k_scale": -1.0}, "k_scale=-1.0"),
    ({"vmem_limit_bytes": -1}, "vmem_limit_bytes=-1"),
    ({"cycles": []}, "cycles are not 4 counts"),
    ({"cycles": [1, 2, 3, None]}, "cycles are not 4 counts"),
    ({"cycles": [1, 2, 3, 2**62]}, "cycles are not 4 counts"),
    ({"cycles": [1, 2, 3, 2**31]}, "cycles are not 4 counts"),
    ({"cycles": None}, "some of cycles, vmem_used_bytes, smem_used_bytes only"),
    ({"cycles": None, "vmem_used_bytes": None, "smem_used_bytes": None}, "that is ok without cycles"),
    ({"vmem_used_bytes": 2**49}, f"vmem_used_bytes={2**49}"),
    ({"vmem_used_bytes": 0}, "vmem_used_bytes=0"),
    ({"smem_used_bytes": 2**21}, f"smem_used_bytes={2**21}"),
    ({"status": "timeout", "latency_us": None}, "a program that did not compile, with cycles"),
    ({"needed_bytes": 5, "limit_bytes": 4}, "needed_bytes that is no overflow"),
    ({"limit_bytes": 4}, "one of needed_bytes and limit_bytes only"),
    ({"model": None}, "a modelled row without model"),
    ({"timer": "device trace"}, "a modelled row with timer"),
    ({"chip": 0}, "a modelled row with chip"),
    ({"latency_low_us": 1.0}, "a modelled row with latency_low_us"),
    ({"device_kind": "TPU v5"}, "a row for v6e of another device_kind"),
    ({"device_kind": None}, "without device_kind"),
    ({"jax": None}, "without jax"),
    ({"num_kv_pages_per_blk": 32}, "num_kv_pages_per_blk is larger than its call"),
    ({"num_queries_per_blk": 2048}, "num_queries_per_blk is larger than its call"),
    ({"num_q_heads": 16}, "num_q_heads is not that of its key"),
    ({"pages_per_seq": 99}, "pages_per_seq is not that of its key"),
    ({"max_num_batched_tokens": 1000}, "max_num_batched_tokens is no power of two"),
    ({"head_dim": 100}, "head_dim is no multiple of 128"),
    ({"num_kv_heads_per_blk": 16, "num_kv_heads": 16}, "query heads are no multiple of its KV heads"),
    ({"workload_fingerprint": None}, "without workload_fingerprint"),
    ({"time": None}, "without time"),
    ({"jax": ""}, "an empty jax"),
    ({"libtpu": ""}, "an empty libtpu"),
    ({"workload": ""}, "an empty workload"),
    ({"model": ""}, "an empty model"),
    ({"error": "it crashed"}, "status=ok and an error"),
    ({"cycles": [1, 2, 3, 0]}, "whose KV block takes no cycle"),
    ({"vmem_used_bytes": 1 << 21, "vmem_limit_bytes": 1 << 20}, "more VMEM than its own limit"),
]


@pytest.mark.parametrize(("changes", "said"), BAD_ROWS, ids=lambda value: str(value)[:40])
def test_a_row_that_no_sweep_makes_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    good = [make_row(p, latency_us=1.0, cycles=[1, 2, 3, 4]) for p in (4, 8)]
    dataset.append(tmp_path, good)
    assert len(dataset.read(tmp_path)) == 2
    bad = pa.Table.from_pylist([*good, {**good[0], **changes}], schema=schema.arrow())
    pq.write_table(bad, tmp_path / "theirs.parquet")
    with pytest.raises(UsageError, match=f"theirs.parquet' holds .*{said}.*: move it out"):
        dataset.read(tmp_path)


BAD_TIMINGS = [
    ({"timer": None}, "a timed row without timer"),
    ({"timer": "a watch"}, "a row with timer=a watch"),
    ({"samples_us": None}, "a timed row without samples_us"),
    ({"samples_us": []}, "a timed row without a sample"),
    ({"samples_us": [1.0, float("nan")]}, "samples_us are not numbers"),
    ({"samples_us": [1.0, 3.0, 4.0]}, "not the median of its samples"),
    ({"latency_low_us": None}, "a timed row without latency_low_us"),
    ({"latency_high_us": 1.5}, "latency_us is not within its interval"),
    ({"latency_low_us": 2.5}, "latency_us is not within its interval"),
    ({"latency_high_us": 3.5}, "a row whose interval is not of its samples"),
    ({"latency_low_us": -1.0, "samples_us": [-1.0, 2.0, 3.0]}, "a sample that is not above zero"),
    ({"latency_low_us": 0.0, "samples_us": [0.0, 2.0, 3.0]}, "a sample that is not above zero"),
    ({"chip": None}, "a timed row without chip"),
    ({"chip": -1}, "chip=-1"),
    ({"model": "m1"}, "a model in a row that is not modelled"),
    ({"status": "crashed", "latency_us": None}, "a row that is not ok with timer"),
    ({"device_kind": "cpu"}, "a row for v6e of another device_kind"),
    ({"source": "interpreted"}, "an interpreted row with a device's clock"),
    ({"source": "interpreted", "timer": "wall clock"}, "an interpreted row of another device than a cpu"),
]


@pytest.mark.parametrize("columns", [None, ["status"]], ids=["all", "few"])
@pytest.mark.parametrize(("changes", "said"), BAD_TIMINGS, ids=lambda value: str(value)[:40])
def test_a_timing_that_no_sweep_makes_is_named(
    tmp_path: Path, changes: dict[str, Any], said: str, columns: list[str] | None
) -> None:
    good = make_row(source="measured", latency_us=2.0, latency_low_us=1.0, latency_high_us=3.0)
    dataset.append(tmp_path, [good])
    assert len(dataset.read(tmp_path, columns)) == 1
    bad = pa.Table.from_pylist([good, {**good, **changes}], schema=schema.arrow())
    pq.write_table(bad, tmp_path / "theirs.parquet")
    with pytest.raises(UsageError, match=f"theirs.parquet' holds .*{said}.*: move it out"):
        dataset.read(tmp_path, columns)


def test_blocks_that_no_call_has_may_be_recorded_as_that(tmp_path: Path) -> None:
    dataset.append(tmp_path, [make_row(32, 2048, status="invalid", error="more than pages_per_seq=16")])
    assert len(dataset.read(tmp_path)) == 1


def test_the_most_vmem_and_smem_are_those_of_jax() -> None:
    kinds = [hardware(generation) for generation in GENERATIONS.values()]
    assert max(kind.vmem_bytes for kind in kinds) == validate.MOST_VMEM_BYTES
    assert max(kind.smem_bytes for kind in kinds) == validate.MOST_SMEM_BYTES


@pytest.mark.parametrize("folder", sorted(COMMITTED_ROWS.iterdir()), ids=lambda path: path.name)
def test_committed_rows_are_a_sweeps(folder: Path) -> None:
    assert len(dataset.read(folder)) > 4000


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "1970-01-01 00:00 UTC"), (7.3e9, "2201-04-30 17:46 UTC"), (1e12, "1000000000000 seconds")],
)
def test_a_wrong_clock_stops_a_sweep_before_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, said: str
) -> None:
    monkeypatch.setattr("time.time", lambda: seconds)
    with pytest.raises(MachineError, match=f"this machine's clock says {said}.*set the clock") as stopped:
        Outbox(tmp_path).__enter__()
    assert stopped.value.exit_code == 3
    early = make_row() | {"time": datetime.datetime(1999, 1, 1, tzinfo=datetime.UTC)}
    with pytest.raises(MachineError, match="this machine's clock says"):
        dataset.append(tmp_path, [early])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("end", [0, 1])
def test_rows_of_every_setting_that_is_taken_are_read(tmp_path: Path, end: int) -> None:
    kinds = {name: float if name in ("soft_cap", "k_scale", "v_scale") else int for name in SETTING_RANGES}
    settings = Settings(**{name: kinds[name](ends[end]) for name, ends in SETTING_RANGES.items()})  # type: ignore[arg-type]
    below = dataclasses.replace(settings, soft_cap=-SETTING_RANGES["soft_cap"][end])
    made = [make_row(settings=s, vmem_used_bytes=1) for s in (settings, below)]
    dataset.append(tmp_path, made)
    assert len(dataset.read(tmp_path)) == 2


@pytest.mark.parametrize("columns", [None, ["cycles"]])
def test_a_latency_that_pandas_made_nan_is_refused(tmp_path: Path, columns: list[str] | None) -> None:
    dataset.append(tmp_path, [make_row()])
    [path] = tmp_path.glob("*.parquet")
    frame = pd.read_parquet(path)
    frame["latency_us"] = float("nan")
    frame.to_parquet(path)
    with pytest.raises(UsageError, match="holds a row with status=ok and no latency_us: move it out"):
        dataset.read(tmp_path, columns)


def test_rows_of_the_largest_call_are_read(tmp_path: Path) -> None:
    most = 2**31 - 1
    key = TableKey("bfloat16", "bfloat16", most, most, most, most, most, 2 * most).rounded()
    dataset.append(tmp_path, [make_row(1, key=key)])
    assert len(dataset.read(tmp_path)) == 1


def test_a_pipe_in_the_folder_is_not_waited_for(tmp_path: Path) -> None:
    dataset.append(tmp_path, [make_row()])
    os.mkfifo(tmp_path / "x.parquet")
    assert len(dataset.read(tmp_path)) == 1


def a_dangling_link(path: Path) -> None:
    path.symlink_to("/nonexistent/rows.parquet")


@pytest.mark.parametrize(
    ("make", "said"),
    [(a_dangling_link, "leads nowhere"), (Path.mkdir, "is no file"), (os.mkfifo, "is no file")],
)
def test_rows_that_are_no_file_are_not_passed_over(
    tmp_path: Path, make: Callable[[Path], None], said: str
) -> None:
    dataset.append(tmp_path, [make_row()])
    make(tmp_path / "other.parquet")
    assert len(dataset.read(tmp_path)) == 1
    make(tmp_path / "rows-1.parquet")
    for reads in (
        dataset.read,
        maintenance.inventory,
        maintenance.compact,
        lambda f: maintenance.merge([f], tmp_path / "m"),
    ):
        with pytest.raises(UsageError, match=f"rows-1.parquet' {said}: move it out of the folder"):
            reads(tmp_path)  # type: ignore[operator]


def test_a_link_to_rows_is_read(tmp_path: Path) -> None:
    dataset.append(tmp_path / "far", [make_row()])
    (tmp_path / "rows-1.parquet").symlink_to(next((tmp_path / "far").iterdir()))
    assert len(dataset.read(tmp_path)) == 1


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = pa.Table.from_pylist([make_row()], schema=schema.arrow())
    pq.write_table(twice.append_column("target", pa.array(["v6e"])), tmp_path / "x.parquet")
    with pytest.raises(UsageError, match="holds no rows of a sweep"):
        dataset.read(tmp_path)


def test_a_folder_that_is_not_there_or_not_writable(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        dataset.read(tmp_path / "no")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        dataset.append(tmp_path / "file", [make_row()])


def test_a_failed_append_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(pa.ArrowException):
        dataset.append(tmp_path, [make_row(latency_us="much")])
    assert list(tmp_path.iterdir()) == []


def test_a_flipped_bit_is_never_another_row(tmp_path: Path) -> None:
    rows = [make_row(pages, latency_us=float(pages), cycles=[1, 2, 3, pages]) for pages in (4, 8, 16)]
    content = dataset.parquet(pa.Table.from_pylist(rows, schema=schema.arrow()))
    path = tmp_path / "rows.parquet"
    path.write_bytes(content)
    expected = dataset.read(tmp_path)
    footer = int.from_bytes(content[-8:-4], "little") + 8
    refused = 0
    for at in range(4, len(content) - footer, 37):  # after the mark at the start, through all pages
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        try:
            assert dataset.read(tmp_path).equals(expected), f"bit {at % 8} of byte {at}"
        except UsageError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("cycles", [[60, 280, 27, 1645], None])
def test_a_verdict_without_its_cycles_is_compiled_anew(cycles: list[int] | None) -> None:
    schedule = {"cycles": cycles, "vmem_used_bytes": 1, "smem_used_bytes": 1, "compile_seconds": 1.0}
    table = pa.Table.from_pylist([make_row(**schedule)], schema=schema.arrow())
    found = plan.known(plan.Request(generation=V6E, keys=(KEY,)), table.to_pandas(), TOOLS)[1]
    assert len(found) == (cycles is not None)


def test_rows_that_a_reader_would_refuse_are_not_written(tmp_path: Path) -> None:
    dataset.append(tmp_path, [make_row()])
    with pytest.raises(MachineError, match=r"could not read back \(a row whose cycles are not 4 counts\)"):
        dataset.append(tmp_path, [make_row(pages=4), make_row(pages=16, cycles=[1, 2, 3, 4, 5])])
    assert len(dataset.read(tmp_path)) == 1
