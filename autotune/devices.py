"""What a sweep times on, and how: a slot a chip."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from autotune import results
from autotune.measure import Slot
from autotune.owner import Owner
from autotune.tpu.attached import Attached
from autotune.tpu.statistics import StoppingRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """How a device sweep times. source: measured or interpreted. top of None: the shortlist's default."""

    source: str
    device_kind: str
    rule: StoppingRule
    top: int | None = None
    exhaustive: bool = False

    @property
    def interpreted(self) -> bool:
        return self.source == results.INTERPRETED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user asks of the timings. top of None: the shortlist's default; timeouts in seconds."""

    rule: StoppingRule
    top: int | None
    exhaustive: bool
    run_timeout: float
    compile_timeout: float

    def timing(self, device_kind: str | None) -> Timing:
        """device_kind: None for the interpreter in the TPU's place."""
        return Timing(
            source=results.MEASURED if device_kind else results.INTERPRETED,
            device_kind=device_kind or "cpu",
            rule=self.rule,
            top=self.top,
            exhaustive=self.exhaustive,
        )


class Devices(NamedTuple):
    """What times, and how: a slot a chip."""

    timing: Timing
    slots: tuple[Slot, ...]


def of_this_host(found: Attached | None, limits: Limits) -> Devices:
    """The attached TPU's chips, each with an owner of its own when it is needed; the CPU for None."""

    def slot(platform: str, chip: int, num_chips: int) -> Slot:
        timeouts = limits.run_timeout, limits.compile_timeout
        return Slot(chip, lambda: Owner(platform, chip, num_chips, *timeouts))

    if not found:
        return Devices(limits.timing(None), (slot("cpu", 0, 1),))
    slots = tuple(slot("tpu", chip, found.num_chips) for chip in found.usable)
    return Devices(limits.timing(found.device_kind), slots)
