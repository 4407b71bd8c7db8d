"""Checks of the machine: the TPU, libtpu's lockfile, the generations, folders and their room, memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from autotune.doctor.checks import FAILURE, OK, WARNING, Check
from autotune.doctor.probe import Probe
from autotune.errors import AutotuneError
from autotune.io.files import user_folder
from autotune.io.folders import Folder, Remote
from autotune.io.terminal import counted, shown, typed
from autotune.tpu import attached
from autotune.tpu import generations as chips
from autotune.tpu.attached import Attached

GIB = 1 << 30
ROOM_BYTES = GIB
COMPILE_BYTES = GIB  # of memory for one compile: 0.4 to 0.65 GiB were seen, for those of 3 s to 8 min


def tpu(
    sysfs: Path = attached.SYSFS_DEVICES, *, shipped: bool = True, **where: Any
) -> tuple[Check, Attached | None]:
    """The attached TPU, or why there is none; where one is free, another process starts JAX on it.

    shipped: whether the installed jax has the look-up. sysfs, where: places to look at, as
    `attached.attached` takes them.
    """
    dev = where.get("dev", attached.DEV)
    if not attached.pci_chips(sysfs, dev):
        if attached.listed_chips(sysfs):
            return Check("tpu", FAILURE, str(attached.no_tpu(sysfs, dev))), None
        check = Check(
            "tpu",
            WARNING,
            "none is attached to this machine, so nothing can be timed"
            + (f"; JAX's own look-up says here `NotImplementedError: {chips.TOO_OLD}`" if shipped else ""),
            "name a generation to compile for, such as --target v6e",
        )
        return check, None
    try:
        found = attached.attached(sysfs=sysfs, **where)
    except AutotuneError as error:
        return Check("tpu", FAILURE, str(error)), None
    generation = found.generation
    text = (
        f"{generation}, TPU version {generation.version}, {found.device_kind!r}: {found.num_chips} chips"
        + (f", of which {len(found.usable)} may be used" if len(found.usable) < found.num_chips else "")
    )
    return Check("tpu", OK, text), found


def lockfile(path: Path = attached.LOCKFILE, proc: Path = attached.PROC) -> Check:
    """libtpu's lockfile, and who holds it. Compiles pass it by; a process that takes a TPU does not."""
    if not path.exists():
        return Check("lockfile", OK, f"no {path}: no process has libtpu for itself")
    holders = attached.lock_holders(path, proc)
    if holders:
        return Check(
            "lockfile",
            WARNING,
            f"{path} is held by {', '.join(map(str, holders))}",
            "compiles are not hindered; a TPU cannot be taken until that process ends",
        )
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # what libtpu does before it asks for the lock
    except OSError as error:
        return Check(
            "lockfile",
            WARNING,
            f"{path} was left behind, no process holds it, and it cannot be opened ({error.strerror})",
            "compiles are not hindered; to take a TPU, remove it",
            f"sudo rm {path}",
        )
    return Check("lockfile", OK, f"{path} was left behind and no process holds it: harmless")


def generations(probe: Probe, *, vital: bool) -> list[Check]:
    """A check a generation: whether libtpu compiles for it, and how much VMEM a kernel has there.

    One check, `compiler`, where it compiles for none; vital: whether no sweep can run then.
    """
    found = probe.answers.get("generations", {})
    if not any("device_kind" in said for said in found.values()):
        errors = [said["error"] for said in found.values()] or list(probe.errors.values())[-1:]
        text = f"nothing can be compiled: {errors[0] if errors else 'jax said nothing'}"
        return [Check("compiler", FAILURE, text, "see the failures above", vital=vital)]
    checks = []
    for generation in chips.GENERATIONS.values():
        said = found[generation.name]
        if "error" in said:
            checks.append(Check(generation.name, FAILURE, f"libtpu does not compile for it: {said['error']}"))
            continue
        text = f"libtpu knows it; a kernel has {generation.scoped_vmem_bytes >> 20} MiB of VMEM by default"
        if vmem := probe.answers.get("vmem", {}).get(generation.name):
            text += f", --vmem-limit up to {vmem >> 20} MiB"
        checks.append(Check(generation.name, OK, text))
    return checks


