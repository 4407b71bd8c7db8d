"""`autotune sweep` against the loop that users write today, in one run.

    python -m bench.naive_sweep [--model 70B] [--model 8B]

Naive: in one process, for every key and every candidate, jit, lower and compile at the key's own shape. Ours:
`autotune sweep` with its defaults, from an empty store. Both have the same eight keys of two layouts, a
Llama 3.1 on four and on eight chips, and the same candidates; the naive loop also reads the schedule, so that
it can name a winner by the same model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from autotune.kernel.problem import NO_SETTINGS, Program, TableKey
from autotune.keys import presets
from autotune.results import dataset, schema, winners
from autotune.results.baselines import incumbent
from autotune.results.rows import blocks_of, keys_of
from autotune.search import space
from autotune.tpu import generations

# Heads and page size of a model on eight and on four chips.
MODELS = {"70B": ((8, 1, 128), (16, 2, 128)), "8B": ((4, 1, 64), (8, 2, 128))}
TARGET = "v6e"

_NAIVE = """
import json, math, os, sys, tempfile
from pathlib import Path
from autotune.kernel.problem import NO_SETTINGS, TableKey
from autotune.tpu import generations
from autotune.tpu.compiler import KERNEL_NAME, environment, target_device
dump = Path(tempfile.mkdtemp())
os.environ.update(environment(dump))
import jax
from jax.sharding import SingleDeviceSharding
from autotune.search import space
from autotune.model.cost import latency_seconds
from autotune.results.baselines import incumbent
from autotune.kernel import workload
from autotune.kernel.jax_rpa.call import abstract_arguments, kernel_call
from autotune.tpu.schedule import read_schedule

generation = generations.by_name(sys.argv[1])
device = target_device(generation)
best, compiles = [], 0
for key in map(TableKey._make, json.loads(sys.argv[2])):
    problem, latencies = key.canonical_problem(), {}
    batches = [workload.generate(name, problem) for name in workload.GENERATORS]
    arguments = abstract_arguments(problem, 1024, SingleDeviceSharding(device))
    now = [blocks for blocks in incumbent(generation, key) if blocks]
    for blocks in space.candidates(problem, incumbents=now):
        compiles += 1
        try:
            with jax.default_device(device):
                jax.jit(kernel_call(blocks, NO_SETTINGS)).trace(*arguments).lower().compile()
            cycles = read_schedule(dump, KERNEL_NAME).cycles
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            continue
        finally:
            for path in dump.iterdir():
                path.unlink()
        logs = [math.log(latency_seconds(generation, problem, blocks, b, cycles)) for b in batches]
        latencies[blocks] = sum(logs) / len(logs)
    best.append(min(latencies, key=latencies.get))
print(json.dumps([compiles, best]))
"""


def keys_for(model: str) -> list[TableKey]:
    return [
        TableKey("bfloat16", "bfloat16", q_heads, kv_heads, 128, page_size, tokens, 2048)
        for q_heads, kv_heads, page_size in MODELS[model]
        for tokens in (512, 1024, 2048, 4096)
    ]


def naive(keys: list[TableKey]) -> tuple[float, int, list[tuple[int, int]]]:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _NAIVE, TARGET, json.dumps(keys)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    compiles, best = json.loads(done.stdout)
    return time.perf_counter() - start, compiles, [tuple(blocks) for blocks in best]


def ours(keys: list[TableKey], folder: Path) -> tuple[float, int, list[tuple[int, int]]]:
    shapes = [
        argument
        for key in keys
        for argument in (
            "--shape",
            f"q_heads={key[2]},kv_heads={key[3]},head_dim=128,page_size={key.page_size},"
            f"max_num_batched_tokens={key.max_num_batched_tokens},max_model_len={key.max_model_len}",
        )
    ]
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "autotune", "sweep", "--target", TARGET, *shapes, "--out", str(folder / "r")],
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    seconds = time.perf_counter() - start
    frame = dataset.read(folder / "r")
    lines = winners.choose(winners.scores(frame))
    best = dict(zip(keys_of(lines), blocks_of(lines), strict=True))
    layout = [*schema.KEY_COLUMNS[:6], *schema.BLOCK_COLUMNS]
    compiles = frame.drop_duplicates(layout)["compile_seconds"].notna().sum()
    return seconds, int(compiles), [tuple(best[key]) for key in keys]


def expected_seconds(keys: list[TableKey]) -> float:
    """Compile seconds of every candidate of every key, none shared, by `expected_compile_seconds`."""
    generation = generations.by_name(TARGET)
    total = 0.0
    for key in keys:
        problem = key.canonical_problem()
        now = [blocks for blocks in incumbent(generation, key) if blocks]
        for blocks in space.candidates(problem, incumbents=now):
            program = Program(layout=problem.layout, blocks=blocks, settings=NO_SETTINGS)
            if not space.scratch_overflow(generation, program, named=False):
                total += space.expected_compile_seconds(program)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=list(MODELS))
    for model in parser.parse_args().model or MODELS:
        keys = keys_for(model)
        with tempfile.TemporaryDirectory() as scratch:
            our_seconds, our_compiles, our_best = ours(keys, Path(scratch))
        naive_seconds, naive_compiles, naive_best = naive(keys)
        same = sum(a == b for a, b in zip(naive_best, our_best, strict=True))
        print(f"Llama 3.1 {model}, {len(keys)} keys")
        print(f"  naive loop      {naive_seconds:7.1f} s  {naive_compiles:4} compiles")
        print(f"  autotune sweep  {our_seconds:7.1f} s  {our_compiles:4} compiles")
        ratio = naive_seconds / our_seconds
        print(f"  {ratio:.1f} times less wall time; the same winner on {same} of {len(keys)} keys")
        if same < len(keys):
            print(f"  naive: {naive_best}\n  ours:  {our_best}")
        published = sorted(presets.keys("published"))
        hours = naive_seconds * expected_seconds(published) / expected_seconds(keys) / 3600
        print(
            f"  extrapolated, not run: {hours:.0f} hours of the naive loop for all {len(published)} keys "
            "that are\n  published, by the compile time expected of each candidate",
            flush=True,
        )


if __name__ == "__main__":
    main()
