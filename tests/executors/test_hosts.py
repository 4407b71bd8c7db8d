"""Several hosts: shards, two sweeps at once, results in a bucket; with real compiles of small programs."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from autotune import sweep
from autotune.cli.progress import CompileProgress
from autotune.compile.local_pool import CompilePool
from autotune.io import folders
from autotune.io.folders import Folder
from autotune.kernel.problem import TableKey
from autotune.results import dataset, maintenance, schema
from autotune.search.plan import Request
from autotune.search.shard import Shard
from autotune.sweep import Summary
from autotune.tables.load import load
from autotune.tpu.generations import V6E
from tests.conftest import command_line, user_environment
from tests.factories import shape

Run = Callable[..., subprocess.CompletedProcess[str]]

# Six programs, which two keys share.
SWEEP = ["sweep", "--target", "v6e", "--kv-pages", "4,8,16", "--queries", "32,64", "--no-cache"]
SWEEP += ["--shape", shape(), "--shape", shape(max_model_len=1024), "--workload", "mixed"]
# What tells one making of a row from another.
MAKING = ["compile_seconds", "host", "time"]


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path, slowly_replayed: str) -> Start:
    """Starts a sweep of one worker, whose compiler takes a second a program."""

    def started(out: object, *extra: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command_line(*SWEEP, "--jobs", 1, "--out", out, *extra),
            cwd=tmp_path,
            env={**user_environment(tmp_path / "cache"), "PYTHONPATH": slowly_replayed},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return started


def ended(*running: subprocess.Popen[str]) -> list[str]:
    said = [process.communicate(timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), said
    return said


def compiled(said: str) -> int:
    found = re.search(r"(\d+) programs? compiled", said)
    return int(found[1]) if found else 0  # as is said where nothing was newly recorded


def raw_rows(folder: Folder) -> pd.DataFrame:
    return pd.concat([table.to_pandas() for table in dataset.tables(folder, schema.arrow())])


def wait_for_files(folder: Folder, count: int) -> None:
    deadline = time.monotonic() + 120
    while len(dataset.names(folder)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def pool(replayed: str) -> Iterator[CompilePool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", replayed)
        with CompilePool(2, 600.0) as pool:
            yield pool


REQUEST = Request(
    generation=V6E,
    keys=tuple(TableKey("bfloat16", "bfloat16", 4, 1, 128, 16, 512, length) for length in (512, 1024)),
    kv_pages=(4, 8, 16),
    queries=(32, 64),
    workloads=("mixed",),
)


def sweep_here(folder: Path, pool: CompilePool, shard: Shard | None = None) -> Summary:
    """What the command does, in this process."""
    prepared = sweep.prepare(REQUEST, folder, None, shard)
    return sweep.sweep(
        REQUEST,
        folder,
        CompileProgress(prepared.search.outlook(), 2),
        prepared=prepared,
        jobs=2,
        start_pool=lambda *_: contextlib.nullcontext(pool),
    )


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory, pool: CompilePool) -> Path:
    folder = tmp_path_factory.mktemp("one")
    assert sweep_here(folder, pool).compiled == 6
    return folder


def same(folder: Folder, one: Path) -> None:
    """The same rows and winners as one run's."""
    mine, theirs = dataset.read(folder), dataset.read(one)
    pd.testing.assert_frame_equal(mine.drop(columns=MAKING), theirs.drop(columns=MAKING))
    assert load(str(folder)).devices == load(str(one)).devices


def test_three_shards_one_after_the_other_are_one_run(
    tmp_path: Path, one_run: Path, pool: CompilePool
) -> None:
    done = [sweep_here(tmp_path / f"r{number}", pool, Shard(number, 3)) for number in (1, 2, 3)]
    assert [(summary.compiled, summary.shared) for summary in done] == [(2, 2)] * 3
    maintenance.merge([tmp_path / f"r{number}" for number in (3, 1, 2)], tmp_path / "all")
    same(tmp_path / "all", one_run)


def test_three_shards_at_once_are_one_run(start: Start, tmp_path: Path, one_run: Path) -> None:
    running = [start("r", "--shard", f"{number}/3") for number in (1, 2, 3)]
    said = ended(*running)
    assert "shard 1/3: 2 keys, 4 candidates; 2 programs to compile for v6e" in said[0]
    assert list(map(compiled, said)) == [2, 2, 2]
    same(tmp_path / "r", one_run)
    assert len(raw_rows(tmp_path / "r")) == 12, "no program is compiled by two"


def test_two_sweeps_at_once_never_harm_each_other(start: Start, tmp_path: Path, one_run: Path) -> None:
    """Both compile what the other has under way; rows that are there twice count once."""
    first, second = start("r"), start("r")
    said = ended(first, second)
    assert 6 <= sum(map(compiled, said)) <= 12
    same(tmp_path / "r", one_run)
    assert 12 <= len(raw_rows(tmp_path / "r")) <= 24


def test_one_that_is_killed_leaves_the_other_and_its_own_rows_whole(
    start: Start, tmp_path: Path, one_run: Path
) -> None:
    first = start("r")
    wait_for_files(tmp_path / "r", 1)
    second = start("r")
    first.kill()
    first.communicate()
    before = raw_rows(tmp_path / "r")
    ended(second)
    same(tmp_path / "r", one_run)
    assert set(before["time"]) <= set(raw_rows(tmp_path / "r")["time"])


def test_in_a_bucket_a_sweep_that_is_killed_goes_on_and_is_emitted(
    start: Start, autotune: Run, tmp_path: Path, one_run: Path, s3: Callable[[str], str]
) -> None:
    uri = s3(uuid.uuid4().hex)
    folder = folders.parse(uri)
    killed = start(uri)
    wait_for_files(folder, 2)
    killed.kill()
    killed.communicate()
    done = len(raw_rows(folder)) // 2
    assert 2 <= done < 6
    [said] = ended(start(uri))
    assert f"{2 * done} recorded before; {6 - done} programs to compile" in said
    same(folder, one_run)
    emitted = autotune("emit", uri, "--allow-modelled", "-o", "t.py")
    assert emitted.returncode == 0, emitted.stderr
    assert "('bfloat16', 'bfloat16', 4, 1, 128, 16, 512, 1024): " in (tmp_path / "t.py").read_text()


@pytest.mark.parametrize(
    ("extra", "code", "said"),
    [
        (["--shard", "3"], 2, "'3' is not a part such as 2/3, the second of three"),
        (["--shard", "0/3"], 2, "'0/3' is not a part"),
        (["--shard", "4/3"], 2, "'4/3' is not a part: type 1/3, 2/3 or 3/3 for three"),
        (["--out", "ftp://host/dir"], 2, "is not a results folder: use a path, s3://BUCKET/DIR"),
        (["--out", "s3://bucket/x?endpoint_override=http://127.0.0.1:9"], 3, "its server cannot be reached"),
    ],
)
def test_what_cannot_be_is_one_line(autotune: Run, extra: list[str], code: int, said: str) -> None:
    done = autotune(*SWEEP, "--out", "r", *extra)
    assert done.returncode == code, done.stderr
    assert said in done.stderr.splitlines()[-1]
