"""What a compiling process does with ragged paged attention v3: its default, the verdict, and the loops."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from autotune.errors import first_line
from autotune.kernel.problem import Problem, Settings
from autotune.kernel.rpa_v3 import call, source
from autotune.kernel.rpa_v3.blocks import Blocks
from autotune.tpu import generations
from autotune.tpu.compiler import Compiled, MachineFault, clear, failed, prepared_device
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
                return Answer(blocks=blocks, verdict=Compiled(status="invalid", error=first_line(error)))
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
