"""Which TPU is attached to this machine, and if none can be used, why and what to do.

`pci_chips` and `held_by` read files of the kernel and answer in milliseconds. Only where a chip is there and
free is JAX asked, in a child process: whoever initializes libtpu holds the chips until it exits.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from autotune.errors import MachineError, UsageError
from autotune.tpu import chips

SYSFS_DEVICES = Path("/sys/bus/pci/devices")
DEV = Path("/dev")
PROC = Path("/proc")
LOCKFILE = Path("/tmp/libtpu_lockfile")  # where libtpu 0.0.42 keeps it, whatever TMPDIR says

GOOGLE_PCI_VENDOR = "0x1ae0"
# Google's network card has the same vendor, so a chip is known by its device id: those of jax 0.12's
# jax._src.hardware_utils. None is a TPU that the kernel does not run on or that is not a generation here.
PCI_DEVICES: dict[str, chips.Generation | None] = {
    "0x0027": None,  # v2 and v3
    "0x0056": None,
    "0x005e": chips.V4,
    "0x0062": chips.V5P,
    "0x0063": chips.V5E,
    "0x006f": chips.V6E,
    "0x0076": chips.V7X,
    "0x007c": None,  # TPU8t
    "0x0083": None,  # TPU8i
}

ASK_SECONDS = 180.0  # libtpu takes 5 to 30 s to start; one that waits for a chip takes for ever

_ASK = """
import json, jax
devices = jax.devices()
print(json.dumps({"kinds": [d.device_kind for d in devices], "platform": devices[0].platform}))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attached:
    """The TPU of this host: its generation, as its device spells itself.

    num_chips: of the host. usable: the numbers of those that may be taken.
    """

    generation: chips.Generation
    device_kind: str
    num_chips: int
    usable: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Holder:
    """A process that has a TPU's device node open."""

    pid: int
    command: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command})"


def no_tpu() -> MachineError:
    """What a user without a TPU is told."""
    return MachineError(
        "no TPU is attached to this machine: name a generation to compile for, such as --target v6e, "
        "or run this on a TPU host"
    )


def pci_chips(sysfs: Path = SYSFS_DEVICES, dev: Path = DEV) -> int:
    """How many TPU chips this machine has, without asking JAX: 0 says for sure that there is none.

    Containers may hide PCI from sysfs and still pass the device nodes on; those are counted then.
    """
    count = sum(_pci_id(device) in PCI_DEVICES for device in _listed(sysfs) if device.name.endswith(".0"))
    return count or len(_accel_nodes(dev))


def _pci_id(device: Path) -> str | None:
    try:
        if (device / "vendor").read_text().strip() != GOOGLE_PCI_VENDOR:
            return None
        return (device / "device").read_text().strip()
    except OSError:
        return None


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _accel_nodes(dev: Path) -> list[Path]:
    return [path for path in _listed(dev) if re.fullmatch(r"accel\d+", path.name)]


def visible_chips(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """The chips that the environment leaves to this user, as libtpu reads it; None for all.

    Raises:
      UsageError: it is no list of numbers.
    """
    for name in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):  # the name of today, and that of before
        if value := environment.get(name):
            parts = [part.strip() for part in value.split(",")]
            if not all(part.isdecimal() for part in parts):
                raise UsageError(f"{name}={value!r} is not a list of chips such as 0,1")
            return tuple(sorted({int(part) for part in parts}))
    return None


def device_nodes(dev: Path = DEV, visible: tuple[int, ...] | None = None) -> list[Path]:
    """The device nodes through which a process holds a chip: /dev/accelN, or /dev/vfio/N from v5e on.

    visible: only those of these chips. The numbers of vfio nodes are not those of chips: none is given then.
    """
    if visible is not None:
        return [path for path in _accel_nodes(dev) if int(path.name.removeprefix("accel")) in visible]
    vfio = [path for path in _listed(dev / "vfio") if path.name.isdecimal()]
    return _accel_nodes(dev) + vfio


def held_by(nodes: list[Path], proc: Path = PROC) -> list[Holder]:
    """The processes that have one of the nodes open, as far as /proc lets this user look."""
    wanted = set(nodes)
    found = []
    for folder in _listed(proc):
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        for link in _listed(folder / "fd"):
            try:
                target = link.readlink()
            except OSError:
                continue
            if target in wanted:
                found.append(Holder(int(folder.name), _command(folder)))
                break
    return found


def _command(process: Path) -> str:
    """What a process was started as, cut to what fits in a line."""
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        words = []
    return (" ".join(word for word in words if word) or "unknown command")[:80]


def lock_holders(lockfile: Path = LOCKFILE, proc: Path = PROC) -> list[Holder]:
    """The processes that have libtpu's lockfile locked; process 0 for one that this container cannot see."""
    try:
        inode = str(lockfile.stat().st_ino)
    except OSError:
        return []
    try:
        locks = (proc / "locks").read_text().splitlines()
    except OSError:
        locks = []
    # "1: POSIX  ADVISORY  WRITE 1234 08:01:393217 0 EOF": the inode ends the sixth field
    fields = [line.split() for line in locks]
    pids = {int(f[4]) for f in fields if len(f) > 5 and f[4].isdecimal() and f[5].rpartition(":")[2] == inode}
    if not pids and _is_locked(lockfile):
        pids = {0}
    return [Holder(pid, _command(proc / str(pid))) for pid in sorted(pids)]


