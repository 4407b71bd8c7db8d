"""The attached TPU, on trees of files laid out as Linux lays them out."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.errors import EXIT_MACHINE, MachineError, UsageError
from autotune.tpu import attached, chips

SAYS_V6E = (sys.executable, "-c", 'print(\'{"kinds": ["TPU v6 lite"]}\')')


def fails_with(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys; sys.exit({text!r})")


class Host:
    """A machine's sysfs, /dev, /proc and lockfile below one folder."""

    def __init__(self, root: Path) -> None:
        self.sysfs, self.dev, self.proc = root / "pci", root / "dev", root / "proc"
        self.lockfile = root / "libtpu_lockfile"
        for folder in (self.sysfs, self.dev, self.proc):
            folder.mkdir()
        self.paths = {"sysfs": self.sysfs, "dev": self.dev, "proc": self.proc, "lockfile": self.lockfile}

    def pci(self, address: str, vendor: str, device: str) -> None:
        folder = self.sysfs / address
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")

    def process(self, pid: int, command: str, opened: Path) -> None:
        fd = self.proc / str(pid) / "fd"
        fd.mkdir(parents=True)
        (fd / "3").symlink_to(opened)
        (fd.parent / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")

    def ask(
        self, *command: str, seconds: float = 20.0, environment: dict[str, str] | None = None
    ) -> attached.Attached:
        return attached.attached(**self.paths, ask=command, seconds=seconds, environment=environment or {})


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_no_chip_is_known_without_asking_jax(host: Host) -> None:
    host.pci("0000:00:04.0", "0x1ae0", "0x0042")  # Google's network card, not a TPU
    host.pci("0000:00:05.0", "0x10de", "0x006f")  # another vendor with a TPU's device id
    start = time.perf_counter()
    with pytest.raises(MachineError, match=r"no TPU is attached.*--target v6e") as raised:
        host.ask(*fails_with("JAX was asked"))
    assert time.perf_counter() - start < 0.1
    assert raised.value.exit_code == EXIT_MACHINE


def test_chips_are_counted_once_each(host: Host) -> None:
    for slot in range(4):
        host.pci(f"0000:00:0{slot}.0", "0x1ae0", "0x006f")
        host.pci(f"0000:00:0{slot}.1", "0x1ae0", "0x006f")  # a second function of the same chip
    assert attached.pci_chips(host.sysfs, host.dev) == 4


def test_device_nodes_count_where_sysfs_is_hidden(host: Host) -> None:
    for name in ("accel0", "accel1", "accelerator"):
        (host.dev / name).touch()
    assert attached.pci_chips(host.dev / "absent", host.dev) == 2


def test_the_quick_check_imports_no_jax() -> None:
    code = (
        "import sys; from autotune.tpu.attached import pci_chips; pci_chips(); "
        "sys.exit(any(m in sys.modules for m in ('jax', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_attached_generation(host: Host) -> None:
    for slot in range(2):
        host.pci(f"0000:00:0{slot}.0", "0x1ae0", "0x006f")
    found = host.ask(*SAYS_V6E)
    assert found == attached.Attached(
        generation=chips.V6E, device_kind="TPU v6 lite", num_chips=2, usable=(0, 1)
    )
    found = host.ask(*SAYS_V6E, environment={"TPU_VISIBLE_CHIPS": "1"})
    assert (found.num_chips, found.usable) == (2, (1,))


@pytest.mark.parametrize(
    ("value", "said"),
    [("0,x", "'0,x' is not a list of chips such as 0,1"), ("0,2", "chip 2, and this host has 2")],
)
def test_visible_chips_that_are_none(host: Host, value: str, said: str) -> None:
    for slot in range(2):
        host.pci(f"0000:00:0{slot}.0", "0x1ae0", "0x006f")
    with pytest.raises(UsageError, match=re.escape(said)):
        host.ask(*fails_with("JAX was asked"), environment={"TPU_VISIBLE_CHIPS": value})


def test_a_chip_that_is_left_to_others_may_be_held(host: Host) -> None:
    for slot in range(2):
        host.pci(f"0000:00:0{slot}.0", "0x1ae0", "0x005e")
        (host.dev / f"accel{slot}").touch()
    host.process(4711, "python serve.py", host.dev / "accel0")
    says_v4 = (sys.executable, "-c", 'print(\'{"kinds": ["TPU v4"]}\')')
    assert host.ask(*says_v4, environment={"TPU_VISIBLE_CHIPS": "1"}).usable == (1,)
    with pytest.raises(MachineError, match="held by process 4711"):
        host.ask(*says_v4, environment={"TPU_VISIBLE_CHIPS": "0"})


@pytest.mark.parametrize(
    ("device", "kind"), [("0x0027", "TPU v3"), ("0x0056", "TPU v2")], ids=["by PCI id", "by device_kind"]
)
def test_too_old(host: Host, device: str, kind: str) -> None:
    host.pci("0000:00:05.0", "0x1ae0", device)
    with pytest.raises(MachineError, match=r"TPU version must be 4 or higher\."):
        host.ask(sys.executable, "-c", f'print(\'{{"kinds": ["{kind}"]}}\')')


def test_unknown_kind_lists_the_known(host: Host) -> None:
    host.pci("0000:00:05.0", "0x1ae0", "0x0083")
    with pytest.raises(MachineError, match=r"'TPU8i' is unknown: known are TPU v4.*TPU7x"):
        host.ask(sys.executable, "-c", 'print(\'{"kinds": ["TPU8i"]}\')')


@pytest.mark.parametrize("node", ["accel0", "vfio/0"])
def test_holder_is_named_and_jax_is_not_asked(host: Host, node: str) -> None:
    host.pci("0000:00:05.0", "0x1ae0", "0x0063")
    (host.dev / "vfio").mkdir()
    (host.dev / "vfio" / "vfio").touch()  # the container of all groups, which is no chip
    (host.dev / node).touch()
    host.process(4711, "python serve.py --port 80", host.dev / node)
    host.process(4712, "python other.py", host.dev / "vfio" / "vfio")
    with pytest.raises(MachineError) as raised:
        host.ask(*fails_with("JAX was asked"))
    assert "held by process 4711 (python serve.py --port 80): stop it (kill 4711)" in str(raised.value)


def test_holder_that_only_libtpu_knows(host: Host) -> None:
    host.pci("0000:00:05.0", "0x1ae0", "0x005e")
    said = (
        "RuntimeError: Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by "
        "process with pid 176028. Not attempting to load libtpu.so in this process."
    )
    with pytest.raises(MachineError, match=r"held by process 176028 \(unknown command\)"):
        host.ask(*fails_with(said))


def test_stale_lockfile(host: Host) -> None:
    host.pci("0000:00:05.0", "0x1ae0", "0x005e")
    host.lockfile.touch()
    (host.proc / "locks").write_text("1: POSIX  ADVISORY  WRITE 99 08:01:1 0 EOF\n")
    said = (
        'Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm /tmp/libtpu_lockfile".'
    )
    with pytest.raises(MachineError, match=rf"left {host.lockfile} behind.*sudo rm {host.lockfile}"):
        host.ask(*fails_with(said))


def test_locked_lockfile_is_another_users(host: Host) -> None:
    host.pci("0000:00:05.0", "0x1ae0", "0x005e")
    (host.dev / "accel0").touch()
    host.lockfile.touch()
    inode = host.lockfile.stat().st_ino
    (host.proc / "locks").write_text(f"1: POSIX  ADVISORY  WRITE 99 08:01:{inode} 0 EOF\n")
    said = "The TPU is already in use by another process probably owned by another user."
    with pytest.raises(MachineError, match=rf"another user: find it \(sudo lsof -w {host.dev}/accel0\)"):
        host.ask(*fails_with(said))


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="no /proc/locks here")
def test_stale_is_told_by_the_kernels_own_list(tmp_path: Path) -> None:
    lockfile = tmp_path / "lock"
    lockfile.touch()
    assert attached.lock_is_stale(lockfile)
    with lockfile.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert not attached.lock_is_stale(lockfile)
    assert attached.lock_is_stale(lockfile)
    assert not attached.lock_is_stale(tmp_path / "absent")


def test_chip_that_a_process_out_of_sight_holds(host: Host) -> None:
    host.pci("0000:00:05.0", "0x1ae0", "0x0063")
    (host.dev / "vfio").mkdir()
    (host.dev / "vfio" / "0").touch()
    said = "TPU initialization failed: open(/dev/vfio/0): Device or resource busy; Couldn't open iommu group"
    with pytest.raises(MachineError, match=rf"not seen from here.*sudo lsof -w {host.dev}/vfio/0"):
        host.ask(*fails_with(said))


def test_open_node_is_seen_in_the_real_proc(tmp_path: Path) -> None:
    node = tmp_path / "accel0"
    node.touch()
    code = f"import sys; f = open({str(node)!r}); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert [holder.pid for holder in attached.held_by([node])] == [child.pid]
    assert attached.held_by([node]) == []
    assert os.getpid() not in [holder.pid for holder in attached.held_by([node])]


def test_libtpu_that_does_not_start(host: Host) -> None:
    host.pci("0000:00:05.0", "0x1ae0", "0x005e")
    with pytest.raises(MachineError, match=r"cannot start it: RuntimeError: no libtpu; see that libtpu"):
        host.ask(*fails_with("Traceback:\n  File\nRuntimeError: no libtpu"))
    with pytest.raises(MachineError, match=r"libtpu; unset TPU_LOAD_LIBRARY$"):
        host.ask(*fails_with("RuntimeError: FAILED_PRECONDITION: TPU_LOAD_LIBRARY=0, not loading libtpu"))
    with pytest.raises(MachineError, match=r"XLA_FLAGS: --x; unset XLA_FLAGS$"):
        host.ask(*fails_with("F1130 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --x"))
    with pytest.raises(MachineError, match="ended with status -6 and said nothing"):
        host.ask(sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGABRT)")


def test_libtpu_that_hangs(host: Host) -> None:
    host.pci("0000:00:05.0", "0x1ae0", "0x005e")
    with pytest.raises(MachineError, match=r"did not start within 1 s.*lsof"):
        host.ask(sys.executable, "-c", "import time; time.sleep(60)", seconds=1)


def test_garbled_answer(host: Host) -> None:
    host.pci("0000:00:05.0", "0x1ae0", "0x005e")
    with pytest.raises(MachineError, match=r"did not say which TPU.*printed 'hello"):
        host.ask(sys.executable, "-c", "print('hello')")
