"""The compiler's listing of a kernel: VLIW bundles by loop depth, and what it allocates.

libtpu writes two files that matter here when LIBTPU_INIT_ARGS holds `dump_flags`. The final bundles are one
line a core cycle, `0x1f LB: >> { ... }`: an address, an optional two-letter mark, and as many '>' as loops
around it. The listing before it, in which every allocation has its final place, has lines such as
`#allocation2 [shape = '...', space=vmem, size = 0x100000, offset = 0x20000, scoped, tag = '...']`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

_BUNDLES_PASS = "final_bundles"
_ALLOCATIONS_PASS = "post-delay-converter"
# libtpu counts a listing's bundles in a third file, whose name the pass filter lets through as well.
_ANALYSIS = f"schedule-analysis_{_BUNDLES_PASS}"
_TOTAL = re.compile(r"\s{0,64}total scheduled bundles:\s{0,64}(\d{1,12})")

# Every repeated part has a bound: a line that is not the compiler's costs no more than its length.
_BUNDLE = re.compile(r"\s{0,64}(?:0x[0-9a-f]{1,16}|0)\s{1,64}(?:[A-Z]{2})?\s{0,64}:\s{0,64}(>*)")
_ALLOCATION = re.compile(
    r"#allocation\d{1,9}\w{0,32} \[shape = '[^']{0,999}', space=(?P<space>\w{1,32}),"
    r" size = 0x(?P<size>[0-9a-f]{1,12}), offset = (?:0x)?(?P<offset>[0-9a-f]{1,12}), scoped"
)

# A listing is read a line at a time, so its size costs time, not memory; past these it is not one of ours.
MAX_LISTING_BYTES = 1 << 30
MAX_LINE_CHARS = 1 << 20
MAX_DEPTH = 32


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What one kernel's listing says.

    cycles: bundles by loop depth. For the ragged paged attention kernel depth 0 is once a call, 1 a grid
    step (one query block), 2 a sequence's visit to that block, 3 one KV block.
    vmem_bytes, smem_bytes: the end of the furthest scoped allocation, register spills included.
    """

    cycles: tuple[int, ...]
    vmem_bytes: int
    smem_bytes: int


class ListingError(Exception):
    """The files are not the listing of one kernel that this module knows."""


class ListingLost(ListingError):
    """A listing that the compiler wrote is not there, or not all of it: removed meanwhile, or a full disk."""


def dump_flags(folder: Path) -> str:
    """Flags for LIBTPU_INIT_ARGS that make the compiler write just these listings to a folder.

    The full dump takes ten times the compile's time; the pass filter keeps the two files that are read.
    """
    return (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex=.*({_BUNDLES_PASS}|{_ALLOCATIONS_PASS}).*"
    )


def read_schedule(folder: Path, kernel_name: str) -> Schedule:
    """The schedule of the one kernel of this name whose listings are in the folder.

    Raises:
      ListingLost: a listing is missing or cut off.
      ListingError: there are several, or one is not in the known form.
    """
    bundles, total = bundles_of(folder, kernel_name)
    cycles = parse_bundles(bundles)
    require_whole(bundles, sum(cycles), total)
    return Schedule(cycles, *allocations_of(folder, kernel_name))


def bundles_of(folder: Path, kernel_name: str) -> tuple[Path, int | None]:
    """The final-bundles listing of the one kernel of this name, and how many bundles the compiler counted.

    Raises:
      ListingLost, ListingError: as `read_schedule`.
    """
    bundles = _only(folder, f"*{kernel_name}*-{_BUNDLES_PASS}.txt")
    total = _total(folder, kernel_name)
    if total and not bundles.stat().st_size:
        raise ListingLost(f"the compiler's listing {bundles.name!r} is empty")
    return bundles, total


def require_whole(bundles: Path, read: int, total: int | None) -> None:
    """Raises ListingLost where fewer bundles were read than the compiler counted."""
    if total is not None and read < total:
        raise ListingLost(f"the compiler's listing {bundles.name!r} has {read} bundles of {total}")


def allocations_of(folder: Path, kernel_name: str) -> tuple[int, int]:
    """(VMEM, SMEM) bytes in use by the one kernel of this name; raises as `read_schedule`."""
    return parse_allocations(_only(folder, f"*{kernel_name}*-{_ALLOCATIONS_PASS}.txt"))


def _total(folder: Path, kernel_name: str) -> int | None:
    """How many bundles the compiler counted; None where it does not say."""
    for path in folder.glob(f"*{kernel_name}*-{_ANALYSIS}.txt"):
        for line in lines_of(path):
            if match := _TOTAL.match(line):
                return int(match[1])
    return None


def _only(folder: Path, pattern: str) -> Path:
    paths = list(folder.glob(pattern))
    if not paths:
        raise ListingLost(f"the compiler's listing {pattern!r} is not there")
    if len(paths) != 1:
        raise ListingError(f"the compiler wrote {len(paths)} listings {pattern!r}, not one")
    if paths[0].stat().st_size > MAX_LISTING_BYTES:
        raise ListingError(f"the compiler's listing {paths[0].name!r} is over {MAX_LISTING_BYTES} bytes")
    return paths[0]


def lines_of(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(MAX_LINE_CHARS + 1):
            if len(line) > MAX_LINE_CHARS:
                raise ListingError(
                    f"the compiler's listing {path.name!r} has a line over {MAX_LINE_CHARS} long"
                )
            yield line


def parse_bundles(path: Path) -> tuple[int, ...]:
    """Bundles by loop depth, from 0 to the deepest, of a final-bundles listing."""
    counts: dict[int, int] = {}
    for line in lines_of(path):
        if match := _BUNDLE.match(line):
            depth = len(match[1])
            if depth > MAX_DEPTH:
                raise ListingError(f"the compiler's listing {path.name!r} has a bundle in {depth} loops")
            counts[depth] = counts.get(depth, 0) + 1
    if not counts:
        raise ListingError(f"the compiler's listing {path.name!r} holds no bundle")
    return tuple(counts.get(depth, 0) for depth in range(max(counts) + 1))


def parse_allocations(path: Path) -> tuple[int, int]:
    """(VMEM, SMEM) bytes in use, from a listing whose allocations have offsets."""
    ends = {"vmem": 0, "smem": 0}
    for line in lines_of(path):
        for match in _ALLOCATION.finditer(line):
            end = int(match["offset"], 16) + int(match["size"], 16)
            ends[match["space"]] = max(ends.get(match["space"], 0), end)
    if not ends["vmem"]:
        raise ListingError(f"the compiler's listing {path.name!r} holds no VMEM allocation")
    return ends["vmem"], ends["smem"]
