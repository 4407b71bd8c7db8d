"""The command line from nothing to a table, with real compiles of small programs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from autotune.analysis import overview
from autotune.cli.render.sweep import after_failures
from autotune.kernel.problem import TableKey
from autotune.results import dataset, schema
from autotune.results.rows import rows_of
from autotune.search.plan import Request
from autotune.timing.history import Known
from autotune.tpu.generations import V6E
from tests.conftest import ROOT, command_line, compiling, user_environment, wait_until_busy
from tests.factories import SWEEP, make_row, shape, start, wait_for_rows

Run = Callable[..., subprocess.CompletedProcess[str]]


def raw_rows(folder: Path) -> pd.DataFrame:
    """Every row of every file, those that reading would drop included."""
    return pd.concat([pq.ParquetFile(p.open("rb")).read().to_pandas() for p in folder.glob("*.parquet")])


def test_sweep_show_and_emit(autotune: Run, tmp_path: Path) -> None:
    done = autotune(*SWEEP)
    assert done.returncode == 0, done.stderr
    assert "1 key, 4 candidates; 4 programs to compile for v6e" in done.stderr
    assert "newly recorded candidates: 4 ok" in done.stderr
    assert "modelled from the compiler's schedule, not timed on a TPU" in " ".join(done.stdout.split())
    assert "autotune emit r --allow-modelled" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80

    rows = rows_of(dataset.read(tmp_path / "r"))
    assert len(rows) == 4 * 3
    assert {row["workload"] for row in rows} == {"mixed", "decode-heavy", "prefill-heavy"}
    for row in rows:
        assert (row["source"], row["status"]) == ("modelled", "ok")
        assert 1 < row["latency_us"] < 1e5
        assert len(row["cycles"]) == 4
        assert row["vmem_used_bytes"] > 0
        assert row["compile_seconds"] > 0
        assert row["samples_us"] is None

    shown = autotune("show", "r")
    assert shown.returncode == 0
    assert done.stdout.startswith(shown.stdout + "Next: ")

    refused = autotune("emit", "r")
    assert refused.returncode == 2
    assert "--allow-modelled" in refused.stderr
    emitted = autotune("emit", "r", "--allow-modelled", "-o", "t.py")
    assert emitted.returncode == 0, emitted.stderr
    assert "1 key (1 modelled)\nNext: " in emitted.stderr
    assert "autotune check t.py; in a program" in emitted.stderr, "no repository is there to commit to"
    assert "('bfloat16', 'bfloat16', 4, 1, 128, 16, 512, 512): " in (tmp_path / "t.py").read_text()

    again = autotune(*SWEEP)
    assert again.returncode == 0
    assert "4 recorded before; 0 programs to compile" in again.stderr
    assert "4 candidates = 0 newly recorded + 4 recorded before\n" in again.stderr
    assert len(raw_rows(tmp_path / "r")) == 12


def test_sixteen_keys_of_one_layout_cost_the_compiles_of_one(autotune: Run, tmp_path: Path) -> None:
    shapes = [
        argument
        for tokens in (256, 512, 1024, 2048)
        for length in (512, 1024, 2048, 4096)
        for argument in ("--shape", shape(max_num_batched_tokens=tokens, max_model_len=length))
    ]
    done = autotune(
        "sweep", "--target", "v6e", *shapes, "--kv-pages", "8,16", "--queries", "32", "--out", "r"
    )
    assert done.returncode == 0, done.stderr
    assert "16 keys, 32 candidates; 2 programs to compile" in done.stderr
    assert "32 newly recorded = 2 programs compiled + 30 of a program that keys share" in done.stderr
    frame = dataset.read(tmp_path / "r")
    assert len(frame) == 16 * 2 * 3
    assert frame.groupby("num_kv_pages_per_blk")["compile_seconds"].nunique().tolist() == [1, 1]


def test_another_workload_or_key_reuses_the_programs_in_the_rows(autotune: Run, tmp_path: Path) -> None:
    autotune(*SWEEP, "--workload", "mixed")
    (tmp_path / "mine.csv").write_text("1,512\n100,300\n")
    more = autotune(*SWEEP, "--workload", "mine.csv", "--shape", shape(max_model_len=1024))
    assert more.returncode == 0, more.stderr
    assert "8 compiled before; 0 programs to compile" in more.stderr
    assert set(dataset.read(tmp_path / "r")["workload"]) == {"mixed", "mine.csv"}


def test_another_folder_does_not_compile_the_same_program_again(autotune: Run, tmp_path: Path) -> None:
    first = autotune(*SWEEP, "--workload", "mixed")
    second = autotune(*SWEEP[:-1], "z", "--workload", "mixed")
    assert "4 compiled before; 0 programs to compile" in second.stderr
    assert re.sub(r"\bz\b", "r", second.stdout) == first.stdout
    without = autotune(*SWEEP[:-1], "third", "--dry-run", "--no-cache")
    assert "4 programs to compile" in without.stderr


def test_failures_are_rows_and_never_win(autotune: Run, tmp_path: Path) -> None:
    done = autotune(
        *("sweep", "--target", "v6e", "--shape", shape(max_model_len=256), "--out", "r"),
        *("--kv-pages", "4,16,32", "--queries", "32,1024", "--vmem-limit", "500KiB"),
    )
    assert done.returncode == 0, done.stderr
    frame = dataset.read(tmp_path / "r").drop_duplicates(schema.BLOCK_COLUMNS)
    found = {
        (int(p), int(q)): (status, error)
        for p, q, status, error in zip(
            *(frame[c] for c in (*schema.BLOCK_COLUMNS, "status", "error")), strict=True
        )
    }
    assert found[4, 32][0] == "ok"
    assert found[16, 32][0] == "vmem_oom"
    assert found[32, 32] == ("invalid", "num_kv_pages_per_blk=32 is more than pages_per_seq=16")
    assert found[4, 1024][1] == "num_queries_per_blk=1024 is more than max_num_batched_tokens=512"
    overflow = frame[frame["status"] == "vmem_oom"].iloc[0]
    assert overflow["limit_bytes"] == 500 * 1024 < overflow["needed_bytes"]
    assert pd.isna(overflow["latency_us"])


def test_heads_of_256_compile_as_the_check_in_advance_says(autotune: Run, tmp_path: Path) -> None:
    one, two = (shape(head_dim=256, q_heads=2 * heads, kv_heads=heads) for heads in (1, 2))
    done = autotune(
        *("sweep", "--target", "v6e", "--shape", one, "--shape", two, "--out", "r"),
        *("--kv-pages", "8", "--queries", "32"),
    )
    assert done.returncode == 0, done.stderr
    assert (
        "nothing can run on v6e for 1 of 2 keys, such as ('bfloat16', 'bfloat16', 4, 2, 256," in done.stderr
    )
    assert "type kv_heads=1, those of one of several chips" in done.stderr
    rows = dataset.read(tmp_path / "r", ["status", "error"])
    found = {(row["num_kv_heads_per_blk"], row["status"]) for row in rows_of(rows)}
    assert found == {(1, "ok"), (2, "compile_error")}


def test_a_time_limit_is_a_row_and_may_be_lifted_later(autotune: Run, tmp_path: Path) -> None:
    # A program of no other test: its verdict is not known before the last of these sweeps.
    arguments = ["sweep", "--target", "v6e", "--out", "r", "--kv-pages", "12", "--queries", "40"]
    arguments += ["--shape", shape(), "--workload", "mixed"]
    done = autotune(*arguments, "--compile-timeout", "0.2")
    assert done.returncode == 0, done.stderr
    assert "newly recorded candidates: 1 timeout" in done.stderr
    assert "no candidate is ok so far" in done.stdout
    assert "0 programs to compile" in autotune(*arguments).stderr
    assert "1 ok" in autotune(*arguments, "--retry-failed").stderr
    assert dataset.read(tmp_path / "r")["status"].tolist() == ["ok"]


def test_retry_failed_tries_all_again_but_what_the_compiler_refuses_for_good(
    autotune: Run, tmp_path: Path
) -> None:
    arguments = [
        "sweep",
        "--target",
        "v4",
        "--shape",
        shape(q_heads=8, kv_heads=2, kv_dtype="float8_e5m2"),
        "--workload",
        "mixed",
    ]
    arguments += ["--kv-pages", "8", "--queries", "32", "--out"]
    done = autotune(*arguments, "r")
    assert "newly recorded candidates: 1 compile_error" in done.stderr, done.stderr
    assert "0 programs to compile" in autotune(*arguments, "r").stderr
    again = autotune(*arguments, "r", "--retry-failed").stderr
    assert "1 newly recorded = 1 program compiled" in again, "the cache answers for the folder"
    assert "1 newly recorded = 1 program compiled" in autotune(*arguments, "other").stderr
    assert len(dataset.read(tmp_path / "r")) == 1

    small = ["--target", "v6e", "--shape", shape(), "--workload", "mixed", "--vmem-limit", "500KiB"]
    small += ["--kv-pages", "16", "--queries", "32", "--out"]
    assert "1 vmem_oom" in autotune("sweep", *small, "small").stderr
    assert "0 programs to compile" in autotune("sweep", *small, "small", "--retry-failed").stderr


@pytest.mark.parametrize("status", schema.STATUSES)
def test_retry_failed_times_again_what_was_not_refused_for_good(status: str) -> None:
    for retry in (False, True):
        request = Request(generation=V6E, keys=(), retry_failed=retry)
        known = Known(request, schema.MEASURED, schema.Tools("1", "1", "1", "x"), "model")
        row = dict.fromkeys((*schema.KEY_COLUMNS, *schema.BLOCK_COLUMNS), 1)
        latencies = dict.fromkeys(("latency_us", "latency_low_us", "latency_high_us"), 1.0)
        batch = {"workload_fingerprint": "x", "timer": "wall clock", "source": schema.MEASURED}
        known.add({**row, **latencies, **batch, "status": status})
        key = TableKey(*(row[name] for name in schema.KEY_COLUMNS))
        lasting = status in ("vmem_oom", "smem_oom", "invalid")
        assert bool(known.failed(key)) == (status != "ok" and (lasting or not retry))


def test_kill_9_loses_and_repeats_nothing(tmp_path: Path, slowly_replayed: str, replayed: str) -> None:
    folder = tmp_path / "r"
    first = start(tmp_path, slowly_replayed)
    wait_for_rows(folder, 3)
    first.kill()
    _, said = first.communicate(timeout=60)
    assert "resource_tracker" not in said and "Traceback" not in said
    before = {json.dumps(r, default=str) for r in rows_of(dataset.read(folder))}
    done = len(before) // 3
    assert 3 <= done < 12
    second = start(tmp_path, replayed)
    _, said = second.communicate(timeout=300)
    assert second.returncode == 0, said
    assert f"{done} recorded before; {12 - done} programs to compile" in said
    after = raw_rows(folder)
    assert len(after) == 12 * 3
    assert not after.duplicated(schema.IDENTITY).any()
    kept = {json.dumps(r, default=str) for r in rows_of(dataset.read(folder))}
    assert before <= kept, "rows of finished compiles were made anew"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_exits_130_with_the_command_that_goes_on(
    tmp_path: Path, slowly_replayed: str, number: int
) -> None:
    running = start(tmp_path, slowly_replayed)
    wait_for_rows(tmp_path / "r", 2)
    running.send_signal(number)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "everything so far is recorded in r. To go on:\n  python -m autotune sweep --target v6e" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_it_plans_says_how_to_go_on(tmp_path: Path, number: int) -> None:
    running = start(tmp_path, str(ROOT), "--keys", "-")
    assert running.stdin is not None
    running.stdin.write(
        " " * (1 << 17)
    )  # more than a pipe holds: once this returns, it reads, and waits for more
    running.stdin.flush()
    deadline = time.monotonic() + 60
    while (
        running.poll() is None and time.monotonic() < deadline
    ):  # one just before it waits does not end that
        running.send_signal(number)
        time.sleep(0.1)
    _, said = running.communicate()
    assert running.returncode == 130, said
    assert "interrupted; nothing was recorded yet. To go on:\n  python -m autotune sweep --target v6e" in said
    assert "Traceback" not in said


# Ray's ways while it starts: processes of a cluster, and a handler of SIGTERM's own that runs no Python.
STARTING_RAY = """
import os, signal, subprocess
class exceptions:
    class RayError(Exception): pass
