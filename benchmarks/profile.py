"""What a step is made of: the programs that a GPU runs, how often and how long.

``python -m benchmarks.profile --model llama_1b`` times each optimizer's step, then
profiles a few, and prints the kinds of program that take most.
"""

import argparse
import collections
import gc
import pathlib
import re
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import models, overlap, record, step, timing, traces

# Milliseconds of a step from which on a kind of program has its place in a line.
LEAST = 0.2


def programs(events: Sequence[traces.Event], steps: int) -> dict[str, list[float]]:
    """{kind: [launches, milliseconds]} of a step; XLA numbers programs of one kind."""
    count: collections.Counter[str] = collections.Counter()
    spent: collections.Counter[str] = collections.Counter()
    for name, (start, end) in events:
        kind = re.sub(r"([._]\d+)+$", "", name)
        count[kind] += 1
        spent[kind] += end - start
    return {
        kind: [round(count[kind] / steps), round(ns / 1e6 / steps, 3)]
        for kind, ns in spent.most_common()
        if ns / 1e6 / steps >= LEAST
    }


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    contender = step.JaxContender(name, step.OURS[name](), args.model)
    taken = contender.times(args.repeats, args.chain)
    gpus = traces.of_step(contender.step, *contender.operands(), args.steps)
    events = gpus[0] if gpus else []
    return {
        "benchmark": "profile",
        "model": args.model,
        "optimizer": name,
        "busy_ms": round(overlap.length([s for _, s in events]) / 1e6 / args.steps, 3),
        "programs": programs(events, args.steps),
        "ms": round(statistics.median(taken), 3),
        "compile_s": round(contender.compile_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama_1b", choices=sorted(models.MODELS))
    parser.add_argument("--optimizers", default="muon2 K=3,muon2_f K=3,muon K=3")
    parser.add_argument("--repeats", type=int, default=8, help="samples of the time")
    parser.add_argument("--chain", type=int, default=timing.CHAIN, help="steps each")
    parser.add_argument("--steps", type=int, default=5, help="that are profiled")
    parser.add_argument("--commit", help="recorded where git is not there")
    parser.add_argument(
        "--out", type=pathlib.Path, default=record.RESULTS / "profile.jsonl"
    )
    args = parser.parse_args()
    environment = record.environment(args.commit)
    for name in args.optimizers.split(","):
        row = measure(name, args)
        record.write(args.out, [{**row, **environment}])
        print(f"{name}: {row['ms']} ms, the GPU works for {row['busy_ms']}", flush=True)
        for kind, (launches, ms) in row["programs"].items():
            print(f"  {ms:8.3f} ms in {launches:4} of {kind}", flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
