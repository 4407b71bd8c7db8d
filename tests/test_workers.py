"""Worker processes that are killed, hang or outlive their parent, with real compiles: here, and on Ray."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from autotune import cluster
from autotune.pool import StartPool, Task
from autotune.ray_pool import RayPool
from autotune.workers import CompilePool
from tests.conftest import ROOT, compiling, each, program, user_environment

QUICK = [Task("v6e", program(pages, 32, page_size=16)) for pages in (8, 16)]
SLOW = Task("v6e", program(16, 256, q_heads=8, kv_heads=4, page_size=128))  # a minute and more


class Started(NamedTuple):
    """Where pools run. start: makes one. tmp: of its workers. script: what a program begins with."""

    start: StartPool
    tmp: Path
    script: str


_LOCAL = """
from autotune.workers import CompilePool as start
"""
_RAY = """
import functools
from autotune import cluster
from autotune.ray_pool import RayPool
start = functools.partial(RayPool, say=print)
if __name__ == "__main__":
    joined = cluster.connected({address!r})
    joined.__enter__()
"""


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def pools(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Started]:
    """Both executors pass the tests that take this."""
    if request.param == "local":
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        yield Started(CompilePool, tmp_path, _LOCAL)
        return
    nodes = request.getfixturevalue("ray_cluster")
    said: list[str] = []
    with cluster.connected(nodes.address):
        yield Started(
            functools.partial(RayPool, say=said.append), nodes.tmp, _RAY.format(address=nodes.address)
        )
    assert not said


def left(tmp: Path) -> list[Path]:
    return list(tmp.glob("autotune-compile-*"))


def kill_a_worker(seen: set[int]) -> None:
    """Kill one worker that was not seen before, once it has had time to begin."""
    while not (fresh := compiling() - seen):
        time.sleep(0.05)
    time.sleep(2.5)
    for pid in fresh & compiling():
        os.kill(pid, signal.SIGKILL)
    seen |= fresh


def test_a_worker_killed_twice_is_crashed_and_the_rest_are_there(pools: Started) -> None:
    seen = compiling()

    def kill_twice() -> None:
        kill_a_worker(seen)
        kill_a_worker(seen)

    killer = threading.Thread(target=kill_twice)
    with pools.start(1, 600.0) as pool:
        killer.start()
        [(task, verdict)] = pool.run(each([SLOW]))
        killer.join()
        rest = dict(pool.run(each(QUICK)))
    assert [rest[task].status for task in QUICK] == ["ok", "ok"]
    assert (task, verdict.status, verdict.seconds) == (SLOW, "crashed", None)
    assert "ended by SIGKILL, 2 times" in (verdict.error or "")


def test_a_worker_killed_once_is_tried_again(pools: Started) -> None:
    killer = threading.Thread(target=kill_a_worker, args=(compiling(),))
    medium = Task("v6e", program(16, 128, q_heads=8, kv_heads=2, page_size=128))
    with pools.start(1, 600.0) as pool:
        killer.start()
        [(task, verdict)] = pool.run(each([medium]))
    killer.join()
    assert (task, verdict.status) == (medium, "ok")


def test_a_compile_beyond_the_limit_is_timeout_and_the_rest_are_there(pools: Started) -> None:
    with pools.start(1, 12.0) as pool:
        verdicts = dict(pool.run(each([SLOW, *QUICK])))
    assert [verdicts[task].status for task in QUICK] == ["ok", "ok"]
    assert verdicts[SLOW].status == "timeout"
    assert verdicts[SLOW].seconds == 12.0
    assert "--compile-timeout 12 s" in (verdicts[SLOW].error or "")


def test_variables_of_the_user_do_not_reach_the_compiler(
    pools: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alone would end the compiler, and so be the verdict on every program."""
    monkeypatch.setenv("XLA_FLAGS", "--bogus_flag")
    monkeypatch.setenv("TPU_LOAD_LIBRARY", "0")
    with pools.start(1, 600.0) as pool:
        [(_, verdict)] = pool.run(each(QUICK[:1]))
    assert verdict.status == "ok", verdict.error


def test_leaving_early_stops_the_workers_and_takes_their_files_along(pools: Started) -> None:
    with pytest.raises(KeyboardInterrupt), pools.start(1, 600.0) as pool:
        for _ in pool.run(each([QUICK[0], SLOW])):
            assert len(left(pools.tmp)) == 1
            raise KeyboardInterrupt
    assert not left(pools.tmp)
    assert not compiling()


_PARENT = """
from tests.conftest import each
from tests.test_workers import SLOW
if __name__ == "__main__":
    with start(1, 600.0) as pool:
        list(pool.run(each([SLOW])))
"""


def test_workers_leave_soon_after_their_parent_is_killed(pools: Started, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(pools.script + _PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script)], cwd=ROOT, env={**user_environment(), "TMPDIR": str(pools.tmp)}
    )
    while not list(pools.tmp.glob("*/*.log")):
        assert parent.poll() is None
        time.sleep(0.1)
    time.sleep(2)  # into the compile
    pids = compiling()
    assert pids
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(_alive(pid) for pid in pids):
        time.sleep(0.2)
    assert not any(_alive(pid) for pid in pids)
    # Ray kills what its workers started before it could clean up.
    for folder in left(pools.tmp):
        assert "cluster" in pools.script
        shutil.rmtree(folder)


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


_BROKEN = """
from autotune.errors import MachineError
from autotune.workers import CompilePool
from tests.conftest import each
from tests.test_workers import QUICK
if __name__ != "__main__":  # a spawned worker runs this script again, and ends here, before it has any task
    raise SystemExit(3)
with CompilePool(1, 600.0) as pool:
    try:
        print("verdicts", list(pool.run(each(QUICK))))
    except MachineError as error:
        print("refused:", error)
"""


def test_workers_that_cannot_be_started_are_an_error_and_no_verdict(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_BROKEN)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env=user_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "refused: the compiling processes cannot be kept running" in done.stdout, done.stderr[-2000:]
    assert "verdicts" not in done.stdout


def test_leaving_on_an_error_keeps_the_handler_of_ctrl_c(pools: Started) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), pools.start(1, 600.0):
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before
