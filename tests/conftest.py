"""What several test modules stand on: real programs, compiled once a test run."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from autotune.kernel.problem import BlockSizes, Layout, Program, Settings
from autotune.pool import Task
from autotune.tpu.compiler import environment

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before any test imports jax
# Started in the background, as by nohup or some CI, this process has SIGINT ignored, and so would the
# commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent

_DUMP = """
import shutil, sys
from pathlib import Path
from autotune.kernel.problem import BlockSizes, Layout, Program
from autotune.tpu import chips
from autotune.tpu.compiler import lower

scratch, kept = map(Path, sys.argv[1:])
layout = Layout(
    q_dtype="bfloat16", kv_dtype="bfloat16", num_q_heads=8, num_kv_heads=2, head_dim=128, page_size=128
)
for generation in chips.GENERATIONS.values():
    lower(generation, Program(layout=layout, blocks=BlockSizes(8, 32))).compile()
    (kept / generation.name).mkdir()
    for path in scratch.iterdir():
        shutil.move(path, kept / generation.name)
"""


def layout(
    q_heads: int = 4,
    kv_heads: int = 1,
    page_size: int = 64,
    kv_dtype: str = "bfloat16",
    q_dtype: str = "bfloat16",
) -> Layout:
    return Layout(
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        page_size=page_size,
    )


def program(
    pages: int = 4, queries: int = 32, vmem_limit_bytes: int | None = None, **kwargs: object
) -> Program:
    return Program(
        layout=layout(**kwargs),  # type: ignore[arg-type]
        blocks=BlockSizes(pages, queries),
        settings=Settings(vmem_limit_bytes=vmem_limit_bytes),
    )


def each(tasks: Iterable[Task]) -> Callable[[], Task | None]:
    """Tasks one after the other, as a pool asks for them."""
    left = iter(tasks)
    return lambda: next(left, None)


@pytest.fixture(scope="session")
def listings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a generation, each with what the compiler wrote of q8 kv2 page128 at blocks (8, 32)."""
    scratch, kept = tmp_path_factory.mktemp("dump"), tmp_path_factory.mktemp("listings")
    subprocess.run(
        [sys.executable, "-c", _DUMP, str(scratch), str(kept)],
        check=True,
        cwd=ROOT,
        env={**os.environ, **environment(scratch)},
        capture_output=True,
    )
    return kept


@pytest.fixture(scope="session")
def s3() -> Iterator[Callable[[str], str]]:
    """An S3 server of this machine, with an empty bucket; gives the URI of a folder in it."""
    from moto.server import ThreadedMotoServer
    from pyarrow import fs

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        fs.S3FileSystem(
            endpoint_override=f"{host}:{port}", scheme="http", region="us-east-1", allow_bucket_creation=True
        ).create_dir("bucket")
        yield lambda name: f"s3://bucket/{name}?endpoint_override=http://{host}:{port}"
    server.stop()


@pytest.fixture
def autotune(tmp_path: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run the command line as a user does, in a folder of its own; returns the finished process."""

    def run(*arguments: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command_line(*arguments),
            cwd=tmp_path,
            env=user_environment(tmp_path / "cache"),
            text=True,
            capture_output=True,
            timeout=600,
            **kwargs,  # type: ignore[call-overload]
        )

    yield run
    shutil.rmtree(tmp_path, ignore_errors=True)


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "autotune", *map(str, arguments)]


def user_environment(cache: Path | None = None) -> dict[str, str]:
    """A user's environment; cache: where it keeps compile results, a place that is not there by default."""
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "COLUMNS", "NO_COLOR")}
    return {**env, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "XDG_CACHE_HOME": str(cache or "/nowhere")}
