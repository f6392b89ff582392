"""Figures of runs: losses, learning rates and gradient norms of their records."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.files import read_metrics, write_atomically
from examples.options import UserError

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
    write_atomically(target, [content.getvalue()])
    return target
