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

from autotune.compile.local_pool import CompilePool
from autotune.compile.pool import StartPool, Task
from autotune.errors import MachineError
from autotune.executors import ray_cluster
from autotune.executors.ray_pool import RayPool
from autotune.tpu import environment
from tests.conftest import ROOT, command_line, compiling, each, program, user_environment, wait_until_busy

QUICK = [Task("v6e", program(pages, 32, page_size=16)) for pages in (8, 16)]
SLOW = Task("v6e", program(16, 256, q_heads=8, kv_heads=4, page_size=128))  # a minute and more


class Started(NamedTuple):
    """Where pools run. start: makes one. tmp: of its workers. script: what a program begins with."""

    start: StartPool
    tmp: Path
    script: str


_LOCAL = """
from autotune.compile.local_pool import CompilePool as start
"""
_RAY = """
import functools
from autotune.executors import ray_cluster
from autotune.executors.ray_pool import RayPool
start = functools.partial(RayPool, say=print)
if __name__ == "__main__":
    joined = ray_cluster.connected({address!r})
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
    with ray_cluster.connected(nodes.address):
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
    for pid in fresh:
        wait_until_busy(pid, 1.5)
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


def test_what_fails_outside_the_compiler_is_no_verdict(pools: Started) -> None:
    """A generation that the process does not know stands for all that is wrong there and not in a program."""
    with pytest.raises(MachineError, match="what is recorded so far is kept"), pools.start(1, 600.0) as pool:
        list(pool.run(each([Task("v99", QUICK[0].program)])))


def test_a_libtpu_that_does_not_load_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libtpu.so").write_text("no library")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    with pytest.raises(MachineError, match="libtpu cannot compile for v6e"), CompilePool(1, 600.0) as pool:
        list(pool.run(each(QUICK)))


def test_a_folder_that_goes_away_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with CompilePool(1, 600.0) as pool:
        assert [verdict.status for _, verdict in pool.run(each(QUICK[:1]))] == ["ok"]
        for folder in left(tmp_path):
            shutil.rmtree(folder)
        with pytest.raises(MachineError, match=r"cannot use '.*' \(No such file or directory\)"):
            list(pool.run(each(QUICK[1:])))


def test_no_folder_for_temporary_files_is_an_error_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at all")
    with pytest.raises(MachineError, match=r"cannot use '/nowhere/at all/.*' \(No such file"):
        CompilePool(1, 600.0).__enter__()


def test_files_may_be_in_a_folder_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "a space, quotes'\", é中, a line\nbreak, $HOME *;&"
    (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    with CompilePool(1, 600.0) as pool:
        [(_, verdict)] = pool.run(each(QUICK[:1]))
        assert left(tmp_path / name)
    assert verdict.status == "ok", verdict.error
    assert not left(tmp_path / name)


_COMPILE_ONE = """
import jax  # a worker that ran this file would have the user's settings
from autotune.compile.local_pool import CompilePool
from tests.conftest import each
from tests.compile.test_local_pool import QUICK
if __name__ == "__main__":
    with CompilePool(1, float({timeout!r})) as pool:
        print([(verdict.status, verdict.schedule) for _, verdict in pool.run(each(QUICK[:1]))])
"""
USERS = {
    "JAX_ENABLE_X64": "1",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "JAX_OPTIMIZATION_LEVEL": "O0",
    "PYTHONOPTIMIZE": "2",
}


def test_settings_of_the_user_change_no_verdict(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_COMPILE_ONE.format(timeout=600))
    plain, set_up = (
        subprocess.run(
            [sys.executable, str(script)],
            cwd=ROOT,
            env={**user_environment(), "JAX_PLATFORMS": "cpu", **variables},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for variables in ({}, USERS)
    )
    assert plain.startswith("[('ok', ")
    assert set_up == plain


@pytest.mark.slow  # tests/timing/test_device_process.py has the same patience of the other kind of process
def test_a_command_that_was_stopped_for_longer_than_the_limit_has_no_timeout(tmp_path: Path) -> None:
    """As by Ctrl-Z, and fg some time later."""
    limit = 15.0
    script = tmp_path / "parent.py"
    script.write_text(_COMPILE_ONE.format(timeout=limit))
    with subprocess.Popen(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**user_environment(), "TMPDIR": str(tmp_path), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        while not list(tmp_path.glob("*/*.log")):
            time.sleep(0.05)
        time.sleep(1.0)  # into the compile
        os.killpg(parent.pid, signal.SIGSTOP)
        time.sleep(limit + 1.0)
        os.killpg(parent.pid, signal.SIGCONT)
        said, _ = parent.communicate()
    assert said.startswith("[('ok', ")


_CHILDREN = """
from autotune.doctor.probe import ask
from autotune.timing.device_process import Chip, Owner
from autotune.compile.local_pool import CompilePool
if __name__ == "__main__":
    import sys
    sys.path.append({root!r})
    from tests.conftest import each
    from tests.compile.test_local_pool import QUICK
    with CompilePool(1, 600.0) as pool:
        print([verdict.status for _, verdict in pool.run(each(QUICK[:1]))])
    print(sorted(ask().errors))
    owner = Owner(Chip("cpu"))
    print(owner.device_kind)
    owner.close()
"""


def test_no_process_runs_files_of_the_current_folder(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("struct", "types", "enum", "signal", "socket", "pickle", "jax"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    script = tmp_path / "parent.py"
    script.write_text(_CHILDREN.format(root=str(ROOT)))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=here,
        env=user_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert done.stdout == "['ok']\n[]\ncpu\n", done.stderr


def test_leaving_early_stops_the_workers_and_takes_their_files_along(pools: Started) -> None:
    with pytest.raises(KeyboardInterrupt), pools.start(1, 600.0) as pool:
        for _ in pool.run(each([QUICK[0], SLOW])):
            assert len(left(pools.tmp)) == 1
            raise KeyboardInterrupt
    assert not left(pools.tmp)
    assert not compiling()


_PARENT = """
from tests.conftest import each
from tests.compile.test_local_pool import SLOW
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
import sys
from autotune.errors import MachineError
from autotune.compile.local_pool import CompilePool
from tests.conftest import each
from tests.compile.test_local_pool import QUICK
sys.executable = "/bin/false"
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


def test_what_a_sitecustomize_sets_does_not_reach_a_compile(tmp_path: Path) -> None:
    """It runs in every Python of the user's, workers included, before anything of autotune does."""
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['JAX_ENABLE_X64'] = '1'\n")
    variables = user_environment(tmp_path / "cache") | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    shape = "q_heads=4,kv_heads=1,head_dim=128,page_size=64,max_num_batched_tokens=512,max_model_len=1024"
    done = subprocess.run(
        command_line(
            "sweep", "--target", "v6e", "--shape", shape, "--kv-pages", 4, "--queries", 32, "--out", "r"
        ),
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "newly recorded candidates: 1 ok" in done.stderr


def test_nor_does_it_reach_a_probe_or_a_process_with_a_device(
    tmp_path: Path,
) -> None:
    """All are started by environment.python, which gives back what they were started with."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nos.environ['JAX_ENABLE_X64'] = '1'\nos.environ['KEPT'] = 'changed'\n"
    )
    code = "import os; print(os.environ.get('JAX_ENABLE_X64'), os.environ['KEPT'])"
    variables = user_environment(tmp_path) | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "KEPT": "ours"}
    done = subprocess.run(environment.python(code), env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == "None ours\n"
