"""How long the compiles of a sweep will take: what is expected, scaled by how long the ones before took."""

from __future__ import annotations

# Expected seconds for which the expectation is trusted as it stands: a share of the sweep's, within bounds.
# The first compiles are of small programs, of which half the time is not the compiler's: by those alone, a
# sweep seems three times as long.
TRUSTED_SHARE = 0.15
TRUSTED_SECONDS = 10.0, 200.0
# Of a worker, before its first compile: it imports jax and loads libtpu.
START_SECONDS = 2.0


def seconds_left(elapsed: float, done: float, left: float, jobs: int) -> float:
    """Seconds until the last compile ends.

    elapsed: seconds since the workers were started. done, left: expected seconds, on one core, of the
    programs that are compiled and of those still to be. jobs: compiles at once.
    """
    compiling = max(0.0, elapsed - START_SECONDS)
    least, most = TRUSTED_SECONDS
    trusted = min(max(TRUSTED_SHARE * (done + left), least), most)
    slower = (compiling * jobs + trusted) / (done + trusted)
    return left / jobs * slower + max(0.0, START_SECONDS - elapsed)


def seconds_of(expected: float, ok: bool, took: float | None) -> float:
    """What a compile adds to the expected seconds that are done.

    ok: whether it ended in an executable. One that overflows or is refused may be done long before it was
    expected to, which says nothing of how long the others take.
    """
    return expected if ok else min(expected, took or 0.0)
