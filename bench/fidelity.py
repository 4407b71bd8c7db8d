"""The model against hardware: does it rank block sizes as the winners in JAX's published tables do?

    python -m bench.fidelity [--fit] [--plots docs/model]

For each published key the candidates that were timed for it are ranked by the model, with the compiler's
schedule of bench/data. A key counts as first (first three) if the published winner is the model's first
(among its first three); its regret is by how much the model calls the published winner slower than its own
first. The keys of 'TPU v6' are split in two halves by a hash of head layout and page size; constants may be
fitted (--fit) on the one, and are reported on the other and, with the v5e compiler, on 'TPU v5'.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from autotune.kernel.jax_rpa.call import published_table
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.kernel.workload import Sequence, Workload
from autotune.model.cost import CALIBRATION, Calibration, Terms, seconds, stack, terms
from autotune.tpu import generations
from bench import cycles

SPLIT_SEED = 0  # chosen before any result was looked at; never to be changed
FITTING, HELD_OUT = 0, 1
TABLES = {"TPU v6": "v6e", "TPU v5": "v5e"}
DECODES = 34


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
    return Workload(
        "timed", (*[Sequence(1, model_len)] * DECODES, Sequence(max(1, tokens - DECODES), model_len))
    )


class Key(NamedTuple):
    """One published key: what was timed, and what won."""

    key: TableKey
    candidates: list[BlockSizes]
    winner: int
    terms: list[Terms]


def load(
    table: str, target: str, batch: Callable[[TableKey], Workload] = timed_batch
) -> tuple[list[Key], int]:
    """The keys of a published table with more than one candidate, and how many lack a program's cycles."""
    generation = generations.by_name(target)
    frame = cycles.read(target)
    known = {
        tuple(line[:-2]): tuple(int(c) for c in line[-1]) if line[-2] == "ok" else None
        for line in frame[[*cycles.PROGRAM_COLUMNS, "status", "cycles"]].itertuples(index=False, name=None)
    }
    keys, lacking = [], 0
    for key, winner in published_table()[table].items():
        blocks = cycles.candidates(key)
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


class Ranked:
    """Keys with their candidates laid out in one array, so that a model is evaluated at once."""

    def __init__(self, keys: list[Key]) -> None:
        self.keys = keys
        sizes = [len(k.candidates) for k in keys]
        self.first = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(int)
        self.of = np.repeat(np.arange(len(keys)), sizes)  # the key of each candidate
        self.winner = self.first + np.array([k.winner for k in keys])
        self.terms = stack(t for k in keys for t in k.terms)

    def predict(self, calibration: Calibration) -> np.ndarray:
        return np.asarray(seconds(self.terms, calibration))

    def best(self, predicted: np.ndarray) -> np.ndarray:
        return np.minimum.reduceat(predicted, self.first)

    def ranks(self, predicted: np.ndarray, winner: np.ndarray | None = None) -> np.ndarray:
        """Rank of each key's winner, from 0."""
        mine = predicted[self.winner if winner is None else winner][self.of]
        return np.add.reduceat((predicted < mine * (1 - 1e-12)).astype(int), self.first)

    def lost(self, predicted: np.ndarray, winner: np.ndarray | None = None) -> np.ndarray:
        """Seconds that each key's winner is slower than the model's first."""
        return predicted[self.winner if winner is None else winner] - self.best(predicted)

    def surprise(self, predicted: np.ndarray, noise: float, relative: float) -> float:
        """Mean negative log likelihood of the winners, if timings carry Gumbel noise of this scale.

        noise: seconds; relative: share of the key's best latency, added to it.
        """
        best = self.best(predicted)
        z = (best[self.of] - predicted) / (noise + relative * best)[self.of]
        total = np.add.reduceat(np.exp(z), self.first)
        return float((np.log(total) - z[self.winner]).mean())


class Figures(NamedTuple):
    keys: int
    first: float
    first_three: float
    median: float
    mean: float
    p90: float
    p90_us: float

    def __str__(self) -> str:
        return (
            f"{self.keys:4d} keys  first {self.first:4.0%}  first three {self.first_three:5.1%}  "
            f"regret: median {self.median:.1%}, mean {self.mean:.1%}, p90 {self.p90:.1%} "
            f"({self.p90_us:.1f} us)"
        )


