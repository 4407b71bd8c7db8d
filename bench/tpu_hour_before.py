"""The account of `bench.tpu_hour` for an older tree: what the process with the chip compiled, and its traces.

    git archive 827ddcb | tar -x -C DIR
    python -m bench.tpu_hour_before --tree DIR --target v6e --keys 8 > before.json
    python -m bench.tpu_hour --target v6e --before before.json

That process made the pool and the queries with `jax.random.normal` of their own shape, and compiled JAX's
reference for every workload, its lengths baked in. A key takes one to three minutes here, one program at a
time; one that takes longer than --limit seconds is cut off and counts as that many. Traces are counted for
all published keys, by the older tree's own `KeyTiming`, in a process that imports that tree.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REVISION = "827ddcb"
NOISE = 0.01


def old(name: str) -> Any:
    """A module of the older tree, which has another interface than the one that mypy reads."""
    return importlib.import_module(f"autotune.{name}")


class Device:
    """What the older KeyTiming times on: one workload and one trace a call of `time`."""

    chip = 0

    def __init__(self, latency: dict[tuple[int, int, str], float], seed: str) -> None:
        self.latency = latency
        self.rng = random.Random(seed)
        self.traces = self.calls = 0
        self.seconds = 0.0

    def prepare(self, problem: Any, workloads: Any, *_: Any) -> None:
        self.workloads = workloads

    def load(self, blocks: Any, payload: bytes | None) -> Any:
        return old("tpu.session").Loaded("ok", None, False)

    def time(self, workload: int, order: list[Any]) -> Any:
        self.traces += 1
        found: dict[Any, list[float]] = {}
        for blocks in order:
            exact = self.latency[(*blocks, self.workloads[workload].fingerprint)]
            self.calls += 1
            self.seconds += exact
            found.setdefault(blocks, []).append(exact * self.rng.gauss(1.0, NOISE))
        return old("tpu.session").Timed(found, old("tpu.trace").KERNEL_EVENTS, None)


def timed(case: dict[str, Any], settings: Any) -> dict[str, Any]:
    """One key, timed by the older scheduling code, with every executable there at once."""
    problems, measure, shortlist = old("kernel.problem"), old("measure"), old("shortlist")
    key, problem, workloads = call_of(case["key"])
    blocks = [tuple(problems.BlockSizes(*pair) for pair in case[name]) for name in ("ranking", "always")]
    device = Device({(p, q, batch): seconds for p, q, batch, seconds in case["latencies"]}, f"noise {key}")
    asked: list[Any] = []

    def request(store: Any, wanted: Any) -> None:
        asked.extend(wanted)
        for each in wanted:
            ok = old("tpu.compiler").Compiled(status="ok")
            store.add(each, old("tpu.executable").Executable(verdict=ok, payload=b""))

    job = measure.Job(
        key=key,
        problem=problem,
        settings=settings,
        workloads=workloads,
        shortlist=shortlist.Shortlist(*blocks),
        target=case["target"],
    )
    rule = old("tpu.statistics").StoppingRule(0.01, 5.0)
    slot = measure.Slot(0, lambda: device)
    for _ in measure.KeyTiming(job, slot, measure.Executables(request), rule, random.Random(0)).run():
        pass
    return {
        "key": case["key"],
        "asked": asked,
        "traces": device.traces,
        "calls": device.calls,
        "device_seconds": device.seconds,
    }


def call_of(fields: list[Any]) -> tuple[Any, Any, tuple[Any, ...]]:
    """A key, its problem and its workloads, as the older tree makes them."""
    key = old("kernel.problem").TableKey(*fields)
    workload = old("kernel.workload")
    problem = key.canonical_problem()
    return key, problem, tuple(workload.generate(name, problem) for name in workload.GENERATORS)


def shapes(fields: list[Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """The pool's and the queries' shape and dtype at a key; each distinct one was a program."""
    _, problem, workloads = call_of(fields)
    pages = old("kernel.inputs").pool_pages(problem, workloads)
    pool, queries = old("kernel.rpa")._argument_shapes(problem, pages)[1::-1]
    return {"pool": pool, "queries": queries}


# In a process that compiles.


def start(folder: str) -> None:
    os.environ.update(old("tpu.compiler").environment(Path(folder)))


@functools.cache
def device_of(target: str) -> Any:
    """The device that is compiled for; a first tiny program takes what only the first one takes."""
    import jax
    from jax.sharding import SingleDeviceSharding

    topology = old("tpu.chips").by_name(target).topology_name
    device = old("tpu.compiler").target_device(topology)
    scalar = jax.ShapeDtypeStruct((), "float32", sharding=SingleDeviceSharding(device))
    with jax.default_device(device):
        jax.jit(lambda x: x - 1).trace(scalar).lower().compile()
    return device


def compiled(target: str, fields: list[Any], what: str) -> float:
    """CPU seconds of tracing, lowering and compiling a program; what: pool, queries or a workload's place."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    device = device_of(target)
    there = SingleDeviceSharding(device)
    found = shapes(fields)

    def struct(shape: tuple[int, ...], dtype: str) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=there)

    if what in found:
        shape, dtype = found[what]
        arguments = [struct((2,), "uint32")]

        def function(bits: Any) -> Any:
            return jax.random.normal(jax.random.wrap_key_data(bits), shape, jnp.float32).astype(dtype)
    else:
        arguments = [struct(*found["queries"]), struct(*found["pool"])]
        function = reference(fields, int(what))
    began = time.process_time()
    with jax.default_device(device):
        jax.jit(function).trace(*arguments).lower().compile()
    return time.process_time() - began


