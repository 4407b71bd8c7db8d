"""What several test modules stand on: real programs, compiled once a test run."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

from autotune.compile.pool import Task
from autotune.io.terminal import INTERRUPTS
from autotune.kernel.problem import BlockSizes, Layout, Program, Settings
from autotune.tpu.compiler import environment

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before any test imports jax
# Before any test imports Ray: it reports nothing, and only who has the token may run anything.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
# Started in the background, as by nohup or some CI, this process has signals ignored, and so would the
# commands that tests interrupt. A handler of its own is none of theirs: they begin with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in set(INTERRUPTS) - {signal.SIGINT}:
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, lambda signum, frame: None)

# The same inputs in every run, and no limit of time for a busy machine. `make fuzz` takes new ones.
settings.register_profile("quick", derandomize=True, deadline=None, max_examples=100)
settings.register_profile("fuzz", deadline=None, max_examples=10_000)
settings.load_profile("quick")

ROOT = Path(__file__).parent.parent

_DUMP = """
import shutil, sys
from pathlib import Path
from autotune.io.terminal import INTERRUPTS
from autotune.kernel.problem import BlockSizes, Layout, Program
from autotune.tpu import generations
from autotune.tpu.compiler import lower

scratch, kept = map(Path, sys.argv[1:])
layout = Layout(
    q_dtype="bfloat16", kv_dtype="bfloat16", num_q_heads=8, num_kv_heads=2, head_dim=128, page_size=128
)
for generation in generations.GENERATIONS.values():
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


class RayNodes(NamedTuple):
    """A Ray cluster on this machine. cluster: ray.cluster_utils.Cluster. tmp: its nodes' temporary folder."""

    cluster: Any
    tmp: Path

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, environment: dict[str, str] | None = None, **arguments: Any) -> Any:
        """A node more, a process of which has these variables."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {
                "TMPDIR": str(self.tmp),
                "PYTHONPATH": str(ROOT),
                **(environment or {}),
            }.items():
                patch.setenv(name, value)
            return self.cluster.add_node(**{"num_cpus": 1, **arguments})


@contextlib.contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """A cluster of two nodes of one CPU each; the head is one of them."""
    pytest.importorskip("ray", reason="Ray has no wheel for this Python, or the extra is not installed")
    from ray.cluster_utils import Cluster

    # Not pytest's folder, whose name is too long for Ray's sockets.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as tmp:
        nodes = RayNodes(Cluster(), Path(tmp))
        try:
            nodes.add(include_dashboard=False)
            nodes.add()
            yield nodes
        finally:
            nodes.cluster.shutdown()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayNodes]:
    """One cluster for all: who kills a node adds one before."""
    with ray_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="session")
def gcs() -> Iterator[Callable[[str], str]]:
    """A server of this machine that speaks as Google Cloud Storage does; else as `s3`."""
    from gcp_storage_emulator.server import create_server

    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    yield lambda name: f"gs://bucket/{name}?endpoint_override=http://127.0.0.1:{port}&anonymous=true"
    server.stop()


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of what the compiler said in this test run, by which no program is compiled twice in it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    (shared / "verdicts").mkdir(mode=0o700, exist_ok=True)
    return shared / "verdicts" / "compiles.sqlite"


@pytest.fixture(scope="session")
def replayed(tmp_path_factory: pytest.TempPathFactory, verdicts: Path) -> str:
    """A PYTHONPATH with which the processes that compile answer at once, if they know a program's verdict."""
    hook = with_faults(tmp_path_factory.mktemp("hook"), {"worker": {"replayed": str(verdicts)}})
    return f"{hook}{os.pathsep}{ROOT}"


@pytest.fixture(scope="session")
def slowly_replayed(tmp_path_factory: pytest.TempPathFactory, verdicts: Path) -> str:
    """As `replayed`, and each answer takes a second: so there is time to interrupt it, and no processor's."""
    faults = {"worker": {"replayed": str(verdicts), "seconds": 1.0}}
    return f"{with_faults(tmp_path_factory.mktemp('hook'), faults)}{os.pathsep}{ROOT}"


@pytest.fixture
def known_programs(monkeypatch: pytest.MonkeyPatch, replayed: str) -> None:
    """What compiles for this process answers at once, if it knows a program's verdict or executable."""
    monkeypatch.setenv("PYTHONPATH", replayed)


def with_faults(folder: Path, faults: dict[str, Any]) -> Path:
    """Makes this a folder for PYTHONPATH, by which the processes of a command have these faults."""
    shutil.copy(ROOT / "tests" / "faults" / "hook" / "sitecustomize.py", folder)
    (folder / "faults.json").write_text(json.dumps(faults))
    return folder


@pytest.fixture
def autotune(tmp_path: Path, replayed: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line in a folder of its own, in this process, as jax and pandas take a second to load.

    Compiles are done by processes as ever, which answer at once if they know a program's verdict.
    """

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        variables = {**user_environment(tmp_path / "cache"), "PYTHONPATH": replayed}
        return in_this_process(list(map(str, arguments)), tmp_path, variables)

    return run


@pytest.fixture
def process(tmp_path: Path, replayed: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """As `autotune`, in a process of its own, as a user does."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command_line(*arguments),
            cwd=tmp_path,
            env={**user_environment(tmp_path / "cache"), "PYTHONPATH": replayed},
            text=True,
            capture_output=True,
            timeout=600,
        )

    return run


def in_this_process(
    arguments: list[str], folder: Path, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """What `autotune` with these arguments, typed in this folder, would answer."""
    from autotune.cli.main import run

    handlers = {number: signal.getsignal(number) for number in INTERRUPTS}
    unraisable, argv, environ = sys.unraisablehook, sys.argv, dict(os.environ)
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    try:
        sys.argv = ["autotune", *arguments]
        os.environ.clear()
        os.environ.update({"JAX_PLATFORMS": "cpu", **variables})
        with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run()
    finally:
        sys.unraisablehook, sys.argv = unraisable, argv
        os.environ.clear()
        os.environ.update(environ)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    said = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(arguments, code, *said)


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "autotune", *map(str, arguments)]


def user_environment(cache: Path | None = None) -> dict[str, str]:
    """A user's environment; cache: where it keeps compile results, a place that is not there by default."""
    ours = ("JAX_PLATFORMS", "COLUMNS", "NO_COLOR", "TPU_")  # jax sets some TPU_ variables when imported
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return {**env, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "XDG_CACHE_HOME": str(cache or "/nowhere")}


def descendants(of: int | None = None) -> dict[int, str]:
    """The processes that come of one, this one by default, each with its command line."""
    found: dict[int, tuple[int, str]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(folder.name)] = parent, words
    family = {of or os.getpid()}
    while more := {pid for pid, (parent, _) in found.items() if parent in family} - family:
        family |= more
    return {pid: found[pid][1] for pid in family - {of or os.getpid()} if pid in found}


def compiling(of: int | None = None) -> set[int]:
    """The processes of this test run, or of one in it, that compile, be it here or on a node of Ray's."""
    return {
        pid for pid, words in descendants(of).items() if "autotune.compile.local_pool import serve" in words
    }


def wait_until_busy(pid: int, seconds: float) -> None:
    """Wait until a process has had so much processor time, however busy the machine is, or is gone."""
    while (stat := Path(f"/proc/{pid}/stat")).exists():
        with contextlib.suppress(OSError):
            user, system = stat.read_text().rpartition(")")[2].split()[11:13]
            if (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") >= seconds:
                return
        time.sleep(0.05)