def figures(ranked: Ranked, predicted: np.ndarray, winner: np.ndarray | None = None) -> Figures:
    ranks, lost = ranked.ranks(predicted, winner), ranked.lost(predicted, winner)
    regret = lost / ranked.best(predicted)
    return Figures(
        len(ranked.keys),
        float((ranks == 0).mean()),
        float((ranks < 3).mean()),
        float(np.median(regret)),
        float(regret.mean()),
        float(np.percentile(regret, 90)),
        float(np.percentile(lost, 90)) * 1e6,
    )


def fit(ranked: Ranked, start: Calibration = CALIBRATION) -> tuple[Calibration, float, float]:
    """copy_seconds, and the noise of the timings (seconds, and share), of greatest likelihood."""
    from scipy.optimize import minimize

    def parts(x: np.ndarray) -> tuple[Calibration, float, float]:
        copy, noise, relative = np.exp(x)
        return dataclasses.replace(start, copy_seconds=float(copy)), float(noise), float(relative)

    def objective(x: np.ndarray) -> float:
        calibration, noise, relative = parts(x)
        return ranked.surprise(ranked.predict(calibration), noise, relative)

    best = min(
        (
            minimize(objective, np.log([copy, 5e-6, 0.01]), method="Nelder-Mead", options={"maxiter": 2000})
            for copy in (0.3e-6, 0.6e-6, 1.2e-6)
        ),
        key=lambda found: float(found.fun),
    )
    return parts(best.x)


def contradictions(winners: dict[TableKey, BlockSizes]) -> tuple[int, int, int]:
    """(pairs, same, contradictory) of keys that differ only in idle query blocks.

    Where max_num_batched_tokens is at least max_model_len, doubling it adds nothing to the timed batch but
    query blocks with nothing to do. There are fewer of those the larger the query block. So the winner
    may only move to more queries; one that moves otherwise was noise, whatever a model says.
    """
    pairs = same = wrong = 0
    for key, blocks in winners.items():
        doubled = winners.get(key._replace(max_num_batched_tokens=2 * key.max_num_batched_tokens))
        if doubled is None or key.max_num_batched_tokens < key.max_model_len:
            continue
        pairs += 1
        same += doubled == blocks
        wrong += doubled != blocks and doubled.num_queries_per_blk <= blocks.num_queries_per_blk
    return pairs, same, wrong


def perfect(ranked: Ranked, predicted: np.ndarray, noise: float, repeats: int = 50) -> tuple[Figures, float]:
    """What a perfect model would score against winners timed with this noise, and their contradictions.

    The predictions are taken for the truth, winners are drawn from them with Gumbel noise (seconds).
    """
    rng = np.random.default_rng(0)
    scored, wrong = [], []
    for _ in range(repeats):
        timed = predicted - noise * rng.gumbel(size=len(predicted))
        lowest = np.minimum.reduceat(timed, ranked.first)
        winner = np.flatnonzero(timed == lowest[ranked.of])
        scored.append(figures(ranked, predicted, winner))
        drawn = {
            k.key: k.candidates[w - f] for k, w, f in zip(ranked.keys, winner, ranked.first, strict=True)
        }
        wrong.append(contradictions(drawn)[2])
    return Figures(*(float(x) for x in np.mean(scored, axis=0)))._replace(keys=len(ranked.keys)), float(
        np.mean(wrong)
    )


def noise_by_contradictions(ranked: Ranked, predicted: np.ndarray) -> float:
    """The noise (seconds) at which winners drawn from the predictions contradict one another as often as the
    published ones do."""
    observed = contradictions({k.key: k.candidates[k.winner] for k in ranked.keys})[2]
    low, high = 0.0, 40e-6
    for _ in range(12):
        middle = (low + high) / 2
        if perfect(ranked, predicted, middle)[1] < observed:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def earlier(table: str) -> dict[TableKey, BlockSizes]:
    """The winners of an earlier published table, of jax 0.6.2: other timings of some of the keys."""
    held = json.loads((cycles.DATA / "published_jax_0.6.2.json").read_text())
    return {TableKey(*v[1:-1]): BlockSizes(*v[-1]) for v in held["values"] if v[0] == table}


