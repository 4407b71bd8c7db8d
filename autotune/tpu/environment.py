"""How processes that compile or time are started: their command, and the environment made for them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

# What a process that compiles or times is given of the user's environment. Everything else is left out, as
# what changes a verdict is not known by name: JAX_*, XLA_*, LIBTPU_INIT_ARGS, what the next version of JAX
# reads, and also PYTHONOPTIMIZE, which removes the assertions by which the kernel refuses arguments.
# - who and where the user is, and in which language errors of the machine are
# - how programs and libraries are found: a TPU VM preloads an allocator
# - where Python is, and its own files
# - of libtpu what describes a host, and not a slice. Without the accelerator type libtpu does not know that
#   the two cores of a v4 or v5p chip are one device (it sets its chip_config_name by it), unless a metadata
#   server tells; where there is none, as on GKE, TPU_SKIP_MDS_QUERY keeps it from asking for minutes.
_PASSED_ON = re.compile(
    r"(HOME|LANG|LANGUAGE|LC_[A-Z]+|LOGNAME|TMPDIR|TZ|USER"
    r"|PATH|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|PYTHON(DONTWRITEBYTECODE|HOME|NOUSERSITE|PATH|PYCACHEPREFIX|USERBASE)"
    r"|GCE_METADATA_(HOST|IP|ROOT)|TPU_(ACCELERATOR_TYPE|LIBRARY_PATH|LOG_DIR|SKIP_MDS_QUERY))$"
)
# Those of them that name one file or folder: such a process has another current folder.
_PATHS = ("PYTHONPYCACHEPREFIX", "TMPDIR", "TPU_LIBRARY_PATH", "TPU_LOG_DIR")

_STANDARD_LIBRARY = {
    str(Path(sysconfig.get_path(name), *part))
    for name in ("stdlib", "platstdlib")
    for part in ((), ("lib-dynload",))
}

# Of what is left out, that which makes another program or other numbers; JAX's settings do but for these.
_CHANGES = re.compile(r"(JAX|LIBTPU|XLA)_|(PYTHONOPTIMIZE|TF_XLA_FLAGS|TPU_MEGACORE)$")
_CHANGES_NOTHING = re.compile(
    r"JAX_(PLATFORMS|PLATFORM_NAME|NUM_PROCESSES|PROCESS_ID|LOG_COMPILES|LOGGING_LEVEL|TRACEBACK_FILTERING)$"
    r"|JAX_(COMPILATION_CACHE|COORDINATOR|DEBUG_LOG|DUMP|ENABLE_COMPILATION_CACHE|PERSISTENT_CACHE)"
    r"|XLA_PYTHON_CLIENT_"  # of the memory of GPUs
)
# jax/_src/cloud_tpu_init.py adds it to the environment of every process on a TPU host that imports jax.
_ADDED_BY_JAX = "--xla_tpu_use_enhanced_launch_barrier=true"

_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b")
_LOGGED = re.compile(r"[IWEF]\d{4} [\d:.]+\s+\d+ \S+:\d+\] ")
MAX_TOLD_CHARS = 300


def environment(platform: str, chip: int, port: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a process that owns a chip, or the CPU in its place, and no other platform.

    With the six variables that are set for a TPU, a process is a slice of its own, of one host with one chip:
    it waits for no other host, and other processes may have the host's other chips. They are those of
    tpu-inference's worker that isolates chips, and of the gist skye/f82ba45d. libtpu 0.0.42 writes the flags
    that it makes of them to its log, which needs no TPU: from the variables of a v5p-16 host
    `slice_builder_worker_addresses=h0:8471,h1:8471` and `host_bounds=1,1,2`, the two hosts waiting for each
    other, from these `localhost:<port>` and `1,1,1`. They are set where the host has one chip, too, as that
    may be one of a slice. With one chip a process jaxlib and libtpu take no lockfile.

    platform: tpu or cpu. chip: its number for libtpu, as `attached.Attached.usable` has it. port: one that
    is free, and is no other process's (`free_port`).
    """
    variables = {
        **passed_on(inherited),
        "JAX_PLATFORMS": platform,  # no silent fallback to the CPU
        # Warnings and errors: they go to a file, and say what a start that takes too long was waiting for.
        "TPU_STDERR_LOG_LEVEL": "1",
        "TPU_MIN_LOG_LEVEL": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if platform == "tpu":
        variables |= {
            "TPU_VISIBLE_CHIPS": str(chip),
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "CLOUD_TPU_TASK_ID": "0",
            "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
            "TPU_PROCESS_PORT": str(port),
        }
    return variables


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """What a process that compiles or times has of an environment: nothing that decides for it."""
    kept = {name: value for name, value in environ.items() if _PASSED_ON.match(name)}
    for name in _PATHS:
        if kept.get(name):
            kept[name] = str(Path(kept[name]).absolute())
    # Files of the current folder such as struct.py are none of this tool's, nor of what its children start.
    return kept | {"PYTHONSAFEPATH": "1"}


def python(code: str, *arguments: str, path: Sequence[str] | None = None) -> list[str]:
    """The command of a Python that imports nothing of its current folder, and keeps the environment that it
    was started with, whatever a sitecustomize sets.

    path: where it looks for modules; by default as this process does. Python's own come first all the same:
    Ray puts the folder that a command was typed in before them.
    """
    given = sys.path if path is None else path
    # What is no path is a mark for an import hook.
    places = [str(Path(place).absolute()) if Path(place).exists() else place for place in given]
    places.sort(key=lambda place: place not in _STANDARD_LIBRARY)
    start = f"import sys; sys.path[:] = {places!a}; from {__name__} import as_started; as_started(); "
    return [sys.executable, "-P", "-c", start + code, *arguments]


def as_started() -> None:
    """Give this process the environment again that it was started with; before it imports jax.

    Where there is no /proc, and so no libtpu, it keeps the one that it has.
    """
    try:
        listed = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return
    pairs = (os.fsdecode(entry).partition("=") for entry in listed)
    os.environ.clear()
    os.environ.update({name: value for name, equals, value in pairs if equals})


def how_ended(process: subprocess.Popen[bytes]) -> str:
    """How a process ended, told after its socket closed, which it does a moment before."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(10)
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return "stopped answering"


def free_port() -> int:
    """A port on which nobody listens. Another process may take it before it is used; a retry asks anew."""
    with socket.socket() as asked:
        asked.bind(("", 0))
        return int(asked.getsockname()[1])


_set_aside: dict[str, str] = {}


def set_aside() -> None:
    """Take the user's JAX_* that this process has no use for out of its environment: JAX reads them as it is
    imported, and one that it does not take ends the import."""
    for name in list(os.environ):
        if name.startswith("JAX_") and name != "JAX_PLATFORMS":
            _set_aside[name] = os.environ.pop(name)


def of_the_user() -> dict[str, str]:
    """The environment that this process was started with."""
    return {**os.environ, **_set_aside}


def dropped(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that the user set, that would change what is compiled or computed, and that are left out."""
    return tuple(
        name
        for name in sorted(environ)
        if _CHANGES.match(name)
        and not _CHANGES_NOTHING.match(name)
        and environ[name].replace(_ADDED_BY_JAX, "").strip()
    )


def told(environ: Mapping[str, str]) -> str:
    """One line about what is left out; empty if nothing is."""
    names = ", ".join(dropped(environ))
    return names and f"not passed on to the processes that compile and time: {names}"


def last_words(said: str) -> str:
    """Of all that a process and libtpu wrote, the line that tells most of why it ended, or what it waits for.

    The last exception; else the last line of a log, without its head; else the last line. Empty for nothing.
    """
    lines = [line for text in said.splitlines() if (line := text.strip()) and line.isprintable()]
    best = next((line for line in reversed(lines) if _EXCEPTION.match(line)), None)
    best = best or next((line for line in reversed(lines) if _LOGGED.match(line)), None)
    best = best or (lines[-1] if lines else "")
    return _LOGGED.sub("", best, count=1)[:MAX_TOLD_CHARS]
