"""What is fuzzed: each reader of files and words that others may have made, and what it may answer."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.timing.profile import TraceError
from autotune.tpu.schedule import ListingError
from tests.fuzz import profiles, readers, rows
from tests.fuzz.mutate import Mutator
from tests.fuzz.readers import LONGEST_MESSAGE, MOST_LINES, Wrong


@dataclasses.dataclass(frozen=True)
class Target:
    """run: gives an input to the reader, in a folder of its own; raises what the reader raises. refusals:
    exceptions that are its documented answer. make: an input by name, seed and number, by default of the
    mutator. seconds: of processor time that one input may take, for a busy machine is no find; the parent of
    the child looks at the clock."""

    name: str
    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes, Path], object]
    refusals: tuple[type[Exception], ...] = (AutotuneError,)
    tokens: tuple[bytes, ...] = ()
    make: Callable[[str, int, int], bytes] | None = None
    seconds: float = 5.0

    def inputs(self) -> Callable[[int, int], bytes]:
        """Gives the input of a seed and a number."""
        if self.make is not None:
            return functools.partial(self.make, self.name)
        return functools.partial(Mutator(self.seeds(), self.tokens).input, self.name)

    def check(self, data: bytes, folder: Path) -> None:
        """Raises if the reader answers in another way than with a value or a short refusal."""
        try:
            self.run(data, folder)
        except self.refusals as error:
            message = str(error)
            lines = message.split("\n")  # several where each names a way out, as for heads that do not tile
            if not 1 <= len(lines) <= MOST_LINES or not all(line.isprintable() for line in lines):
                raise Wrong(f"a refusal that is not a few printable lines: {message[:300]!r}") from error
            if len(message) > LONGEST_MESSAGE:
                raise Wrong(f"a refusal of {len(message)} characters: {message[:300]!r}") from error


TARGETS = {
    target.name: target
    for target in (
        Target(
            "table",
            readers.table_seeds,
            readers.table,
            tokens=(b"TUNED_BLOCK_SIZES = {", b"PROVENANCE = {", b"'TPU v6'", b"None"),
        ),
        Target("config", readers.config_seeds, readers.config, tokens=readers.CONFIG_WORDS),
        Target(
            "keys",
            readers.key_seeds,
            readers.keys,
            tokens=(b"bfloat16", b"origin", b"max_model_len", b"[]", b"{}"),
        ),
        Target(
            "shape",
            readers.shape_seeds,
            readers.shape,
            tokens=(b"q_heads=", b"kv_heads=", b"page_size=", b"q_dtype="),
        ),
        Target(
            "words",
            lambda: list(readers.WORDS),
            readers.words,
            tokens=(b"%", b"MiB", b"?region=", b"s3://", b"@", b".."),
        ),
        Target(
            "names",
            lambda: [b"jax:TPU v6", b"v6e", b"llama-3.1-8b", b"/tmp/x.py:v5e"],
            readers.names,
            tokens=(b":", b"/"),
        ),
        Target(
            "batch", lambda: list(readers.BATCHES), readers.batch, tokens=(b"q_len,kv_len", b"1,1\n", b"#")
        ),
        Target(
            "calibration",
            readers.calibration_seeds,
            readers.calibration,
            tokens=(b'"TPU v6 lite": ', b'"origin": '),
        ),
        Target(
            "listing",
            readers.listing_seeds,
            readers.listing,
            refusals=(ListingError,),
            tokens=readers.LISTING_WORDS,
        ),
        Target("profile", profiles.sound, readers.profile, refusals=(TraceError,), make=profiles.profile),
        Target("row-files", rows.files, readers.row_files, tokens=(b"PAR1", b"ARROW:schema")),
        Target("row-values", rows.files, readers.row_values, make=rows.wild),
        Target("note", readers.note_seeds, readers.note, tokens=(b'"target": [', b'"keys": [', b'"time": ')),
        Target(
            "store",
            readers.store_seeds,
            readers.store,
            tokens=(b"SQLite format 3\0", b"CREATE VIEW verdicts AS SELECT 1"),
        ),
        Target(
            "verdict",
            readers.verdict_seeds,
            readers.verdict,
            refusals=(),
            tokens=(b'"schedule": ', b'"status": "ok"'),
        ),
    )
}

_BLANK = re.compile(r"\s+")


def named(kind: str, error: BaseException) -> str:
    """A find in a few words: what was raised, and where in this repository."""
    root = str(Path(__file__).parents[2])
    place, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name.startswith(root) and "/.venv" not in name and not name.endswith("/child.py"):
            place = f"{name[len(root) + 1 :]}:{trace.tb_lineno}"
        trace = trace.tb_next
    said = _BLANK.sub(" ", str(error))[:200]
    return f"{kind} {type(error).__name__} at {place}: {said}"
