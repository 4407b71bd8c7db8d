"""The cost model against winners that were timed on hardware: JAX's tables of April, June and July 2025.

    python -m bench.fidelity [--fit] [--fitting-only] [--plots docs/model]

Each key's candidates are ranked by the model, with the compiler's schedules in bench/data. A key counts as
first (first three) if the published winner is the model's first (among its first three). Its regret is by how
much the model calls the published winner slower than its own first. Beside it stand rules that need no model,
and the ceiling: what the truth itself would score against winners that were timed with noise. Keys are in two
halves by a hash of dtypes, heads, head_dim and page size: constants are fitted (--fit) on one, and reported
on the other. Brackets are 95% intervals: of figures by a bootstrap over layouts, of a ceiling by the
contradictions among the winners.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.stats import chi2

from autotune.kernel import workload
from autotune.kernel.jax_rpa.call import default_blocks, published_table
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.kernel.workload import Workload
from autotune.model.cost import CALIBRATIONS, Calibration, Terms, seconds, stack, terms
from autotune.tpu import generations
from bench import cycles

SPLIT_SEED = 0  # chosen before any result was looked at; never to be changed
FITTING, HELD_OUT = 0, 1
TABLES = {"v6e": "TPU v6", "v5e": "TPU v5"}
DECODES = 34
RESAMPLES = 1000
DRAWS = 40  # of winners with noise, for a ceiling
MOST_PAGES = 16  # that most keys were timed with; those won by more had up to 128

Winners = Mapping[TableKey, BlockSizes]


def half(key: TableKey) -> int:
    """FITTING or HELD_OUT; keys that share dtypes, heads and page size are in one half."""
    text = "|".join(map(str, (SPLIT_SEED, *key[:6])))
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 2


def timed_batch(key: TableKey) -> Workload:
    """The batch on which the published winners were timed, as far as is known.

    34 decodes, then one chunk of a prompt that fills max_num_batched_tokens or max_model_len, all at full
    context. This is the one example in a later, public version of the script that made the tables
    (tpu-inference). The published winners bear it out: see docs/model.md.
    """
    tokens, model_len = min(key.max_num_batched_tokens, key.max_model_len), key.max_model_len
    one, chunk = workload.Sequence(1, model_len), workload.Sequence(max(1, tokens - DECODES), model_len)
    return Workload("timed", (*[one] * DECODES, chunk))


@functools.cache
def published(target: str) -> dict[str, Winners]:
    """The three tables of a target by month: the keys that a look-up reaches."""
    found: dict[str, Winners] = {}
    for month, number in (("April", "04"), ("June", "06")):
        held = json.loads((cycles.DATA / f"published_2025_{number}.json").read_text())["tables"]
        found[month] = {TableKey(*line[:8]): BlockSizes(*line[8:]) for line in held[TABLES[target]]}
    found["July"] = published_table()[TABLES[target]]
    return {
        month: {key: blocks for key, blocks in table.items() if cycles.reachable(key)}
        for month, table in found.items()
    }


WIDE = "April and June, more than 16 pages"
AGREED = "June and July agree"
MAJORITY = "majority of the three"


def judges(target: str) -> dict[str, Winners]:
    """What the model is judged by: the tables, and the keys on which tables agree."""
    april, june, july = published(target).values()
    votes = {key: Counter(t[key] for t in (april, june, july) if key in t) for key in {*april, *june, *july}}
    common = {key: count.most_common(1)[0] for key, count in sorted(votes.items())}
    return {
        "April": {key: blocks for key, blocks in april.items() if not _wide(blocks)},
        "June": {key: blocks for key, blocks in june.items() if not _wide(blocks)},
        "July": july,
        MAJORITY: {key: blocks for key, (blocks, n) in common.items() if n > 1 and not _wide(blocks)},
        AGREED: {key: blocks for key, blocks in june.items() if july.get(key) == blocks},
        WIDE: {key: blocks for key, blocks in {**june, **april}.items() if _wide(blocks)},
    }


def _wide(winner: BlockSizes) -> bool:
    return winner.num_kv_pages_per_blk > MOST_PAGES


class Key(NamedTuple):
    """One published key: what was timed, and what won."""

    key: TableKey
    candidates: list[BlockSizes]
    winner: int
    terms: list[Terms]


def load(
    target: str, winners: Winners, batch: Callable[[TableKey], Workload] = timed_batch
) -> tuple[list[Key], int]:
    """The keys with more than one candidate, and how many lack a program's cycles in bench/data."""
    generation, known = generations.by_name(target), cycles.known(target)
    keys, lacking = [], 0
    for key, winner in winners.items():
        blocks = cycles.candidates(key, winner)
        if len(blocks) < 2:
            continue
        if any((*key[:6], *b) not in known for b in blocks):
            lacking += 1
            continue
        fitting = [b for b in blocks if known[*key[:6], *b]]
        problem, work = key.canonical_problem(), batch(key)
        made = [terms(generation, problem, b, work, known[*key[:6], *b] or ()) for b in fitting]
        keys.append(Key(key, fitting, fitting.index(winner), made))
    return keys, lacking


