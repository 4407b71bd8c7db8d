"""`use` and `install`: JAX's kernel, traced for a v6e that is not here, takes another table's pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import UsageError
from autotune.tables import Table, install, use
from autotune.tables.dialects import SGLANG
from autotune.tables.load import committed_path
from autotune.tpu.compiler import environment

# Runs where nothing has imported jax yet: what the compiler needs of the environment is set before.
SCRIPT = """
import json, threading
import jax
from jax.sharding import SingleDeviceSharding
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel, tuned_block_sizes
from autotune.kernel.problem import BlockSizes, Problem, TableKey
from autotune.kernel.jax_rpa.call import abstract_arguments
from autotune.tables import Table, install, use
from autotune.tables.dialects import JAX
from autotune.tpu import generations
from autotune.tpu.compiler import target_device

own = kernel.get_tuned_block_sizes
tuned_block_sizes.get_tpu_version = lambda: 6  # JAX's own look-up asks the host, which has no TPU
tuned_block_sizes.get_device_name = lambda *_: "TPU v6"

key = TableKey("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 1024)
def table(*blocks):
    return Table(dialect=JAX, devices={"TPU v6e": {key: BlockSizes(*blocks)}})

device = target_device(generations.V6E)
arguments = abstract_arguments(key.canonical_problem(8), 64, SingleDeviceSharding(device))

def model(*xs):
    return kernel.ragged_paged_attention(*xs) * 1
jitted = jax.jit(model)

def pair(function=jitted):
    grids = []
    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                mapping = equation.params["grid_mapping"]
                scratch = [v.aval.shape for v in equation.params["jaxpr"].invars if len(v.aval.shape) == 5]
                grids.append((max(scratch, key=len)[1], 1024 // mapping.grid[1]))
            for value in equation.params.values():
                if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                    walk(getattr(value, "jaxpr", value))
    with jax.default_device(device):
        traced = function.trace(*arguments)
    walk(traced.jaxpr.jaxpr)
    [found] = set(grids)
    return list(found), traced

def elsewhere():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(pair()[0]))
    thread.start(); thread.join()
    return seen[0]

said = {"default table": pair()[0]}
mine, other = table(4, 32), table(2, 128)
with use(mine) as entered:
    said["inside"], traced = pair()
    with jax.default_device(device):
        compiled = traced.lower().compile()
    said["compiled"] = compiled is not None
    with use(other):
        said["nested"] = pair()[0]
    said["back in the outer"] = pair()[0]
    said["another thread"] = elsewhere()
said["after"] = pair()[0]
said["restored"] = kernel.get_tuned_block_sizes is own
with use(mine, target="v6e"):
    said["again"] = pair()[0]
    said["named blocks"] = pair(jax.jit(lambda *xs: kernel.ragged_paged_attention(
        *xs, num_kv_pages_per_block=1, num_queries_per_block=32)))[0]
with use(mine, target="v5e"):
    said["a target without rows"] = pair()[0]
try:
    with use(mine):
        raise RuntimeError
except RuntimeError:
    said["restored after an error"] = kernel.get_tuned_block_sizes is own

said["installed"] = install(mine) is mine and [pair()[0], elsewhere()]
with use(other):
    said["used where one is installed"] = [pair()[0], elsewhere()]
said["installed, after a block"] = [pair()[0], elsewhere()]
install(other)
said["replaced"] = [pair()[0], elsewhere()]
try:
    install("nothing.py")
except Exception as error:
    said["what cannot be installed changes nothing"] = [type(error).__name__, elsewhere()]
with use(mine):
    install(None)
    said["taken out inside a block"] = [pair()[0], elsewhere()]
said["taken out"] = [pair()[0], elsewhere(), kernel.get_tuned_block_sizes is own]
install(None)
said["taken out twice"] = kernel.get_tuned_block_sizes is own
import asyncio
async def tasks():
    seen, entered, left = {}, asyncio.Event(), asyncio.Event()
    async def first():
        with use(mine):
            entered.set()
            await asyncio.sleep(0.02)
            seen["first"] = pair()[0]
            await left.wait()
        seen["first, after"] = pair()[0]
    async def second():
        await entered.wait()
        seen["second, without a block"] = pair()[0]
        with use(other):
            await asyncio.sleep(0.04)
            seen["second"] = pair()[0]
            left.set()
            await asyncio.sleep(0.04)  # the first leaves meanwhile
            seen["second, alone"] = pair()[0]
            seen["started in a block"] = await asyncio.create_task(third())
        seen["second, after"] = pair()[0]
    async def third():
        await asyncio.sleep(0)
        return pair()[0]
    await asyncio.gather(first(), second())
    return seen
step = asyncio.Handle._run
said["tasks"] = asyncio.run(tasks())
said["after tasks"] = [pair()[0], asyncio.Handle._run is step, kernel.get_tuned_block_sizes is own]
with use(mine):
    said["tasks in a block"] = asyncio.run(tasks())["second, after"]
    said["after tasks in a block"] = pair()[0]

async def never_ends():
    with use(mine):
        await asyncio.sleep(99)
async def leaves_it():
    coroutine = never_ends()
    coroutine.send(None)
    return coroutine
with use(other):
    loop = asyncio.new_event_loop()
    left = loop.run_until_complete(leaves_it())
    loop.close()
    left.close()  # in another context than it was begun in
    said["a block that another task closed"] = pair()[0]
first, second = use(mine), use(other)
first.__enter__(); second.__enter__()
first.__exit__(None, None, None)
said["the outer block is left first"] = pair()[0]
second.__exit__(None, None, None)
said["nothing is left behind"] = [pair()[0], kernel.get_tuned_block_sizes is own]
print(json.dumps(said))
"""


def test_jaxs_kernel_takes_the_pair_of_the_table_in_force(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | environment(tmp_path) | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    published = [8, 64]  # of jax 0.10's 'TPU v6' table, asked below
    from autotune.tables import load

    key = ("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 1024)
    assert list(load("jax:TPU v6").devices["TPU v6"][key]) == published
    assert said == {
        "default table": published,
        "inside": [4, 32],
        "compiled": True,
        "nested": [2, 128],
        "back in the outer": [4, 32],
        "another thread": published,
        "after": published,
        "restored": True,
        "again": [4, 32],
        "named blocks": [1, 32],
        "a target without rows": [8, 32],  # JAX's default (128, 32), cut to the call's 8 pages
        "restored after an error": True,
        "installed": [[4, 32], [4, 32]],
        "used where one is installed": [[2, 128], [4, 32]],
        "installed, after a block": [[4, 32], [4, 32]],
        "replaced": [[2, 128], [2, 128]],
        "what cannot be installed changes nothing": ["UsageError", [2, 128]],
        "taken out inside a block": [[4, 32], published],
        "taken out": [published, published, True],
        "taken out twice": True,
        "tasks": {
            "first": [4, 32],
            "first, after": published,
            "second, without a block": published,
            "second": [2, 128],
            "second, alone": [2, 128],
            "started in a block": [2, 128],
            "second, after": published,
        },
        "after tasks": [published, True, True],
        "tasks in a block": [4, 32],
        "after tasks in a block": [4, 32],
        "a block that another task closed": [2, 128],
        "the outer block is left first": [2, 128],
        "nothing is left behind": [published, True],
    }


def test_a_path_is_a_table_too(tmp_path):
    path = tmp_path / "v6e"  # not the committed table, though it is called so
    path.write_bytes(committed_path("v5e").read_bytes())
    with use(path) as entered:
        assert entered.generations() == ["v5e"]
    with pytest.raises(UsageError, match=r"'nothing\.py' does not exist"), use(Path("nothing.py")):
        pass


@pytest.mark.parametrize("table", [b"v6e", None, 3])
def test_what_names_no_table_is_said_in_pythons_words(table):
    from autotune.tables import load, use

    for call in (load, use):
        with pytest.raises(TypeError, match=r"^a table is named by a string or a path, not by "), call(table):
            pass


def test_any_path_is_a_table(tmp_path):
    from autotune.tables import load
    from autotune.tables.load import committed_path

    class Named:
        def __fspath__(self):
            return str(committed_path("v6e"))

    assert load(Named()).devices == load("v6e").devices


def test_tables_that_jaxs_kernel_cannot_use():
    with pytest.raises(UsageError, match="sglang-jax dialect"), use(Table(dialect=SGLANG, devices={})):
        pass
    with pytest.raises(UsageError, match="target 'v9' is unknown"), use("jax", target="v9"):
        pass
    with pytest.raises(UsageError, match="does not exist"), use("nothing.py"):
        pass
    with pytest.raises(UsageError, match="sglang-jax dialect"):
        install(Table(dialect=SGLANG, devices={}))
    with pytest.raises(UsageError, match="target 'v9' is unknown"):
        install("jax", target="v9")
