"""The process that owns a device: it runs what it is told over a socket, and may die of it.

    python -m autotune.tpu.session FD PLATFORM

Only this process initializes the device. Before anything that the device might not survive it says which
candidate is next, so that its death can be laid at the right door. An exception out of a run may leave the
runtime unusable, so it is a death too: the process says what it was, and ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from autotune.kernel.problem import BlockSizes, Problem, Settings
from autotune.kernel.workload import Workload

# What it is told.


class Prepare(NamedTuple):
    """Make the inputs of a problem and what they should give; forgets the problem before."""

    problem: Problem
    workloads: tuple[Workload, ...]
    settings: Settings
    seed: int
    target: str | None


class Load(NamedTuple):
    """Take a candidate in: load its executable, or compile it; run it on every workload; compare."""

    blocks: BlockSizes
    payload: bytes | None


class Time(NamedTuple):
    """Time candidates on one workload, once for each time that they are named."""

    workload: int
    order: tuple[BlockSizes, ...]


# What it says.


class Ready(NamedTuple):
    """The device is there; device_kind as JAX spells it."""

    device_kind: str


class Began(NamedTuple):
    """A candidate is about to run."""

    blocks: BlockSizes


class Compiling(NamedTuple):
    """A candidate, or the reference, is about to be compiled, which takes longer than a run."""

    blocks: BlockSizes | None


class Failed(NamedTuple):
    """What was told could not be done, and the device is as it was."""

    error: str


class Poisoned(NamedTuple):
    """A run raised; the process ends after saying so."""

    error: str


class Prepared(NamedTuple):
    """The inputs are there."""


class Loaded(NamedTuple):
    """status: ok, wrong_result, or why it did not compile here; compiled: whether it had to."""

    status: str
    error: str | None
    compiled: bool


class Timed(NamedTuple):
    """Seconds of each call by candidate, how they were timed, and what went wrong if there are none."""

    seconds: dict[BlockSizes, list[float]]
    timer: str
    note: str | None


class _Current(NamedTuple):
    """The problem that is being timed: inputs.Inputs, and an inputs.Expected a workload."""

    told: Prepare
    inputs: Any
    expected: list[Any]


class _Session:
    def __init__(self, connection: Connection) -> None:
        import jax

        from autotune.tpu.compiler import KERNEL_NAME
        from autotune.tpu.timer import Timer

        self._connection = connection
        self._device = jax.devices()[0]
        self._wait: Callable[[Any], Any] = jax.block_until_ready
        number = getattr(self._device, "local_hardware_id", None)
        self._timer = Timer(KERNEL_NAME, self._device.id if number is None else number, self._wait)
        self._programs: dict[BlockSizes, Callable[..., Any]] = {}
        self._current: _Current | None = None
        self.send(Ready(self._device.device_kind))

    def send(self, message: NamedTuple) -> None:
        self._connection.send(message)

    def prepare(self, told: Prepare) -> Prepared:
        from autotune.kernel import inputs

        self._programs.clear()
        self._current = None  # its memory is needed for what comes
        self.send(Compiling(None))
        made = inputs.make_inputs(told.problem, told.workloads, told.seed)
        expected = [
            inputs.expected(told.problem, workload, batch, arguments, told.settings)
            for workload, batch, arguments in zip(told.workloads, made.batches, made.arguments, strict=True)
        ]
        self._current = _Current(told, made, expected)
        return Prepared()

    def load(self, told: Load) -> Loaded:
        from autotune.tpu import executable
        from autotune.tpu.compiler import failed

        assert self._current is not None
        problem, inputs, expected = self._current
        program: Callable[..., Any] | None = None
        compiled = False
        if told.payload is not None:
            # One that was made for another runtime is compiled here instead, and the answer says so.
            with contextlib.suppress(Exception):
                program = executable.load(told.payload, self._device)
        if program is None:
            self.send(Compiling(told.blocks))
            compiled = True
            pages = inputs.arguments[0][1].shape[0]
            call = executable.Call(
                target=problem.target,
                problem=problem.problem,
                total_num_pages=pages,
                blocks=told.blocks,
                settings=problem.settings,
            )
            try:
                program = executable.compile_here(call, self._device)
            except Exception as error:
                verdict = failed(error, 0.0)
                return Loaded(verdict.status, verdict.error, compiled)
        for workload, arguments, want in zip(problem.workloads, inputs.arguments, expected, strict=True):
            self.send(Began(told.blocks))
            output = self._running(functools.partial(program, *arguments))
            if wrong := want.mismatch(output):
                return Loaded("wrong_result", f"workload {workload.name}: {wrong}", compiled)
        self._programs[told.blocks] = program
        return Loaded("ok", None, compiled)

    def time(self, told: Time) -> Timed:
        from autotune.kernel.rpa import program_name

        assert self._current is not None
        arguments = self._current.inputs.arguments[told.workload]
        names = {program_name(blocks): blocks for blocks in told.order}
        calls = {
            name: lambda program=self._programs[blocks]: program(*arguments) for name, blocks in names.items()
        }
        found = self._running(
            lambda: self._timer.time(
                calls, [program_name(b) for b in told.order], lambda name: self.send(Began(names[name]))
            )
        )
        return Timed({names[n]: s for n, s in found.seconds.items()}, found.timer, found.note)

    def _running(self, run: Callable[[], Any]) -> Any:
        """What a run gives; if it raises, this process says so and ends."""
        from autotune.tpu.compiler import first_line

        try:
            return self._wait(run())
        except Exception as error:
            self.send(Poisoned(first_line(error)))
            self._connection.close()
            os._exit(1)  # a poisoned runtime may hang at a regular exit


def serve(connection: Connection) -> None:
    """Do what the connection tells until it is closed."""
    from autotune.tpu.compiler import first_line

    session = _Session(connection)
    does: dict[type, Callable[[Any], NamedTuple]] = {
        Prepare: session.prepare,
        Load: session.load,
        Time: session.time,
    }
    while True:
        try:
            told = connection.recv()
        except EOFError:
            return
        try:
            answer: NamedTuple = does[type(told)](told)
        except Exception as error:
            answer = Failed(first_line(error))
        session.send(answer)


def _leave_with_parent(parent: int) -> None:
    """End this process soon after its parent was killed: nobody else would free the device."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    code = 0
    try:
        serve(Connection(int(sys.argv[1])))
    except BrokenPipeError:
        pass  # the parent is gone
    except Exception as error:
        from autotune.tpu.compiler import first_line

        print(first_line(error), file=sys.stderr, flush=True)
        code = 1
    os._exit(code)


if __name__ == "__main__":
    # Under its own name, not __main__'s: the messages are pickled by the module they are of.
    from autotune.tpu import session

    session.main()
