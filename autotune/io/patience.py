"""Time limits that count only the time during which this process ran."""

from __future__ import annotations

import time
from collections.abc import Callable

STEP_SECONDS = 0.5


class Patience:
    """A time limit for another process, in seconds that this process saw pass.

    Where both are stopped for a while (Ctrl-Z, a frozen container, a paused machine), this must not cost the
    other process its time: a step counts for no longer than it was to take. clock: monotonic.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left = seconds
        self._clock = clock

    def waits(self, came: Callable[[float], bool]) -> bool:
        """Whether something came within the limit. came: waits for it for so many seconds at most."""
        while self._left > 0:
            step = min(STEP_SECONDS, self._left)
            start = self._clock()
            if came(step):
                return True
            self._left -= min(step, self._clock() - start)
        return came(0.0)
