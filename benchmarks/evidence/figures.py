"""The figures of the results page: small SVG files without a date."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.evidence import mechanism
from benchmarks.evidence.cells import Cell
from benchmarks.evidence.stages import FIRST_SEED

STYLE = {
    "svg.hashsalt": "muon2_optax",  # the same file from the same lines
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "figure.facecolor": "white",
}
COLORS = ("#1b6ca8", "#8a8a8a", "#3d8361", "#d9a441", "#c8553d")


def save(figure: Any, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def rates(
    results: Mapping[Cell, Mapping[str, Any]],
    size: str,
    panels: Sequence[str],
    arms: Sequence[str],
    path: pathlib.Path,
) -> None:
    """Perplexity over the peak rate, a panel for each treatment."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(panels), figsize=(2.6 * len(panels), 2.6), sharey=True
        )
        for axis, panel in zip(np.atleast_1d(axes), panels):
            for arm, color in zip(arms, COLORS):
                points = sorted(
                    (cell.rate, math.exp(row["loss"]))
                    for cell, row in results.items()
                    if (cell.size, cell.arm, cell.treatment) == (size, arm, panel)
                    and (cell.seed, cell.steps) == (FIRST_SEED, 0)
                    and row["loss"] is not None
                )
                if points:
                    axis.plot(*zip(*points), "o-", color=color, label=arm, ms=3, lw=1.2)
            axis.set(title=panel, xlabel="peak rate")
        np.atleast_1d(axes)[0].set_ylabel("validation perplexity")
        shown = {}
        for axis in np.atleast_1d(axes):
            handles, labels = axis.get_legend_handles_labels()
            shown |= dict(zip(labels, handles))
        figure.legend(
            [shown[arm] for arm in arms if arm in shown],
            [arm for arm in arms if arm in shown],
            loc="upper center",
            bbox_to_anchor=(0.5, -0.02),
            ncols=3,
            frameon=False,
        )
        save(figure, path)


def mechanisms(
    phases: Mapping[tuple[str, str], mechanism.Phase], path: pathlib.Path
) -> None:
    """Input spectra early and late, and the cosine similarity by steps."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(8.6, 2.6), layout="constrained")
        for axis, phase in zip(axes, ("early", "late")):
            for name, color in zip(mechanism.ARMS, COLORS):
                quantiles = phases[name, phase].quantiles
                share = (np.arange(quantiles.size) + 0.5) / quantiles.size
                axis.plot(quantiles, share, color=color, label=name, lw=1.2)
            axis.set(
                xscale="log",
                xlim=(1e-5, 0.5),
                title=f"input of Newton–Schulz, {phase}",
                xlabel="normalized singular value",
            )
        axes[0].set_ylabel("share below")
        axes[0].legend(frameon=False, fontsize=8)
        steps = mechanism.ITERATIONS
        for name, color in zip(mechanism.ARMS, COLORS):
            found = phases[name, "early"].cosine
            keller = [found["keller", k] for k in steps]
            axes[2].plot(steps, keller, "o-", color=color, ms=3, lw=1.2)
            fitted = [found["muon2", k] for k in steps[1:]]
            axes[2].plot(steps[1:], fitted, "s--", color=color, ms=3, lw=1)
        axes[2].set(
            title="cosine to polar factor, early",
            xlabel="K (dashed: fitted schedule)",
            xticks=steps,
        )
        save(figure, path)
