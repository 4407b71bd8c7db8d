"""The process that owns a chip, as its parent sees it: told what to run, watched, replaced when it dies."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from autotune.errors import MachineError
from autotune.io.files import user_folder
from autotune.io.patience import Patience
from autotune.kernel.problem import BlockSizes, Problem, Settings
from autotune.kernel.workload import Workload
from autotune.timing import device_worker
from autotune.timing.device_worker import Doing
from autotune.tpu import environment

START_SECONDS = 180.0  # libtpu takes 5 to 30 s to start
MAX_LOG_TAIL = 1 << 16
_CHILD = "import autotune.timing.device_worker as s; s.main()"


class DeviceDied(Exception):
    """The process that held the device is gone.

    blocks: the candidate that was loading or running; None if none was. status: crashed or timeout. loading:
    it was still being loaded. bystander: the chip's other device was at work, and this one is not to blame.
    """

    def __init__(
        self,
        blocks: BlockSizes | None,
        status: str,
        said: str,
        loading: bool = False,
        bystander: bool = False,
    ) -> None:
        super().__init__(blocks, status, said, loading, bystander)  # as Ray makes it again elsewhere
        self.blocks = blocks
        self.status = status
        self.said = said
        self.loading = loading
        self.bystander = bystander

    def __str__(self) -> str:
        return self.said


class PrepareFailed(Exception):
    """The inputs of a problem cannot be made on this device; the message says why."""


class Device(Protocol):
    """What runs candidates: a problem is prepared, its candidates loaded, and those timed in rounds.

    Each of the three raises DeviceDied; the device must then be replaced.
    """

    chip: int
    device_kind: str

    def prepare(
        self,
        problem: Problem,
        workloads: Sequence[Workload],
        settings: Settings,
        seed: int,
        target: str | None,
    ) -> None: ...

    def load(self, blocks: BlockSizes, payload: bytes | None) -> device_worker.Loaded: ...

    def time(self, order: Sequence[device_worker.Turn]) -> device_worker.Timed: ...

    def close(self) -> None: ...


def programs_folder() -> Path:
    """Where processes that hold a chip keep what they compiled, for the next of them."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "device-programs"


def _environment(platform: str, chip: int, num_devices: int) -> dict[str, str]:
    own = environment.environment(platform, chip, environment.free_port(), os.environ)
    # The reference is computed there. On a busy host BLAS threads wait for one another: 1.9 s a key, not 0.2.
    own["OPENBLAS_NUM_THREADS"] = "1"
    if platform == "cpu":  # compiling for it costs nothing, and its programs are of one CPU model
        return own | {"JAX_NUM_CPU_DEVICES": str(num_devices)}
    return own | {
        "JAX_COMPILATION_CACHE_DIR": str(programs_folder()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


class ChipProcess:
    """A process of its own that holds one chip, and serves each of its devices over a socket.

    platform: tpu or cpu. num_devices: of the chip. send_timeout: seconds that it may take to read a message.
    """

    def __init__(self, platform: str, chip: int, num_devices: int, send_timeout: float) -> None:
        self._log = tempfile.TemporaryFile(prefix="autotune-device-")  # noqa: SIM115
        pairs = [socket.socketpair() for _ in range(num_devices)]
        # A process that hangs does not read either: an executable fills the socket's buffer.
        limit = struct.pack("ll", int(send_timeout), int(send_timeout % 1 * 1e6))
        numbers = [theirs.fileno() for _, theirs in pairs]
        self._process = subprocess.Popen(
            environment.python(_CHILD, *map(str, numbers)),
            pass_fds=numbers,
            env=_environment(platform, chip, num_devices),
            stdin=subprocess.DEVNULL,
            # What libtpu prints belongs to a row that failed, not on the user's screen.
            stdout=self._log,
            stderr=self._log,
        )
        self._free: dict[int, Connection] = {}
        for index, (ours, theirs) in enumerate(pairs):
            theirs.close()
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._free[index] = Connection(ours.detach())
        # By device that is at work on the chip: the candidate, or None while inputs are made.
        self.running: dict[int, BlockSizes | None] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    def take(self, index: int) -> Connection | None:
        """The connection of a device; None where the process is gone, or the device was taken before."""
        return self._free.pop(index, None) if self._process.poll() is None else None

    def close(self) -> None:
        """End the process, and free the chip."""
        self._process.kill()  # nothing on the device is worth waiting for
        self._process.wait()
        for connection in self._free.values():
            connection.close()
        self._free.clear()

    def ended(self) -> str:
        """How it ended, and the last telling line that it or libtpu wrote; once its socket is closed."""
        how = environment.how_ended(self._process)
        said = ""
        with contextlib.suppress(OSError, ValueError):
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - MAX_LOG_TAIL))
            said = environment.last_words(self._log.read().decode(errors="replace"))
        return f"the process that held the device {how}" + (f": {said}" if said else "")