def part(keys: Iterable[Key], wanted: int) -> list[Key]:
    """The keys of one half."""
    return [k for k in keys if half(k.key) == wanted]


class Ranked:
    """Keys with their candidates laid out in one array, so that a model is evaluated at once."""

    def __init__(self, keys: list[Key]) -> None:
        self.keys = keys
        sizes = [len(k.candidates) for k in keys]
        self.first = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(int)
        self.of = np.repeat(np.arange(len(keys)), sizes)  # the key of each candidate
        self.winner = self.first + np.array([k.winner for k in keys])
        self.terms = stack(t for k in keys for t in k.terms)
        names = sorted({k.key[:6] for k in keys})
        self.layouts = np.array([names.index(k.key[:6]) for k in keys])

    def predict(self, calibration: Calibration) -> np.ndarray:
        return np.asarray(seconds(self.terms, calibration))

    def best(self, predicted: np.ndarray) -> np.ndarray:
        return np.minimum.reduceat(predicted, self.first)

    def firsts(self, values: np.ndarray) -> np.ndarray:
        """The candidate of each key with the least value."""
        lowest = np.flatnonzero(values == self.best(values)[self.of])
        return lowest[np.unique(self.of[lowest], return_index=True)[1]]

    def ranks(self, predicted: np.ndarray, winner: np.ndarray | None = None) -> np.ndarray:
        """Rank of each key's winner, from 0."""
        mine = predicted[self.winner if winner is None else winner][self.of]
        return np.add.reduceat((predicted < mine * (1 - 1e-12)).astype(int), self.first)

    def regret(self, predicted: np.ndarray, winner: np.ndarray | None = None) -> np.ndarray:
        """By what share of the model's first each key's winner is slower."""
        return predicted[self.winner if winner is None else winner] / self.best(predicted) - 1

    def surprise(self, predicted: np.ndarray, noise: float) -> float:
        """Negative log likelihood of the winners, if a timing carries Gumbel noise of this scale, seconds."""
        z = (self.best(predicted)[self.of] - predicted) / noise
        return float((np.log(np.add.reduceat(np.exp(z), self.first)) - z[self.winner]).sum())


class Figures(NamedTuple):
    """Shares of keys, and shares of a latency."""

    first: float
    first_three: float
    median: float
    p90: float


def figures(ranks: np.ndarray, regret: np.ndarray) -> Figures:
    median, p90 = map(float, np.percentile(regret, (50, 90)))
    return Figures(float((ranks == 0).mean()), float((ranks < 3).mean()), median, p90)


class Scored(NamedTuple):
    """Figures with the ends of their 95% intervals."""

    keys: int
    value: Figures
    low: Figures
    high: Figures


def score(ranked: Ranked, calibration: Calibration) -> Scored:
    """The figures of a model; intervals by a bootstrap over layouts."""
    predicted = ranked.predict(calibration)
    ranks, regret = ranked.ranks(predicted), ranked.regret(predicted)
    members = [np.flatnonzero(ranked.layouts == n) for n in range(ranked.layouts.max() + 1)]
    rng = np.random.default_rng(0)
    resampled = []
    for _ in range(RESAMPLES):
        some = np.concatenate([members[n] for n in rng.integers(len(members), size=len(members))])
        resampled.append(figures(ranks[some], regret[some]))
    low, high = (Figures(*map(float, np.percentile(resampled, q, axis=0))) for q in (2.5, 97.5))
    return Scored(len(ranked.keys), figures(ranks, regret), low, high)


