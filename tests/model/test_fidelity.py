"""The model against the published winners, as bench/fidelity.py has it, and the data behind it."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

import pytest

from autotune.kernel.jax_rpa.call import published_table
from autotune.kernel.problem import BlockSizes
from autotune.model.cost import CALIBRATIONS
from autotune.tpu.compiler import KERNEL_NAME
from autotune.tpu.schedule import read_schedule
from bench import cycles, fidelity


def test_the_split_never_changes() -> None:
    groups = sorted({key[:6]: fidelity.half(key) for key in published_table()["TPU v6"]}.items())
    digest = hashlib.sha256(repr(groups).encode()).hexdigest()
    assert digest[:12] == "e98948b5de12", "the halves are fixed: figures on the held-out one were looked at"


# Least shares of first and of first three, and most p90 of regret, on layouts held out from every fit.
# docs/model.md has the figures, which are a little better.
LEAST = {
    ("v6e", "April"): (0.85, 1.0, 0.01),
    ("v6e", "July"): (0.63, 0.98, 0.13),
    ("v6e", fidelity.AGREED): (0.82, 1.0, 0.04),
    ("v6e", fidelity.WIDE): (0.8, 0.95, 0.05),
    ("v5e", "April"): (0.92, 1.0, 0.01),
    ("v5e", "July"): (0.66, 0.97, 0.25),
}


@pytest.mark.parametrize(("target", "judge"), LEAST)
def test_the_ranking_is_as_good_as_it_was(target: str, judge: str) -> None:
    keys, _ = fidelity.load(target, fidelity.judges(target)[judge])
    held_out = fidelity.part(keys, fidelity.HELD_OUT)
    found = fidelity.score(fidelity.Ranked(held_out), CALIBRATIONS[target]).value
    first, first_three, p90 = LEAST[target, judge]
    assert found.first >= first
    assert found.first_three >= first_three
    assert found.median == 0.0
    assert found.p90 <= p90


def test_the_built_in_constants_are_those_of_the_fit() -> None:
    """As rounded: the core's time a KV block is taken on v6e only, see docs/model.md."""
    for target, fixed in (("v6e", {}), ("v5e", {"kv_block_seconds": 0.0})):
        built_in = CALIBRATIONS[target]
        found = fidelity.fit(fidelity.fitting_tables(target), built_in, **fixed)
        assert built_in.copy_seconds == pytest.approx(found.copy_seconds, abs=0.01e-6)
        assert built_in.kv_block_seconds == pytest.approx(found.kv_block_seconds, abs=0.01e-6)


def test_a_ceiling_without_noise_is_the_truth() -> None:
    keys, _ = fidelity.load("v6e", fidelity.judges("v6e")["April"])
    ranked = fidelity.Ranked(keys[:30])
    predicted = ranked.predict(CALIBRATIONS["v6e"])
    assert fidelity.ceiling(ranked, predicted, [0.0, 0.0], 2) == fidelity.Figures(1.0, 1.0, 0.0, 0.0)
    noisy = fidelity.ceiling(ranked, predicted, [20e-6], 1)
    assert noisy.first < 0.7


def test_a_table_without_noise_does_not_contradict_itself() -> None:
    """April's does nowhere, July's does: what fidelity's noise rests on."""
    for target in fidelity.TABLES:
        april, july = (fidelity.contradictions(fidelity.published(target)[m]) for m in ("April", "July"))
        assert april[0] >= 60
        assert april[1] == 0
        assert july[1] > 10


def test_the_cycles_are_the_compilers(listings: Path) -> None:
    """One program of the data set, compiled by this run."""
    for target in ("v6e", "v5e"):
        frame = cycles.read(target)
        line = frame.set_index(cycles.PROGRAM_COLUMNS).loc[("bfloat16", "bfloat16", 8, 2, 128, 128, 8, 32)]
        if line["libtpu"] != version("libtpu"):
            pytest.skip("the data set was made with another compiler")
        # The data set's programs have another VMEM limit, which moves a bundle or two.
        assert list(line["cycles"]) == pytest.approx(
            read_schedule(listings / target, KERNEL_NAME).cycles, abs=5
        )


def test_candidates_are_those_that_were_timed() -> None:
    key = next(k for k in published_table()["TPU v6"] if k.pages_per_seq == 8)
    assert cycles.candidates(key, BlockSizes(8, 32))[0] == BlockSizes(4, 32)
    assert cycles.candidates(key, BlockSizes(8, 32))[-1] == BlockSizes(8, 256)
    for target in fidelity.TABLES:
        for table in fidelity.published(target).values():
            assert all(winner in cycles.candidates(key, winner) for key, winner in table.items())
