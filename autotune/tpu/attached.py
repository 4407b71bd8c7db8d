"""Which TPU is attached to this machine, and if none can be used, why and what to do.

`accessible_chips` and `held_by` read files of the kernel and answer in milliseconds. Only where a chip is
there and free is JAX asked, in a child process that takes this one chip until it exits.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from autotune.errors import MachineError, UsageError
from autotune.tpu import environment as chip_process
from autotune.tpu import generations

SYSFS_DEVICES = Path("/sys/bus/pci/devices")
DEV = Path("/dev")
PROC = Path("/proc")
LOCKFILE = Path("/tmp/libtpu_lockfile")  # where libtpu 0.0.42 keeps it, whatever TMPDIR says

GOOGLE_PCI_VENDOR = "0x1ae0"
# Google's network card has the same vendor, so a chip is known by its device id: those of jax 0.12's
# jax._src.hardware_utils. None is a TPU that the kernel does not run on or that is not a generation here.
PCI_DEVICES: dict[str, generations.Generation | None] = {
    "0x0027": None,  # v2 and v3
    "0x0056": None,
    "0x005e": generations.V4,
    "0x0062": generations.V5P,
    "0x0063": generations.V5E,
    "0x006f": generations.V6E,
    "0x0076": generations.V7X,
    "0x007c": None,  # TPU8t
    "0x0083": None,  # TPU8i
}

ASK_SECONDS = 180.0  # libtpu takes 5 to 30 s to start; one that waits for a chip takes for ever
ASK_CHIPS = 2  # tried: one chip may be broken; if two do not start, it is not the chip

_ASK = """
import json, jax
devices = jax.devices()
print(json.dumps({"kinds": [d.device_kind for d in devices], "platform": devices[0].platform}))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attached:
    """The TPU of this host: its generation, as its device spells itself.

    num_chips: those whose device nodes this process can open. usable: the numbers of those that may be taken
    and are free, as TPU_VISIBLE_CHIPS has them. devices_per_chip: as JAX lists them in a process that has one
    chip; 2 on v7x, else 1.
    """

    generation: generations.Generation
    device_kind: str
    num_chips: int
    usable: tuple[int, ...]
    devices_per_chip: int


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip that this process can open: its number for TPU_VISIBLE_CHIPS, and its device nodes."""

    number: int
    nodes: tuple[Path, ...]


@dataclasses.dataclass(frozen=True)
class Holder:
    """A process that has a TPU's device node open."""

    pid: int
    command: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command})"


def no_tpu(sysfs: Path = SYSFS_DEVICES, dev: Path = DEV) -> MachineError:
    """What a user without a TPU is told, or with one that this process cannot open."""
    number = listed_chips(sysfs)
    if number and not accessible_chips(sysfs, dev):
        return MachineError(
            f"this machine lists {number} TPU chips and this process can open no device node of theirs "
            f"({dev}/vfio/<number> or {dev}/accel<number>): give the container its chips (google.com/tpu in "
            "Kubernetes, --privileged in docker), or the user the right to read and write the nodes; or "
            "compile for a generation, such as --target v6e"
        )
    return MachineError(
        "no TPU is attached to this machine: name a generation to compile for, such as --target v6e, "
        "or run this on a TPU host"
    )


def listed_chips(sysfs: Path = SYSFS_DEVICES) -> int:
    """How many TPU chips sysfs lists, which may be more than this process was given."""
    return len(_functions(sysfs))


def pci_chips(sysfs: Path = SYSFS_DEVICES, dev: Path = DEV) -> int:
    """How many TPU chips this process can open, without asking JAX: 0 says for sure that it has none."""
    return len(accessible_chips(sysfs, dev))


def listed_generations(sysfs: Path = SYSFS_DEVICES) -> set[str]:
    """The generations of the chips that sysfs lists, as far as their PCI ids tell them apart."""
    found = (PCI_DEVICES[name] for device in _listed(sysfs) if (name := _pci_id(device)) in PCI_DEVICES)
    return {generation.name for generation in found if generation}