class Chip:
    """A chip of this host, whose process is started when one of its devices is needed, and shared by them."""

    def __init__(self, platform: str, number: int = 0, num_devices: int = 1) -> None:
        self.platform = platform
        self.number = number
        self.num_devices = num_devices
        self._lock = threading.Lock()
        self._process: ChipProcess | None = None

    def process(self, index: int, send_timeout: float) -> tuple[ChipProcess, Connection]:
        """The chip's process, and the connection of one of its devices.

        A device that comes a second time has seen the process die: a new one is started.
        """
        with self._lock:
            if self._process:
                if connection := self._process.take(index):
                    return self._process, connection
                self._process.close()
            try:
                self._process = ChipProcess(self.platform, self.number, self.num_devices, send_timeout)
            except OSError as error:  # such as too many processes
                self._process = None
                said = f"its process cannot be started: {error.strerror or error}"
                raise DeviceDied(None, "crashed", said) from None
            connection = self._process.take(index)
            if connection is None:
                raise DeviceDied(None, "crashed", self._process.ended())
            return self._process, connection


class Owner:
    """A device of a chip whose process is taken for it: a Device.

    index: of the device among the chip's. run_timeout: seconds that one run may take. compile_timeout: the
    same for what has to be compiled on the device.

    Raises:
      DeviceDied: the process did not get as far as holding the device.
    """

    def __init__(
        self,
        chip: Chip,
        index: int = 0,
        run_timeout: float = 60.0,
        compile_timeout: float = 900.0,
        start_timeout: float = START_SECONDS,
    ) -> None:
        self.chip = chip.number
        self._index = index
        self._run_timeout = run_timeout
        self._compile_timeout = compile_timeout
        self._loading = False
        self._process, self._connection = chip.process(index, run_timeout)
        self.device_kind: str = self._answer(start_timeout)

    @property
    def pid(self) -> int:
        """Of the process that holds the device."""
        return self._process.pid

    @property
    def running(self) -> BlockSizes | None:
        """The candidate that the process said it would compile or run next; None once it has."""
        return None if self._loading else self._running

    @property
    def _running(self) -> BlockSizes | None:
        return self._process.running.get(self._index)

    def prepare(
        self,
        problem: Problem,
        workloads: Sequence[Workload],
        settings: Settings,
        seed: int,
        target: str | None,
    ) -> None:
        """Make a problem's inputs, on the device, and compute what they should give.

        Raises:
          PrepareFailed: they do not fit, or the reference does not run.
        """
        answer = self._ask(device_worker.Prepare(problem, tuple(workloads), settings, seed, target))
        if isinstance(answer, device_worker.Failed):
            raise PrepareFailed(answer.error)

    def load(self, blocks: BlockSizes, payload: bytes | None) -> device_worker.Loaded:
        """Take a candidate in: it has run once on every workload, and its outputs were compared."""
        answer = self._ask(device_worker.Load(blocks, payload))
        if isinstance(answer, device_worker.Failed):
            return device_worker.Loaded("crashed", answer.error, compiled=False)
        assert isinstance(answer, device_worker.Loaded)
        return answer

    def time(self, order: Sequence[device_worker.Turn]) -> device_worker.Timed:
        """Time loaded candidates, in this order; turns of one workload follow one another."""
        answer = self._ask(device_worker.Time(tuple(order)))
        if isinstance(answer, device_worker.Failed):
            raise self._dead("crashed", answer.error)
        if isinstance(answer, device_worker.NoRoom):
            self.close()
            raise MachineError(
                f"there is no room for a profile in {tempfile.gettempdir()!r} ({answer.error}); what is "
                "recorded so far is kept: make room there, or name another folder in TMPDIR, then run the "
                "same command again"
            )
        assert isinstance(answer, device_worker.Timed)
        return answer

    def close(self) -> None:
        """End the process, and free the chip."""
        with contextlib.suppress(OSError):
            self._connection.close()
        self._process.close()

    def _ask(self, told: Any) -> Any:
        try:
            self._connection.send(told)
        except BlockingIOError:
            raise self._hangs(self._run_timeout) from None
        except OSError:
            raise self._died() from None
        answer = self._answer(self._run_timeout)
        self._process.running.pop(self._index, None)
        return answer

    def _answer(self, seconds: float) -> Any:
        """The next message that is an answer; those before it say what runs, and how long it may take."""
        while True:
            try:
                if not Patience(seconds).waits(self._connection.poll):
                    raise self._hangs(seconds)
                message = self._connection.recv()
            except (EOFError, OSError):
                raise self._died() from None
            self._loading = False
            if isinstance(message, device_worker.Next):
                doing, blocks = message
                self._loading = doing is Doing.LOAD
                if doing is Doing.WAIT:
                    self._process.running.pop(self._index, None)
                else:
                    self._process.running[self._index] = blocks
                    seconds = self._compile_timeout if doing is Doing.COMPILE else self._run_timeout
            elif isinstance(message, device_worker.Poisoned):
                raise self._dead("crashed", message.error)
            else:
                return message

    def _hangs(self, seconds: float) -> DeviceDied:
        return self._dead("timeout", f"no answer from the device for {seconds:g} s")

    def _died(self) -> DeviceDied:
        return self._dead("crashed", self._process.ended())

    def _dead(self, status: str, said: str) -> DeviceDied:
        """Close what is left; the parent starts another."""
        running, at_work = self._running, self._index in self._process.running
        bystander = not at_work and bool(self._process.running)
        self.close()
        return DeviceDied(running, status, said, self._loading, bystander)
