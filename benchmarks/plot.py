"""Figures of runs: `python -m benchmarks.plot RUN... [--out FILE]`.

Losses against tokens and against time, learning rates and gradient norms; of a sweep,
the final losses against what it varies as well.
"""

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples import options
from examples.files import read_metrics, write_atomically
from examples.options import UserError, check
from examples.runs import METRICS_FILE

SWEEP_FILE = "sweep.json"
# The records of a run, by optimizer and then by their kind.
Curves = dict[str, dict[str, list[dict[str, Any]]]]
NATS = ("loss", "nats per token")


def pyplot() -> Any:
    """matplotlib.pyplot, without a display."""
    import matplotlib  # takes a moment

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def curves(metrics: Path) -> Curves:
    """Of the optimizers of one run."""
    found: Curves = {}
    for record in read_metrics(metrics):
        if record["kind"] in ("train", "eval") and record["loss"]:
            kinds = found.setdefault(record["optimizer"], {"train": [], "eval": []})
            kinds[record["kind"]].append(record)
    return found


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and of up to `window` - 1 before it."""
    ends = range(1, len(values) + 1)
    parts = (values[max(0, end - window) : end] for end in ends)
    return [sum(part) / len(part) for part in parts]


def draw(found: Curves, target: Path, measure: tuple[str, str] = NATS) -> Path:
    """Write a figure to `target`; validation losses by their key and its unit.

    Training losses and norms are means over a fiftieth of the curve.
    """
    panels = (
        ("validation loss", "eval", "tokens", *measure),
        ("validation loss", "eval", "seconds", *measure),
        ("training loss", "train", "tokens", *NATS),
        ("training loss", "train", "seconds", *NATS),
        ("learning rate", "train", "tokens", "learning_rate", ""),
        ("gradient norm, before clipping", "train", "tokens", "grad_norm", ""),
    )
    size = {"figsize": (11, 11), "constrained_layout": True}
    figure, grid = pyplot().subplots(3, 2, **size)
    for axis, (title, kind, over, key, label) in zip(grid.flat, panels, strict=True):
        for name, kinds in found.items():
            records = [r for r in kinds[kind] if r.get(key) is not None]
            values = [r[key] for r in records]
            if kind == "train" and key != "learning_rate":
                values = smoothed(values, max(1, len(values) // 50))
            marker = "o" if kind == "eval" else ""
            places = [r[over] for r in records]
            axis.plot(places, values, marker=marker, ms=4, lw=1.3, label=name)
        axis.set(title=title, xlabel=over, ylabel=label)
        axis.grid(alpha=0.3)
    grid[0, 0].legend(fontsize="small")
    return save(figure, target)


def save(figure: Any, target: Path) -> Path:
    """Write a figure to a file, atomically; its suffix says in which format."""
    content = io.BytesIO()
    try:
        figure.savefig(content, format=target.suffix[1:] or "none", dpi=120)
    except ValueError as error:
        said = f"{target}: its name does not end as that of a figure ({error})"
        raise UserError(said) from None
    finally:
        pyplot().close(figure)
    write_atomically(target, content.getvalue())
    return target


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