# Rules that need no model.

Rule = Callable[[Key], BlockSizes]


def rules(target: str, winners: Winners) -> dict[str, Rule]:
    """Each gives one of a key's candidates; JAX's default is clamped to the most pages that they have."""
    default = default_blocks(generations.by_name(target).version)
    by_layout: dict[tuple[object, ...], Counter[BlockSizes]] = {}
    for key, blocks in winners.items():
        by_layout.setdefault(key[:6], Counter())[blocks] += 1
    total = sum(by_layout.values(), Counter[BlockSizes]())

    def todays(k: Key) -> BlockSizes:
        pages = max(b[0] for b in k.candidates if b[0] <= default[0])
        return BlockSizes(pages, default[1])

    def largest(k: Key) -> BlockSizes:
        return max(k.candidates, key=lambda b: (b[0], -b[1]))

    def elsewhere(k: Key) -> BlockSizes:
        others = total - by_layout[k.key[:6]]
        return max(k.candidates, key=lambda blocks: others[blocks])

    return {
        "JAX's default": todays,
        "largest pages, 32 queries": largest,
        "commonest in other layouts": elsewhere,
    }


def hits(keys: list[Key], rule: Rule) -> float:
    """The share of keys on which a rule gives the published winner."""
    return sum(rule(k) == k.candidates[k.winner] for k in keys) / len(keys)


# What noise does to winners.


def contradictions(winners: Winners) -> tuple[int, int]:
    """(pairs, contradictory) of keys that differ only in idle query blocks.

    Where max_num_batched_tokens is at least max_model_len, doubling it adds nothing to the timed batch but
    query blocks with nothing to do. There are fewer of those the larger the query block. So the winner
    may only move to more queries; one that moves otherwise was noise, whatever a model says.
    """
    pairs = wrong = 0
    for key, blocks in winners.items():
        doubled = winners.get(key._replace(max_num_batched_tokens=2 * key.max_num_batched_tokens))
        if doubled is None or key.max_num_batched_tokens < key.max_model_len:
            continue
        pairs += 1
        wrong += doubled != blocks and doubled.num_queries_per_blk <= blocks.num_queries_per_blk
    return pairs, wrong


def drawn(ranked: Ranked, predicted: np.ndarray, noise: float, seed: int) -> np.ndarray:
    """Winners, if the predictions are the truth and a timing carries Gumbel noise (seconds)."""
    rng = np.random.default_rng(seed)
    return ranked.firsts(predicted - noise * rng.gumbel(size=len(predicted)))


def noise_interval(ranked: Ranked, predicted: np.ndarray) -> tuple[float, float]:
    """The noise (seconds, at least and at most) with which drawn winners contradict one another as often.

    The number of contradictions is taken as Poisson's, with its 95% interval.
    """
    _, seen = contradictions({k.key: k.candidates[k.winner] for k in ranked.keys})
    wanted = chi2.ppf(0.025, 2 * seen) / 2 if seen else 0.0, chi2.ppf(0.975, 2 * seen + 2) / 2

    def expected(noise: float) -> float:
        counts = []
        for seed in range(DRAWS):
            winner = drawn(ranked, predicted, noise, seed) - ranked.first
            found = {k.key: k.candidates[w] for k, w in zip(ranked.keys, winner, strict=True)}
            counts.append(contradictions(found)[1])
        return float(np.mean(counts))

    scales = np.arange(0, 41) * 0.5e-6
    counts = np.maximum.accumulate([expected(scale) for scale in scales])
    low, high = (float(np.interp(count, counts, scales)) for count in wanted)
    return low, high


def ceiling(ranked: Ranked, predicted: np.ndarray, noises: Sequence[float], agreeing: int) -> Figures:
    """What the truth scores against winners on which so many of several tables agree.

    noises: seconds, of each table's timings.
    """
    ranks, regret = [], []
    for seed in range(DRAWS):
        tables = np.array([drawn(ranked, predicted, n, 100 * seed + i) for i, n in enumerate(noises)])
        votes = (tables[:, None] == tables[None]).sum(axis=0)
        winner = tables[votes.argmax(axis=0), np.arange(len(ranked.keys))]
        kept = votes.max(axis=0) >= agreeing
        ranks.append(ranked.ranks(predicted, winner)[kept])
        regret.append(ranked.regret(predicted, winner)[kept])
    return figures(np.concatenate(ranks), np.concatenate(regret))


