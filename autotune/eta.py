"""How long the compiles of a sweep will take: what is expected, scaled by how long the ones before took."""

from __future__ import annotations

# Expected seconds for which the expectation is trusted as it stands. The first compiles are of small
# programs, of which half the time is not the compiler's: by those alone, a sweep seems three times as long.
TRUSTED_SECONDS = 60.0
# Of a worker, before its first compile: it imports jax and loads libtpu.
START_SECONDS = 2.0


def seconds_left(elapsed: float, done: float, left: float, jobs: int) -> float:
    """Seconds until the last compile ends.

    elapsed: seconds since the workers were started. done, left: expected seconds, on one core, of the
    programs that are compiled and of those still to be. jobs: compiles at once.
    """
    compiling = max(0.0, elapsed - START_SECONDS)
    slower = (compiling * jobs + TRUSTED_SECONDS) / (done + TRUSTED_SECONDS)
    return left / jobs * slower + max(0.0, START_SECONDS - elapsed)
