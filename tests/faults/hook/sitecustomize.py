"""Faults from inside: with a copy of this file on PYTHONPATH, a process does to itself what faults.json says.

That file lies beside it, and is {role: {...}}, with the roles sweep (the command itself), worker (a compiling
process) and owner (the process that holds the device). No variable would reach the latter two. Of a role:

  places    folders; each operation on a file below one of them is a step
  steps     a file to write the steps to, one a line
  messages  true to count what an owner says to its sweep as steps
  kill_at   the number of the step, from 1, before which the process is killed, by SIGKILL
  once      a file that is made then: a process that finds it lives on
  memory    bytes of address space that the process may take, from when it imports jax
  garbage   bytes to write to both standard streams when it imports jax
  abort     true to abort after the garbage
  back      seconds by which the clock goes back when it imports jax
  replayed  a store of verdicts: the worker answers at once with what the real compiler said before; a program
            of which no verdict is kept is compiled, and its verdict kept; likewise with executables
  seconds   how long it takes to answer, besides

Nothing else of the product is changed: sys.addaudithook tells of file operations, and imports say how far it
is.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE_EVENTS = {
    *("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.scandir", "os.listdir"),
    *("shutil.rmtree", "tempfile.mkdtemp", "sqlite3.connect"),
}


def role() -> str:
    words = sys.orig_argv
    if any("autotune.timing.device_worker" in word for word in words):
        return "owner"
    if any("autotune.compile.local_pool import serve" in word for word in words):
        return "worker"
    return "sweep" if "sweep" in words else ""


def count_steps(what: dict[str, Any]) -> None:
    log = os.open(what["steps"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    lock = threading.RLock()
    done = 0

    def step(name: str) -> None:
        nonlocal done
        with lock:
            done += 1
            os.write(log, f"{name}\n".encode())
            if done == what.get("kill_at") and first():
                os.kill(os.getpid(), signal.SIGKILL)

    def first() -> bool:
        try:
            return "once" not in what or os.open(what["once"], os.O_CREAT | os.O_EXCL) >= 0
        except FileExistsError:
            return False

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS and arguments and isinstance(arguments[0], str | bytes | os.PathLike):
            # No Path: an operation of its own would be seen here too.
            path = os.path.join(here, os.fsdecode(arguments[0]))  # noqa: PTH118
            if any(path.startswith(place) for place in what["places"]):
                step(f"{event} {path}")

    here = os.getcwd()  # noqa: PTH109
    sys.addaudithook(watch)
    # What has no event: the moments before and after a file is on disk.
    os.fsync = around(os.fsync, step)
    if what.get("messages"):
        from multiprocessing.connection import Connection

        send = Connection.send

        def said(self: Connection, message: Any) -> None:
            step(type(message).__name__)
            send(self, message)

        Connection.send = said  # type: ignore[method-assign]


def around(call: Callable[[int], None], step: Callable[[str], None]) -> Callable[[int], None]:
    def called(descriptor: int) -> None:
        step("before fsync")
        call(descriptor)
        step("after fsync")

    return called


def at_jax(what: dict[str, Any]) -> None:
    """What happens once the process is under way."""
    begun = False

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal begun
        if event == "import" and arguments[0] == "jax" and not begun:
            begun = True
            if limit := what.get("memory"):
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            if size := what.get("garbage"):
                for descriptor in (1, 2):
                    os.write(descriptor, os.urandom(size))
                    os.write(descriptor, b"\n\x1b[2Jclear\x07\n\xff\xfe last words\n")
            if what.get("abort"):
                os.abort()
            if seconds := what.get("back"):
                clock = time.time
                time.time = lambda: clock() - seconds

    sys.addaudithook(watch)


def replay(verdicts: Path, seconds: float) -> None:
    from autotune.compile import local_pool
    from autotune.kernel.problem import Program
    from autotune.tpu.compiler import Compiled, compile_program
    from autotune.tpu.executable import Call, Executable, compile_ahead
    from autotune.tpu.generations import Generation

    def known(generation: Generation, program: Program, dump_folder: Path) -> Compiled:
        from autotune.compile.cache import Store
        from autotune.results.schema import Tools

        time.sleep(seconds)
        store, tools = Store(verdicts), Tools.installed()
        if kept := store.get(generation.name, tools, [program]):
            return kept[program]
        found = compile_program(generation, program, dump_folder)
        store.put(generation.name, tools, program, found)
        return found

    def known_ahead(call: Call) -> Executable:
        path = verdicts.parent / hashlib.sha256(repr(call).encode()).hexdigest()
        if path.exists():
            kept: Executable = pickle.loads(path.read_bytes())
            return kept
        found = compile_ahead(call)
        if found.payload:
            new = path.with_suffix(f".{os.getpid()}")
            new.write_bytes(pickle.dumps(found))
            new.rename(path)
        return found

    local_pool.compile_program = known
    local_pool.compile_ahead = known_ahead


WHAT = json.loads(Path(__file__).with_name("faults.json").read_text()).get(role(), {})
if "steps" in WHAT:
    count_steps(WHAT)
if WHAT.keys() & {"memory", "garbage", "abort", "back"}:
    at_jax(WHAT)
if "replayed" in WHAT:
    replay(Path(WHAT["replayed"]), WHAT.get("seconds", 0.0))
