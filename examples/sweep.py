"""Runs over all combinations of some options, and one table of them.

    python -m examples.sweep --set learning_rate=0.01,0.02,0.04 \\
        --set optimizer=muon,muon2 --out sweeps/rates -- --steps 300 --data text/

Whatever follows `--` goes to every run. A sweep that was stopped goes on with the same
command: runs that have finished are not repeated, others continue.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples import config as configs
from examples.config import METRICS_FILE
from examples.files import write_atomically
from examples.flags import UserError, check, failed
from examples.folder import check_unchanged, holds_run, stored_config
from examples.records import read_metrics

SWEEP_FILE = "sweep.json"
Setting = dict[str, str]


def parse_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    """`learning_rate=0.01,0.02` to names and values, in the order given."""
    known = configs.Config().flat().keys() - {"out", "resume"}
    grid: dict[str, list[str]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        check(name in known, f"--set {text}: no option {name!r} that can be varied")
        # Commas separate values; a plus joins optimizers or mesh axes in one value.
        grid[name] = [value.strip() for value in values.split(",") if value.strip()]
        check(bool(grid[name]), f"--set {text}: no values")
    check(bool(grid), "--set NAME=VALUE,VALUE is needed")
    return grid


def settings(grid: Mapping[str, Sequence[str]]) -> list[Setting]:
    """Every combination."""
    return [
        dict(zip(grid, values, strict=True))
        for values in itertools.product(*grid.values())
    ]


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


def _results(folder: Path) -> list[dict[str, Any]]:
    path = folder / METRICS_FILE
    records = read_metrics(path) if path.exists() else []
    return [record for record in records if record["kind"] == "result"]


# Of what a run may change when it goes on, what its numbers depend on.
_OF_RESULTS = ("data", "eval_tokens")


def _check_begun(folder: Path, wanted: configs.Config) -> None:
    """What a run there was begun with must be what is asked for now."""
    if holds_run(folder):
        old = stored_config(folder)
        check_unchanged(old, wanted, f"--out {folder}", _OF_RESULTS)


def _finished(folder: Path, argv: Sequence[str]) -> bool:
    """Whether the run has all its results, for as many steps as are wanted now."""
    from examples import optim

    wanted = configs.parse(argv)
    names = {plan.name for plan in optim.plans(wanted.optim, wanted.run.steps)}
    enough = [r for r in _results(folder) if r["steps"] >= wanted.run.steps]
    return names <= {record["optimizer"] for record in enough}


def summarize(
    grid: Mapping[str, Sequence[str]], out: Path, codes: Mapping[str, int]
) -> dict[str, Any]:
    """Rows by the first option that is no optimizer, columns by all others."""
    row_key = next((name for name in grid if name != "optimizer"), "optimizer")
    rows = []
    for setting in settings(grid):
        name = folder_name(setting)
        others = {k: v for k, v in setting.items() if k not in (row_key, "optimizer")}
        suffix = "".join(f" {k}={v}" for k, v in others.items())
        found: list[dict[str, Any]] = _results(out / name)
        if not found:
            method = setting.get("optimizer", "all")
            found = [{"optimizer": method, "val_loss": None, "perplexity": None}]
        for result in found:
            key = setting.get(row_key, "")
            single = row_key == "optimizer"
            rows.append(
                {
                    "row": _number(result["optimizer"] if single else key),
                    "column": "val loss" if single else result["optimizer"] + suffix,
                    "setting": setting,
                    "folder": name,
                    "exit_code": codes.get(name, 0),
                    "val_loss": result["val_loss"],
                    "perplexity": result["perplexity"],
                }
            )
    return {"varied": row_key, "grid": dict(grid), "rows": rows}


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def show(summary: Mapping[str, Any]) -> None:
    """The table: the best of each column is bold; a run without a result is a dash."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = summary["rows"]
    columns = list(dict.fromkeys(entry["column"] for entry in rows))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(summary["varied"], justify="right")
    best = {}
    for column in columns:
        table.add_column(column, justify="right")
        losses = [r["val_loss"] for r in rows if r["column"] == column]
        best[column] = min((x for x in losses if x is not None), default=None)
    for label in dict.fromkeys(entry["row"] for entry in rows):
        cells = []
        for column in columns:
            mine = [r for r in rows if (r["row"], r["column"]) == (label, column)]
            loss = mine[-1]["val_loss"] if mine else None
            bold = "[bold]" if loss is not None and loss == best[column] else ""
            cells.append("-" if loss is None else f"{bold}{loss:.4f}")
        shown = f"{label:g}" if isinstance(label, float) else str(label)
        table.add_row(shown, *cells)
    Console(highlight=False).print(table)


def sweep(grid: Mapping[str, Sequence[str]], out: Path, common: Sequence[str]) -> int:
    """Run every combination that has not finished; returns the exit code."""
    from examples import optim, plot

    chosen = settings(grid)
    argvs = [[*common, *_flags(setting)] for setting in chosen]
    for setting, argv in zip(chosen, argvs, strict=True):  # all, before any starts
        wanted = configs.parse(argv)
        optim.plans(wanted.optim, wanted.run.steps)
        _check_begun(out / folder_name(setting), wanted)
    codes: dict[str, int] = {}
    for number, (setting, argv) in enumerate(zip(chosen, argvs, strict=True), 1):
        name = folder_name(setting)
        print(f"[{number}/{len(chosen)}] {name}", flush=True)
        if not _finished(out / name, argv):
            codes[name] = _run(out / name, argv)
        if codes.get(name, 0) > 2:  # a signal: the run has saved, and so does the sweep
            return codes[name]
        if codes.get(name) == 2:
            raise UserError(f"{name}: its options are at fault, see above")
        summary = summarize(grid, out, codes)
        text = json.dumps(summary, indent=2) + "\n"
        write_atomically(out / SWEEP_FILE, [text.encode()])
    show(summarize(grid, out, codes))
    print(f"summary: {out / SWEEP_FILE}")
    print(f"plot: {plot.plot_sweep(summarize(grid, out, codes), out / 'sweep.png')}")
    return max(codes.values(), default=0)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code (1: some run failed)."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="python -m examples.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=V,V",
        help="an option of examples.pretrain and its values (+ joins names in one)",
    )
    parser.add_argument("--out", default="sweeps/sweep", help="folder of the runs")
    options = parser.parse_args(words[:cut])
    try:
        return sweep(parse_grid(options.set), Path(options.out), words[cut + 1 :])
    except UserError as error:
        return failed("sweep", error)


if __name__ == "__main__":
    sys.exit(main())
