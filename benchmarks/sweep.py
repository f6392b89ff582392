"""Runs over all combinations of some options, and one table of them.

    python -m benchmarks.sweep --set learning_rate=0.01,0.02,0.04 \\
        --set optimizer=muon,muon2 --out sweeps/rates -- --steps 300 --data text/

Whatever follows `--` goes to every run. Of several seeds (`--set seed=0,1,2`) the table
shows mean and standard deviation. A sweep that was stopped goes on with the same
command: runs that have finished or diverged are not repeated, others continue.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plot
from examples import config as configs
from examples import options, runs
from examples.files import write_json
from examples.options import Interrupted, check

Setting = dict[str, str]


def parse_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    """`learning_rate=0.01,0.02` to names and values, in the order given."""
    known = configs.Config().flat().keys() - {"out", "resume"}
    grid: dict[str, list[str]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        check(name in known, f"--set {text}: no option {name!r} that can be varied")
        check(name not in grid, f"--set {text}: {name} is given twice; use commas")
        # Commas separate values; a plus joins optimizers or mesh axes in one value.
        grid[name] = [value.strip() for value in values.split(",") if value.strip()]
        check(bool(grid[name]), f"--set {text}: no values")
    check(bool(grid), "--set NAME=VALUE,VALUE is needed")
    return grid


def settings(grid: Mapping[str, Sequence[str]]) -> list[Setting]:
    """Every combination."""
    return [dict(zip(grid, values)) for values in itertools.product(*grid.values())]


def _flags(setting: Setting) -> list[str]:
    argv = []
    for name, value in setting.items():
        flag = "--" + name.replace("_", "-")
        if value in ("true", "false"):
            argv.append(flag if value == "true" else f"--no-{flag[2:]}")
        else:
            argv += [flag, value.replace("+", ",")]
    return argv


def folder_name(setting: Setting) -> str:
    """A folder for a combination, readable and safe as a name."""
    text = "_".join(f"{name}={value}" for name, value in setting.items())
    return "".join(c if c.isalnum() or c in "=_.+-" else "-" for c in text)


def _run(folder: Path, argv: Sequence[str]) -> int:
    """Run or continue one combination; its exit code."""
    from examples import pretrain

    return pretrain.main([*argv, "--out", str(folder), "--resume", "auto"])


def _is_done(folder: Path, names: set[str], steps: int) -> bool:
    """Whether the run has diverged, or all its results for as many steps."""
    stopped = runs.records(folder, "stopped")
    if stopped and "--learning-rate" in stopped[-1]["reason"]:
        return True
    found = [r for r in runs.records(folder, "result") if r["steps"] >= steps]
    return names <= {record["optimizer"] for record in found}


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def summarize(grid: Mapping[str, Sequence[str]], out: Path) -> dict[str, Any]:
    """One cell for each row (the first option varied, but for optimizer and seed) and
    column (all others): mean and deviation of the validation losses of all seeds.
    """
    fixed = ("optimizer", "seed")
    row_key = next((name for name in grid if name not in fixed), "optimizer")
    losses: dict[tuple[Any, str], list[float | None]] = {}
    for setting in settings(grid):
        others = {k: v for k, v in setting.items() if k not in (row_key, *fixed)}
        suffix = "".join(f" {k}={v}" for k, v in others.items())
        missing = {"optimizer": setting.get("optimizer", "all"), "val_loss": None}
        for result in runs.records(out / folder_name(setting), "result") or [missing]:
            name = result["optimizer"]
            alone = row_key == "optimizer"
            row = name if alone else _number(setting[row_key])
            cell = row, ("val loss" if alone else name) + suffix
            losses.setdefault(cell, []).append(result["val_loss"])
    cells = []
    for (row, column), found in losses.items():
        known = [loss for loss in found if loss is not None]
        whole = len(known) == len(found)  # a seed that diverged leaves no mean
        mean = statistics.fmean(known) if whole else None
        deviation = statistics.stdev(known) if whole and len(known) > 1 else 0.0
        spread = {"mean": mean, "deviation": deviation, "losses": found}
        cells.append({"row": row, "column": column} | spread)
    return {"varied": row_key, "grid": dict(grid), "cells": cells}


def show(summary: Mapping[str, Any]) -> None:
    """The table; a run without a result is a dash."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    texts: dict[Any, dict[str, str]] = {}
    for cell in summary["cells"]:
        text = "-" if cell["mean"] is None else f"{cell['mean']:.4f}"
        text += f" ± {cell['deviation']:.4f}" if cell["deviation"] else ""
        texts.setdefault(cell["row"], {})[cell["column"]] = text
    columns = list(dict.fromkeys(cell["column"] for cell in summary["cells"]))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in (summary["varied"], *columns):
        table.add_column(head, justify="right")
    for row, found in texts.items():
        shown = f"{row:g}" if isinstance(row, float) else str(row)
        table.add_row(shown, *(found.get(column, "-") for column in columns))
    Console(highlight=False).print(table)


def sweep(grid: Mapping[str, Sequence[str]], out: Path, common: Sequence[str]) -> int:
    """Run every combination that has not finished; 1 if some have no result."""
    from examples import optim

    planned = []
    for setting in settings(grid):  # all are checked before any starts
        argv, folder = [*common, *_flags(setting)], out / folder_name(setting)
        wanted = configs.parse(argv)
        plans = optim.plans(wanted.optim, wanted.run.steps)
        if runs.holds_run(folder):
            runs.check_unchanged(runs.stored_config(folder), wanted, f"--out {folder}")
        planned.append((argv, folder, {plan.name for plan in plans}, wanted.run.steps))
    for number, (argv, folder, names, steps) in enumerate(planned, 1):
        print(f"[{number}/{len(planned)}] {folder.name}", flush=True)
        code = 0 if _is_done(folder, names, steps) else _run(folder, argv)
        if code > 2:  # a signal: the run has saved, and so does the sweep
            raise Interrupted(code - 128, "the same command goes on")
        check(code != 2, f"{folder.name}: its options are at fault, see above")
        write_json(out / plot.SWEEP_FILE, summarize(grid, out))
    summary = summarize(grid, out)
    show(summary)
    print(f"summary: {out / plot.SWEEP_FILE}")
    print(f"plot: {plot.plot_sweep(summary, out / 'sweep.png')}")
    return int(any(cell["mean"] is None for cell in summary["cells"]))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code (1: some run failed)."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    text = "an option of examples.pretrain and its values (+ joins names in one)"
    parser.add_argument("--set", action="append", default=[], help=text)
    parser.add_argument("--out", default="sweeps/sweep", help="folder of the runs")

    def run() -> int:
        given = parser.parse_args(words[:cut])
        return sweep(parse_grid(given.set), Path(given.out), words[cut + 1 :])

    return options.run_command("sweep", run)


if __name__ == "__main__":
    sys.exit(main())
