"""Sweeps on a Ray cluster of this machine: nodes that leave, nodes that are not alike, a head that dies."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from autotune.compile.pool import Task
from autotune.executors import ray_cluster as cluster
from autotune.executors.ray_pool import NODE_ATTEMPTS, RayPool
from autotune.results import dataset, schema
from tests.conftest import (
    ROOT,
    RayNodes,
    command_line,
    compiling,
    descendants,
    each,
    program,
    ray_nodes,
    user_environment,
)
from tests.factories import SWEEP, wait_for_rows

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
Run = Callable[..., subprocess.CompletedProcess[str]]
QUICK = Task("v6e", program(8, 32, page_size=16))
SLOW = Task("v6e", program(16, 256, q_heads=8, kv_heads=4, page_size=128))  # a minute and more
# What two machines cannot have in common.
OF_THE_MACHINE = ["time", "host", "compile_seconds"]


def comparable(folder: Path) -> pd.DataFrame:
    frame = dataset.read(folder)
    order = [*schema.KEY_COLUMNS, *schema.BLOCK_COLUMNS, "workload"]
    return frame.drop(columns=OF_THE_MACHINE).sort_values(order, ignore_index=True)


def actors() -> set[int]:
    return {pid for pid, words in descendants().items() if words.startswith("ray::Compiler")}


@needs_ray
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--ray-address", "auto"], 2, "Error: --ray-address auto goes with --executor ray"),
        (
            ["--executor", "ray", "--ray-address", "head"],
            2,
            "'head' is not auto, local or the head's HOST:PORT",
        ),
        (["--executor", "ray", "--ray-address", "127.0.0.1:1"], 3, "no Ray cluster answers at 127.0.0.1:1"),
        (["--executor", "slurm"], 2, "'slurm' is not one of 'local', 'ray'"),
    ],
)
def test_a_users_mistake_is_one_clear_line(
    process: Run, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    done = process(*SWEEP, *arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "r").exists()


def test_without_the_extra_what_to_install(tmp_path: Path) -> None:
    without = "import sys; sys.modules['ray'] = None; from autotune.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", without, *SWEEP, "--executor", "ray"],
        cwd=tmp_path,
        env=user_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert done.stderr == "Error: --executor ray needs Ray: pip install 'tpu-autotune[ray]'\n"
    assert not (tmp_path / "r").exists()


@needs_ray
def test_no_cluster_says_how_to_start_one(process: Run) -> None:
    if Path("/tmp/ray/ray_current_cluster").exists():
        pytest.skip("a Ray cluster runs, or ran, on this machine")
    done = process(*SWEEP, "--executor", "ray")
    assert done.returncode == 3
    assert "this machine is not a node of a Ray cluster: start one (ray start --head)" in done.stderr


def listening(pids: set[int]) -> set[str]:
    """The addresses, as the kernel writes them, at which processes take connections of TCP."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                sockets.add(str(link.readlink()))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.add(words[1].partition(":")[0])
    return found


LOCAL = """
import os
from autotune.executors import ray_cluster
with ray_cluster.connected("local") as address:
    print(address, os.environ["RAY_AUTH_MODE"], flush=True)
    input()
"""
# 127.0.0.1 alone, and as an address of IPv6.
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


