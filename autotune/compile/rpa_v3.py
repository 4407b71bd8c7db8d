"""What a compiling process does with ragged paged attention v3: its default, the verdict, and the loops."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from autotune.compile.cache import Store, default_path
from autotune.errors import first_line
from autotune.kernel.problem import Problem, Settings
from autotune.kernel.rpa_v3 import call, source
from autotune.kernel.rpa_v3.blocks import Blocks
from autotune.results.schema import Tools
from autotune.tpu import generations
from autotune.tpu.compiler import LASTING, Compiled, MachineFault, clear, failed, prepared_device
from autotune.tpu.loops import Loop, read_loops
from autotune.tpu.schedule import ListingError, allocations_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """blocks: those of the case; None where the kernel has no default.

    verdict: the compiler's; its schedule is None. loops, vmem_bytes, smem_bytes: of an ok one's call.
    """

    blocks: Blocks | None
    verdict: Compiled
    loops: Loop | None = None
    vmem_bytes: int | None = None
    smem_bytes: int | None = None


# A change of what an answer holds, or of how listings are read, asks for a new number.
VERSION = 1
_MOST, _MOST_LOOPS = 2**40, 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One case to compile at the shape of a call.

    folder: the one that holds tpu_inference. blocks: None for the kernel's own default.
    """

    target: str
    folder: Path
    case: str
    blocks: Blocks | None
    problem: Problem
    settings: Settings

    def run(self, listings: Path) -> Answer:
        """Raises MachineFault or OSError for what says nothing about the program."""
        from unittest import mock

        import jax
        from jax.sharding import SingleDeviceSharding

        clear(listings)
        start = time.perf_counter()
        device = prepared_device(generations.by_name(self.target))
        blocks = self.blocks
        # The kernel asks jax.devices() for its generation, which no context manager of jax's changes.
        with mock.patch.object(jax, "devices", lambda *_, **__: [device]), jax.default_device(device):
            try:
                module = source.load(self.folder)
            except Exception as error:
                raise MachineFault(f"the kernel in {str(self.folder)!r}: {first_line(error)}") from error
            try:
                blocks = blocks or call.default_blocks(module, self.case, self.problem)
                sharding = SingleDeviceSharding(device)
                lowered = call.lower(module, self.case, self.blocks, self.problem, self.settings, sharding)
            except (ValueError, AssertionError, NotImplementedError) as error:
                said = first_line(error)
                return Answer(blocks=blocks, verdict=Compiled(status="invalid", error=said))
            except Exception as error:
                return Answer(blocks=blocks, verdict=failed(error, time.perf_counter() - start))
        try:
            lowered.compile()
            loops = read_loops(listings, call.listing_name(self.case))
            vmem, smem = allocations_of(listings, call.listing_name(self.case))
        except ListingError as error:
            raise MachineFault(first_line(error)) from error
        except Exception as error:
            return Answer(blocks=blocks, verdict=failed(error, time.perf_counter() - start))
        finally:
            clear(listings)
        verdict = Compiled(status="ok", seconds=time.perf_counter() - start)
        return Answer(blocks=blocks, verdict=verdict, loops=loops, vmem_bytes=vmem, smem_bytes=smem)


class Answers:
    """Answers that were compiled before, kept in the user's cache beside the verdicts of other sweeps."""

    def __init__(self, folder: Path) -> None:
        self._store = Store(default_path())
        self._tools = dataclasses.replace(Tools.installed(), kernel_fingerprint=source.fingerprint(folder))

    def get(self, job: Job) -> Answer | None:
        identity = self._identity(job)
        text = self._store.texts([identity]).get(identity)
        return _decoded(text) if text is not None else None

    def put(self, job: Job, answer: Answer) -> None:
        """Keep an answer, if it is one that lasts."""
        if answer.verdict.status in LASTING and answer.verdict.seconds is not None:
            text = json.dumps(dataclasses.asdict(answer))
            seconds = answer.verdict.seconds
            self._store.keep(self._identity(job), job.target, self._tools, seconds, text)

    def _identity(self, job: Job) -> str:
        asked = dataclasses.asdict(job) | {"folder": None}
        parts = ["rpa_v3", VERSION, dataclasses.asdict(self._tools), asked]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _decoded(text: str) -> Answer | None:
    """An answer as `Answers.put` wrote it; None for anything else, which costs a compile."""
    try:
        fields = json.loads(text)
        verdict = Compiled(**fields["verdict"])
        blocks, loops = Blocks(*fields["blocks"]), fields["loops"]
        answer = Answer(
            blocks=blocks,
            verdict=verdict,
            loops=None if loops is None else _loop(loops),
            vmem_bytes=fields["vmem_bytes"],
            smem_bytes=fields["smem_bytes"],
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    counts = [*blocks]
    if verdict.status == "ok":
        counts += [answer.vmem_bytes, answer.smem_bytes]  # type: ignore[list-item]
    elif verdict.status in ("vmem_oom", "smem_oom"):
        counts += [verdict.needed_bytes, verdict.limit_bytes]  # type: ignore[list-item]
    sound = verdict.status in LASTING and all(type(n) is int and 0 < n < _MOST for n in counts)
    return answer if sound and (answer.loops is None) == (verdict.status != "ok") else None


def _loop(fields: dict[str, Any]) -> Loop:
    bundles, inner = fields["bundles"], fields["inner"]
    if type(bundles) is not int or not 0 <= bundles < _MOST or len(inner) > _MOST_LOOPS:
        raise ValueError("not a loop")
    return Loop(bundles, [_loop(loop) for loop in inner])
