"""Winners into an older table, by rows that say what each pair costs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune import emit
from autotune.errors import UsageError
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results import dataset
from autotune.results.schema import Tools
from autotune.tables import load
from autotune.tables.dialects import JAX, SGLANG
from autotune.tables.source import read_text, render
from autotune.tables.table import Table
from tests.factories import KEY, make_row

KEYS = [KEY._replace(max_num_batched_tokens=1 << i) for i in range(10, 16)]


def base_table(**values: tuple[int, int]) -> Table:
    rows: dict[TableKey, BlockSizes] = {
        KEYS[0]: BlockSizes(4, 32),  # much slower than the winner
        KEYS[1]: BlockSizes(8, 64),  # the winner itself
        KEYS[2]: BlockSizes(2, 32),  # not in the rows
        KEYS[3]: BlockSizes(16, 256),  # does not fit
        KEY._replace(max_model_len=8192): BlockSizes(1, 1),  # not re-tuned
    }
    return Table(dialect=JAX, devices={"TPU v6e": rows}, origin="old.py", provenance={"source": "measured"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = []
    for key in KEYS[:5]:
        rows.append(make_row(8, 64, key=key, latency_us=100.0))
        rows.append(make_row(4, 32, key=key, latency_us=110.0))
        rows.append(make_row(16, 256, key=key, status="vmem_oom", needed_bytes=2, limit_bytes=1))
    dataset.append(tmp_path / "rows", rows)
    return tmp_path / "rows"


def test_only_what_is_clearly_slower_changes(folder: Path) -> None:
    won = emit.read(folder, base=base_table())
    assert won.merged is not None
    assert {key: won.tables["v6e"][key] for key in KEYS[:5]} == {
        KEYS[0]: (8, 64),
        KEYS[1]: (8, 64),
        KEYS[2]: (2, 32),
        KEYS[3]: (8, 64),
        KEYS[4]: (8, 64),
    }
    assert won.tables["v6e"][KEY._replace(max_model_len=8192)] == (1, 1)
    counts = won.merged
    assert (counts.changed, counts.new, counts.kept, counts.untold, counts.untouched) == (2, 1, 1, 1, 1)


def test_a_gain_may_be_too_small(folder: Path) -> None:
    won = emit.read(folder, base=base_table(), min_gain=0.15)
    assert won.tables["v6e"][KEYS[0]] == (4, 32)
    assert won.merged is not None
    assert (won.merged.changed, won.merged.kept) == (1, 2)


def test_within_noise_the_base_stays(tmp_path: Path) -> None:
    timed = {"source": "measured", "latency_low_us": 95.0, "latency_high_us": 106.0}
    dataset.append(
        tmp_path, [make_row(8, 64, latency_us=100.0, **timed), make_row(4, 32, latency_us=101.0, **timed)]
    )
    base = Table(dialect=JAX, devices={"TPU v6e": {KEY: BlockSizes(4, 32)}})
    assert emit.read(tmp_path, base=base).tables["v6e"][KEY] == (4, 32)
    other = Table(dialect=JAX, devices={"TPU v6e": {KEY: BlockSizes(8, 64)}})
    assert emit.read(tmp_path, base=other).tables["v6e"][KEY] == (8, 64)


def test_the_text_says_what_was_merged(folder: Path) -> None:
    text = emit.emit(emit.read(folder, base=base_table()), allow_modelled=True).text
    assert "merged into old.py (measured):" in text
    assert "2 changed, 1 new, 1 kept" in text
    table = read_text(text, "x")
    assert table.modelled and len(table) == 6


def test_the_header_counts_what_the_table_holds(folder: Path) -> None:
    """Of the base: one that it kept, one untold, one untouched; the other three are of the rows."""
    emitted = emit.emit(emit.read(folder, base=base_table()), allow_modelled=True)
    assert "MODELLED: 3 of 6 values" in emitted.text
    assert (emitted.rows, dict(emitted.sources)) == (6, {"measured": 3, "modelled": 3})
    other = Table(
        dialect=JAX,
        devices={"TPU v5e": {KEY: BlockSizes(4, 32)}},
        origin="t5.py",
        provenance={"source": "modelled"},
    )
    both = emit.emit(emit.read(folder, base=other), allow_modelled=True)
    assert "MODELLED: 6 of 6 values" in both.text
    assert "keys: 1 v5e, 5 v6e" in both.text
    assert (both.rows, dict(both.sources)) == (6, {"modelled": 6})
    named = emit.emit(emit.read(folder, base=load("jax")), allow_modelled=True, names="jax")
    held = read_text(named.text, "x")
    assert "'keys: " in named.text.replace('"', "'")
    assert sum(named.sources.values()) == named.rows == len(held)


def test_bases_that_cannot_be_merged_into(folder: Path) -> None:
    with pytest.raises(UsageError, match="sglang-jax dialect"):
        emit.read(folder, base=Table(dialect=SGLANG, devices={}))
    modelled = Table(dialect=JAX, devices={}, origin="m.py", provenance={"source": "modelled"})
    dataset.append(folder.parent / "timed", [make_row(latency_us=1.0, source="measured")])
    with pytest.raises(UsageError, match=r"values of --base m\.py are modelled"):
        emit.emit(emit.read(folder.parent / "timed", base=modelled), allow_modelled=False)


def test_jaxs_own_names(tmp_path: Path) -> None:
    rows = [make_row(4, target=target, latency_us=1.0) for target in ("v5e", "v5p", "v6e", "v7x")]
    dataset.append(tmp_path, rows)
    with pytest.raises(UsageError, match="v5e and v5p are both 'TPU v5' in JAX's table: choose one"):
        emit.emit(emit.read(tmp_path), allow_modelled=True, names="jax")
    one = emit.read(tmp_path, target="v5p", base=load("jax"))
    table = read_text(emit.emit(one, allow_modelled=True, names="jax").text, "x")
    published = load("jax").devices
    assert list(table.devices) == ["TPU v5", "TPU v6"]
    assert table.devices["TPU v6"] == published["TPU v6"]
    changed = {key for key, pair in table.devices["TPU v5"].items() if published["TPU v5"].get(key) != pair}
    assert changed <= {KEY}


def test_the_installed_jax_names_its_devices() -> None:
    from importlib.metadata import version

    from autotune.kernel.jax_rpa.call import jax_device_name

    assert [jax_device_name(kind) for kind in ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite")] == [
        "TPU v4",
        "TPU v5",
        "TPU v5",
        "TPU v6",
    ]
    newer = tuple(map(int, version("jax").split(".")[:2])) >= (0, 12)
    assert jax_device_name("TPU7x") == ("TPU v7" if newer else "TPU7x")


def test_check_says_whether_the_file_would_change(
    folder: Path, tmp_path: Path, autotune: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    command = ("emit", folder, "--allow-modelled", "-o", "table.py")
    missing = autotune(*command, "--check")
    assert missing.returncode == 1
    assert not (tmp_path / "table.py").exists()
    assert autotune(*command).returncode == 0
    same = autotune(*command, "--check")
    assert (same.returncode, same.stderr) == (0, "table.py is up to date\n")
    (tmp_path / "old.py").write_text(render(base_table()))
    other = autotune(*command, "--check", "--base", "old.py")
    assert other.returncode == 1
    assert other.stderr.splitlines()[0].startswith(
        "2 changed, 1 new, 1 kept as not slower, 1 kept as the rows"
    )
    wrong = autotune("emit", folder, "--check")
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr


@pytest.mark.parametrize("how", ["crashed", "timeout", "other tools"])
def test_what_may_run_the_next_time_or_failed_with_other_tools_does_not_move_the_base(
    tmp_path: Path, how: str
) -> None:
    """Only what the winner's own tools refused for good takes the base's pair out of a table."""
    rows = [make_row(8, 64, latency_us=100.0), make_row(4, 32, latency_us=110.0)]
    if how == "other tools":
        rows.append(make_row(16, 256, status="vmem_oom", tools=Tools("0", "0", "0", "x")))
    else:
        rows.append(make_row(16, 256, status=how))
    dataset.append(tmp_path / "rows", rows)
    base = Table(dialect=JAX, devices={"TPU v6e": {KEY: BlockSizes(16, 256)}}, origin="old.py")
    won = emit.read(tmp_path / "rows", base=base)
    assert won.merged is not None
    assert (won.merged.untold, won.merged.changed) == (1, 0)
    assert won.tables["v6e"][KEY] == (16, 256)