# The fit.

LEAST_NOISE = 1e-6  # else one contradiction in a table of little noise would outweigh all else


class Fit(NamedTuple):
    """Constants of greatest likelihood (seconds), the noise of April's timings and of others', and nats."""

    copy_seconds: float
    kv_block_seconds: float
    noise_april: float
    noise: float
    surprise: float = math.nan


def surprise(tables: Mapping[str, Ranked], x: Fit, start: Calibration) -> float:
    """Nats of the winners of several tables, by month."""
    calibration = dataclasses.replace(start, copy_seconds=x.copy_seconds, kv_block_seconds=x.kv_block_seconds)
    noises = {month: LEAST_NOISE + (x.noise_april if month == "April" else x.noise) for month in tables}
    return sum(r.surprise(r.predict(calibration), noises[month]) for month, r in tables.items())


# Where a search for the likeliest constants starts, seconds.
STARTS = {"copy_seconds": (0.25e-6, 0.6e-6), "noise_april": (1e-6,), "noise": (6e-6,)}
CORE_STARTS = {"kv_block_seconds": (0.05e-6, 0.3e-6)}


def fit(tables: Mapping[str, Ranked], start: Calibration, **fixed: float) -> Fit:
    """The constants under which the winners are likeliest, but for those that are fixed."""
    free = {name: tried for name, tried in {**STARTS, **CORE_STARTS}.items() if name not in fixed}

    def parts(logs: np.ndarray) -> Fit:
        return Fit(**dict(zip(free, map(float, np.exp(logs)), strict=True)), **fixed)

    found = [
        minimize(
            lambda logs: surprise(tables, parts(logs), start),
            np.log(first),
            method="Nelder-Mead",
            options={"maxiter": 4000, "xatol": 1e-3, "fatol": 1e-3},
        )
        for first in itertools.product(*free.values())
    ]
    best = min(found, key=lambda one: float(one.fun))
    return parts(best.x)._replace(surprise=float(best.fun))


def interval(tables: Mapping[str, Ranked], start: Calibration, best: Fit, name: str, **fixed: float) -> str:
    """A constant and its 95% interval by the profile of the likelihood, in microseconds."""
    scales = np.arange(0, 101) * 0.01e-6
    near = [x for x in scales if abs(x - getattr(best, name)) < 0.3e-6]
    inside = [
        x
        for x in near
        if fit(tables, start, **fixed, **{name: x}).surprise < best.surprise + chi2.ppf(0.95, 1) / 2
    ]
    return f"{getattr(best, name) * 1e6:.2f} [{min(inside) * 1e6:.2f}, {max(inside) * 1e6:.2f}] us"


def fitting_tables(target: str) -> dict[str, Ranked]:
    """What a fit may look at: the fitting half of each table, without winners of more than 16 pages.

    Tables that are the same count once.
    """
    found: dict[str, Winners] = {}
    for month, winners in judges(target).items():
        if month in published(target) and winners not in found.values():
            found[month] = winners
    return {month: Ranked(part(load(target, winners)[0], FITTING)) for month, winners in found.items()}


def without(
    tables: Mapping[str, Ranked], layout: tuple[object, ...]
) -> tuple[dict[str, Ranked], dict[str, Ranked]]:
    """Tables without a layout, and of that layout alone."""

    def some(only: bool) -> dict[str, Ranked]:
        keys = {m: [k for k in r.keys if (k.key[:6] == layout) == only] for m, r in tables.items()}
        return {month: Ranked(chosen) for month, chosen in keys.items() if chosen}

    return some(False), some(True)


