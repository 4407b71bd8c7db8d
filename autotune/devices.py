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


class Devices(NamedTuple):
    """What times, and how: a slot a chip."""

    timing: Timing
    slots: tuple[Slot, ...]


def of_this_host(
    found: Attached | None,
    rule: StoppingRule,
    top: int | None,
    exhaustive: bool,
    run_timeout: float,
    compile_timeout: float,
) -> Devices:
    """The attached TPU's chips, each with an owner of its own when it is needed; the CPU for None."""

    def slot(platform: str, chip: int, num_chips: int) -> Slot:
        return Slot(chip, lambda: Owner(platform, chip, num_chips, run_timeout, compile_timeout))

    source = results.MEASURED if found else results.INTERPRETED
    kind = found.device_kind if found else "cpu"
    timing = Timing(source=source, device_kind=kind, rule=rule, top=top, exhaustive=exhaustive)
    if not found:
        return Devices(timing, (slot("cpu", 0, 1),))
    return Devices(timing, tuple(slot("tpu", chip, found.num_chips) for chip in found.usable))
