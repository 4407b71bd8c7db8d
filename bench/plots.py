"""The plot of docs/model.md, from bench/fidelity.py; needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from autotune.model.cost import CALIBRATIONS
from bench import fidelity

DPI = 80


def draw(folder: Path) -> None:
    """first.png: on how many held-out keys the model's first is the winner, beside JAX's default."""
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(1, len(fidelity.TABLES), figsize=(10, 3))
    for axis, target in zip(axes, fidelity.TABLES, strict=True):
        names, models, defaults = [], [], []
        for judge, winners in fidelity.judges(target).items():
            keys = fidelity.part(fidelity.load(target, winners)[0], fidelity.HELD_OUT)
            if keys:
                names.append(judge.replace(", ", ",\n"))
                models.append(fidelity.score(fidelity.Ranked(keys), CALIBRATIONS[target]))
                defaults.append(fidelity.hits(keys, fidelity.rules(target, winners)["JAX's default"]))
        values = [s.value.first for s in models]
        ends = [
            [s.value.first - s.low.first for s in models],
            [s.high.first - s.value.first for s in models],
        ]
        places = range(len(names))
        axis.barh(places, values, xerr=ends, height=0.6, label="the model's first", alpha=0.8)
        axis.plot(defaults, places, "k|", ms=16, mew=2, label="JAX's default")
        axis.set(title=f"{target}, layouts held out", xlim=(0, 1), xlabel="share of keys with the winner")
        axis.set_yticks(places, names, fontsize=8)
        axis.invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="lower center", ncols=2)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(folder / "first.png", dpi=DPI)
    plt.close(figure)