def temporary() -> Check:
    """Where compiles write their listings; the compiler dies where it cannot."""
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        return Check(
            "tmp", FAILURE, f"no folder for temporary files can be written: {error.strerror or error}",
            "name one that can", "export TMPDIR=/some/folder", vital=True,
        )  # fmt: skip
    named = os.environ.get("TMPDIR")
    if named and Path(named).resolve() != folder.resolve():
        there = Path(named).is_dir()
        return Check(
            "tmp",
            WARNING,
            f"TMPDIR={shown(named)} {'cannot be written' if there else 'is not there'}, so {shown(folder)} "
            "is used",
            "it is full, or not yours to write: make room, or name another one" if there else "",
            "export TMPDIR=/some/folder" if there else f"mkdir -p {typed(named)}",
        )
    return room("tmp", folder, "compiles write there", "export TMPDIR=/some/folder", vital=True)


def cache() -> Check:
    """The store of compile results."""
    folder = user_folder("XDG_CACHE_HOME", ".cache")
    held = sum(path.stat().st_size for path in folder.glob("*") if path.is_file()) if folder.is_dir() else 0
    size = f"{held / 2**20:.1f} MiB" if held >= 2**20 // 10 else f"{-(-held // 1024)} KiB"
    count = _kept(folder / "compiles.sqlite")
    what = f"{size} of compile results" if count is None else f"{counted(count, 'compile result')} in {size}"
    return room(
        "cache", folder, what if held else "no compile results yet", "export XDG_CACHE_HOME=/some/folder"
    )


def _kept(path: Path) -> int | None:
    """How many compile results the store holds; None if it does not say. `store` needs more than is there."""
    if not path.is_file():
        return 0
    try:
        import sqlite3
    except ImportError:  # of a Python that was built without
        return None
    address = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
            return int(connection.execute("SELECT count(*) FROM verdicts").fetchone()[0])
    except (OSError, ValueError, sqlite3.Error):
        return None


def results(out: Folder | None) -> Check:
    """The results folder that was named, else the current folder."""
    if out is None:
        return room("results", Path.cwd(), "the current folder; --out names another one")
    if isinstance(out, Remote):
        try:
            what = "can be read" if out.exists() else "is new"
        except (AutotuneError, ImportError) as error:
            return Check("results", FAILURE, str(error), vital=True)
        return Check(
            "results", OK, f"{shown(out)} {what}; whether it can be written is seen by a sweep", vital=True
        )
    if out.exists() and not out.is_dir():
        return Check("results", FAILURE, f"{str(out)!r} is a file", "name a folder with --out", vital=True)
    files = sum(1 for _ in out.glob("*.parquet"))
    return room("results", out, f"{files} files of rows" if files else "new", vital=True)


def room(name: str, folder: Path, what: str, command: str = "", *, vital: bool = False) -> Check:
    """Whether a folder, which need not exist yet, can be written, and has a GiB of room."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    state = FAILURE if vital else WARNING
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(4096))
            file.flush()
        free = shutil.disk_usage(existing).free
    except OSError as error:
        text = f"{shown(folder)} cannot be written: {error.strerror or error}"
        return Check(name, state, text, "name another folder", command, vital)
    text = f"{shown(folder)}: {what}; {free / GIB:.1f} GiB free"
    if free < ROOM_BYTES:
        return Check(
            name, WARNING, text, "less than 1 GiB is free: make room, or name another folder", command, vital
        )
    return Check(name, OK, text, vital=vital)


def memory(cores: int, meminfo: Path = attached.PROC / "meminfo") -> Check:
    """Cores and memory, and how many compiles at once they bear."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        available = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, LookupError):
        return Check("memory", WARNING, f"{cores} cores; the free memory is unknown")
    bears = max(1, available // COMPILE_BYTES)
    text = f"{cores} cores, {available / GIB:.1f} GiB of memory free"
    if bears >= cores:
        return Check("memory", OK, text)
    return Check(
        "memory",
        WARNING,
        text,
        f"a compile takes up to 1 GiB: if compiles crash, sweep with --jobs {bears}",
    )
