"""What the fitting half says of other models and other batches: `python -m bench.why`.

Each line fits copy_seconds and the noise of the timings anew, on the fitting half of July's v6e keys alone,
and says by how many nats all its winners together are less likely than under the model (more than 2 is
telling, for one constant).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize

from autotune.kernel.problem import TableKey
from autotune.kernel.workload import Sequence, Workload, generate
from autotune.model.cost import CALIBRATIONS, Calibration, seconds
from bench import fidelity
from bench.fidelity import Ranked

CALIBRATION = CALIBRATIONS["v6e"]
Predictor = Callable[[Ranked, Calibration, float], np.ndarray]


def model(ranked: Ranked, c: Calibration, extra: float) -> np.ndarray:
    return np.asarray(seconds(ranked.terms, c))


def one_buffer_ahead(ranked: Ranked, c: Calibration, extra: float) -> np.ndarray:
    """A KV block waits for the whole of its copy's latency: max(compute, arrival)."""
    t = ranked.terms
    arrival = c.copy_seconds + t.kv_copy / c.bandwidth_fraction
    rest = np.asarray(seconds(t._replace(kv_blks=t.kv_blks * 0), c))
    return rest + t.kv_blks * np.maximum(t.kv_blk, arrival)


def constant_a_block(ranked: Ranked, c: Calibration, extra: float) -> np.ndarray:
    """max(compute, copy) and a constant for each KV block; a constant for each query block (copy_seconds)."""
    t = ranked.terms
    return (
        t.query_blks * (t.query_blk + c.copy_seconds)
        + t.visits * t.visit
        + t.kv_blks * (extra + np.maximum(t.kv_blk, t.kv_copy / c.bandwidth_fraction))
    )


def more_a_row(ranked: Ranked, c: Calibration, extra: float) -> np.ndarray:
    """The model, with a constant of the core for each eight rows of queries of each KV block."""
    rows = [b.num_queries_per_blk * k.key.num_q_heads_per_blk / 8 for k in ranked.keys for b in k.candidates]
    kv_blk = ranked.terms.kv_blk + extra / 100 * np.array(rows)
    return np.asarray(seconds(ranked.terms._replace(kv_blk=kv_blk), c))


def likelihood(
    ranked: Ranked, predict: Predictor, start: Calibration = CALIBRATION
) -> tuple[float, np.ndarray]:
    """Nats by which the winners surprise, at the best (copy_seconds, noise, extra) seconds."""

    def objective(x: np.ndarray) -> float:
        copy, noise, extra = np.exp(x)
        c = dataclasses.replace(start, copy_seconds=float(copy))
        return ranked.surprise(predict(ranked, c, extra), noise)

    best = min(
        (
            minimize(objective, np.log([copy, 6e-6, extra]), method="Nelder-Mead", options={"maxiter": 3000})
            for copy in (0.2e-6, 0.6e-6)
            for extra in (0.1e-6, 1e-6)
        ),
        key=lambda found: float(found.fun),
    )
    return float(best.fun), np.exp(best.x)


def decodes(count: int, context: float = 1.0) -> Callable[[TableKey], Workload]:
    """The timed batch with another number of decodes, at another share of the context."""

    def batch(key: TableKey) -> Workload:
        tokens = min(key.max_num_batched_tokens, key.max_model_len)
        some = min(count, tokens - 1)
        kv_len = max(1, round(context * key.max_model_len))
        return Workload("other", (*[Sequence(1, kv_len)] * some, Sequence(tokens - some, key.max_model_len)))

    return batch


def main() -> None:
    def ranked_for(batch: Callable[[TableKey], Workload]) -> Ranked:
        keys, _ = fidelity.load("v6e", fidelity.published("v6e")["July"], batch)
        return Ranked(fidelity.part(keys, fidelity.FITTING))

    timed = ranked_for(fidelity.timed_batch)
    base, found = likelihood(timed, model)
    print(f"the model: {base:.1f} nats over {len(timed.keys)} keys, copy_seconds {found[0]:.3g}")

    def line(name: str, ranked: Ranked, predict: Predictor = model, start: Calibration = CALIBRATION) -> None:
        nats, x = likelihood(ranked, predict, start)
        c = dataclasses.replace(start, copy_seconds=float(x[0]))
        predicted = predict(ranked, c, x[2])
        scored = fidelity.figures(ranked.ranks(predicted), ranked.regret(predicted))
        print(
            f"{name:44} {nats - base:+7.1f} nats  first {scored.first:.0%}  p90 {scored.p90:5.1%}  "
            f"copy {x[0] * 1e6:.2f} us  noise {x[1] * 1e6:.1f} us"
            + (f"  constant {x[2] * 1e6:.2f} us" if predict is constant_a_block else ""),
            flush=True,
        )

    for share in (0.8, 0.85, 0.9, 0.95, 1.0):
        line(
            f"bandwidth_fraction {share}",
            timed,
            start=dataclasses.replace(CALIBRATION, bandwidth_fraction=share),
        )
    for stall in (0.9, 1.1, 1.25):
        line(f"stall {stall}", timed, start=dataclasses.replace(CALIBRATION, stall=stall))
    line("a KV block waits for a whole copy", timed, one_buffer_ahead)
    line("a constant a KV block, none for copies", timed, constant_a_block)
    line("no core time a KV block", timed, start=dataclasses.replace(CALIBRATION, kv_block_seconds=0.0))
    line("the model and a constant 8 query rows", timed, more_a_row)
    for count in (4, 8, 16, 24, 48, 64):
        line(f"{count} decodes for 34", ranked_for(decodes(count)))
    for context in (0.75, 0.5):
        line(f"34 decodes at {context} of the context", ranked_for(decodes(34, context)))
    for name in ("mixed", "decode-heavy", "prefill-heavy"):
        line(
            f"the sweep's {name} batch", ranked_for(lambda key, n=name: generate(n, key.canonical_problem()))
        )


if __name__ == "__main__":
    main()