def accessible_chips(sysfs: Path = SYSFS_DEVICES, dev: Path = DEV) -> tuple[Chip, ...]:
    """The TPU chips with a device node that this process can open, in PCI order, numbered from 0.

    A container that was given some of the chips sees all of them in sysfs, and nodes of its own only. A
    function's node is /dev/accelN on v4, N in its sysfs folder `accel`, and from v5e on /dev/vfio/N, N its
    IOMMU group. v7x has two nodes a chip (ray-project/ray #65105). Containers may hide PCI from sysfs and
    still pass accel nodes on; those are chips then.

    What number libtpu gives the one chip of four that a pod was given is not documented. Known: libtpu 0.0.42
    looks for chips by their nodes, /dev/accel[0-9]* and /dev/vfio/[0-9]*, and only then for the IOMMU groups
    of those that it may read (its system calls, with one node of four functions made up); Ray numbers the
    nodes that a pod has from 0; tpu-inference numbers the chips of a host from 0, on v7x too. So the number
    is the position among the chips with a node. A guess is that libtpu orders them as PCI does: on the hosts
    whose files were seen the order of the nodes is the same.
    """
    found = [nodes for functions in _functions(sysfs).values() if (nodes := _nodes(functions, dev))]
    found = found or [(n,) for n in _listed(dev) if re.fullmatch(r"accel\d+", n.name) and _can_open(n)]
    return tuple(Chip(number, nodes) for number, nodes in enumerate(found))


def _functions(sysfs: Path) -> dict[str, list[Path]]:
    """The PCI functions of each TPU chip, in PCI order, by its address without the function's number."""
    found: dict[str, list[Path]] = {}
    for function in _listed(sysfs):
        if _pci_id(function) in PCI_DEVICES:
            found.setdefault(function.name.rpartition(".")[0], []).append(function)
    return found


def _nodes(functions: list[Path], dev: Path) -> tuple[Path, ...]:
    nodes: dict[Path, None] = {}
    for function in functions:
        nodes |= dict.fromkeys(dev / accel.name for accel in _listed(function / "accel"))
        try:
            nodes[dev / "vfio" / (function / "iommu_group").readlink().name] = None
        except OSError:
            continue
    return tuple(filter(_can_open, nodes))


def _can_open(node: Path) -> bool:
    """Asked, not tried: a vfio node can be open once, and a try might keep another process from its chip."""
    return os.access(node, os.R_OK | os.W_OK)


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


def _usable(here: tuple[Chip, ...], environment: Mapping[str, str], listed: int) -> tuple[Chip, ...]:
    """Of the chips that this process can open those that the environment leaves to this user."""
    if paths := environment.get("TPU_VISIBLE_DEVICE_PATHS"):  # which libtpu heeds before the numbers
        named = {Path(path.strip()) for path in paths.split(",")}
        if not (chosen := tuple(chip for chip in here if named & set(chip.nodes))):
            raise UsageError(f"TPU_VISIBLE_DEVICE_PATHS={paths!r} names no chip that this process can open")
        return chosen
    visible = visible_chips(environment)
    if visible is None:
        return here
    if len(visible) == len(here) and max(visible) < listed:
        # As many as there are: whoever gave this process its chips numbered them, and will know how.
        return tuple(Chip(number, chip.nodes) for number, chip in zip(visible, here, strict=True))
    if max(visible) >= len(here):
        raise UsageError(f"TPU_VISIBLE_CHIPS names chip {max(visible)}, and this host has {len(here)}")
    return tuple(here[number] for number in visible)


