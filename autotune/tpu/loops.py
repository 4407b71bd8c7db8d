"""A pallas call's listing as a tree of loops, each with the bundles of its own body."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from autotune.tpu.schedule import MAX_DEPTH, ListingError, bundles_of, lines_of, require_whole

# Address, mark of a loop's first bundle (LB), a '>' for each loop around, and whether the bundle is empty.
_BUNDLE = re.compile(r"\s{0,64}(?:0x[0-9a-f]{1,16}|0)\s{1,64}([A-Z]{2})?\s{0,64}:\s{0,64}(>*)(\s{0,64}\{\})?")


@dataclasses.dataclass
class Loop:
    """bundles: core cycles of one pass through the body, without the loops in it. inner: those, in order.

    The root is the call itself. Bodies under a condition count as if they always ran.
    """

    bundles: int = 0
    inner: list[Loop] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        """Bundles of the whole listing."""
        return self.bundles + sum(loop.total for loop in self.inner)


def read_loops(folder: Path, kernel_name: str) -> Loop:
    """The loops of the one call whose name begins so and whose listings are in the folder.

    Raises:
      ListingLost: a listing is missing or cut off.
      ListingError: there are several, or one is not in the known form.
    """
    bundles, total = bundles_of(folder, kernel_name)
    root = parse_loops(bundles)
    require_whole(bundles, root.total, total)
    return root


def parse_loops(path: Path) -> Loop:
    """The tree of a final-bundles listing.

    An empty bundle carries no '>' wherever it stands: it belongs to the loop that it stands in. Two loops of
    one depth are told apart by the mark LB of the second one's first bundle.

    Raises:
      ListingError: it holds no bundle, or more than MAX_DEPTH loops in each other.
    """
    root = Loop()
    stack = [root]
    for line in lines_of(path):
        match = _BUNDLE.match(line)
        if not match:
            continue
        mark, depth = match[1], len(match[2])
        if depth > MAX_DEPTH:
            raise ListingError(f"the compiler's listing {path.name!r} has a bundle in {depth} loops")
        if depth or match[3] is None:
            del stack[depth + 1 :]
            if mark == "LB" and len(stack) > depth >= 1:
                del stack[depth:]
            while len(stack) <= depth:
                loop = Loop()
                stack[-1].inner.append(loop)
                stack.append(loop)
        stack[-1].bundles += 1
    if not root.total:
        raise ListingError(f"the compiler's listing {path.name!r} holds no bundle")
    return root
