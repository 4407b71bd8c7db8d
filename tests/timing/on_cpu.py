"""The CPU in a chip's place: the processes and messages are those of a TPU."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from autotune.compile.pool import Task
from autotune.kernel.problem import BlockSizes, Program, TableKey
from autotune.results import dataset, schema
from autotune.search.plan import Request
from autotune.timing.device_process import Chip, Device, Owner
from autotune.timing.key_timing import Result
from autotune.timing.slot import Slot
from autotune.timing.statistics import StoppingRule
from autotune.tpu import generations
from autotune.tpu.compiler import Compiled


class Cpu:
    """Slots whose devices are real processes; keeps the one that runs."""

    def __init__(self, run_timeout: float = 60.0) -> None:
        self.run_timeout = run_timeout
        self.started: list[int] = []
        self.owner: Owner | None = None
        self.slot = Slot(0, self.start, sleep=lambda seconds: None)

    def start(self) -> Device:
        self.owner = Owner(Chip("cpu"), run_timeout=self.run_timeout, compile_timeout=20)
        self.started.append(self.owner.pid)
        return self.owner


class Signaller:
    """Sends a signal to the device's process when a candidate has just begun to run, as often as told."""

    def __init__(self, cpu: Cpu, victim: BlockSizes, with_signal: int, times: int) -> None:
        self.cpu, self.victim, self.signal, self.left = cpu, victim, with_signal, times
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *exception: object) -> None:
        self.stop.set()
        self.thread.join()

    def watch(self) -> None:
        before = None
        while self.left and not self.stop.wait(0.0005):
            owner = self.cpu.owner
            now = owner.running if owner else None
            if now == self.victim != before and owner:
                os.kill(owner.pid, self.signal)
                self.left -= 1
                self.stop.wait(0.5)  # until the parent has noticed
            before = now


KEY = TableKey("bfloat16", "bfloat16", 4, 1, 128, 64, 128, 256)


LONGER = KEY._replace(max_model_len=512)


RULE = StoppingRule(precision=0.5, max_seconds=0.2)


def request(**values: Any) -> Request:
    values = {"keys": (KEY,), "kv_pages": (2, 4), "queries": (32,), "workloads": ("mixed",), **values}
    return Request(generation=generations.V6E, **values)


class Quiet(contextlib.AbstractContextManager["Quiet"]):
    """Progress that counts."""

    def __init__(self) -> None:
        self.modelled = 0
        self.results: list[Result] = []
        self.notes: list[str] = []

    def compiling(self, task: Task) -> None: ...

    def advance(self, task: Task, verdict: Compiled, left: Iterable[Program]) -> None:
        self.modelled += 1

    def __exit__(self, *error: object) -> None:
        pass

    def recorded(self, made: Iterable[Mapping[str, Any]]) -> None:
        pass

    def timed(self, key: TableKey, result: Result) -> None:
        self.results.append(result)

    def note(self, said: str) -> None:
        self.notes.append(said)

    def keys_timed(self, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.keys = done, total


def rows(folder: Path, source: str) -> pd.DataFrame:
    frame = dataset.read(folder)
    return frame[frame["source"] == source]


def statuses(folder: Path) -> dict[BlockSizes, str]:
    frame = rows(folder, schema.INTERPRETED)
    columns = (frame[name].tolist() for name in (*schema.BLOCK_COLUMNS, "status"))
    return {BlockSizes(pages, queries): status for pages, queries, status in zip(*columns, strict=True)}
