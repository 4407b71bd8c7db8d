from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from autotune import emit, tables
from autotune.errors import AutotuneError, UsageError
from autotune.kernel.problem import BlockSizes, Settings, TableKey
from autotune.results import dataset
from autotune.results.rows import blocks_of, rows_of
from autotune.tables import render
from autotune.tables.source import read_text
from autotune.tpu.compiler import environment
from autotune.tpu.generations import GENERATIONS
from tests.conftest import ROOT
from tests.factories import KEY, make_row

OTHER = KEY._replace(max_model_len=4096)


def emitted(folder: Path, **kwargs: bool) -> str:
    return emit.emit(emit.read(folder), **{"allow_modelled": True, **kwargs}).text


def load(text: str, tmp_path: Path) -> ModuleType:
    path = tmp_path / "emitted_table.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("emitted_table", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        make_row(p, q, key=key, target=target, latency_us=1.0 + abs(p - 8) + abs(q - 64))
        for target in ("v5e", "v6e", "v4")
        for key in (KEY, OTHER)
        for p in (4, 8)
        for q in (32, 64)
    ]
    dataset.append(tmp_path / "rows", rows)
    return tmp_path / "rows"


def test_modelled_rows_need_leave_and_then_the_module_says_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="6 of 6 winners are modelled"):
        emitted(folder, allow_modelled=False)
    text = emitted(folder)
    assert "MODELLED: 6 of 6 values" in text
    module = load(text, tmp_path)
    assert (module.SOURCE, module.MODELLED) == ("modelled", True)


def test_measured_rows_need_no_leave(tmp_path: Path) -> None:
    dataset.append(tmp_path / "r", [make_row(latency_us=1.0, source="measured")])
    module = load(emitted(tmp_path / "r", allow_modelled=False), tmp_path)
    assert (module.SOURCE, module.MODELLED) == ("measured", False)


def test_interpreted_rows_are_always_refused(tmp_path: Path) -> None:
    dataset.append(tmp_path / "r", [make_row(latency_us=1.0, source="interpreted")])
    with pytest.raises(UsageError, match="interpreted rows"):
        emitted(tmp_path / "r")


def test_the_same_rows_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    for row in reversed(rows_of(dataset.read(folder))):
        dataset.append(tmp_path / "again", [row])
    assert emitted(folder) == emitted(tmp_path / "again")


def test_one_table_holds_one_setting(folder: Path) -> None:
    dataset.append(folder, [make_row(latency_us=1.0, settings=Settings(vmem_limit_bytes=100 << 20))])
    with pytest.raises(UsageError, match=r"2 settings .*100 MiB"):
        emitted(folder)


def test_no_ok_row_is_said(tmp_path: Path) -> None:
    dataset.append(tmp_path, [make_row(status="timeout", error="slow")])
    with pytest.raises(AutotuneError, match="1 row and no candidate that is ok") as said:
        emit.read(tmp_path)
    assert said.value.exit_code == 1


def test_the_table_is_sorted_literal_python(folder: Path) -> None:
    tree = ast.parse(emitted(folder))
    [table] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "TUNED_BLOCK_SIZES"
    ]
    assert list(table) == ["TPU v4", "TPU v5e", "TPU v6e"]
    assert table["TPU v6e"] == {tuple(KEY): (8, 64), tuple(OTHER): (8, 64)}
    assert all(list(rows) == sorted(rows) for rows in table.values())


def test_a_hostile_name_cannot_leave_the_docstring(tmp_path: Path) -> None:
    row = make_row(latency_us=1.0, model='"""\nimport os; os.abort()\n\\')
    dataset.append(tmp_path, [row])
    tree = ast.parse(emitted(tmp_path))
    imported = [a.name for node in tree.body if isinstance(node, ast.Import) for a in node.names]
    assert imported == ["functools", "logging", "jax", "jax.numpy"]


CALL = {
    "q_dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "num_q_heads_per_blk": 8,
    "num_kv_heads_per_blk": 2,
    "head_dim": 128,
    "page_size": 128,
    "max_num_batched_tokens": 1024,
    "pages_per_seq": 16,
}


class Device:
    def __init__(self, kind: str) -> None:
        self.device_kind = kind


@pytest.fixture
def module(folder: Path, tmp_path: Path) -> ModuleType:
    return load(emitted(folder), tmp_path)


