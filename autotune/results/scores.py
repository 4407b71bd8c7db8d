"""What pairs of block sizes cost on each key, by the rows of a results folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from autotune.errors import UsageError
from autotune.io.folders import Folder
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results import dataset, schema, versions, winners
from autotune.results.rows import blocks_of, key_of, keys_of, pair_of, rows_of

if TYPE_CHECKING:
    import pandas as pd

# The rows behind the committed tables, a folder a generation, come with the package.
COMMITTED_ROWS = Path(__file__).parents[1] / "tables" / "rows"


class Score(NamedTuple):
    """One pair on one key: 1.0 is the best pair's; latency_us is the geometric mean over the workloads."""

    score: float
    latency_us: float
    source: str


class Failure(NamedTuple):
    """Why a pair has no score: its row's status, and the bytes of an overflow."""

    status: str
    needed_bytes: int | None
    limit_bytes: int | None
    error: str | None


@dataclasses.dataclass(frozen=True)
class Scoreboard:
    """Scores and failures by (generation, key) and pair, of one setting of the kernel.

    origin: where the rows are, for messages. vmem_limit_bytes: that of the rows; None for the compiler's own.
    """

    scores: dict[tuple[str, TableKey], dict[BlockSizes, Score]]
    failures: dict[tuple[str, TableKey], dict[BlockSizes, Failure]]
    origin: str
    vmem_limit_bytes: int | None = None

    def best(self, generation: str, key: TableKey) -> tuple[BlockSizes, Score] | None:
        """The best pair of a key and its score; None where no pair has one."""
        pairs = self.scores.get((generation, key))
        return min(pairs.items(), key=lambda item: (item[1].score, item[0])) if pairs else None

    def score(self, generation: str, key: TableKey, blocks: BlockSizes) -> Score | None:
        """What a pair, cut to the key's own call, costs there; None if the rows do not say."""
        clamped = blocks.clamped(key.pages_per_seq, key.max_num_batched_tokens)
        return self.scores.get((generation, key), {}).get(clamped)

    def failure(self, generation: str, key: TableKey, blocks: BlockSizes) -> Failure | None:
        """Why a pair does not run there; None if it does, or if the rows do not say."""
        clamped = blocks.clamped(key.pages_per_seq, key.max_num_batched_tokens)
        return self.failures.get((generation, key), {}).get(clamped)

    def generations(self) -> set[str]:
        """Those that a pair has a score on."""
        return {generation for generation, _ in self.scores}

    def sources(self) -> list[str]:
        """Where the latencies come from: measured, modelled, interpreted."""
        return sorted({score.source for pairs in self.scores.values() for score in pairs.values()})


def committed(generations: list[str], key: TableKey | None = None) -> Scoreboard | None:
    """The rows behind the committed tables of these generations, or of one key; None if there are none."""
    folders = [COMMITTED_ROWS / name for name in generations if (COMMITTED_ROWS / name).is_dir()]
    return read(folders, origin="the committed rows", key=key) if folders else None


def read(folders: Sequence[Folder], origin: str | None = None, key: TableKey | None = None) -> Scoreboard:
    """The scoreboard of some results folders.

    key: the only one that is scored; all by default.

    Raises:
      UsageError: a folder cannot be read, or the rows hold several settings of the kernel's arguments.
    """
    import numpy as np
    import pandas as pd

    columns = [*winners.READ_COLUMNS, "needed_bytes", "limit_bytes", "error"]
    frame = pd.concat([dataset.read(folder, columns) for folder in folders], ignore_index=True)
    if key is not None:
        mine = [frame[name] == value for name, value in key._asdict().items()]
        frame = frame[np.logical_and.reduce(mine)]
    return of(frame, origin or (str(folders[0]) if len(folders) == 1 else f"{len(folders)} results folders"))


def of(frame: pd.DataFrame, name: str) -> Scoreboard:
    """The scoreboard of some rows, as `results.read` gives them with `winners.READ_COLUMNS`.

    Raises:
      UsageError: the rows hold several settings of the kernel's arguments.
    """
    settings = rows_of(frame[schema.SETTING_COLUMNS].drop_duplicates())
    if len(settings) > 1:
        raise UsageError(
            f"{name} has rows of {len(settings)} settings of the kernel's static arguments, which cannot be "
            "compared: name folders of one setting"
        )
    scored = winners.scores(frame)
    return Scoreboard(
        _scores(scored),
        _failures(versions.deciding(frame, scored)),
        name,
        settings[0]["vmem_limit_bytes"] if settings else None,
    )


def _scores(scored: pd.DataFrame) -> dict[tuple[str, TableKey], dict[BlockSizes, Score]]:
    out: dict[tuple[str, TableKey], dict[BlockSizes, Score]] = {}
    for target, key, blocks, score, latency, source in zip(
        scored["target"],
        keys_of(scored),
        blocks_of(scored),
        scored["score"].tolist(),
        scored["latency_us"].tolist(),
        scored["source"],
        strict=True,
    ):
        out.setdefault((target, key), {})[blocks] = Score(score, latency, source)
    return out


def _failures(frame: pd.DataFrame) -> dict[tuple[str, TableKey], dict[BlockSizes, Failure]]:
    candidate = ["target", *schema.KEY_COLUMNS, *schema.BLOCK_COLUMNS]
    failed = frame[frame["status"] != schema.Status.OK].sort_values("time", kind="stable")
    failed = failed.drop_duplicates(candidate, keep="last")
    out: dict[tuple[str, TableKey], dict[BlockSizes, Failure]] = {}
    for line in rows_of(failed):
        key = key_of(line)
        blocks = pair_of(line)
        out.setdefault((line["target"], key), {})[blocks] = Failure(
            line["status"], line["needed_bytes"], line["limit_bytes"], line["error"]
        )
    return out
