"""What a sweep that compiles only contenders misses, against one that compiles every candidate.

    python -m bench.exhaustive --out results/exhaustive [--target v6e] [--share 0.1] [--seed 0]

Of the canonical keys that JAX's published tables stand for, a random share is swept with --exhaustive. The
winners of `autotune sweep --preset published` are then looked up among all candidates of those keys, by the
model with every candidate's real cycles. Compile results are shared with your other sweeps (autotune cache);
from an empty store the exhaustive half takes hours. Both go on where they were stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

from autotune.keys import presets
from autotune.results import scores


def sweep(*arguments: str) -> None:
    """Run `autotune sweep`; its progress goes to standard error, its table nowhere."""
    command = [sys.executable, "-m", "autotune", "sweep", *arguments]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="v6e")
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

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
