"""The process that owns a chip: it runs what it is told over a socket a device, and may die of it.

    python -c 'import autotune.timing.device_worker as s; s.main()' FD [FD ...]

Only this process initializes the chip's devices: one, or two on v7x. Before anything that a device might not
survive it says which candidate is next, so that the parent knows what it died of. An exception out of a run
may leave the runtime unusable, so it is a death too: the process says what it was, and ends.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from autotune.errors import first_line
from autotune.io.terminal import FROM_TERMINAL
from autotune.kernel.problem import BlockSizes, Problem, Settings
from autotune.kernel.workload import Workload

# How often a thread that waits for the other device of its chip says that it does.
WAITING_SECONDS = 0.5

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


class Turn(NamedTuple):
    """One call to time: a workload, by its place among the problem's, and a candidate."""

    workload: int
    blocks: BlockSizes


class Time(NamedTuple):
    """Time candidates, once for each turn; turns of one workload follow one another."""

    order: tuple[Turn, ...]


# What it says: its device_kind at first, then answers, None where something is prepared.


class Doing(enum.Enum):
    """What a device is about to do."""

    WAIT = enum.auto()  # for its turn, or for the host: nothing of it is at work on the chip
    LOAD = enum.auto()  # an executable that another process compiled
    COMPILE = enum.auto()  # a candidate, or the reference, which takes longer than a run
    RUN = enum.auto()


class Next(NamedTuple):
    """What comes next, and of which candidate."""

    doing: Doing
    blocks: BlockSizes | None = None


class Failed(NamedTuple):
    """What was told could not be done, and the device is as it was."""

    error: str


class NoRoom(NamedTuple):
    """There is no room for the files of a profile."""

    error: str


class Poisoned(NamedTuple):
    """A run raised; the process ends after saying so."""

    error: str


class Loaded(NamedTuple):
    """status: ok, wrong_result, or why it did not compile here. compiled: whether it had to. refused: why the
    executable that was sent did not load."""

    status: str
    error: str | None
    compiled: bool
    refused: str | None = None


class Timed(NamedTuple):
    """Seconds of the calls by turn, how they were timed, and what went wrong if there are none.

    seconds: may lack turns, where a profile lost their events. timer: None before a clock is decided on.
    """

    seconds: dict[Turn, list[float]]
    timer: str | None
    note: str | None


class _Current(NamedTuple):
    """The problem that is being timed: inputs.Inputs, and an inputs.Expected a workload."""

    told: Prepare
    inputs: Any
    expected: list[Any]


