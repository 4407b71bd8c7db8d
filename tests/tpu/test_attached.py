"""The attached TPU, on trees of files laid out as Linux lays them out."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli.main import cli
from autotune.errors import EXIT_MACHINE, MachineError, UsageError
from autotune.tpu import attached, generations

SAYS_V6E = (sys.executable, "-c", 'print(\'{"kinds": ["TPU v6 lite"]}\')')


def fails_with(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys; sys.exit({text!r})")


class Host:
    """A machine's /sys, /dev, /proc and lockfile below one folder, with links where Linux has them."""

    def __init__(self, root: Path) -> None:
        self.sys, self.dev, self.proc = root / "sys", root / "dev", root / "proc"
        self.sysfs = self.sys / "bus/pci/devices"
        self.lockfile = root / "libtpu_lockfile"
        for folder in (self.sysfs, self.dev, self.proc):
            folder.mkdir(parents=True)
        self.paths = {"sysfs": self.sysfs, "dev": self.dev, "proc": self.proc, "lockfile": self.lockfile}

    def pci(self, address: str, vendor: str, device: str, node: str = "") -> None:
        """A PCI function; node: accelN or vfio/N of its driver, which `give` puts into /dev."""
        folder = self.sys / "devices/pci0000:00" / address
        folder.mkdir(parents=True)
        (self.sysfs / address).symlink_to(f"../../../devices/pci0000:00/{address}")
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
        if node.startswith("accel"):
            (folder / "accel" / node).mkdir(parents=True)
        elif node:
            group = Path("kernel/iommu_groups") / node.removeprefix("vfio/")
            (self.sys / group / "devices").mkdir(parents=True)
            (self.sys / group / "devices" / address).symlink_to(folder)
            (folder / "iommu_group").symlink_to(Path("../../..") / group)

    def give(self, *nodes: str) -> None:
        """Device nodes that this process has; with vfio's, the container of all groups, which is no chip."""
        for node in nodes:
            (self.dev / node).parent.mkdir(exist_ok=True)
            (self.dev / node).touch()
            if node.startswith("vfio/"):
                (self.dev / "vfio/vfio").touch()

    def tpus(self, device: str, nodes: Sequence[str]) -> None:
        """Chips of one function each, in PCI order, with their nodes."""
        for slot, node in enumerate(nodes):
            self.pci(f"0000:00:{slot + 4:02x}.0", "0x1ae0", device, node)
        self.give(*nodes)

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


def test_a_chip_of_two_functions_is_counted_once(host: Host) -> None:
    for number in range(8):
        host.pci(f"0000:00:{number // 2 + 4:02x}.{number % 2}", "0x1ae0", "0x0076", f"vfio/{number}")
    host.give(*(f"vfio/{number}" for number in range(8)))
    assert attached.pci_chips(host.sysfs, host.dev) == 4
    assert attached.accessible_chips(host.sysfs, host.dev)[1] == attached.Chip(
        1, (host.dev / "vfio/2", host.dev / "vfio/3")
    )


