"""Timings on nodes of a Ray cluster that say they have a chip, with the interpreter in its place."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune import sweep
from autotune.errors import MachineError, UsageError
from autotune.executors import ray_cluster as cluster
from autotune.executors import ray_devices
from autotune.kernel.problem import BlockSizes
from autotune.results import dataset, schema
from autotune.search.plan import Request
from autotune.timing.devices import Limits
from autotune.tpu import generations
from tests.conftest import RayNodes, descendants
from tests.timing.on_cpu import KEY, LONGER, RULE, Quiet, request, rows, statuses

Run = Callable[..., subprocess.CompletedProcess[str]]
V6E = {"TPU": 1, "accelerator_type:TPU-V6E": 1}
LIMITS = Limits(rule=RULE, top=None, exhaustive=False, run_timeout=60.0, compile_timeout=600.0)


@contextlib.contextmanager
def chip(nodes: RayNodes, **arguments: Any) -> Iterator[Any]:
    """A node more, that says it has a chip."""
    node = nodes.add(num_cpus=0, **{"resources": V6E, **arguments})
    try:
        yield node
    finally:
        if node in nodes.cluster.worker_nodes:
            nodes.cluster.remove_node(node, allow_graceful=False)
        nodes.cluster.wait_for_nodes()  # until the head has noticed, the chip seems to be there


def sessions(of: int | None = None) -> set[int]:
    """The processes that hold a device."""
    return {pid for pid, words in descendants(of).items() if "autotune.timing.device_worker" in words}


def time_all(asked: Request, folder: Path, progress: Quiet | None = None) -> sweep.Summary:
    devices = ray_devices.of_cluster(asked.generation, False, LIMITS)
    return sweep.sweep(asked, folder, progress or Quiet(), devices=devices, timeout=600.0)


def test_which_generation_is_timed_on() -> None:
    assert ray_devices.generation_of({"v6e": 8}, None) is generations.V6E
    assert ray_devices.generation_of({"v5e": 4, "v6e": 8}, "v6e") is generations.V6E
    with pytest.raises(UsageError, match="offers v5e and v6e: say which, such as --ray-tpu v5e"):
        ray_devices.generation_of({"v5e": 4, "v6e": 8}, None)
    with pytest.raises(MachineError, match="no node of the Ray cluster offers v4: it has v5e"):
        ray_devices.generation_of({"v5e": 4}, "v4")
    with pytest.raises(MachineError, match="offers a TPU: name a generation to compile for"):
        ray_devices.generation_of({}, None)


def test_every_generation_has_the_name_that_ray_gives_it() -> None:
    accelerators = pytest.importorskip("ray.util.accelerators")
    names = {value for name, value in vars(accelerators).items() if name.startswith("GOOGLE_TPU_V")}
    assert set(ray_devices.ACCELERATOR_TYPES.values()) == names - {"TPU-V2", "TPU-V3"}
    assert set(ray_devices.ACCELERATOR_TYPES) == set(generations.GENERATIONS)


@pytest.mark.slow
def test_from_the_command_line_a_chip_is_what_its_node_says(
    process: Run, ray_cluster: RayNodes, tmp_path: Path
) -> None:
    shape = "q_heads=4,kv_heads=1,head_dim=128,page_size=64,max_num_batched_tokens=128,max_model_len=256"
    command = ("sweep", "--interpret", "--shape", shape, "--kv-pages", "2,4", "--queries", "32")
    command = (*command, "--workload", "mixed", "--jobs", "1", "--out")
    on_ray = ("--executor", "ray", "--ray-address", ray_cluster.address)
    with chip(ray_cluster):
        done = process(*command, "r", *on_ray)
    assert done.returncode == 0, done.stderr
    assert "newly interpreted (a candidate on a workload each): 2 ok; by wall clock\n" in done.stderr
    assert "did not load" not in done.stderr
    timed = rows(tmp_path / "r", schema.INTERPRETED)
    assert timed["workload"].tolist() == ["mixed (cut)"] * 2 and (timed["status"] == "ok").all()
    assert (timed["host"] == socket.gethostname()).all() and (timed["chip"] == 0).all()
    assert (timed["device_kind"] == "cpu").all()
    assert not sessions()
    again = process(*command, "r")  # on this machine, with the rows of the cluster
    assert "newly interpreted (a candidate on a workload each): none" in again.stderr


@pytest.mark.slow
def test_a_node_that_leaves_with_its_chip_and_the_other_takes_its_keys(
    ray_cluster: RayNodes, tmp_path: Path
) -> None:
    keys = (KEY, LONGER, KEY._replace(max_model_len=1024), KEY._replace(max_num_batched_tokens=256))
    asked = request(keys=keys, workloads=("mixed", "decode-heavy"))
    with chip(ray_cluster), chip(ray_cluster) as doomed, cluster.connected(ray_cluster.address):
        raylet = doomed.all_processes["raylet"][0].process.pid

        class Killer(Quiet):
            """Has the node killed once it holds a device, and something is timed."""

            def timed(self, key: Any, result: Any) -> None:
                super().timed(key, result)
                if doomed in ray_cluster.cluster.worker_nodes and sessions(raylet):
                    ray_cluster.cluster.remove_node(doomed, allow_graceful=False)

        killer = Killer()
        summary = time_all(asked, tmp_path, killer)
        assert doomed not in ray_cluster.cluster.worker_nodes
    assert summary.timings == {"ok": len(keys) * 2 * 2}
    assert set(statuses(tmp_path).values()) == {"ok"}
    assert not rows(tmp_path, schema.INTERPRETED).duplicated(schema.IDENTITY).any()


@pytest.mark.slow
def test_a_device_that_dies_on_its_node_is_replaced(ray_cluster: RayNodes, tmp_path: Path) -> None:
    with chip(ray_cluster), cluster.connected(ray_cluster.address):
        killed = threading.Event()

        def kill() -> None:
            while not (found := sessions()):
                time.sleep(0.01)
            time.sleep(1)
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            killed.set()

        threading.Thread(target=kill).start()
        summary = time_all(request(), tmp_path)
    assert killed.is_set()
    assert summary.timings == {"ok": 2}
    assert statuses(tmp_path) == {BlockSizes(2, 32): "ok", BlockSizes(4, 32): "ok"}


@pytest.mark.slow
def test_a_chip_that_is_none_ends_the_sweep_with_what_libtpu_says(
    process: Run, ray_cluster: RayNodes, tmp_path: Path
) -> None:
    """The node says that it has a v6e, and there is none: as far as a measured sweep gets without a TPU."""
    arguments = (
        "sweep",
        "--preset",
        "smoke",
        "--kv-pages",
        "4",
        "--queries",
        "32",
        "--jobs",
        "1",
        "--out",
        "r",
    )
    on_ray = ("--executor", "ray", "--ray-address", ray_cluster.address)
    without = process(*arguments, *on_ray)
    assert without.returncode == 3
    assert "no node of the Ray cluster offers a TPU" in without.stderr
    with chip(ray_cluster):
        done = process(*arguments, *on_ray)
    assert done.returncode == 3, done.stderr
    assert "could not be taken, last tried after 65 s: " in done.stderr
    assert "Traceback" not in done.stderr
    assert set(dataset.read(tmp_path / "r")["source"]) <= {schema.MODELLED}
