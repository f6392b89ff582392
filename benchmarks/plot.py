"""Figures that compare runs: `python -m benchmarks.plot RUN... [--out FILE]`.

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
from examples.options import UserError, check
from examples.plot import NATS, Curves, curves, draw, pyplot, save
from examples.runs import METRICS_FILE

SWEEP_FILE = "sweep.json"


def collect(folders: Sequence[Path]) -> Curves:
    """The curves of every run below the folders, by the run's name and optimizer."""
    found: Curves = {}
    for folder in folders:
        paths = sorted(folder.rglob(METRICS_FILE))
        check(bool(paths), f"{folder}: no {METRICS_FILE} in it")
        for path in paths:
            parts = [folder.name] if len(folders) > 1 else []
            label = "/".join([*parts, *path.parent.relative_to(folder).parts])
            mine = curves(path).items()
            found |= {f"{label} {name}".strip(): kinds for name, kinds in mine}
    return found


def plot_runs(folders: Sequence[Path], target: Path) -> Path:
    """Write a figure of the runs below the folders to `target`.

    Validation losses are in bits per byte where runs differ in their tokens.
    """
    found = collect(folders)
    last = [r for kinds in found.values() for r in kinds["eval"][-1:]]
    ratios = {round(r.get("bits_per_byte", 0) / r["loss"], 3) for r in last}
    same = len(ratios) == 1
    return draw(found, target, NATS if same else ("bits_per_byte", "bits per byte"))


def plot_sweep(summary: dict[str, Any], target: Path) -> Path:
    """Write a figure of the final validation losses of a sweep to `target`."""
    figure, axis = pyplot().subplots(figsize=(6, 4), constrained_layout=True)
    cells = [cell for cell in summary["cells"] if cell["mean"] is not None]
    numeric = all(isinstance(cell["row"], int | float) for cell in cells)
    for column in dict.fromkeys(cell["column"] for cell in cells):
        mine = [cell for cell in cells if cell["column"] == column]
        places = [cell["row"] if numeric else str(cell["row"]) for cell in mine]
        means, errors = ([cell[key] for cell in mine] for key in ("mean", "deviation"))
        axis.errorbar(places, means, errors, marker="o", capsize=3, label=column)
    if numeric and all(cell["row"] > 0 for cell in cells):
        axis.set_xscale("log")
    axis.set(xlabel=summary["varied"], ylabel="validation loss, nats per token")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    return save(figure, target)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", default=["runs"], help="folders with runs")
    text = "the figure (default: loss.png in the folder; comparison.png of several)"
    parser.add_argument("--out", help=text)

    def run() -> None:
        given = parser.parse_args(argv)
        folders = [Path(name) for name in given.runs]
        alone, several = folders[0] / "loss.png", Path("comparison.png")
        target = Path(given.out) if given.out else several if folders[1:] else alone
        print(plot_runs(folders, target))
        for path in (folder / SWEEP_FILE for folder in folders):
            if path.exists():
                try:
                    summary = json.loads(path.read_text(encoding="utf-8"))
                    print(plot_sweep(summary, path.with_name("sweep.png")))
                except (ValueError, KeyError, TypeError) as error:
                    said = f"{path}: unreadable ({error!r}); sweep again"
                    raise UserError(said) from None

    return options.run_command("plot", run)


if __name__ == "__main__":
    sys.exit(main())