def test_a_target_that_is_attached_is_told_that_nothing_is_timed(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.tpus("0x006f", [f"vfio/{number}" for number in range(4)])
    assert attached.listed_generations(host.sysfs) == {"v6e"}
    monkeypatch.setattr(attached.listed_generations, "__defaults__", (host.sysfs,))
    monkeypatch.setattr(attached.pci_chips, "__defaults__", (host.sysfs, host.dev))
    shape = "q_heads=4,kv_heads=1,head_dim=128,page_size=64,max_num_batched_tokens=512,max_model_len=1024"
    said = {
        target: CliRunner().invoke(cli, ["sweep", "--target", target, "--shape", shape, "--dry-run"])
        for target in ("v6e", "v5e")
    }
    assert [done.exit_code for done in said.values()] == [0, 0]
    line = "this host has a TPU v6e, and --target times nothing on it: leave --target out to time\n"
    assert said["v6e"].stderr.count(line) == 1
    assert line not in said["v5e"].stderr


def test_device_nodes_count_where_sysfs_is_hidden(host: Host) -> None:
    for name in ("accel0", "accel1", "accelerator"):
        (host.dev / name).touch()
    assert attached.pci_chips(host.dev / "absent", host.dev) == 2


def test_vfio_nodes_of_others_are_no_chips(host: Host) -> None:
    host.pci("0000:00:04.0", "0x15b3", "0xc2d5", "vfio/96")
    host.give("vfio/96")
    assert attached.pci_chips(host.sysfs, host.dev) == 0


def test_chips_without_a_device_node_are_not_there_and_this_is_said(host: Host) -> None:
    host.pci("0000:00:04.0", "0x1ae0", "0x006f", "vfio/0")
    assert attached.pci_chips(host.sysfs, host.dev) == 0
    with pytest.raises(MachineError, match="lists 1 TPU chips and this process can open no device node"):
        host.ask(*fails_with("JAX was asked"))
    host.give("vfio/0")
    assert attached.pci_chips(host.sysfs, host.dev) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write whatever the mode says")
def test_a_node_that_may_not_be_written_is_no_chip(host: Host) -> None:
    host.tpus("0x005e", ["accel0"])
    (host.dev / "accel0").chmod(0o400)
    assert attached.pci_chips(host.sysfs, host.dev) == 0
    assert attached.pci_chips(host.dev / "absent", host.dev) == 0


def test_the_quick_check_imports_no_jax() -> None:
    code = (
        "import sys; from autotune.tpu.attached import pci_chips; pci_chips(); "
        "sys.exit(any(m in sys.modules for m in ('jax', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_attached_generation(host: Host) -> None:
    host.tpus("0x006f", ["vfio/0", "vfio/1"])
    found = host.ask(*SAYS_V6E)
    assert found == attached.Attached(
        generation=generations.V6E, device_kind="TPU v6 lite", num_chips=2, usable=(0, 1), devices_per_chip=1
    )
    found = host.ask(*SAYS_V6E, environment={"TPU_VISIBLE_CHIPS": "1"})
    assert (found.num_chips, found.usable) == (2, (1,))


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TPU_VISIBLE_CHIPS": "0,x"}, "'0,x' is not a list of chips such as 0,1"),
        ({"TPU_VISIBLE_CHIPS": "0,2"}, "chip 2, and this host has 2"),
        ({"TPU_VISIBLE_DEVICE_PATHS": "/dev/vfio/7"}, "'/dev/vfio/7' names no chip"),
    ],
)
def test_visible_chips_that_are_none(host: Host, variables: dict[str, str], said: str) -> None:
    host.tpus("0x006f", ["vfio/0", "vfio/1"])
    with pytest.raises(UsageError, match=re.escape(said)):
        host.ask(*fails_with("JAX was asked"), environment=variables)


def test_visible_device_paths_leave_the_other_chips_to_others(host: Host) -> None:
    host.tpus("0x006f", ["vfio/4", "vfio/5", "vfio/6"])
    paths = f"{host.dev}/vfio/5,{host.dev}/vfio/6"
    assert host.ask(*SAYS_V6E, environment={"TPU_VISIBLE_DEVICE_PATHS": paths}).usable == (1, 2)


@pytest.mark.parametrize(
    ("device", "kind", "nodes"),
    [("0x005e", "TPU v4", ["accel0", "accel1"]), ("0x006f", "TPU v6 lite", ["vfio/1", "vfio/2"])],
)
def test_a_chip_that_another_process_holds_is_left_to_it(
    host: Host, device: str, kind: str, nodes: list[str]
) -> None:
    host.tpus(device, nodes)
    host.process(4711, "python serve.py", host.dev / nodes[0])
    says = (sys.executable, "-c", f'print(\'{{"kinds": ["{kind}"]}}\')')
    assert host.ask(*says).usable == (1,)
    assert host.ask(*says, environment={"TPU_VISIBLE_CHIPS": "1"}).usable == (1,)
    with pytest.raises(MachineError, match="held by process 4711"):
        host.ask(*says, environment={"TPU_VISIBLE_CHIPS": "0"})


