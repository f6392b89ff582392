"""Figures of runs: `python -m examples.plot RUN... [--out FILE]`.

Loss of training and validation against tokens and against time; of a sweep, the final
loss against what it varies as well.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed, or touched

from matplotlib import pyplot as plt  # noqa: E402

from examples.config import METRICS_FILE  # noqa: E402
from examples.files import WriteFailed  # noqa: E402
from examples.flags import UserError, failed  # noqa: E402
from examples.records import read_metrics  # noqa: E402

SWEEP_FILE = "sweep.json"
Records = list[dict[str, Any]]
_KINDS = {"train": "training loss", "eval": "validation loss"}
_AXES = {"tokens": "tokens", "seconds": "seconds of training"}


def curves(folders: Sequence[Path]) -> dict[str, dict[str, Records]]:
    """Label to kind to records, for every optimizer of every run below the folders."""
    found: dict[str, dict[str, Records]] = {}
    for folder in folders:
        paths = sorted(folder.rglob(METRICS_FILE))
        if not paths:
            raise UserError(f"{folder}: no {METRICS_FILE} in it")
        for path in paths:
            records = [r for r in read_metrics(path) if r["kind"] in _KINDS]
            parts = [folder.name] if len(folders) > 1 else []
            parts += path.parent.relative_to(folder).parts
            for name in dict.fromkeys(r["optimizer"] for r in records):
                mine = [r for r in records if r["optimizer"] == name]
                found[" ".join(["/".join(parts), name]).strip()] = {
                    kind: [r for r in mine if r["kind"] == kind and r["loss"]]
                    for kind in _KINDS
                }
    return found


def plot_runs(folders: Sequence[Path], target: Path) -> Path:
    """Write a figure of losses over tokens and over time to `target`."""
    figure, grid = plt.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    found = curves(folders)
    for row, (key, unit) in zip(grid, _AXES.items(), strict=True):
        for axis, (kind, title) in zip(row, _KINDS.items(), strict=True):
            for label, records in found.items():
                places = [r[key] for r in records[kind]]
                losses = [r["loss"] for r in records[kind]]
                marker = "o" if kind == "eval" else ""
                axis.plot(places, losses, marker=marker, ms=4, lw=1.3, label=label)
            axis.set(title=title, xlabel=unit, ylabel="nats per token")
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend(fontsize="small")
    return _write(figure, target)


def plot_sweep(summary: dict[str, Any], target: Path) -> Path:
    """Write a figure of the final validation losses of a sweep to `target`."""
    figure, axis = plt.subplots(figsize=(6, 4), constrained_layout=True)
    rows = summary["rows"]
    numeric = all(isinstance(entry["row"], int | float) for entry in rows)
    for column in dict.fromkeys(entry["column"] for entry in rows):
        mine = [r for r in rows if r["column"] == column and r["val_loss"] is not None]
        places = [r["row"] if numeric else str(r["row"]) for r in mine]
        axis.plot(places, [r["val_loss"] for r in mine], marker="o", label=column)
    if numeric and all(entry["row"] > 0 for entry in rows):
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
        plt.close(figure)
    return target


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / SWEEP_FILE
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        return {"rows": summary["rows"], "varied": summary["varied"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: unreadable ({error!r}); sweep again") from None


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.plot", description=__doc__
    )
    parser.add_argument("runs", nargs="*", default=["runs"], help="folders with runs")
    parser.add_argument("--out", help="the figure (default: loss.png in the folder)")
    options = parser.parse_args(argv)
    folders = [Path(name) for name in options.runs]
    try:
        print(plot_runs(folders, Path(options.out or folders[0] / "loss.png")))
        for folder in folders:
            if (folder / SWEEP_FILE).exists():
                print(plot_sweep(_summary(folder), folder / "sweep.png"))
    except UserError as error:
        return failed("plot", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