@pytest.mark.parametrize("name", GENERATIONS)
def test_every_generation_is_told_from_the_others(
    module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in GENERATIONS[name].device_kinds:
        module._first_device_kind.cache_clear()
        monkeypatch.setattr("jax.devices", lambda kind=kind: [Device(kind)])
        assert module.get_tpu_version() == GENERATIONS[name].version
        assert module.get_device_name() == render.device_name(name)
        listed = name in ("v4", "v5e", "v6e")
        default = (32, 32) if name == "v4" else (16, 32)
        assert module.get_tuned_block_sizes(**CALL) == ((8, 64) if listed else (min(16, default[0]), 32))


def test_the_device_is_asked_for_once(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("jax.devices", lambda: asked.append(1) or [Device("TPU v6 lite")])
    assert [module.get_tuned_block_sizes(**CALL) for _ in range(3)] == [(8, 64)] * 3
    assert len(asked) == 1


def test_a_call_without_a_row_is_told_once_a_key(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jax.devices", lambda: [Device("TPU v6 lite")])
    for _ in range(2):
        module.get_tuned_block_sizes(**CALL)
        assert module.get_tuned_block_sizes(**{**CALL, "pages_per_seq": 4096}) == (128, 32)
    assert caplog.messages == [
        "no tuned block sizes for TPU v6e and the key "
        "('bfloat16', 'bfloat16', 8, 2, 128, 128, 1024, 524288): using the default (128, 32)"
    ]


@pytest.mark.parametrize("kind", ["TPU v3", "TPU v2", "cpu"])
def test_what_is_no_tpu_of_version_4_raises_jaxs_error(
    module: ModuleType, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes

    monkeypatch.setattr("jax.devices", lambda: [Device(kind)])
    with pytest.raises(NotImplementedError) as theirs:
        tuned_block_sizes.get_tuned_block_sizes(*CALL.values())
    with pytest.raises(NotImplementedError) as ours:
        module.get_tuned_block_sizes(**CALL)
    assert str(ours.value) == str(theirs.value) == "TPU version must be 4 or higher."


def test_names_defaults_and_clamping_are_those_of_the_installed_jax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With JAX's own 'TPU v6' table emitted, the two look-ups answer alike on v6e."""
    import numpy as np
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes as theirs

    table = {TableKey(*k): BlockSizes(*v) for k, v in theirs.TUNED_BLOCK_SIZES["TPU v6"].items()}
    ours = load(render.render({"v6e": table}, "measured", ["x"]), tmp_path)
    public = {n for n in vars(theirs) if not n.startswith("_") and n not in ("re", "jax", "jnp")}
    assert public <= set(vars(ours))
    monkeypatch.setattr("jax.devices", lambda: [Device("TPU v6 lite")])
    rng = np.random.default_rng(1)
    keys = list(table)
    for index in rng.integers(0, len(keys), 300):
        key = keys[index]
        call = (
            *key[:5],
            key.page_size,
            int(key.max_num_batched_tokens * rng.uniform(0.3, 1)) or 1,
            key.pages_per_seq,
        )
        assert ours.get_tuned_block_sizes(*call) == theirs.get_tuned_block_sizes(*call)
    for length in (1, 100, 4096, 100_000):
        assert ours.get_min_page_size(length) == theirs.get_min_page_size(length)


_COMPILE = """
import importlib.util, re, sys
from pathlib import Path
import jax
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel
from jax.sharding import SingleDeviceSharding
from autotune.kernel.problem import NO_SETTINGS, TableKey
from autotune.kernel.jax_rpa.call import abstract_arguments, kernel_call
from autotune.tpu import generations
from autotune.tpu.compiler import target_device

dump = Path(sys.argv[1])
spec = importlib.util.spec_from_file_location("emitted_table", sys.argv[2])
emitted = importlib.util.module_from_spec(spec)
spec.loader.exec_module(emitted)
kernel.get_tuned_block_sizes = emitted.get_tuned_block_sizes

device = target_device(generations.V6E)
for model_len in (2048, 512):
    key = TableKey("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, model_len)
    arguments = abstract_arguments(key.canonical_problem(), 64, SingleDeviceSharding(device))
    with jax.default_device(device):
        jax.jit(kernel_call(None, NO_SETTINGS)).trace(*arguments).lower().compile()
    [listing] = dump.glob("*ragged_paged_attention_kernel*post-delay-converter.txt")
    text = listing.read_text()
    pages = re.search(r"'bf16\\[2,(\\d+),128,4,128\\].*?scratch operand", text)[1]
    queries = re.search(r"'f32\\[(\\d+),8,128\\].*?scratch operand", text)[1]
    print(model_len, pages, queries)
    for path in dump.iterdir():
        path.unlink()
"""


def test_jaxs_kernel_compiled_for_v6e_picks_the_emitted_pair(folder: Path, tmp_path: Path) -> None:
    """The blocks are read from the compiler's own allocations; an unlisted key has JAX's default, clamped."""
    (tmp_path / "table.py").write_text(emitted(folder))
    dump = tmp_path / "dump"
    dump.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, str(dump), str(tmp_path / "table.py")],
        cwd=ROOT,
        env={**os.environ, **environment(dump)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split("\n")[:2] == ["2048 8 64", "512 4 32"], done.stderr[-2000:]


def test_winners_of_v5e_and_v5p_are_kept_apart(tmp_path: Path) -> None:
    dataset.append(
        tmp_path, [make_row(4, target="v5e", latency_us=1.0), make_row(16, target="v5p", latency_us=1.0)]
    )
    lines = emit.read(tmp_path).lines
    assert dict(zip(lines["target"], blocks_of(lines), strict=True)) == {
        "v5e": (4, 32),
        "v5p": (16, 32),
    }


def test_rows_to_paste_say_what_to_do_with_them(
    folder: Path, tmp_path: Path, autotune: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    command = ("emit", folder, "--allow-modelled", "--names", "jax", "--target", "v6e", "-o", "rows.py")
    done = autotune(*command)
    assert done.returncode == 0, done.stderr
    assert "it is not a module: paste its rows into the TUNED_BLOCK_SIZES of jax/experimental/" in done.stderr
    assert "takes the place of" not in done.stderr
    text = (tmp_path / "rows.py").read_text()
    assert "rows to paste into the TUNED_BLOCK_SIZES of" in text.splitlines()[0]
    table = read_text(text, "x")
    assert list(table.devices) == ["TPU v6"]
    assert table.rule is tables.load("jax").rule
    checked = autotune("check", "rows.py")
    assert (checked.returncode, "judged by the look-up jax-" in checked.stdout) == (0, True)


def test_tables_of_other_kernels_are_not_written(
    folder: Path, autotune: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = autotune("emit", folder, "--allow-modelled", "--dialect", "tpu-inference")
    assert done.returncode == 2
    assert "No such option" in done.stderr
    assert done.stdout == ""


def test_the_header_names_the_hosts_whose_timings_it_rests_on(tmp_path: Path) -> None:
    timed = [make_row(p, source="measured", latency_us=float(p), host=f"vm-{p}") for p in (4, 8)]
    other = [make_row(2, source="measured", host="elsewhere", workload="chat"), make_row(4, host="laptop")]
    dataset.append(tmp_path / "a", timed + other)
    header = emitted(tmp_path / "a").split('"""')[1]
    assert "timed on: vm-4, vm-8\n" in header
    assert "elsewhere" not in header and "laptop" not in header
    dataset.append(tmp_path / "b", [row | {"host": None} for row in timed])
    assert "timed on: hosts that the rows do not name\n" in emitted(tmp_path / "b")
    dataset.append(tmp_path / "c", [make_row(p, host="laptop") for p in (4, 8)])
    assert "timed on:" not in emitted(tmp_path / "c")
    hostile = 'a"""\nimport os\n'
    dataset.append(tmp_path / "d", [row | {"host": hostile} for row in timed])
    assert "\nimport os" not in emitted(tmp_path / "d")


@pytest.mark.parametrize("more", [(), ("--base", "jax"), ("-o", "t.py")], ids=str)
def test_where_nothing_can_win_nothing_is_written(
    tmp_path: Path, autotune: Callable[..., subprocess.CompletedProcess[str]], more: tuple[str, ...]
) -> None:
    dataset.append(tmp_path / "r", [make_row(p, status="vmem_oom") for p in (4, 8)])
    done = autotune("emit", tmp_path / "r", "--allow-modelled", *more)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert "has 2 rows and no candidate that is ok: nothing can win" in line
    assert not (tmp_path / "t.py").exists()
