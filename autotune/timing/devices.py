"""What a sweep times on, and how: a slot a device, which is a chip but on v7x, whose chips are two."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from autotune.results import schema
from autotune.timing.device_process import Chip, Owner
from autotune.timing.slot import Slot
from autotune.timing.statistics import StoppingRule
from autotune.tpu.attached import Attached


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
        return self.source == schema.INTERPRETED


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
            source=schema.MEASURED if device_kind else schema.INTERPRETED,
            device_kind=device_kind or "cpu",
            rule=self.rule,
            top=self.top,
            exhaustive=self.exhaustive,
        )


class Devices(NamedTuple):
    """What times, and how: a slot a device."""

    timing: Timing
    slots: tuple[Slot, ...]


def of_this_host(found: Attached | None, limits: Limits) -> Devices:
    """The devices of the attached TPU's chips; the CPU for None."""
    chips = (
        [Chip("tpu", number, found.devices_per_chip) for number in found.usable] if found else [Chip("cpu")]
    )
    # Devices of one chip are apart, so that chips are all in use before any has two keys at once.
    slots = [_slot(chip, index, limits) for index in range(chips[0].num_devices) for chip in chips]
    return Devices(limits.timing(found.device_kind if found else None), tuple(slots))


def _slot(chip: Chip, index: int, limits: Limits) -> Slot:
    return Slot(chip.number, lambda: Owner(chip, index, limits.run_timeout, limits.compile_timeout), index)
