"""The owner of a device, as the process sees it that must not die: told what to run, watched, replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from autotune.kernel.problem import BlockSizes, Problem, Settings
from autotune.kernel.workload import Workload
from autotune.tpu import session

START_SECONDS = 180.0  # libtpu takes 5 to 30 s to start
MAX_LOG_TAIL = 4096


class DeviceDied(Exception):
    """The process that held the device is gone.

    blocks: the candidate that was running; None if none was. status: crashed or timeout.
    """

    def __init__(self, blocks: BlockSizes | None, status: str, said: str) -> None:
        super().__init__(said)
        self.blocks = blocks
        self.status = status
        self.said = said


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

    def load(self, blocks: BlockSizes, payload: bytes | None) -> session.Loaded: ...

    def time(self, workload: int, order: Sequence[BlockSizes]) -> session.Timed: ...

    def close(self) -> None: ...


def environment(platform: str, chip: int, num_chips: int) -> dict[str, str]:
    """Variables with which a process takes one chip and no other platform.

    On a host with several chips the three of libtpu's that give a process one of them, with the values that
    are documented for one chip a process (gist skye/f82ba45d, Ray's TPU accelerator manager): with them
    libtpu lets each process have its own. With one chip they are left alone.
    """
    variables = {
        "JAX_PLATFORMS": platform,  # no silent fallback to the CPU
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if platform == "tpu" and num_chips > 1:
        variables |= {
            "TPU_VISIBLE_CHIPS": str(chip),
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_BOUNDS": "1,1,1",
        }
    return variables


def _environment(platform: str, chip: int, num_chips: int) -> dict[str, str]:
    own = environment(platform, chip, num_chips)
    # The older name of TPU_VISIBLE_CHIPS, which would contradict it.
    older = {"TPU_VISIBLE_DEVICES"} if "TPU_VISIBLE_CHIPS" in own else set()
    return {name: value for name, value in os.environ.items() if name not in older} | own


class Owner:
    """A process of its own that holds one chip: a Device.

    platform: tpu or cpu. run_timeout: seconds that one run may take. compile_timeout: the same for what has
    to be compiled on the device.

    Raises:
      DeviceDied: the process did not get as far as holding the device.
    """

    def __init__(
        self,
        platform: str,
        chip: int = 0,
        num_chips: int = 1,
        run_timeout: float = 60.0,
        compile_timeout: float = 900.0,
        start_timeout: float = START_SECONDS,
    ) -> None:
        self.chip = chip
        self._run_timeout = run_timeout
        self._compile_timeout = compile_timeout
        self._running: BlockSizes | None = None
        self._log = tempfile.TemporaryFile(prefix="autotune-device-")  # noqa: SIM115
        ours, theirs = socket.socketpair()
        # A process that hangs does not read either: an executable fills the socket's buffer.
        limit = struct.pack("ll", int(run_timeout), int(run_timeout % 1 * 1e6))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "autotune.tpu.session", str(theirs.fileno()), platform],
                pass_fds=[theirs.fileno()],
                env=_environment(platform, chip, num_chips),
                stdin=subprocess.DEVNULL,
                # What libtpu prints belongs to a row that failed, not on the user's screen.
                stdout=self._log,
                stderr=self._log,
            )
        self._connection = Connection(ours.detach())
        ready = self._answer(start_timeout)
        self.device_kind: str = ready.device_kind

    @property
    def pid(self) -> int:
        """Of the process that holds the device."""
        return self._process.pid

    @property
    def running(self) -> BlockSizes | None:
        """The candidate that the process said it would run next."""
        return self._running

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
        answer = self._ask(session.Prepare(problem, tuple(workloads), settings, seed, target))
        if isinstance(answer, session.Failed):
            raise PrepareFailed(answer.error)

    def load(self, blocks: BlockSizes, payload: bytes | None) -> session.Loaded:
        """Take a candidate in: it has run once on every workload, and its outputs were compared."""
        answer = self._ask(session.Load(blocks, payload))
        if isinstance(answer, session.Failed):
            return session.Loaded("crashed", answer.error, compiled=False)
        assert isinstance(answer, session.Loaded)
        return answer

    def time(self, workload: int, order: Sequence[BlockSizes]) -> session.Timed:
        """Time loaded candidates on a workload, in this order."""
        answer = self._ask(session.Time(workload, tuple(order)))
        if isinstance(answer, session.Failed):
            self.close()
            raise DeviceDied(self._running, "crashed", answer.error)
        assert isinstance(answer, session.Timed)
        return answer

    def close(self) -> None:
        """End the process, and free the device."""
        with contextlib.suppress(OSError):
            self._connection.close()
        self._process.kill()  # nothing on the device is worth waiting for
        self._process.wait()
        self._log.close()

    def _ask(self, told: Any) -> Any:
        self._running = told.blocks if isinstance(told, session.Load) else None
        try:
            self._connection.send(told)
        except BlockingIOError:
            raise self._hangs(self._run_timeout) from None
        except OSError:
            raise self._died() from None
        return self._answer(self._run_timeout)

    def _answer(self, seconds: float) -> Any:
        """The next message that is an answer; those before it say what runs, and how long it may take."""
        while True:
            try:
                if not self._connection.poll(seconds):
                    raise self._hangs(seconds)
                message = self._connection.recv()
            except (EOFError, OSError):
                raise self._died() from None
            if isinstance(message, session.Began):
                self._running, seconds = message.blocks, self._run_timeout
            elif isinstance(message, session.Compiling):
                self._running, seconds = message.blocks, self._compile_timeout
            elif isinstance(message, session.Poisoned):
                running = self._running
                self.close()
                raise DeviceDied(running, "crashed", message.error)
            else:
                return message

    def _hangs(self, seconds: float) -> DeviceDied:
        running = self._running
        self.close()
        return DeviceDied(running, "timeout", f"no answer from the device for {seconds:g} s")

    def _died(self) -> DeviceDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)  # the socket closes a moment before the process ends
        code = self._process.poll()
        how = "stopped answering"
        if code is not None:
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        text = f"the process that held the device {how}"
        if said := self._last_line():
            text += f": {said}"
        running = self._running
        self.close()
        return DeviceDied(running, "crashed", text)

    def _last_line(self) -> str:
        """The last line that the process or libtpu wrote."""
        with contextlib.suppress(OSError, ValueError):
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, size - MAX_LOG_TAIL))
            lines = [line.strip() for line in self._log.read().decode(errors="replace").split("\n")]
            said = [line for line in lines if line and line.isprintable()]
            return said[-1][:300] if said else ""
        return ""
