"""Plots of docs/model.md, from bench/fidelity.py; needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

from autotune.model.cost import Calibration

Ranked = Any  # of bench.fidelity, which calls this
# Seconds of noise of one timing, given keys and their predicted latencies.
Noise = Callable[[Ranked, np.ndarray], float]

DPI = 80


def draw(folder: Path, parts: dict[str, Ranked], calibration: Calibration, noise_of: Noise) -> None:
    """rank.png and regret.png in a folder, a panel a part."""
    folder.mkdir(parents=True, exist_ok=True)
    _ranks(folder / "rank.png", parts, calibration, noise_of)
    _regret(folder / "regret.png", parts, calibration)


def _panels(parts: dict[str, Ranked]) -> tuple[plt.Figure, list[plt.Axes]]:
    figure, axes = plt.subplots(1, len(parts), figsize=(4.2 * len(parts), 3.4), squeeze=False, sharey=True)
    return figure, list(axes[0])


def _ranks(path: Path, parts: dict[str, Ranked], calibration: Calibration, noise_of: Noise) -> None:
    figure, axes = _panels(parts)
    for axis, (name, ranked) in zip(axes, parts.items(), strict=True):
        predicted = ranked.predict(calibration)
        noise = noise_of(ranked, predicted)
        timed = predicted - noise * np.random.default_rng(0).gumbel(size=(50, len(predicted)))
        drawn = []
        for one in timed:
            lowest = np.minimum.reduceat(one, ranked.first)
            drawn.append(ranked.ranks(predicted, np.flatnonzero(one == lowest[ranked.of])))
        edges = np.arange(0, 7)
        for ranks, label, offset in (
            (ranked.ranks(predicted), "published winners", -0.2),
            (np.concatenate(drawn), f"a perfect model, {noise * 1e6:.0f} us noise", 0.2),
        ):
            share = [np.mean(np.minimum(ranks, 6) == rank) for rank in edges]
            axis.bar(edges + 1 + offset, share, 0.4, label=label)
        axis.set_title(f"{name} ({len(ranked.keys)} keys)", fontsize=9)
        axis.set_xlabel("rank by the model (7: seventh or worse)")
        axis.legend(fontsize=8)
    axes[0].set_ylabel("share of keys")
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def _regret(path: Path, parts: dict[str, Ranked], calibration: Calibration) -> None:
    from bench import cycles

    figure, axes = _panels(parts)
    for axis, (name, ranked) in zip(axes, parts.items(), strict=True):
        predicted = ranked.predict(calibration)
        best, lost = ranked.best(predicted) * 1e6, ranked.lost(predicted) * 1e6
        reached = np.array([cycles.reachable(k.key) for k in ranked.keys])
        for chosen, marker in ((reached, "o"), (~reached, "x")):
            label = "reachable" if marker == "o" else "not reachable"
            axis.plot(best[chosen], np.maximum(lost[chosen], 0.05), marker, ms=3, label=label)
        line = np.array([best.min(), best.max()])
        axis.plot(line, 0.05 * line, "k--", lw=0.8, label="5% of the latency")
        axis.set(xscale="log", yscale="log", xlabel="latency of the model's first, us")
        axis.set_xticks([25, 50, 100, 200, 400], ["25", "50", "100", "200", "400"])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_title(name, fontsize=9)
        axis.legend(fontsize=7, loc="center right")
    axes[0].set_ylabel("published winner slower by, us\n(0.05: it is the model's first)")
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