def held_by(nodes: Collection[Path], proc: Path = PROC) -> list[Holder]:
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
    ask: tuple[str, ...] = (sys.executable, "-P", "-c", _ASK),
    seconds: float = ASK_SECONDS,
    environment: Mapping[str, str] = os.environ,
) -> Attached:
    """The TPU that is attached, and its chips that are free.

    A child process takes one of them, so that it waits for no other host of a slice; the next one, if that
    chip does not start.

    ask: the command that starts JAX on the chip and prints its devices; seconds: how long it may take.

    Raises:
      UsageError: TPU_VISIBLE_CHIPS is no list of chips of this host.
      MachineError: there is none, it is older than v4, processes hold all chips, a stale lockfile is in the
        way, or libtpu does not start; the message says which, and what to do.
    """
    if any(_pci_id(device) == "0x0027" for device in _listed(sysfs)):
        raise MachineError(
            f"the attached TPU is a v2 or v3: {generations.TOO_OLD} Use a v4 or newer, or --target v6e"
        )
    here = accessible_chips(sysfs, dev)
    if not here:
        raise no_tpu(sysfs, dev)
    free = _free(_usable(here, environment, listed_chips(sysfs)), proc)
    for chip in free[:ASK_CHIPS]:
        code, stdout, stderr = _asked(ask, chip.number, environment, seconds)
        if not code:
            break
    if code is None:
        said = chip_process.last_words(f"{stdout}\n{stderr}") or "libtpu said nothing"
        raise MachineError(
            f"the TPU did not start within {seconds:.0f} s: {said}; see that nothing else uses it "
            f"({_look_at(chip.nodes)}), then run this again"
        )
    if code:
        raise MachineError(_explain(stderr, code, chip.nodes, proc, lockfile))
    kinds, generation = _understood(stdout)
    return Attached(
        generation=generation,
        device_kind=kinds[0],
        num_chips=len(here),
        usable=tuple(chip.number for chip in free[free.index(chip) :]),
        devices_per_chip=len(kinds),
    )


def _free(usable: tuple[Chip, ...], proc: Path) -> tuple[Chip, ...]:
    """The chips that no process holds."""
    holders = held_by([node for chip in usable for node in chip.nodes], proc)
    if not holders:
        return usable
    if free := tuple(chip for chip in usable if not held_by(chip.nodes, proc)):
        return free
    raise MachineError(_held(holders))


def _asked(
    ask: tuple[str, ...], chip: int, environment: Mapping[str, str], seconds: float
) -> tuple[int | None, str, str]:
    """The child's exit code, None where it had to be stopped as it took too long, and what it wrote."""
    variables = chip_process.environment("tpu", chip, chip_process.free_port(), environment)
    done: subprocess.CompletedProcess[bytes] | subprocess.TimeoutExpired
    try:
        done = subprocess.run(
            ask,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        done = expired
    code = done.returncode if isinstance(done, subprocess.CompletedProcess) else None
    stdout, stderr = ((said or b"").decode(errors="replace") for said in (done.stdout, done.stderr))
    return code, stdout, stderr


def _understood(stdout: str) -> tuple[list[str], generations.Generation]:
    """What the child printed: the kind of each device of the chip, and the generation."""
    try:
        kinds: list[str] = json.loads(stdout.strip().splitlines()[-1])["kinds"]
        return kinds, generations.by_device_kind(kinds[0])
    except UsageError as error:  # the message has JAX's words where the TPU is too old
        raise MachineError(f"the attached TPU cannot be used: {error}") from None
    except (ValueError, LookupError, TypeError):
        raise MachineError(f"JAX did not say which TPU is attached: it printed {stdout[:200]!r}") from None


def _held(holders: list[Holder]) -> str:
    return (
        f"the TPU is held by {', '.join(map(str, holders[:3]))}: stop it "
        f"(kill {' '.join(str(h.pid) for h in holders[:3])}) or wait for it, then run this again"
    )


def _look_at(nodes: Collection[Path]) -> str:
    return f"sudo lsof -w {' '.join(map(str, nodes))}"


def _explain(stderr: str, returncode: int, nodes: Collection[Path], proc: Path, lockfile: Path) -> str:
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
            f"({_look_at(nodes)}) and stop it, then run this again"
        )
    if "Device or resource busy" in stderr:
        return (
            "the TPU is held by a process that is not seen from here, or was not yet let go of: find it "
            f"({_look_at(nodes)}), or wait, then run this again"
        )
    said = chip_process.last_words(stderr) or f"it ended with status {returncode} and said nothing"
    return (
        f"the TPU is attached but JAX cannot start it: {said}; see that libtpu is installed "
        "(pip install 'jax[tpu]')"
    )
