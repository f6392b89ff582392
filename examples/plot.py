"""Figures of runs: `python -m examples.plot RUN... [--out FILE]`.

Losses against tokens and against time, learning rates and gradient norms; of a sweep,
the final losses against what it varies as well.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples import options
from examples.files import WriteFailed, read_metrics
from examples.options import UserError, check
from examples.runs import METRICS_FILE

SWEEP_FILE = "sweep.json"
Records = list[dict[str, Any]]


def _pyplot() -> Any:
    import matplotlib  # takes a moment

    matplotlib.use("Agg")  # no display is needed, or touched
    from matplotlib import pyplot

    return pyplot


def curves(folders: Sequence[Path]) -> dict[str, dict[str, Records]]:
    """Label to kind to records, for every optimizer of every run below the folders."""
    found: dict[str, dict[str, Records]] = {}
    for folder in folders:
        paths = sorted(folder.rglob(METRICS_FILE))
        check(bool(paths), f"{folder}: no {METRICS_FILE} in it")
        for path in paths:
            records = read_metrics(path)
            parts = [folder.name] if len(folders) > 1 else []
            label = "/".join([*parts, *path.parent.relative_to(folder).parts])
            for name in dict.fromkeys(
                r["optimizer"] for r in records if r["kind"] in ("train", "eval")
            ):
                mine = [r for r in records if r.get("optimizer") == name]
                found[f"{label} {name}".strip()] = {
                    kind: [r for r in mine if r["kind"] == kind and r["loss"]]
                    for kind in ("train", "eval")
                }
    return found


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and of up to `window` - 1 before it."""
    return [
        sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window)
        for i in range(len(values))
    ]


def plot_runs(folders: Sequence[Path], target: Path, window: int = 0) -> Path:
    """Write a figure of the runs below the folders to `target`.

    Training losses are means over `window` records; 0: a fiftieth of the curve. Losses
    are in nats per token; validation losses are in bits per byte where runs differ in
    their tokens.
    """
    found = curves(folders)
    ratios = {
        round(r["bits_per_byte"] / r["loss"], 3)
        for kinds in found.values()
        for r in kinds["eval"][-1:]
        if r.get("bits_per_byte")
    }
    measure = "bits_per_byte" if len(ratios) > 1 else "loss"
    unit = "bits per byte" if len(ratios) > 1 else "nats per token"
    panels = (
        ("validation loss", "eval", "tokens", measure, unit),
        ("validation loss", "eval", "seconds", measure, unit),
        ("training loss", "train", "tokens", "loss", "nats per token"),
        ("training loss", "train", "seconds", "loss", "nats per token"),
        ("learning rate", "train", "tokens", "learning_rate", ""),
        ("gradient norm, before clipping", "train", "tokens", "grad_norm", ""),
    )
    plt = _pyplot()
    figure, grid = plt.subplots(3, 2, figsize=(11, 11), constrained_layout=True)
    for axis, (title, kind, over, key, label) in zip(grid.flat, panels, strict=True):
        for name, kinds in found.items():
            records = [r for r in kinds[kind] if r.get(key) is not None]
            values = [r[key] for r in records]
            if kind == "train" and key != "learning_rate":
                values = smoothed(values, window or max(1, len(values) // 50))
            marker = "o" if kind == "eval" else ""
            places = [r[over] for r in records]
            axis.plot(places, values, marker=marker, ms=4, lw=1.3, label=name)
        axis.set(title=title, xlabel=over, ylabel=label)
        axis.grid(alpha=0.3)
    grid[0, 0].legend(fontsize="small")
    return _write(figure, target)


def plot_sweep(summary: dict[str, Any], target: Path) -> Path:
    """Write a figure of the final validation losses of a sweep to `target`."""
    figure, axis = _pyplot().subplots(figsize=(6, 4), constrained_layout=True)
    cells = [cell for cell in summary["cells"] if cell["mean"] is not None]
    numeric = all(isinstance(cell["row"], int | float) for cell in summary["cells"])
    for column in dict.fromkeys(cell["column"] for cell in cells):
        mine = [cell for cell in cells if cell["column"] == column]
        places = [cell["row"] if numeric else str(cell["row"]) for cell in mine]
        means, errors = ([cell[key] for cell in mine] for key in ("mean", "deviation"))
        axis.errorbar(places, means, errors, marker="o", capsize=3, label=column)
    if numeric and all(cell["row"] > 0 for cell in summary["cells"]):
        axis.set_xscale("log")
    axis.set(xlabel=summary["varied"], ylabel="validation loss, nats per token")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    return _write(figure, target)


def _write(figure: Any, target: Path) -> Path:
    try:
        figure.savefig(target, dpi=120)
    except OSError as error:
        raise WriteFailed(target, error) from None
    finally:
        _pyplot().close(figure)
    return target


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / SWEEP_FILE
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        return {"cells": summary["cells"], "varied": summary["varied"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: unreadable ({error!r}); sweep again") from None


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""

    def run() -> None:
        prog = "python -m examples.plot"
        parser = argparse.ArgumentParser(prog=prog, description=__doc__)
        parser.add_argument("runs", nargs="*", default=["runs"], help="their folders")
        parser.add_argument(
            "--out", help="default: loss.png in the folder; comparison.png of several"
        )
        parser.add_argument(
            "--smooth", type=int, default=0, help="records that a mean is taken over"
        )
        given = parser.parse_args(argv)
        folders = [Path(name) for name in given.runs]
        alone = folders[0] / "loss.png"
        target = alone if len(folders) == 1 else Path("comparison.png")
        print(plot_runs(folders, Path(given.out or target), given.smooth))
        for folder in folders:
            if (folder / SWEEP_FILE).exists():
                print(plot_sweep(_summary(folder), folder / "sweep.png"))

    return options.run_command("plot", run)


if __name__ == "__main__":
    sys.exit(main())
