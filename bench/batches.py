"""What the figures of bench.fidelity owe to the batch that is assumed: `python -m bench.batches`.

The published winners' batch is not known. For each batch, copy_seconds is chosen anew on the fitting half of
'TPU v6', by likelihood, as bench.fidelity does, and for the least p90 of regret, whatever it takes. The
figures are those of the reachable keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autotune.kernel.problem import TableKey
from autotune.kernel.workload import Sequence, Workload
from autotune.model.cost import CALIBRATION
from bench import cycles, fidelity
from bench.fidelity import FITTING, HELD_OUT, Ranked

MOST_DECODES = 256
COPY_US = (0.1, 0.2, 0.3, 0.4, 0.55, 0.7, 0.9, 1.2, 1.6, 2.2, 3.0, 4.0)


def full(decoding: float, decode_context: float, chunk: float) -> Callable[[TableKey], Workload]:
    """Batches that use all of max_num_batched_tokens.

    decoding: share of the tokens that are decodes, 256 sequences at most, at this share of the context.
    chunk: the length of the prompts' pieces, at full context, as a share of max_model_len.
    """

    def batch(key: TableKey) -> Workload:
        length = key.max_model_len
        decodes = min(int(key.max_num_batched_tokens * decoding), MOST_DECODES)
        sequences = [Sequence(1, max(1, int(decode_context * length)))] * decodes
        left = key.max_num_batched_tokens - decodes
        while left > 0:
            piece = min(left, max(1, int(chunk * length)))
            sequences.append(Sequence(piece, length))
            left -= piece
        return Workload("full", tuple(sequences))

    return batch


BATCHES = {
    "34 decodes and a chunk": fidelity.timed_batch,
    "full: a tenth decodes, chunks of 0.3": full(0.1, 1.0, 0.3),
    "full: a fifth decodes, chunks of 0.1": full(0.2, 0.75, 0.1),
}


def main() -> None:
    for name, batch in BATCHES.items():
        v6 = [k for k in fidelity.load("TPU v6", "v6e", batch)[0] if cycles.reachable(k.key)]
        v5 = [k for k in fidelity.load("TPU v5", "v5e", batch)[0] if cycles.reachable(k.key)]
        fitting = Ranked([k for k in v6 if fidelity.half(k.key) == FITTING])
        held_out = Ranked([k for k in v6 if fidelity.half(k.key) == HELD_OUT])
        likeliest, noise, relative = fidelity.fit(fitting)
        surprise = len(fitting.keys) * fitting.surprise(fitting.predict(likeliest), noise, relative)
        least = min(
            (dataclasses.replace(CALIBRATION, copy_seconds=us * 1e-6) for us in COPY_US),
            key=lambda c: fidelity.figures(fitting, fitting.predict(c)).p90,
        )
        for how, calibration in ((f"likeliest, {surprise:.0f} nats", likeliest), ("least p90", least)):
            print(f"\n{name}; {how}: copy_seconds {calibration.copy_seconds * 1e6:.2f} us")
            for part, ranked in (("fitting", fitting), ("held out", held_out), ("'TPU v5'", Ranked(v5))):
                print(f"  {part:9}", fidelity.figures(ranked, ranked.predict(calibration)), flush=True)


if __name__ == "__main__":
    main()
