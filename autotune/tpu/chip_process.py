"""The environment of a process that owns one TPU chip, and what of the user's it leaves out."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

# What libtpu reads of a host, and not of a slice. Without the accelerator type libtpu does not know that the
# two cores of a v4 or v5p chip are one device (it sets its chip_config_name by it), unless a metadata server
# tells; where there is none, as on GKE, TPU_SKIP_MDS_QUERY keeps it from asking for minutes.
KEPT = ("TPU_ACCELERATOR_TYPE", "TPU_LIBRARY_PATH", "TPU_LOG_DIR", "TPU_SKIP_MDS_QUERY")

# Everything else of these names; the slice's own, as GKE and the TPU VM set them, are among them.
# TPU_*: bounds of the host and the slice by their old and new names, worker id and hostnames, topology and
#   wrap, visible chips, devices and device paths (which go before chips), megacore, metrics ports: the names
#   in libtpu 0.0.42. TPU_LOAD_LIBRARY keeps jaxlib from loading libtpu at all.
# CLOUD_TPU_*, HOST_BOUNDS, CHIPS_PER_HOST_BOUNDS, SLICER_BUILDER_WORKER_IPS: also libtpu's.
# MEGASCALE_*: of several slices; with them libtpu starts a transport and looks for a coordinator.
# LIBTPU_INIT_ARGS, XLA_*, TF_XLA_FLAGS: flags that change what is compiled; an unknown one ends the process.
# JAX_*: the configuration of JAX (jax/_src/config.py); some of it changes dtypes, precision and programs.
_DROPPED = re.compile(
    r"(CLOUD_TPU|JAX|LIBTPU|MEGASCALE|TPU|XLA)_"
    r"|(CHIPS_PER_HOST_BOUNDS|HOST_BOUNDS|SLICER_BUILDER_WORKER_IPS|TF_XLA_FLAGS)$"
)

# Of what is dropped, that which makes another program or other numbers; JAX's settings do but for these.
_CHANGES = re.compile(r"(LIBTPU_INIT_ARGS|XLA_FLAGS|TPU_MEGACORE)$|JAX_")
_CHANGES_NOTHING = re.compile(
    r"JAX_(PLATFORMS|PLATFORM_NAME|NUM_PROCESSES|PROCESS_ID|LOG_COMPILES|LOGGING_LEVEL|TRACEBACK_FILTERING)$"
    r"|JAX_(COMPILATION_CACHE|COORDINATOR|DEBUG_LOG|DUMP|ENABLE_COMPILATION_CACHE|PERSISTENT_CACHE)"
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
    """What a process that compiles or times takes over of an environment: nothing that decides for it."""
    return {name: value for name, value in environ.items() if name in KEPT or not _DROPPED.match(name)}


def free_port() -> int:
    """A port on which nobody listens. Another process may take it before it is used; a retry asks anew."""
    with socket.socket() as asked:
        asked.bind(("", 0))
        return int(asked.getsockname()[1])


def dropped(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that the user set, that would change what is compiled or computed, and that are dropped."""
    return tuple(
        name
        for name in sorted(environ)
        if _CHANGES.match(name)
        and not _CHANGES_NOTHING.match(name)
        and environ[name].replace(_ADDED_BY_JAX, "").strip()
    )


def told(environ: Mapping[str, str]) -> str:
    """One line about what is dropped; empty if nothing is."""
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
