"""Compiles on the nodes of a Ray cluster: `workers` on every node, Ray between them and the sweep.

An actor a compile, which runs a pool of one process of its own: so crashes of the compiler, time limits and
last words are what they are on one machine. What Ray adds is where an actor runs, and that its node may go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import re
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from autotune.compile.local_pool import ATTEMPTS, CompilePool
from autotune.compile.pool import Pool, Work, failed
from autotune.errors import MachineError, first_line
from autotune.executors import ray_cluster
from autotune.io.patience import Patience
from autotune.results.schema import Tools
from autotune.tpu.compiler import Compiled

# A program is given up after so many nodes left, or were lost, while they compiled it: it may be the cause.
NODE_ATTEMPTS = 4
START_ATTEMPTS = 3
STOP_SECONDS = 5.0
GRACE_SECONDS = 120.0  # beyond the time limit, within which a node must answer
POLL_SECONDS = 1.0
HEAD_SECONDS = 20.0  # Ray ends this process when the head has been away for 60
PLACE_SECONDS = 600.0


class Compiler:
    """The actor: a pool of one process on whichever node Ray put it."""

    def __init__(self, timeout: float) -> None:
        self._pool = CompilePool(1, timeout).__enter__()

    def place(self) -> tuple[str, Tools]:
        """The node's name, and what is installed there."""
        return socket.gethostname(), Tools.installed()

    def ping(self) -> None:
        """Answer, which says that the node is there."""

    def compile(self, work: Work) -> Any:
        done = queue.SimpleQueue[Any]()
        self._pool.submit(work, done.put)
        result = done.get()
        if self._pool.broken:  # the result is for nobody to record
            raise self._pool.broken
        return result

    def stop(self) -> None:
        """End the process, and take its files along."""
        self._pool.__exit__(KeyboardInterrupt, None, None)


@dataclasses.dataclass
class _Item:
    """Something to compile. lost: how many nodes left with it."""

    work: Work
    then: Callable[[Any], None]
    lost: int = 0

    def fail(self, verdict: Compiled) -> None:
        self.then(failed(self.work, verdict))


class _Refused(Exception):
    """A node that no compile may run on."""