def report_fit(target: str) -> Calibration:
    """Fit on the fitting half; what the core's time a KV block gains on layouts left out decides on it."""
    start, tables = CALIBRATIONS[target], fitting_tables(target)
    folds = [
        without(tables, layout) for layout in sorted({k.key[:6] for r in tables.values() for k in r.keys})
    ]
    print(f"\n{target}: fitted to the fitting half, {len(folds)} layouts, of {', '.join(tables)}")
    found, left_out = [], []
    for fixed in ({"kv_block_seconds": 0.0}, {}):
        best = fit(tables, start, **fixed)
        found.append(best)
        left_out.append(sum(surprise(left, fit(kept, start, **fixed), start) for kept, left in folds))
        named = {"copy": "copy_seconds", **({} if fixed else {"core a KV block": "kv_block_seconds"})}
        said = (f"{word} {interval(tables, start, best, name, **fixed)}" for word, name in named.items())
        print(
            f"  {', '.join(said)}; noise {best.noise_april * 1e6:.1f} us (April), {best.noise * 1e6:.1f} us; "
            f"{best.surprise:.1f} nats, {left_out[-1]:.1f} on layouts left out"
        )
    print(f"  the core's time a KV block gains {left_out[0] - left_out[1]:.1f} nats on layouts left out")
    x = found[left_out[0] - left_out[1] > 2]
    return dataclasses.replace(start, copy_seconds=x.copy_seconds, kv_block_seconds=x.kv_block_seconds)


# The report.

HEAD = f"{'':36}{'keys':>5}{'first':>13}{'first three':>20}{'median':>9}{'p90':>13}"
# The tables that a judge's winners come from, and on how many of them these agree.
TABLES_OF = {MAJORITY: (("April", "June", "July"), 2), AGREED: (("June", "July"), 2), WIDE: (("April",), 1)}


def report(target: str, wanted: int, calibration: Calibration) -> None:
    """The figures of a half of the keys, by every judge."""
    print(f"\n{target}, {'held-out' if wanted == HELD_OUT else 'fitting'} half\n{HEAD}")
    noises = {}
    for month in ("April", "July"):
        ranked = Ranked(load(target, published(target)[month])[0])
        noises[month] = noise_interval(ranked, ranked.predict(calibration))
    noises["June"] = noises["July"]  # June's own winners have too few pairs
    for judge, winners in judges(target).items():
        keys, lacking = load(target, winners)
        if not (keys := part(keys, wanted)):
            continue
        ranked = Ranked(keys)
        s = score(ranked, calibration)
        print(
            f"{judge:36}{s.keys:5d}{s.value.first:6.0%} [{s.low.first:3.0%},{s.high.first:4.0%}]"
            f"{s.value.first_three:8.1%} [{s.low.first_three:4.0%},{s.high.first_three:4.0%}]"
            f"{s.value.median:7.1%}{s.value.p90:7.1%} [{s.low.p90:5.1%},{s.high.p90:6.1%}]"
            + (f"  {lacking} lack cycles" if lacking else "")
        )
        months, agreeing = TABLES_OF.get(judge, ((judge,), 1))
        least, most = (
            ceiling(ranked, ranked.predict(calibration), [noises[m][at] for m in months], agreeing)
            for at in (1, 0)
        )
        print(
            f"{'  the truth, timed with noise':41}{'':6} [{least.first:3.0%},{most.first:4.0%}]"
            f"{'':8} [{least.first_three:4.0%},{most.first_three:4.0%}]"
            f"{'':14} [{most.p90:5.1%},{least.p90:6.1%}]"
        )
        for rule, choose in rules(target, winners).items():
            print(f"  {rule:39}{hits(keys, choose):6.0%}")
    print(
        "noise of a timing, by contradictions: "
        + ", ".join(f"{m} {low * 1e6:.1f} to {high * 1e6:.1f} us" for m, (low, high) in noises.items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants on the fitting half, use them")
    parser.add_argument("--fitting-only", action="store_true", help="do not look at the held-out half")
    parser.add_argument("--plots", type=Path, help="folder for the plot of docs/model.md")
    args = parser.parse_args()
    for target in TABLES:
        calibration = report_fit(target) if args.fit else CALIBRATIONS[target]
        for wanted in (FITTING,) if args.fitting_only else (FITTING, HELD_OUT):
            report(target, wanted, calibration)
    if args.plots:
        from bench import plots

        plots.draw(args.plots)


if __name__ == "__main__":
    main()
