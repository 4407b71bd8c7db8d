"""Time limits of other processes, on a clock that does what a test says."""

from __future__ import annotations

from autotune.io.patience import STEP_SECONDS, Patience


class Waiting:
    """A clock, and waits that take as long as they are given, but for those that are listed by number."""

    def __init__(self, stops: dict[int, float], comes_after: float = float("inf")) -> None:
        self.now, self.waits = 0.0, 0
        self._stops, self._comes_after = stops, comes_after

    def came(self, seconds: float) -> bool:
        self.waits += seconds > 0
        self.now += self._stops.get(self.waits, seconds) if seconds else 0.0
        return self.now >= self._comes_after and seconds == 0.0

    def run(self, limit: float) -> bool:
        return Patience(limit, lambda: self.now).waits(self.came)


def test_a_limit_is_as_long_as_it_says() -> None:
    waiting = Waiting({})
    assert not waiting.run(3.2)
    assert waiting.now == 3.2


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    waiting = Waiting({2: 3600.0, 5: STEP_SECONDS + 0.1})
    assert not waiting.run(3.0)
    assert waiting.waits == 3.0 / STEP_SECONDS


def test_many_short_stops_do_not_add_up() -> None:
    waiting = Waiting(dict.fromkeys(range(1, 7), STEP_SECONDS + 1.0))
    assert not waiting.run(3.0)
    assert waiting.now == 9.0


def test_an_answer_that_is_there_at_the_end_of_the_limit_is_taken() -> None:
    assert Waiting({}, comes_after=3.0).run(3.0)
