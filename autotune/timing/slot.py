"""The place of one device in a sweep: started when it is needed, and anew when it has died."""

from __future__ import annotations

import time
from collections.abc import Callable

from autotune.errors import MachineError
from autotune.timing.device_process import Device, DeviceDied

# Seconds to wait before each new start: a chip stays busy for seconds after its holder was killed.
RESTART_SECONDS = (5.0, 15.0, 45.0)


class ChipLost(MachineError):
    """A chip cannot be taken. said: how it went, without what to do if it was the last."""

    def __init__(self, said: str) -> None:
        self.said = said
        super().__init__(
            f"{said}; what is recorded so far is kept: see what else uses the TPU, then run the same "
            "command again"
        )


class Slot:
    """The place of one device: started when it is needed, and anew when it has died.

    chip: the chip's number on its host. host: the host's name; None for this one. index: of the device among
    its chip's. start: gives a device, or raises DeviceDied. sleep: waits so many seconds.

    refused: why no executables of other processes are sent to the device, if none are: one did not load, or
    killed the process while it was loaded. The device then compiles its own.
    """

    host: str | None = None

    def __init__(
        self,
        chip: int,
        start: Callable[[], Device],
        index: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.chip = chip
        self.index = index
        self.refused: str | None = None
        self._start = start
        self._sleep = sleep
        self._device: Device | None = None
        self._died = False
        self._said = ""
        self._closed = False

    def device(self) -> Device:
        """The device.

        Raises:
          MachineError: it cannot be started, not even after all of RESTART_SECONDS.
        """
        pauses = list(RESTART_SECONDS)
        while self._device is None:
            if self._died and not pauses:
                raise ChipLost(
                    f"chip {self.chip} could not be taken, last tried after {sum(RESTART_SECONDS):.0f} s: "
                    f"{self._said}"
                )
            if self._died:
                self._pause(pauses.pop(0))
            if self._closed:
                raise MachineError(f"chip {self.chip} was given back")
            try:
                self._device = self._start()
            except DeviceDied as died:
                self._died, self._said = True, died.said
        if self._closed:  # meanwhile
            self._device.close()
            raise MachineError(f"chip {self.chip} was given back")
        self._died = False
        return self._device

    def _pause(self, seconds: float) -> None:
        """Sleep in short steps, so that a sweep that ends meanwhile is not kept waiting."""
        while seconds > 0 and not self._closed:
            self._sleep(min(1.0, seconds))
            seconds -= 1.0

    def drop(self) -> None:
        """Forget a device that has died."""
        self._device = None
        self._died = True

    def restart(self) -> None:
        """End the device's process; the next device is a new one's."""
        if self._device is not None:
            self._device.close()
            self._device = None

    def idle(self) -> None:
        """There is nothing to time at the moment; a chip that others wait for is given back."""

    def close(self) -> None:
        """Free the chip, for good."""
        self._closed = True
        if self._device is not None:
            self._device.close()
            self._device = None