def test_the_next_chip_is_tried_where_one_does_not_start(host: Host) -> None:
    host.tpus("0x006f", ["vfio/0", "vfio/1", "vfio/2"])
    code = (
        "import os; assert os.environ['TPU_VISIBLE_CHIPS'] == '{}'; print('{{\"kinds\": [\"TPU v6 lite\"]}}')"
    )
    assert host.ask(sys.executable, "-c", code.format(1)).usable == (1, 2)
    with pytest.raises(MachineError, match="AssertionError"):  # two are tried, no more
        host.ask(sys.executable, "-c", code.format(2))


@pytest.mark.parametrize(
    ("device", "kind"), [("0x0027", "TPU v3"), ("0x0056", "TPU v2")], ids=["by PCI id", "by device_kind"]
)
def test_too_old(host: Host, device: str, kind: str) -> None:
    host.tpus(device, ["accel0"])
    with pytest.raises(MachineError, match=r"TPU version must be 4 or higher\."):
        host.ask(sys.executable, "-c", f'print(\'{{"kinds": ["{kind}"]}}\')')


def test_unknown_kind_lists_the_known(host: Host) -> None:
    host.tpus("0x0083", ["vfio/0"])
    with pytest.raises(MachineError, match=r"'TPU8i' is unknown: known are TPU v4.*TPU7x"):
        host.ask(sys.executable, "-c", 'print(\'{"kinds": ["TPU8i"]}\')')


@pytest.mark.parametrize("node", ["accel0", "vfio/0"])
def test_holder_is_named_and_jax_is_not_asked(host: Host, node: str) -> None:
    host.tpus("0x0063" if "vfio" in node else "0x005e", [node])
    host.give("vfio/vfio")
    host.process(4711, "python serve.py --port 80", host.dev / node)
    host.process(4712, "python other.py", host.dev / "vfio" / "vfio")
    with pytest.raises(MachineError) as raised:
        host.ask(*fails_with("JAX was asked"))
    assert "held by process 4711 (python serve.py --port 80): stop it (kill 4711)" in str(raised.value)


def test_holder_that_only_libtpu_knows(host: Host) -> None:
    host.tpus("0x005e", ["accel0"])
    said = (
        "RuntimeError: Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by "
        "process with pid 176028. Not attempting to load libtpu.so in this process."
    )
    with pytest.raises(MachineError, match=r"held by process 176028 \(unknown command\)"):
        host.ask(*fails_with(said))


def test_stale_lockfile(host: Host) -> None:
    host.tpus("0x005e", ["accel0"])
    host.lockfile.touch()
    (host.proc / "locks").write_text("1: POSIX  ADVISORY  WRITE 99 08:01:1 0 EOF\n")
    said = (
        'Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm /tmp/libtpu_lockfile".'
    )
    with pytest.raises(MachineError, match=rf"left {host.lockfile} behind.*sudo rm {host.lockfile}"):
        host.ask(*fails_with(said))


def test_locked_lockfile_is_another_users(host: Host) -> None:
    host.tpus("0x005e", ["accel0"])
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
    host.tpus("0x0063", ["vfio/0"])
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
    host.tpus("0x005e", ["accel0"])
    with pytest.raises(MachineError, match=r"cannot start it: RuntimeError: no libtpu; see that libtpu"):
        host.ask(*fails_with("Traceback:\n  File\nRuntimeError: no libtpu"))
    with pytest.raises(MachineError, match="ended with status -6 and said nothing"):
        host.ask(sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGABRT)")


def test_libtpu_that_hangs_is_heard(host: Host) -> None:
    host.tpus("0x005e", ["accel0"])
    warning = "W1201 01:42:46.601290    4692 slice.cc:87] Waiting for h1:8471"
    hangs = f"import sys, time; print({warning!r}, file=sys.stderr, flush=True); time.sleep(60)"
    with pytest.raises(MachineError, match=r"did not start within 1 s: Waiting for h1:8471; see.*lsof"):
        host.ask(sys.executable, "-c", hangs, seconds=1)
    with pytest.raises(MachineError, match=r"did not start within 1 s: libtpu said nothing"):
        host.ask(sys.executable, "-c", "import time; time.sleep(60)", seconds=1)


def test_garbled_answer(host: Host) -> None:
    host.tpus("0x005e", ["accel0"])
    with pytest.raises(MachineError, match=r"did not say which TPU.*printed 'hello"):
        host.ask(sys.executable, "-c", "print('hello')")
