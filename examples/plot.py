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
            parts = [folder.name] if len(folders) > 1 else []
            label = "/".join([*parts, *path.parent.relative_to(folder).parts])
            for record in read_metrics(path):
                if record["kind"] in ("train", "eval") and record["loss"]:
                    name = f"{label} {record['optimizer']}".strip()
                    kinds = found.setdefault(name, {"train": [], "eval": []})
                    kinds[record["kind"]].append(record)
    return found


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and of up to `window` - 1 before it."""
    ends = range(1, len(values) + 1)
    parts = (values[max(0, end - window) : end] for end in ends)
    return [sum(part) / len(part) for part in parts]


def plot_runs(folders: Sequence[Path], target: Path, window: int = 0) -> Path:
    """Write a figure of the runs below the folders to `target`.

    Training losses and norms are means over `window` records; 0: a fiftieth of the
    curve. Validation losses are in bits per byte where runs differ in their tokens.
    """
    found = curves(folders)
    last = [r for kinds in found.values() for r in kinds["eval"][-1:]]
    ratios = {round(r.get("bits_per_byte", 0) / r["loss"], 3) for r in last}
    measure = ("bits_per_byte", "bits per byte"), ("loss", "nats per token")
    measure = measure[len(ratios) == 1]
    panels = (
        ("validation loss", "eval", "tokens", *measure),
        ("validation loss", "eval", "seconds", *measure),
        ("training loss", "train", "tokens", "loss", "nats per token"),
        ("training loss", "train", "seconds", "loss", "nats per token"),
        ("learning rate", "train", "tokens", "learning_rate", ""),
        ("gradient norm, before clipping", "train", "tokens", "grad_norm", ""),
    )
    figure, grid = _pyplot().subplots(3, 2, figsize=(11, 11), constrained_layout=True)
    for axis, (title, kind, over, key, label) in zip(grid.flat, panels, strict=True):
        for name, kinds in found.items():
            records = [r for r in kinds[kind] if r.get(key) is not None]
            values, marker = [r[key] for r in records], "o"
            if kind == "train":
                wide, marker = window or max(1, len(values) // 50), ""
                values = smoothed(values, 1 if key == "learning_rate" else wide)
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
    return _write(figure, target)


def _write(figure: Any, target: Path) -> Path:
    try:
        figure.savefig(target, dpi=120)
    except OSError as error:
        raise WriteFailed(target, error) from None
    finally:
        _pyplot().close(figure)
    return target


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", default=["runs"], help="folders with runs")
    text = "the figure (default: loss.png in the folder; comparison.png of several)"
    parser.add_argument("--out", help=text)
    text = "records that a mean is taken over"
    parser.add_argument("--smooth", type=int, default=0, help=text)

    def run() -> None:
        given = parser.parse_args(argv)
        folders = [Path(name) for name in given.runs]
        alone, several = folders[0] / "loss.png", Path("comparison.png")
        target = Path(given.out) if given.out else several if folders[1:] else alone
        print(plot_runs(folders, target, given.smooth))
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
