"""Runs what a plan still wants, on every GPU of the machine; stops and goes on.

``python -m benchmarks.evidence.run --plan llama_60m --tokens FOLDER`` starts one
process for each GPU. Each takes the first cell that nobody has, trains it, and adds a
line to the results. A cell with a line is never run again.
"""

import argparse
import fcntl
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any

from benchmarks import record
from benchmarks.evidence import cells, plan
from benchmarks.evidence.cells import Cell

RESULTS = record.RESULTS / "evidence.jsonl"


def read(path: pathlib.Path) -> dict[Cell, dict[str, Any]]:
    """Results by cell; none before there is a file."""
    return cells.read(path.read_text().splitlines()) if path.exists() else {}


def append(path: pathlib.Path, row: dict[str, Any]) -> None:
    """One whole line, also where several processes write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row) + "\n")


def line(
    cell: Cell, found: dict[str, Any], environment: dict[str, Any]
) -> dict[str, Any]:
    """What is kept of a run."""
    named = {name: getattr(cell, name) for name in cells.FIELDS}
    return {"benchmark": "evidence", **named, **found, **environment}


def claim(folder: pathlib.Path, cell: Cell) -> bool:
    """Whether the cell is ours now: false if another process has it."""
    name = hashlib.sha256(repr(cell).encode()).hexdigest()[:24]
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def work(args: argparse.Namespace) -> None:
    """One process: cells in the plan's order until none is left, or no time."""
    from benchmarks.evidence import data, sizes, training

    environment = record.environment(args.commit)
    trainers: dict[str, training.Trainer] = {}

    def trainer(size: str) -> training.Trainer:
        if size not in trainers:
            tokens = data.load(args.tokens / sizes.SIZES[size].tokenizer)
            trainers[size] = training.Trainer(sizes.SIZES[size], tokens)
        return trainers[size]

    longest: dict[str, float] = {}
    while True:
        results = read(args.out)
        todo = [c for p in args.plan.split(",") for c in plan.wanted(p, results)]
        left = args.until - time.time() if args.until else float("inf")
        todo = [c for c in todo if longest.get(c.size, 0) * _share(c) < left]
        mine = next((c for c in todo if claim(args.claims, c)), None)
        if mine is None:
            break
        for cell in todo[: args.ahead]:  # compiled while this one runs
            trainer(cell.size).prepare(cell.arm, cell.control)
        try:
            found = trainer(mine.size).run(mine)
        except Exception:  # the others can still be run
            traceback.print_exc()
            continue
        append(args.out, line(mine, found, environment))
        longest[mine.size] = found["wall_s"] / _share(mine)
        print(time.strftime("%X"), mine, found["loss"], found["wall_s"], flush=True)


def _share(cell: Cell) -> float:
    """Length of a run as a share of its size's."""
    from benchmarks.evidence.sizes import SIZES

    return cell.steps / SIZES[cell.size].steps if cell.steps else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", required=True, help=", ".join(plan.PLANS))
    parser.add_argument(
        "--tokens", type=pathlib.Path, required=True, help="folder of tokenized text"
    )
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--workers", type=int, default=1, help="GPUs to use")
    parser.add_argument("--seconds", type=float, help="start no run beyond this")
    parser.add_argument("--ahead", type=int, default=8, help="cells compiled ahead")
    parser.add_argument("--commit", help="recorded where git is not there")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--claims", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.claims:
        work(args)
        return
    more = ["--claims", tempfile.mkdtemp(prefix="claims-")]
    if args.seconds:
        more += ["--until", str(time.time() + args.seconds)]
    command = [sys.executable, "-m", "benchmarks.evidence.run", *sys.argv[1:], *more]
    processes = [
        subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": str(i)})
        for i in range(args.workers)
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"a process ended with an error: {codes}")


if __name__ == "__main__":
    main()