def reference(fields: list[Any], workload: int) -> Any:
    """The program that `inputs.expected` of the older tree compiled for one workload."""
    import numpy as np
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    _, problem, workloads = call_of(fields)
    inputs = old("kernel.inputs")
    batch = inputs._placed(problem, workloads, 0)[workload]
    chosen = inputs.compared_sequences(workloads[workload], problem.num_q_heads)
    spans = [np.arange(batch.cu_q_lens[i], batch.cu_q_lens[i + 1]) for i in chosen]
    tokens = np.concatenate(spans)
    lengths = np.cumsum([0, *map(len, spans)]).astype(np.int32)
    lens, pages, count = batch.kv_lens[chosen], batch.page_indices[chosen], np.array([len(chosen)], np.int32)

    def compute(q: Any, pool: Any) -> Any:
        return kernel.ref_ragged_paged_attention(q[tokens], pool, lens, pages, lengths, count)

    return compute


def compiles(target: str, keys: list[list[Any]], limit: float) -> list[dict[str, Any]]:
    """CPU seconds of the programs of some keys, one at a time; those cut off count as the limit."""
    import multiprocessing

    import pebble

    found = []
    with (
        tempfile.TemporaryDirectory() as folder,
        pebble.ProcessPool(1, 0, start, (folder,), multiprocessing.get_context("spawn")) as pool,
    ):
        for fields in keys:
            for what in ("pool", "queries", *map(str, range(len(call_of(fields)[2])))):
                try:
                    seconds = pool.schedule(compiled, args=[target, fields, what], timeout=limit).result()
                    cut = False
                except TimeoutError:
                    seconds, cut = limit, True
                found.append({"key": fields, "program": what, "seconds": seconds, "cut": cut})
                print(
                    fields, what, f"{seconds:.1f} s{', cut off' if cut else ''}", file=sys.stderr, flush=True
                )
    return found


def account(told: dict[str, Any]) -> dict[str, Any]:
    """All that is known of the older tree, as JSON."""
    settings = old("kernel.problem").Settings(**told["settings"])
    return {
        "target": told["target"],
        "timings": [timed({**case, "target": told["target"]}, settings) for case in told["cases"]],
        "distinct": {
            name: len({str(shapes(case["key"])[name]) for case in told["cases"]})
            for name in ("pool", "queries")
        },
        "compiles": compiles(told["target"], told["sample"], told["limit"]),
    }


def main() -> None:
    if len(sys.argv) == 1:  # started below, to import the older tree
        print(json.dumps(account(json.load(sys.stdin))))
        return
    from bench.tpu_hour import published, sample

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", required=True, help=f"folder of the older tree, {REVISION}")
    parser.add_argument("--target", default="v6e")
    parser.add_argument("--keys", type=int, default=8, help="keys whose programs are compiled (8)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that one program may take (300)")
    arguments = parser.parse_args()
    preset = published(arguments.target)
    told = {
        "target": arguments.target,
        "settings": preset.settings,
        "cases": [case.as_json() for case in preset.cases],
        "sample": [case.key for case in sample(preset.cases, arguments.keys, arguments.seed)],
        "limit": arguments.limit,
    }
    subprocess.run(
        [sys.executable, str(Path(__file__).resolve())],
        input=json.dumps(told),
        text=True,
        env={**os.environ, "PYTHONPATH": arguments.tree},
        check=True,
    )


if __name__ == "__main__":
    main()