def repeated(table: str, keys: list[Key], calibration: Calibration) -> None:
    """What the published tables say of keys that were timed twice, and the model of the same keys."""
    before = earlier(table)
    both = [k for k in keys if k.key in before and before[k.key] in k.candidates]
    agreed = [k for k in both if before[k.key] == k.candidates[k.winner]]
    published = published_table()[table]
    same = sum(published[key] == blocks for key, blocks in before.items())
    print(f"\n{table!r}: {len(before)} keys are in the table of jax 0.6.2 too, {same} with the same winner")
    chosen = {"all of them that bench/data has": both, "those with the same winner": agreed}
    if table == "TPU v6":
        chosen["of these, the held-out half"] = [k for k in agreed if half(k.key) == HELD_OUT]
    for name, some in chosen.items():
        if not some:
            continue
        ranked = Ranked(some)
        print(f"  model, {name:32}", figures(ranked, ranked.predict(calibration)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit copy_seconds on the fitting half, and use it")
    parser.add_argument("--fitting-only", action="store_true", help="do not look at the held-out half or v5")
    parser.add_argument("--plots", type=Path, help="folder for the plots of docs/model.md")
    args = parser.parse_args()
    loaded = {table: load(table, target) for table, target in TABLES.items()}
    parts: dict[str, list[Key]] = {}
    for name, wanted in (("fitting half", FITTING), ("held-out half", HELD_OUT)):
        parts[f"'TPU v6' {name}"] = [k for k in loaded["TPU v6"][0] if half(k.key) == wanted]
    parts["'TPU v5', v5e compiler"] = loaded["TPU v5"][0]
    if args.fitting_only:
        parts = dict([next(iter(parts.items()))])
    calibration = CALIBRATION
    fitting = Ranked(parts["'TPU v6' fitting half"])
    noise, relative = 6e-6, 0.01
    if args.fit:
        calibration, noise, relative = fit(fitting)
        print(
            f"fitted: copy_seconds {calibration.copy_seconds:.3g}; noise of a timing {noise * 1e6:.1f} us + "
            f"{relative:.1%}; surprise {fitting.surprise(fitting.predict(calibration), noise, relative):.3f}"
        )
    bare = dataclasses.replace(calibration, copy_seconds=0.0, bandwidth_fraction=1e9)
    for name, keys in parts.items():
        for reachable in (True, False):
            chosen = [k for k in keys if cycles.reachable(k.key) == reachable]
            if not chosen:
                continue
            ranked = Ranked(chosen)
            print(f"\n{name}, keys that a look-up {'reaches' if reachable else 'cannot reach'}")
            predicted = ranked.predict(calibration)
            print("  model                    ", figures(ranked, predicted))
            print("  schedule, copies free    ", figures(ranked, ranked.predict(bare)))
            pairs, _, wrong = contradictions({k.key: k.candidates[k.winner] for k in chosen})
            print(
                f"  published winners: {pairs} pairs that may differ one way only, {wrong} differ the other"
            )
            if pairs >= 20:
                noise = noise_by_contradictions(ranked, predicted)
                print(f"  noise of a timing that makes as many do so: {noise * 1e6:.1f} us")
                print("  a perfect model at that  ", perfect(ranked, predicted, noise)[0])
    if not args.fitting_only:
        for table, (keys, _) in loaded.items():
            repeated(table, keys, calibration)
    for table, (_, lacking) in loaded.items():
        print(f"\n{table!r}: {lacking} keys left out, as bench/data lacks a program of theirs")
    if args.plots:
        from bench import plots

        ranked_parts = {name: Ranked(keys) for name, keys in parts.items()}
        plots.draw(args.plots, ranked_parts, calibration, noise_by_contradictions)


if __name__ == "__main__":
    main()