def init(**options):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    node = subprocess.Popen(["sleep", "60"], preexec_fn=lambda: None)
    os.killpg(os.getpid(), {number})
    open("node", "w").write(f"{{node.poll()}}")
    node.terminate()
    open("ended", "w").write(f"{{node.wait(10)}}")
def shutdown():
    open("left", "w").close()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_ray_starts_says_how_to_go_on(tmp_path: Path, number: int) -> None:
    (tmp_path / "ray.py").write_text(STARTING_RAY.format(number=int(number)))
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    running = start(tmp_path, path, "--executor", "ray", "--ray-address", "local")
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "interrupted; nothing was recorded yet. To go on:\n  python -m autotune sweep --target v6e" in said
    assert "Traceback" not in said
    assert (tmp_path / "node").read_text() == "None", "the group's signal ended a cluster that was starting"
    assert (tmp_path / "ended").read_text() == str(-signal.SIGTERM), "its processes do not take SIGTERM"
    assert (tmp_path / "left").exists()


def test_killed_workers_become_crashed_rows_and_the_rest_is_there(tmp_path: Path, replayed: str) -> None:
    """The slow program, of which no verdict is known, is compiled first, and takes two workers along."""
    (tmp_path / "tmp").mkdir()
    arguments = ["sweep", "--target", "v6e", "--out", "r", "--jobs", "1", "--workload", "mixed"]
    arguments += ["--shape", shape(q_heads=8, kv_heads=4, page_size=128, max_model_len=2048)]
    sweep = subprocess.Popen(
        command_line(*arguments, "--kv-pages", "16", "--queries", "32,256"),
        cwd=tmp_path,
        env={
            **user_environment(tmp_path / "cache"),
            "TMPDIR": str(tmp_path / "tmp"),
            "PYTHONPATH": replayed,
        },
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    killed: set[int] = set()

    def kill_the_next_worker() -> None:
        while not (fresh := compiling(sweep.pid) - killed):
            time.sleep(0.05)
        for pid in fresh:
            wait_until_busy(pid, 1.5)  # a worker that is killed as it starts is no fault of its program
            os.kill(pid, signal.SIGKILL)
        killed.update(fresh)

    kill_the_next_worker()
    kill_the_next_worker()
    _, said = sweep.communicate(timeout=300)
    assert sweep.returncode == 0, said
    rows = {tuple(r[c] for c in schema.BLOCK_COLUMNS): r for r in rows_of(dataset.read(tmp_path / "r"))}
    statuses = {blocks: r["status"] for blocks, r in rows.items()}
    assert statuses == {(16, 32): "ok", (16, 256): "crashed"}
    assert "ended by SIGKILL, 2 times" in rows[16, 256]["error"]


@pytest.mark.parametrize("seconds", [1.0, 3.0, 6.0])
def test_ctrl_c_in_a_terminal_is_quiet_however_early_and_often(tmp_path: Path, seconds: float) -> None:
    """A terminal interrupts the whole process group, and people press it more than once."""
    (tmp_path / "tmp").mkdir()
    running = subprocess.Popen(
        command_line(*SWEEP, "--no-cache"),
        cwd=tmp_path,
        env={**user_environment(), "TMPDIR": str(tmp_path / "tmp")},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        for _ in range(3):
            os.killpg(running.pid, signal.SIGINT)
            time.sleep(0.3)
    _, said = running.communicate(timeout=60)
    if said.startswith("Fatal Python error: init_"):
        pytest.skip("this machine is so busy that Python itself had not started")
    assert "Traceback" not in said
    # A fast machine has finished by then: what was done in full is not called interrupted, nor dies of it.
    ended = "interrupted" if running.returncode else "newly recorded candidates: 4 ok"
    assert running.returncode in (0, 130)
    assert ended in said
    assert not list((tmp_path / "tmp").iterdir())


def test_dry_run_makes_nothing(autotune: Run, tmp_path: Path) -> None:
    done = autotune(*SWEEP, "--dry-run")
    assert done.returncode == 0
    assert "4 programs to compile" in done.stderr
    assert not (tmp_path / "r").exists()


def test_28_query_heads_are_swept_under_the_key_of_32(autotune: Run) -> None:
    done = autotune(
        *("sweep", "--target", "v6e", "--dry-run", "--shape", shape(q_heads=28, kv_heads=4)),
    )
    assert done.returncode == 0
    assert "q_heads=28, kv_heads=4" in done.stderr
    assert "the key (bfloat16, bfloat16, 32, 4, 128, 16, 512, 512)" in done.stderr
    assert "rounded" not in done.stderr


BAD: list[tuple[list[Any], int, str]] = [
    (["sweep"], 3, "no TPU is attached"),
    (["sweep", "--target", "v6e", "--out", "r"], 2, "no keys are named"),
    (["sweep", "--target", "v9"], 2, "'v9' is not one of 'v4', 'v5e', 'v5p', 'v6e', 'v7x'"),
    (["sweep", "--target", "v6e", "--preset", "smoke"], 2, "--out is missing"),
    (["sweep", "--target", "v6e", "--preset", "all"], 2, "'all' is not one of"),
    (["sweep", "--target", "v6e", "--shape", "q_heads=8", "--out", "r"], 2, "kv_heads, head_dim, page_size"),
    (["sweep", "--target", "v6e", "--shape", "heads=8", "--out", "r"], 2, "'heads=8' is not one of q_heads"),
    (["sweep", "--target", "v6e", "--shape", shape(q_heads="x"), "--out", "r"], 2, "q_heads=x must be a pos"),
    (["sweep", "--target", "v6e", "--shape", shape(q_heads=-4), "--out", "r"], 2, "q_heads=-4 must be a pos"),
    (
        ["sweep", "--target", "v6e", "--shape", shape(q_heads=7, kv_heads=2), "--out", "r"],
        2,
        "must be a mult",
    ),
    (["sweep", "--target", "v6e", "--shape", shape(kv_dtype="fp8"), "--out", "r"], 2, "kv_dtype=fp8 is unk"),
    ([*SWEEP, "--kv-pages", "4,x"], 2, "'4,x' is not a list"),
    ([*SWEEP, "--vmem-limit", "lots"], 2, "'lots' is not a size such as 100MiB"),
    ([*SWEEP, "--vmem-limit", "64"], 2, "did you mean 64MiB?"),
    ([*SWEEP, "--soft-cap", "0"], 2, "soft_cap=0.0 must be"),
    ([*SWEEP, "--soft-cap", "1e308"], 2, "soft_cap=1e+308 must be from 1e-30 to 1e+30, or both below 0"),
    ([*SWEEP, "--workload", "decode"], 2, "workload 'decode' is unknown"),
    ([*SWEEP, "--workload", "none.csv"], 2, "'none.csv' cannot be read"),
    (
        ["sweep", "--target", "v6e", "--shape", shape(q_heads=12, kv_heads=6), "--out", "r"],
        2,
        "8 KV and 16 q",
    ),
    (["show", "nowhere"], 2, "'nowhere' does not exist"),
    (["sweep", "--target", "v6e", "--preset", "smoke", "--out", ""], 2, "the name is empty"),
    ([*SWEEP, "--vmem-limit", "9" * 400], 2, "is not a size"),
    ([*SWEEP, "--queries", "9" * 5000], 2, "is not a list of positive whole numbers"),
    ([*SWEEP, "--compile-timeout", "nan"], 2, "is not a finite number"),
    ([*SWEEP, "--sliding-window", "9" * 23], 2, "is not in the range"),
    (["emit", "nowhere"], 2, "'nowhere' does not exist"),
    (["swep"], 2, "No such command 'swep'. Did you mean sweep?"),
    (["sweep", "--target", "V6"], 2, "Did you mean v6e?"),
    (["sweep", "--target", "V6E", "--shape", "pagesize=128", "--out", "r"], 2, "Did you mean page_size?"),
]


@pytest.mark.parametrize(("arguments", "code", "said"), BAD, ids=lambda value: str(value)[:40])
def test_a_users_mistake_is_one_clear_line(
    autotune: Run, tmp_path: Path, arguments: list[Any], code: int, said: str
) -> None:
    done = autotune(*arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r").exists()


def test_a_workload_that_does_not_fit_names_the_key(autotune: Run, tmp_path: Path) -> None:
    (tmp_path / "long.csv").write_text("1,4096\n")
    done = autotune(*SWEEP, "--workload", "long.csv")
    assert done.returncode == 2
    assert "kv_len 4096 is more than max_model_len=512" in done.stderr


def test_a_file_in_place_of_the_results_folder(autotune: Run, tmp_path: Path) -> None:
    (tmp_path / "r").write_text("mine")
    done = autotune(*SWEEP)
    assert done.returncode == 2
    assert "--out 'r' is a file" in done.stderr
    assert (tmp_path / "r").read_text() == "mine"


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        (
            {"compile_error": 12, "vmem_oom": 5},
            "the compiler refuses 12 of 17 candidates, and another --vmem",
        ),
        (
            {"vmem_oom": 5, "smem_oom": 1},
            "try smaller --kv-pages and --queries, or a larger --vmem-limit, up",
        ),
        (
            {"smem_oom": 5, "vmem_oom": 1},
            "a larger page size, a shorter --max-model-len or a smaller --max-num",
        ),
        ({"timeout": 3}, None),
    ],
)
def test_the_advice_after_failures_is_of_what_fails_most(statuses: dict[str, int], said: str | None) -> None:
    seen = overview.Overview([], {"modelled": statuses}, [], [], "", [], [], {})
    advice = after_failures(seen, Request(generation=V6E, keys=()))
    assert advice is None if said is None else said in (advice or "")


def test_a_key_without_a_winner_tells_each_way_of_failing_the_most_frequent_first(tmp_path: Path) -> None:
    dataset.append(
        tmp_path,
        [
            *(make_row(pages, 32, status="compile_error", error="refused") for pages in (1, 2, 4)),
            make_row(8, 32, status="vmem_oom", needed_bytes=34603008, limit_bytes=33554432),
            make_row(16, 32, status="vmem_oom", needed_bytes=68157440, limit_bytes=33554432),
        ],
    )
    [(_, _, why)] = overview.overview(tmp_path).without_winner
    assert why == (
        "3 compile_error, such as 1,32: refused; 2 vmem_oom, such as 8,32: needs 33.00 MiB, limit 32.00 MiB"
    )
