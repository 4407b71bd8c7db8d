"""What a sweep that compiles only contenders misses, against one that compiles every candidate.

    python -m bench.exhaustive --out results/exhaustive [--target v6e] [--share 0.1] [--seed 0]
    python -m bench.exhaustive --known [--target v6e]

Of the canonical keys that JAX's published tables stand for, a random share is swept with --exhaustive. The
winners of `autotune sweep --preset published` are then looked up among all candidates of those keys, by the
model with every candidate's real cycles. Compile results are shared with your other sweeps (autotune cache);
from an empty store the exhaustive half takes hours. Both go on where they were stopped.

--known compiles nothing: the winners of the committed rows are looked up among those candidates of all keys
whose programs these rows or bench/data know.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from pathlib import Path

from autotune.kernel import workload
from autotune.keys import presets
from autotune.model.cost import latency_seconds
from autotune.results import dataset, schema, scores
from autotune.results.rows import key_of, pair_of, rows_of
from autotune.search import space
from autotune.tpu import generations
from bench import cycles


def sweep(*arguments: str) -> None:
    """Run `autotune sweep`; its progress goes to standard error, its table nowhere."""
    command = [sys.executable, "-m", "autotune", "sweep", *arguments]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def cycles_known(target: str) -> dict[tuple[object, ...], tuple[int, ...] | None]:
    """Cycles by program, as `cycles.known` has them, of bench/data and of the committed rows."""
    frame = dataset.read(scores.COMMITTED_ROWS / target)
    found = cycles.known(target)
    for line in rows_of(frame.drop_duplicates([*schema.KEY_COLUMNS[:6], *schema.BLOCK_COLUMNS, "status"])):
        program = (*key_of(line)[:6], *pair_of(line))
        if line["status"] == "ok":
            found[program] = tuple(line["cycles"])
        else:
            found.setdefault(program, None)
    return found


def among_the_known(target: str) -> None:
    """How the winners of the committed rows stand among all candidates whose cycles are known."""
    generation, board = generations.by_name(target), scores.committed([target])
    assert board is not None
    known = cycles_known(target)
    costs, candidates, lacking, whole = [], 0, 0, 0
    for key in sorted(presets.keys("published")):
        best = board.best(target, key)
        if best is None:
            continue
        problem = key.canonical_problem()
        batches = [workload.generate(name, problem) for name in workload.GENERATORS]
        pairs = {*space.candidates(problem, None, None, []), best[0]}
        there = [pair for pair in pairs if (*key[:6], *pair) in known]
        score = {
            pair: math.fsum(
                math.log(latency_seconds(generation, problem, pair, batch, found)) for batch in batches
            )
            for pair in there
            if (found := known[*key[:6], *pair])
        }
        costs.append(math.exp((score[best[0]] - min(score.values())) / len(batches)) - 1)
        candidates += len(there)
        lacking += len(pairs) - len(there)
        whole += len(pairs) == len(there)
    print(f"{len(costs)} keys, {candidates} candidates known, {lacking} not; {whole} keys with all of theirs")
    print(f"the very best of the known: {sum(c <= 1e-9 for c in costs)}/{len(costs)}; worst {max(costs):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="v6e")
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--known", action="store_true")
    arguments = parser.parse_args()
    if arguments.known:
        among_the_known(arguments.target)
        return
    if arguments.out is None:
        parser.error("--out is missing")

    keys = sorted(presets.keys("published"))
    sample = sorted(random.Random(arguments.seed).sample(keys, round(arguments.share * len(keys))))
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "keys.json"
    file.write_text(json.dumps([key._asdict() for key in sample]))
    target = ("--target", arguments.target)
    sweep(*target, "--preset", "published", "--out", str(arguments.out / "contenders"))
    sweep(*target, "--keys", str(file), "--exhaustive", "--out", str(arguments.out / "exhaustive"))

    ours = scores.read([arguments.out / "contenders"])
    full = scores.read([arguments.out / "exhaustive"])
    costs = {}
    for key in sample:
        chosen, best = ours.best(arguments.target, key), full.best(arguments.target, key)
        if best is None:
            continue  # nothing fits this key
        assert chosen, f"the sweep of contenders has no winner for {tuple(key)}"
        score = full.score(arguments.target, key, chosen[0])
        assert score, f"{chosen[0]} of {tuple(key)} is not among all candidates"
        costs[key] = score.score / best[1].score - 1
    within = sum(cost <= 0.01 for cost in costs.values())
    print(f"{len(costs)} keys, {sum(map(len, full.scores.values()))} candidates that are ok")
    print(f"contenders' choice within 1% of the best of all candidates: {within}/{len(costs)}")
    print(f"the very best: {sum(cost <= 1e-9 for cost in costs.values())}/{len(costs)}")
    for key, cost in sorted(costs.items(), key=lambda item: -item[1])[:5]:
        if cost > 1e-9:
            print(f"  {tuple(key)}: {cost:.1%} above it")


if __name__ == "__main__":
    main()
