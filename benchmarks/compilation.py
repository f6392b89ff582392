"""Seconds to trace, lower and compile the step of ``benchmarks.step``.

``python -m benchmarks.compilation --model llama_1b`` does it twice for each optimizer:
the first time in a process pays for a kernel that is compiled then, and kept. Not for
importing Pallas, which the first program with a kernel waits for in any process: that
stands in ``import_s``, where there is a kernel.
"""

import argparse
import importlib
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import models, record, step


def measure(name: str, model: str, import_s: float | None) -> dict[str, Any]:
    jax.clear_caches()  # of what was traced before
    fn, operands = step.abstract(step.MAKERS[name](), model)
    times = [time.perf_counter()]
    traced = fn.trace(*operands)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    text = compiled.as_text()
    trace_s, lower_s, xla_s = (round(b - a, 2) for a, b in zip(times, times[1:]))
    return {
        "benchmark": "compilation",
        "model": model,
        "optimizer": name,
        "trace_s": trace_s,
        "lower_s": lower_s,
        "xla_s": xla_s,
        "total_s": round(times[-1] - times[0], 2),
        "import_s": import_s if "mosaic_gpu" in text else None,
        "hlo_lines": text.count("\n"),
    }


def start() -> float | None:
    """Readies the device, and Pallas for it: seconds of import, None without Pallas."""
    jax.block_until_ready(jax.jit(lambda x: x @ x)(jnp.ones((64, 64))))
    begin = time.perf_counter()
    try:
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    except ImportError:
        return None
    return round(time.perf_counter() - begin, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama_1b", choices=sorted(models.MODELS))
    parser.add_argument("--optimizers", default="muon2 K=3,muon K=3,optax.adamw")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--commit", help="recorded where git is not there")
    parser.add_argument(
        "--out", type=pathlib.Path, default=record.RESULTS / "compilation.jsonl"
    )
    args = parser.parse_args()
    environment = record.environment(args.commit)
    import_s = start()
    print(f"importing Pallas: {import_s} s", flush=True)
    for name in args.optimizers.split(","):
        for time_ in range(1, args.times + 1):
            row = {**measure(name, args.model, import_s), "time": time_}
            record.write(args.out, [{**row, **environment}])
            print(
                f"{name}, time {time_}: trace {row['trace_s']} + lower"
                f" {row['lower_s']} + XLA {row['xla_s']} = {row['total_s']} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
