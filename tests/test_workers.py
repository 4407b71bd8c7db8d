"""Worker processes that are killed, hang or outlive their parent, with real compiles."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autotune.pool import Task
from autotune.workers import CompilePool
from tests.conftest import ROOT, each, program, user_environment

QUICK = [Task("v6e", program(pages, 32, page_size=16)) for pages in (8, 16)]
SLOW = Task("v6e", program(16, 256, q_heads=8, kv_heads=4, page_size=128))  # a minute and more


def worker_pids() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid}


def kill_a_worker(seen: set[int], after: threading.Event) -> None:
    """Kill one worker that was not seen before, once the event is set and it has had time to begin."""
    after.wait()
    while not (fresh := worker_pids() - seen):
        time.sleep(0.05)
    time.sleep(2.5)
    for pid in fresh & worker_pids():
        os.kill(pid, signal.SIGKILL)
    seen |= fresh


def test_a_worker_killed_twice_is_crashed_and_the_rest_are_there() -> None:
    """The slow task loses its worker at once, and after the one task that was queued behind it again."""
    seen = worker_pids()
    one_done = threading.Event()
    now = threading.Event()
    now.set()

    def kill_twice() -> None:
        kill_a_worker(seen, now)
        one_done.wait()
        time.sleep(1)
        for pid in worker_pids():
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_twice)
    verdicts = {}
    with CompilePool(1, 600.0) as pool:
        killer.start()
        for task, verdict in pool.run(each([SLOW, *QUICK])):
            verdicts[task] = verdict
            one_done.set()
    killer.join()
    assert [verdicts[task].status for task in QUICK] == ["ok", "ok"]
    assert verdicts[SLOW].status == "crashed"
    assert "ended by SIGKILL, 2 times" in (verdicts[SLOW].error or "")
    assert verdicts[SLOW].seconds is None


def test_a_worker_killed_once_is_tried_again() -> None:
    seen = worker_pids()
    now = threading.Event()
    now.set()
    killer = threading.Thread(target=kill_a_worker, args=(seen, now))
    medium = Task("v6e", program(16, 128, q_heads=8, kv_heads=2, page_size=128))
    with CompilePool(1, 600.0) as pool:
        killer.start()
        [(task, verdict)] = pool.run(each([medium]))
    killer.join()
    assert (task, verdict.status) == (medium, "ok")


def test_a_compile_beyond_the_limit_is_timeout_and_the_rest_are_there() -> None:
    with CompilePool(1, 12.0) as pool:
        verdicts = dict(pool.run(each([SLOW, *QUICK])))
    assert [verdicts[task].status for task in QUICK] == ["ok", "ok"]
    assert verdicts[SLOW].status == "timeout"
    assert verdicts[SLOW].seconds == 12.0
    assert "--compile-timeout 12 s" in (verdicts[SLOW].error or "")


def test_leaving_early_stops_the_workers_and_takes_their_files_along(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), CompilePool(1, 600.0) as pool:
        folder = pool._folder
        for _ in pool.run(each([QUICK[0], SLOW])):
            raise KeyboardInterrupt
    assert not folder.exists()
    assert not worker_pids()


_PARENT = """
import sys
from autotune.workers import CompilePool
from tests.conftest import each
from tests.test_workers import SLOW
if __name__ == "__main__":
    with CompilePool(1, 600.0) as pool:
        print(pool._folder, flush=True)
        list(pool.run(each([SLOW])))
"""


def test_workers_leave_soon_after_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script)], cwd=ROOT, env=user_environment(), stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout
    folder = Path(parent.stdout.readline().strip())
    while not list(folder.glob("*.log")):
        time.sleep(0.1)
    pids = [int(path.stem) for path in folder.glob("*.log")]
    time.sleep(2)  # into the compile
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(_alive(pid) for pid in pids):
        time.sleep(0.2)
    assert not any(_alive(pid) for pid in pids)
    assert not folder.exists()


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


def test_leaving_on_an_error_keeps_the_handler_of_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), CompilePool(1, 600.0):
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before
