"""Table: block sizes by device name and key, as one file, installation or results folder holds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.errors import UsageError
from autotune.io.terminal import shown
from autotune.kernel.problem import BlockSizes
from autotune.tables import lookups
from autotune.tables.dialects import Dialect
from autotune.tables.keys import Key, Rows
from autotune.tables.lookups import Rule
from autotune.tpu.generations import GENERATIONS


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A key that a file writes again with the value it already has."""

    device: str
    key: Key
    line: int
    first_line: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Table:
    """A table of one dialect; two tables are equal only if they are the same object.

    dialect: whose keys these are, and which generations its device names mean.
    rule: the look-up that asks for them; None where it is not known.
    devices: device name to rows; in the jax dialect the keys are TableKeys.
    origin: what was loaded, for messages: a path, 'jax', a generation.
    provenance: where the values come from, as the file's PROVENANCE says; empty if it says nothing.
    lines: (device name, key) to the line of the file, where there is a file.
    repeats: keys that the file holds more than once, with one value.
    """

    dialect: Dialect
    devices: Mapping[str, Rows]
    origin: str = "a table"
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lines: Mapping[tuple[str, Key], int] = dataclasses.field(default_factory=dict)
    repeats: tuple[Repeat, ...] = ()
    rule: Rule | None = None

    def __len__(self) -> int:
        return sum(map(len, self.devices.values()))

    def __iter__(self) -> Iterator[tuple[str, Key, BlockSizes]]:
        for device, rows in self.devices.items():
            for key, blocks in rows.items():
                yield device, key, blocks

    @property
    def shown(self) -> str:
        """Its origin, as messages name it."""
        return shown(self.origin)

    @property
    def look_up(self) -> Rule:
        """What answers calls: its own look-up, or the newest of its dialect where that is not known."""
        return self.rule or lookups.newest(self.dialect)

    @property
    def modelled(self) -> bool:
        """Whether the values were chosen by the cost model and not by a clock."""
        return str(self.provenance.get("source", "")).lower() == "modelled"

    def generations(self) -> list[str]:
        """Names of the generations that the table has rows for, oldest first, each once."""
        named = {g for device in self.devices for g in self.dialect.generations(device)}
        return [name for name in GENERATIONS if name in named]

    def device_of(self, generation: str) -> str | None:
        """The device name under which this generation's rows are; None if there are none.

        A name of this generation alone goes before one that it shares.
        """
        names = [d for d in self.devices if generation in self.dialect.generations(d)]
        return min(names, key=lambda d: len(self.dialect.generations(d)), default=None)

    def rows_of(self, generation: str) -> Rows:
        """The rows for a generation; none where the table has none for it."""
        device = self.device_of(generation)
        return {} if device is None else self.devices[device]

    def only(self, device: str) -> Table:
        """The same table with one device name, or one generation's, alone.

        Raises:
          UsageError: the table has no such device.
        """
        name = device if device in self.devices else self.device_of(device)
        if name is None:
            held = ", ".join(map(repr, self.devices)) or "no device"
            raise UsageError(f"{self.shown} has no device {device!r}: it has {held}")
        return dataclasses.replace(
            self,
            devices={name: self.devices[name]},
            origin=f"{self.origin}:{name}",
            lines={place: line for place, line in self.lines.items() if place[0] == name},
            repeats=tuple(repeat for repeat in self.repeats if repeat.device == name),
        )
