"""The account of a sweep on a TPU: how it is added up, and that traces are those of the real scheduling."""

from __future__ import annotations

import pytest

from autotune.kernel.problem import Settings
from autotune.keys import presets
from bench.tpu_hour import (
    START_SECONDS,
    Account,
    Preset,
    Term,
    amounts,
    pipelined,
    published,
    sample,
    table,
    timed,
)

MADE_UP = Account(
    terms=(Term("compiles", 60.0, "made up", each_chip=True), Term("host", 240.0, "made up")),
    traces=300,
    executables=((4.0, 6.0),) * 100,
    schedules=(10.0, 30.0),
)


@pytest.fixture(scope="module")
def few() -> Preset:
    return published("v6e", presets.keys("published")[::200])


def test_chips_share_what_is_not_each_chips_own() -> None:
    assert MADE_UP.chain(1, 0.1) == pytest.approx(60 + 240 + 30)
    assert MADE_UP.chain(4, 0.1) == pytest.approx(60 + 60 + 7.5)
    assert MADE_UP.compiling() == 40 + 1000


def test_a_sweep_is_its_start_and_the_longer_of_timing_and_compiling() -> None:
    start = START_SECONDS + 40 / 20
    # 20 cores compile a key's executables in half a second, a chip takes 3.3 s; it waits once, for the first.
    assert MADE_UP.sweep(1, 20, 0.1) == pytest.approx(start + 6 + 330)
    # One core compiles all, and the chip waits for the last.
    assert MADE_UP.sweep(1, 1, 0.1) == pytest.approx(START_SECONDS + 40 + 1000 + 3.3)


def test_a_chip_waits_for_a_late_executable_and_the_keys_after_it_too() -> None:
    quick, late = (1.0,), (100.0,)
    assert pipelined([quick] * 10, 2.0, 1, 4) == pytest.approx(1 + 20)
    assert pipelined([quick, late, *[quick] * 8], 2.0, 1, 4) == pytest.approx(100 + 18)
    # On two chips the other goes on, until it has done all that may be given out ahead.
    assert pipelined([quick, late, *[quick] * 2], 2.0, 2, 4) == pytest.approx(100 + 2)
    assert pipelined([late] * 4, 2.0, 4, 2) == pytest.approx(200 + 2)


def test_the_rows_of_the_table_add_up_to_its_sums() -> None:
    lines = list(table(MADE_UP, 2, [0.1, 0.3, 1.0]))
    cells = {row[1]: row[2:6] for row in (line.split(" | ") for line in (" | " + x[2:] for x in lines))}
    assert cells["compiles"][:2] == amounts(60.0, 50) and cells["host"][1] == "2.0"
    assert cells["all, traces at 0.3 s"][1] == f"{(60 + 120 + 45) / 60:.1f}"
    shares = [float(cells[name][2].rstrip("% |")) for name in ("compiles", "host", "traces at 0.3 s")]
    assert sum(shares) == pytest.approx(100, abs=0.2)


def test_traces_and_candidates_are_counted_by_the_real_scheduling_code(few: Preset) -> None:
    assert len(few.cases) == 3
    for case in few.cases:
        found = timed(case, Settings(**few.settings), "v6e")
        assert set(found.asked) == {*case.ranking[:4], *case.always}
        assert 1 <= found.traces <= 4
        # Six samples of each on three workloads at least, and three marks a workload.
        assert found.calls >= len(found.asked) * 3 * 6 + 9
        least = 6 * sum(sum(case.latency[blocks].values()) for blocks in found.asked)
        assert least < found.device_seconds < 20 * least


def test_a_smaller_sample_is_the_beginning_of_a_larger(few: Preset) -> None:
    assert sample(few.cases, 2, 0) == sample(few.cases, 3, 0)[:2]
    assert sorted(case.key for case in sample(few.cases, 3, 1)) == sorted(case.key for case in few.cases)
