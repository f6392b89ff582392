"""Loss curves of all runs below a folder: `python -m examples.plots FOLDER`."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed, or touched

from matplotlib import pyplot as plt  # noqa: E402

from examples.flags import UserError  # noqa: E402
from examples.report import METRICS_FILE  # noqa: E402

Curve = tuple[list[float], list[float]]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of one JSONL file."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _curve(records: list[dict[str, Any]], kind: str, optimizer: str) -> Curve:
    chosen = [r for r in records if r["kind"] == kind and r["optimizer"] == optimizer]
    return [r["tokens"] for r in chosen], [r["loss"] for r in chosen]


def curves(folder: Path) -> dict[str, tuple[Curve, Curve]]:
    """Label to (training curve, validation curve), for every run below `folder`."""
    paths = sorted(folder.rglob(METRICS_FILE))
    if not paths:
        raise UserError(f"{folder}: no {METRICS_FILE} in it")
    found: dict[str, tuple[Curve, Curve]] = {}
    for path in paths:
        records = read_metrics(path)
        names = dict.fromkeys(r["optimizer"] for r in records if r["kind"] == "train")
        for name in names:
            place = path.parent.relative_to(folder).as_posix()
            label = name if place == "." else f"{place} {name}"
            found[label] = (
                _curve(records, "train", name),
                _curve(records, "eval", name),
            )
    return found


def plot_folder(folder: Path, target: Path) -> Path:
    """Write a figure of training and validation loss over tokens to `target`."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for label, pair in curves(folder).items():
        for axis, (tokens, losses), marker in zip(axes, pair, ("", "o"), strict=True):
            axis.plot(tokens, losses, marker=marker, markersize=4, lw=1.3, label=label)
    for axis, title in zip(axes, ("training loss", "validation loss"), strict=True):
        axis.set(title=title, xlabel="tokens", ylabel="nats per token")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize="small")
    figure.savefig(target, dpi=120)
    plt.close(figure)
    return target


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) == 2 else "runs")
    try:
        print(plot_folder(root, root / "loss.png"))
    except UserError as problem:
        print(f"plots: error: {problem}", file=sys.stderr)
        sys.exit(2)