class _Session:
    """One device. lock: of the chip's devices, one at a time loads or runs a candidate."""

    def __init__(self, connection: Connection, device: Any, lock: threading.Lock) -> None:
        import jax

        from autotune.kernel.jax_rpa import inputs
        from autotune.kernel.jax_rpa.call import named
        from autotune.timing.timer import Timer, mark_name
        from autotune.tpu.compiler import KERNEL_NAME

        self._connection = connection
        self._device = device
        self._lock = lock
        self._wait: Callable[[Any], Any] = jax.block_until_ready
        self._marks: list[Callable[[], Any]] = []
        self._zero = jax.device_put(0.0, device)
        self._new_mark = lambda section: functools.partial(
            jax.jit(named(lambda x: x + 1, mark_name(section))), self._zero
        )
        self._timer = Timer(KERNEL_NAME, lambda section: self._marks[section](), self._wait)
        self._inputs = inputs.InputMaker(device)
        self._programs: dict[BlockSizes, Callable[..., Any]] = {}
        self._current: _Current | None = None
        self.send(device.device_kind)

    def send(self, message: Any) -> None:
        self._connection.send(message)

    def prepare(self, told: Prepare) -> None:
        from autotune.kernel.jax_rpa import inputs

        self._programs.clear()
        self._current = None  # its memory is needed for what comes
        with self._turn():
            self.send(Next(Doing.COMPILE))
            made = self._inputs.make(told.problem, told.workloads, told.seed, interpreted=told.target is None)
            while len(self._marks) < len(told.workloads):
                self._marks.append(self._new_mark(len(self._marks)))
                self._wait(self._marks[-1]())
            self._wait(made.arguments)
        self.send(Next(Doing.WAIT))
        expected = [
            inputs.expected(told.problem, workload, batch, made, told.settings)
            for workload, batch in zip(told.workloads, made.batches, strict=True)
        ]
        self._current = _Current(told, made, expected)

    def load(self, told: Load) -> Loaded:
        from autotune.tpu.compiler import failed

        assert self._current is not None
        problem, inputs, expected = self._current
        program, refused = self._loaded(told)
        compiled = program is None
        if program is None:
            try:
                with self._turn():
                    self.send(Next(Doing.COMPILE, told.blocks))
                    program = self._compiled(told.blocks)
            except Exception as error:
                verdict = failed(error, 0.0)
                return Loaded(verdict.status, verdict.error, compiled, refused)
        for workload, arguments, want in zip(problem.workloads, inputs.arguments, expected, strict=True):
            with self._turn():
                self.send(Next(Doing.RUN, told.blocks))
                output = self._running(functools.partial(program, *arguments))
            self.send(Next(Doing.WAIT))
            if wrong := want.mismatch(output):
                return Loaded("wrong_result", f"workload {workload.name}: {wrong}", compiled, refused)
        self._programs[told.blocks] = program
        return Loaded("ok", None, compiled, refused)

    def _loaded(self, told: Load) -> tuple[Callable[..., Any] | None, str | None]:
        """The executable that was sent, if it loads; else why not, if one was sent."""
        from autotune.tpu import executable

        if told.payload is None:
            return None, None
        try:
            with self._turn():
                self.send(Next(Doing.LOAD, told.blocks))
                return executable.load(told.payload, self._device), None
        except Exception as error:  # it was made for another runtime or topology
            return None, first_line(error)

    def _compiled(self, blocks: BlockSizes) -> Callable[..., Any]:
        from autotune.tpu import executable

        assert self._current is not None
        problem, inputs, _ = self._current
        call = executable.Call(
            target=problem.target,
            problem=problem.problem,
            total_num_pages=inputs.arguments[0][1].shape[0],
            blocks=blocks,
            settings=problem.settings,
        )
        return executable.compile_here(call, self._device)

    def time(self, told: Time) -> Timed:
        from autotune.kernel.jax_rpa.call import program_name
        from autotune.timing.timer import Step

        assert self._current is not None
        arguments = self._current.inputs.arguments
        turns = {Step(turn.workload, program_name(turn.blocks)): turn for turn in told.order}

        def call(step: Step) -> Any:
            return self._programs[turns[step].blocks](*arguments[step.section])

        with self._turn():
            found = self._running(
                lambda: self._timer.time(
                    call,
                    [Step(turn.workload, program_name(turn.blocks)) for turn in told.order],
                    lambda step: self.send(Next(Doing.RUN, turns[step].blocks)),
                    lambda: self.send(Next(Doing.WAIT)),
                )
            )
        return Timed({turns[step]: seconds for step, seconds in found.seconds.items()}, *found[1:])

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Have the chip to this device: whatever dies meanwhile, one candidate alone is to blame."""
        while not self._lock.acquire(timeout=WAITING_SECONDS):
            self.send(Next(Doing.WAIT))
        try:
            yield
        finally:
            self._lock.release()

    def _running(self, run: Callable[[], Any]) -> Any:
        """What a run gives; if it raises, this process says so and ends."""
        from autotune.timing import timer

        try:
            return self._wait(run())
        except timer.NoRoom:
            raise
        except Exception as error:
            self.send(Poisoned(first_line(error)))
            self._connection.close()
            os._exit(1)  # a poisoned runtime may hang at a regular exit


def serve(connection: Connection, device: Any, lock: threading.Lock) -> None:
    """Do what the connection tells of one device until it is closed."""
    import jax

    from autotune.timing import timer

    with jax.default_device(device):
        session = _Session(connection, device, lock)
        does: dict[type, Callable[[Any], Any]] = {
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
                answer = does[type(told)](told)
            except timer.NoRoom as error:
                answer = NoRoom(str(error))
            except Exception as error:
                answer = Failed(first_line(error))
            session.send(answer)


def _serve_or_end(connection: Connection, device: Any, lock: threading.Lock) -> None:
    """`serve`, in a thread of its own; if it fails, the process ends."""
    code = 0
    try:
        serve(connection, device, lock)
    except BrokenPipeError:
        pass  # the parent is gone
    except Exception as error:
        print(first_line(error), file=sys.stderr, flush=True)
        code = 1
    os._exit(code)


def _leave_with_parent(parent: int) -> None:
    """End this process soon after its parent was killed: nobody else would free the device."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    for number in FROM_TERMINAL:  # they reach the whole terminal; the parent decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    connections = [Connection(int(number)) for number in sys.argv[1:]]
    try:
        import jax

        devices = jax.devices()
        if len(devices) < len(connections):
            raise RuntimeError(f"the chip has {len(devices)} devices, not {len(connections)}")
    except Exception as error:
        print(first_line(error), file=sys.stderr, flush=True)
        os._exit(1)
    lock = threading.Lock()
    for connection, device in zip(connections, devices, strict=False):
        threading.Thread(target=_serve_or_end, args=(connection, device, lock)).start()