def _is_locked(path: Path) -> bool:
    """Whether another process has a file locked as lockf does it; asks without taking the lock."""
    if sys.platform != "linux":
        return False
    import fcntl

    asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with path.open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
    except OSError:
        return False
    return struct.unpack("hhqqi", answer)[0] != fcntl.F_UNLCK


def lock_is_stale(lockfile: Path = LOCKFILE, proc: Path = PROC) -> bool:
    """Whether libtpu's lockfile lies there and no process has it locked: a killed one left it behind."""
    return lockfile.exists() and not lock_holders(lockfile, proc)


def attached(
    *,
    sysfs: Path = SYSFS_DEVICES,
    dev: Path = DEV,
    proc: Path = PROC,
    lockfile: Path = LOCKFILE,
    ask: tuple[str, ...] = (sys.executable, "-c", _ASK),
    seconds: float = ASK_SECONDS,
    environment: Mapping[str, str] = os.environ,
) -> Attached:
    """The TPU that is attached and free.

    ask: the command that starts JAX on the TPU and prints its devices; seconds: how long it may take.

    Raises:
      UsageError: TPU_VISIBLE_CHIPS is no list of chips of this host.
      MachineError: there is none, it is older than v4, a process holds it, a stale lockfile is in the way,
        or libtpu does not start; the message says which, and what to do.
    """
    num_chips = pci_chips(sysfs, dev)
    if not num_chips:
        raise no_tpu()
    ids = {_pci_id(device) for device in _listed(sysfs)}
    if "0x0027" in ids:
        raise MachineError(
            f"the attached TPU is a v2 or v3: {chips.TOO_OLD} Use a v4 or newer, or --target v6e"
        )
    visible = visible_chips(environment)
    usable = tuple(range(num_chips)) if visible is None else visible
    if max(usable) >= num_chips:
        raise UsageError(f"TPU_VISIBLE_CHIPS names chip {max(usable)}, and this host has {num_chips}")
    if holders := held_by(device_nodes(dev, visible), proc):
        raise MachineError(_held(holders))
    try:
        done = subprocess.run(
            ask,
            env={
                **environment,
                "JAX_PLATFORMS": "tpu",
                "TPU_STDERR_LOG_LEVEL": "3",
                "TPU_MIN_LOG_LEVEL": "3",
            },
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MachineError(
            f"the TPU did not start within {seconds:.0f} s: see that nothing else uses it "
            f"(sudo lsof -w {_nodes_to_look_at(dev)}), then run this again"
        ) from None
    if done.returncode:
        raise MachineError(_explain(done.stderr, done.returncode, dev, proc, lockfile))
    try:
        kinds = json.loads(done.stdout.strip().splitlines()[-1])["kinds"]
        generation = chips.by_device_kind(kinds[0])
    except UsageError as error:  # the message has JAX's words where the TPU is too old
        raise MachineError(f"the attached TPU cannot be used: {error}") from None
    except (ValueError, LookupError, TypeError):
        raise MachineError(
            f"JAX did not say which TPU is attached: it printed {done.stdout[:200]!r}"
        ) from None
    return Attached(generation=generation, device_kind=kinds[0], num_chips=num_chips, usable=usable)


def _held(holders: list[Holder]) -> str:
    return (
        f"the TPU is held by {', '.join(map(str, holders[:3]))}: stop it "
        f"(kill {' '.join(str(h.pid) for h in holders[:3])}) or wait for it, then run this again"
    )


def _nodes_to_look_at(dev: Path) -> str:
    return " ".join(map(str, device_nodes(dev))) or "/dev/accel*"


def _explain(stderr: str, returncode: int, dev: Path, proc: Path, lockfile: Path) -> str:
    """What libtpu's failure means, in one line; the words looked for are those of libtpu 0.0.42."""
    if match := re.search(r"already in use by process with pid (\d+)", stderr):
        pid = int(match[1])
        return _held([Holder(pid, _command(proc / str(pid)))])
    if "libtpu multi-process lockfile" in stderr or "already in use by another process" in stderr:
        if lock_is_stale(lockfile, proc):
            return (
                f"a process that was killed left {lockfile} behind and no process holds it: "
                f"remove it (sudo rm {lockfile}), then run this again"
            )
        return (
            "the TPU is held by a process of another user: find it "
            f"(sudo lsof -w {_nodes_to_look_at(dev)}) and stop it, then run this again"
        )
    if "Device or resource busy" in stderr:
        return (
            "the TPU is held by a process that is not seen from here, or was not yet let go of: find it "
            f"(sudo lsof -w {_nodes_to_look_at(dev)}), or wait, then run this again"
        )
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    # The last line of a traceback is the exception itself; an abort has none.
    said = lines[-1][:300] if lines else f"it ended with status {returncode} and said nothing"
    variable = blamed(stderr)
    cure = f"unset {variable}" if variable else "see that libtpu is installed (pip install 'jax[tpu]')"
    return f"the TPU is attached but JAX cannot start it: {said}; {cure}"


def blamed(said: str) -> str | None:
    """The variable of the environment that a process blames that could not start JAX; None if none."""
    match = re.search(r"Unknown flags? in (XLA_FLAGS)|(TPU_LOAD_LIBRARY)=", said)
    return match and (match[1] or match[2])