@needs_ray
def test_a_cluster_that_is_started_here_is_nobody_elses(tmp_path: Path) -> None:
    env = {k: v for k, v in user_environment().items() if not k.startswith("RAY_")}
    with subprocess.Popen(
        [sys.executable, "-c", LOCAL],
        cwd=tmp_path,
        env={**env, "HOME": str(tmp_path)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin and process.stdout
        address, mode = process.stdout.readline().split()
        found = listening({process.pid, *descendants(process.pid)})
        process.stdin.write("\n")
    assert address.startswith("127.0.0.1:") and mode == "token"
    assert found and found <= LOOPBACK
    assert not (tmp_path / ".ray").exists(), "a token that is in no file cannot be read there"


def test_a_users_own_rules_of_who_may_use_a_cluster_hold() -> None:
    alone = cluster._for_this_user_alone
    tokens = {alone({})["RAY_AUTH_TOKEN"] for _ in range(2)}
    assert len(tokens) == 2 and all(len(token) == 64 for token in tokens)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        assert not [key for key in alone({name: "x"}) if key.startswith("RAY_AUTH")]


def test_a_node_killed_in_mid_sweep_and_the_rows_of_the_local_pool(
    process: Run, ray_cluster: RayNodes, tmp_path: Path
) -> None:
    arguments = [*SWEEP[:-2], "--queries", "32,40,48,56,64,72", "--no-cache"]
    assert process(*arguments, "--out", "local").returncode == 0
    doomed = ray_cluster.add()
    sweep = subprocess.Popen(
        command_line(*arguments, "--out", "r", "--executor", "ray", "--ray-address", ray_cluster.address),
        cwd=tmp_path,
        env=user_environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_for_rows(tmp_path / "r", 3)
    raylet = doomed.all_processes["raylet"][0].process.pid
    while not compiling(raylet):
        assert sweep.poll() is None, "the sweep is done, and the node had none of it"
        time.sleep(0.05)
    ray_cluster.cluster.remove_node(doomed, allow_graceful=False)
    out, said = sweep.communicate(timeout=300)
    assert sweep.returncode == 0, said
    assert "12 programs to compile for v6e" in said and "with --jobs 3" in said
    assert "12 programs compiled" in said and "16" in out
    pd.testing.assert_frame_equal(comparable(tmp_path / "r"), comparable(tmp_path / "local"))
    assert not actors() and not compiling()
    again = process(*arguments, "--out", "r")  # any executor goes on with the rows of any other
    assert "12 recorded before; 0 programs to compile" in again.stderr


@pytest.mark.slow
def test_a_node_with_another_compiler_is_left_out(ray_cluster: RayNodes, tmp_path: Path) -> None:
    """Rows are of one version of libtpu: its name and version are looked up as the node would."""
    other = tmp_path / "libtpu-9.9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: libtpu\nVersion: 9.9.9\n")
    said: list[str] = []
    node = ray_cluster.add({"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    try:
        with cluster.connected(ray_cluster.address), RayPool(3, 60.0, said.append) as pool:
            verdicts = [verdict for _, verdict in pool.run(each([QUICK] * 4))]
            deadline = time.monotonic() + 60
            while not said and time.monotonic() < deadline:
                time.sleep(0.1)
    finally:
        ray_cluster.cluster.remove_node(node)
    assert [verdict.status for verdict in verdicts] == ["ok"] * 4
    [line] = said
    assert "a Ray node is left out: " in line and "has libtpu 9.9.9 where this machine has " in line


@pytest.mark.slow
def test_a_program_that_takes_its_nodes_along_is_crashed_in_the_end(ray_cluster: RayNodes) -> None:
    """Ray's own process is killed under it, as by its memory monitor."""
    with cluster.connected(ray_cluster.address), RayPool(1, 600.0, print) as pool:
        tasks = pool.run(each([SLOW, QUICK]))

        def kill() -> None:
            for _ in range(NODE_ATTEMPTS):
                while not compiling():
                    time.sleep(0.1)
                time.sleep(2)
                for pid in actors():
                    os.kill(pid, signal.SIGKILL)
                while compiling():
                    time.sleep(0.1)

        killer = threading.Thread(target=kill)
        killer.start()
        verdicts = dict(tasks)
        killer.join()
    assert verdicts[SLOW].status == "crashed"
    assert f"the Ray node that compiled it was lost, {NODE_ATTEMPTS} times" in (verdicts[SLOW].error or "")
    assert verdicts[QUICK].status == "ok"


@pytest.mark.slow
def test_ray_is_not_loaded_beside_the_compiler(ray_cluster: RayNodes) -> None:
    with cluster.connected(ray_cluster.address), RayPool(1, 600.0, print) as pool:
        for _ in pool.run(each([QUICK])):
            [pid] = compiling()
            libraries = Path(f"/proc/{pid}/maps").read_text()
            assert "libtpu.so" in libraries and "_raylet" not in libraries


LONG = [*SWEEP[:-2], "--queries", ",".join(str(n) for n in range(32, 257, 8)), "--no-cache", "--out", "r"]


def start(nodes: RayNodes, tmp_path: Path, *extra: str) -> subprocess.Popen[str]:
    """A sweep of 58 programs on the cluster."""
    return subprocess.Popen(
        command_line(*LONG, "--executor", "ray", "--ray-address", nodes.address, *extra),
        cwd=tmp_path,
        env=user_environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def gone(find: Callable[[], set[int]], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while find() and time.monotonic() < deadline:
        time.sleep(0.2)
    return not find()


@pytest.mark.slow
def test_ctrl_c_leaves_at_once_and_nothing_runs_on(ray_cluster: RayNodes, tmp_path: Path) -> None:
    sweep = start(ray_cluster, tmp_path)
    wait_for_rows(tmp_path / "r", 2)
    for _ in range(3):
        os.killpg(sweep.pid, signal.SIGINT)
        time.sleep(0.2)
    _, said = sweep.communicate(timeout=60)
    assert sweep.returncode == 130, said
    assert "everything so far is recorded in r. To go on:\n" in said and "Traceback" not in said
    assert not compiling() and gone(actors)


@pytest.mark.slow
def test_kill_9_loses_nothing_and_nothing_runs_on(ray_cluster: RayNodes, tmp_path: Path) -> None:
    sweep = start(ray_cluster, tmp_path)
    wait_for_rows(tmp_path / "r", 2)
    sweep.kill()
    sweep.communicate()
    assert gone(actors) and gone(compiling)
    before = len(comparable(tmp_path / "r")) // 3
    second = start(ray_cluster, tmp_path, "--dry-run")
    _, said = second.communicate(timeout=120)
    assert f"{before} recorded before; {58 - before} programs to compile" in said


@pytest.mark.slow
def test_the_heads_death_ends_the_sweep_and_the_same_command_goes_on(tmp_path: Path) -> None:
    with ray_nodes() as nodes:
        sweep = start(nodes, tmp_path)
        wait_for_rows(tmp_path / "r", 3)
        head = nodes.cluster.head_node
        nodes.cluster.remove_node(head, allow_graceful=False)
        began = time.monotonic()
        _, said = sweep.communicate(timeout=120)
        print(time.monotonic() - began, said)
    assert sweep.returncode == 3, said
    assert "Traceback" not in said
    assert "is gone; what is recorded so far is kept: run the same command again" in said
    before = len(comparable(tmp_path / "r")) // 3
    assert before >= 3
    on = subprocess.run(
        command_line(*LONG, "--dry-run"), cwd=tmp_path, env=user_environment(), capture_output=True, text=True
    )
    assert f"{before} recorded before; {58 - before} programs to compile" in on.stderr
