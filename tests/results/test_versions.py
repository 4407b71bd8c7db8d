"""Which rows are of the versions that decide a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.results import dataset, versions, winners
from autotune.results.rows import blocks_of
from autotune.results.schema import Tools
from tests.factories import KEY, make_row

NEWER = Tools("0.12.0", "0.12.0", "0.0.50", "def")


def deciding(folder: Path, *rows: dict[str, Any]) -> list[int]:
    """The pages of the rows that are left."""
    dataset.append(folder, rows)
    frame = dataset.read(folder)
    return sorted(pages for pages, _ in blocks_of(versions.deciding(frame, winners.scores(frame))))


def test_the_winners_versions_decide_though_others_are_newer(tmp_path: Path) -> None:
    rows = [make_row(pages, model="1") for pages in (1, 2)]
    newer = make_row(4, status="vmem_oom", model="1", minute=9, tools=NEWER)
    assert deciding(tmp_path, *rows, make_row(8, status="vmem_oom", model="1"), newer) == [1, 2, 8]


def test_where_nothing_is_ok_the_newest_versions_decide_each_key_apart(tmp_path: Path) -> None:
    other = KEY._replace(max_model_len=4096)
    assert deciding(
        tmp_path,
        make_row(1, status="vmem_oom", model="1", tools=NEWER),
        make_row(2, status="vmem_oom", model="1", minute=1),
        make_row(4, status="vmem_oom", model="1", key=other, tools=NEWER),
    ) == [2, 4]


def test_a_timed_winner_goes_with_the_modelled_rows_of_its_versions(tmp_path: Path) -> None:
    timed = {"source": "measured", "latency_low_us": 1.0, "latency_high_us": 1.0}
    assert deciding(
        tmp_path,
        make_row(1, **timed),
        make_row(2, **timed),
        make_row(4, status="vmem_oom", model="1"),
        make_row(8, status="vmem_oom", model="2"),
        make_row(16, status="vmem_oom", model="2", tools=NEWER),
    ) == [1, 2, 4, 8]


def test_no_rows_are_no_rows(tmp_path: Path) -> None:
    dataset.append(tmp_path, [make_row(1)])
    frame = dataset.read(tmp_path).iloc[:0]
    assert versions.deciding(frame, winners.scores(frame)).empty