class RayPool(Pool):
    """Compiles on the nodes of the cluster that this process has joined.

    jobs: how many compile at once; beyond the CPUs that there are, they wait for nodes to join. timeout:
    seconds that one compile may take. say: told of nodes that are refused.
    """

    def __init__(self, jobs: int, timeout: float, say: Callable[[str], None]) -> None:
        self.jobs = jobs
        self._timeout = timeout
        self._say = say
        self._tools = Tools.installed()
        # Those that a node left with keep their number, and so come before all others.
        self._items: queue.PriorityQueue[tuple[float, _Item | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._leaving = threading.Event()
        self._lock = threading.Lock()
        self._actors: dict[int, Any] = {}  # by slot
        self._placed: set[int] = set()  # the slots whose actor is on a node
        self._refused: dict[int, str] = {}

    def __enter__(self) -> Self:
        self._threads = [threading.Thread(target=self._watch, daemon=True, name="ray head")]
        for slot in range(self.jobs):
            self._threads.append(
                threading.Thread(target=self._work, args=(slot,), daemon=True, name=f"ray {slot}")
            )
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        import ray

        # What is still under way is of no use to anybody.
        with self._lock:
            self._leaving.set()
            placed = [self._actors[slot] for slot in self._placed]
            actors = list(self._actors.values())
        if placed and ray_cluster.answers(ray.get_runtime_context().gcs_address):
            stops = [actor.stop.remote() for actor in placed]
            with contextlib.suppress(ray.exceptions.RayError):
                ray.wait(stops, num_returns=len(stops), timeout=STOP_SECONDS)
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        for _ in self._threads:
            self._items.put((-next(self._numbers), None))
        deadline = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def submit(self, work: Work, then: Callable[[Any], None]) -> None:
        item = _Item(work, then)
        if self.broken:
            item.fail(_nobodys(self.broken))
        else:
            self._items.put((next(self._numbers), item))

    def _work(self, slot: int) -> None:
        """A slot's thread: an actor, and another when its node has left; an item at a time."""
        while not self._leaving.is_set() and not self.broken:
            try:
                actor = self._start(slot)
            except _Refused as refused:
                self._refuse(slot, str(refused))
                return
            while actor and not self.broken:
                number, item = self._items.get()
                if item is None:
                    return
                if not self._answers(actor):  # it left while it was idle: no fault of the item's
                    self._items.put((number, item))
                    break
                if not self._do(actor, number, item):
                    break
            self._drop(slot)

    def _start(self, slot: int) -> Any:
        """An actor that compiles with this very software, once a node has room; None if it is time to leave.

        Raises:
          _Refused: the node's software is another, or actors cannot be started.
        """
        import ray

        said = ""
        for attempt in range(START_ATTEMPTS):
            # Two calls at once, so that `stop` is heard during a compile.
            actor = ray.remote(Compiler).options(num_cpus=1, max_concurrency=2).remote(self._timeout)
            with self._lock:
                if self._leaving.is_set():
                    ray.kill(actor)
                    return None
                self._actors[slot] = actor
            place = actor.place.remote()
            while not self._leaving.is_set() and not self.broken:
                if not ray.wait([place], timeout=POLL_SECONDS)[0]:
                    continue
                try:
                    host, tools = ray.get(place)
                except ray.exceptions.RayError as error:
                    said = reason(error)
                    self._leaving.wait(2.0**attempt)
                    break
                if tools != self._tools:
                    # The actor stays, so that Ray places no other one there.
                    raise _Refused(f"{host} {difference(tools, self._tools)}")
                self._placed.add(slot)
                return actor
            else:
                return None
        raise _Refused(f"a node cannot start a compile: {said}")

    def _answers(self, actor: Any) -> bool:
        import ray

        try:
            ray.get(actor.ping.remote(), timeout=GRACE_SECONDS)
        except ray.exceptions.RayError:
            return False
        return True

    def _do(self, actor: Any, number: float, item: _Item) -> bool:
        """Have an item compiled; whether the actor is there still."""
        import ray

        try:
            asked = actor.compile.remote(item.work)
            limit = Patience(ATTEMPTS * self._timeout + GRACE_SECONDS)
            limit.waits(lambda seconds: bool(ray.wait([asked], timeout=seconds)[0]))
            result = ray.get(asked, timeout=0)
        except ray.exceptions.RayTaskError as error:  # the node's fault, and not the program's
            cause = error.cause
            self._lost(number, item, cause if isinstance(cause, MachineError) else _not_compiled(cause))
        except ray.exceptions.RayError as error:
            self._lost(number, item, error)
        else:
            item.then(result)
            return True
        return False

    def _lost(self, number: float, item: _Item, error: Exception) -> None:
        """A node left with an item: it is tried elsewhere, before all others."""
        item.lost += 1
        if self._leaving.is_set():
            return
        if self.broken:
            item.fail(_nobodys(self.broken))
        elif item.lost < NODE_ATTEMPTS:
            self._items.put((number, item))
        elif isinstance(error, MachineError):
            item.fail(self._break(error))
        else:
            said = f"the Ray node that compiled it was lost, {NODE_ATTEMPTS} times: {reason(error)}"
            item.fail(Compiled(status="crashed", error=said))

    def _drop(self, slot: int) -> None:
        import ray

        with self._lock:
            if self._leaving.is_set():
                return  # it is being stopped, and must not be killed at that
            self._placed.discard(slot)
            actor = self._actors.pop(slot)
        with contextlib.suppress(Exception):
            ray.kill(actor)

    def _refuse(self, slot: int, said: str) -> None:
        """This slot compiles nothing; where none does, nothing can be compiled."""
        with self._lock:
            new = said not in self._refused.values()
            self._refused[slot] = said
            none_left = len(self._refused) == self.jobs
        if none_left:
            self._break(MachineError(f"no node of the Ray cluster can compile: {said}"))
        elif new:
            self._say(f"a Ray node is left out: {said}")

    def _watch(self) -> None:
        """Break when the head is gone, or no node has room: Ray itself waits, and then ends the process."""
        import ray

        address = ray.get_runtime_context().gcs_address
        last_seen = last_placed = time.monotonic()
        while not self._leaving.wait(POLL_SECONDS) and not self.broken:
            now = time.monotonic()
            if ray_cluster.answers(address):
                last_seen = now
            if self._placed or self._items.empty():
                last_placed = now
            said = None
            if now - last_seen > HEAD_SECONDS:
                said = f"the head of the Ray cluster at {address} is gone"
            elif now - last_placed > PLACE_SECONDS:
                said = f"no node of the Ray cluster had a free CPU for {PLACE_SECONDS / 60:.0f} minutes"
            if said:
                again = "run the same command again when that has changed, or with --executor local"
                self._break(MachineError(f"{said}; what is recorded so far is kept: {again}"))

    def _break(self, error: MachineError) -> Compiled:
        """Note that no more can be compiled, and tell all who wait; the verdict is for nobody to record."""
        self.broken = error
        verdict = _nobodys(error)
        with contextlib.suppress(queue.Empty):
            while True:
                _, item = self._items.get_nowait()
                if item:
                    item.fail(verdict)
        return verdict


def _nobodys(error: MachineError) -> Compiled:
    return Compiled(status="crashed", error=first_line(error))


def _not_compiled(error: Exception) -> MachineError:
    return MachineError(
        f"the nodes of the Ray cluster do not compile ({first_line(error)}); what is recorded so far is "
        "kept: see `autotune doctor` on a node, then run the same command again, or with --executor local"
    )


def reason(error: Exception) -> str:
    """What Ray says, in a line: it tells most at the end, where it has a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (raised or lines or [first_line(error)])[-1 if raised else 0][:300]


def difference(theirs: Tools, ours: Tools) -> str:
    differ = [
        (field.name, getattr(theirs, field.name), getattr(ours, field.name))
        for field in dataclasses.fields(Tools)
        if getattr(theirs, field.name) != getattr(ours, field.name)
    ]
    has = ", ".join(f"{name.replace('_', ' ')} {their}" for name, their, _ in differ)
    here = ", ".join(str(our) for *_, our in differ)
    return f"has {has} where this machine has {here}: install the same there"
