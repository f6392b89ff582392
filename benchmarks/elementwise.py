"""How close the elementwise part of a step comes to the memory's bandwidth.

``python -m benchmarks.elementwise --model llama_1b`` times the moments and the
application of an update, without orthogonalization, and a copy of as many bytes, and
prints bytes that must move / (time x bandwidth of the copy).
"""

import argparse
import gc
import math
import pathlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import optax

import muon2_optax as m2
from benchmarks import models, record, timing

# Bytes per parameter in float32: gradient, momentum, (second moment,) parameter read;
# all but the gradient written.
CASES: dict[str, tuple[optax.GradientTransformation, int]] = {
    "momentum": (m2.scale_by_momentum(nesterov=True), 20),
    "second moment": (m2.scale_by_second_moment(), 28),
    # Its statistics need all of the gradient before the first update: read twice.
    "factored second moment": (m2.factorized_second_moment(), 24),
}


def copy_bandwidth(elements: int, repeats: int, chain: int) -> float:
    """Bytes per second, read and written, of the fastest copy."""
    kept = [jnp.zeros(elements)]
    # Something that a compiler cannot leave out, and in place.
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)

    def run() -> None:
        kept[0] = bump(kept[0])

    taken = timing.milliseconds(
        run, lambda: jax.block_until_ready(kept), repeats, chain
    )
    return 8 * elements / (1e-3 * statistics.median(taken))


def step_of(tx: optax.GradientTransformation) -> Any:
    chained = optax.chain(tx, optax.scale_by_learning_rate(0.02))
    return chained, jax.jit(timing.full_step(chained), donate_argnums=(0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama_1b", choices=sorted(models.MODELS))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--chain", type=int, default=timing.CHAIN)
    parser.add_argument("--commit", help="recorded where git is not there")
    parser.add_argument(
        "--out", type=pathlib.Path, default=record.RESULTS / "elementwise.jsonl"
    )
    args = parser.parse_args()

    shapes = models.leaves(args.model)
    elements = sum(math.prod(s) for s in shapes.values())
    bandwidth = copy_bandwidth(elements, args.repeats, args.chain)
    print(f"copy: {bandwidth / 1e9:.0f} GB/s", flush=True)
    draw = jax.jit(jax.random.normal, static_argnums=1)
    for name, (tx, per_parameter) in CASES.items():
        grads = timing.drawn(draw, shapes)
        params = {k: jnp.zeros(s) for k, s in shapes.items()}
        chained, step = step_of(tx)
        taken = timing.of_step(
            step, params, chained.init(params), [grads], args.repeats, args.chain
        )
        ms = statistics.median(taken)
        row = {
            "benchmark": "elementwise",
            "model": args.model,
            "part": name,
            "ms": round(ms, 3),
            "bytes_per_parameter": per_parameter,
            "copy_gb_per_s": round(bandwidth / 1e9, 1),
            "of_copy": round(per_parameter * elements / (1e-3 * ms * bandwidth), 3),
            "samples": len(taken),
            "chain": args.chain,
            **record.environment(args.commit),
        }
        record.write(args.out, [row])
        print(f"{name}: {ms:.3f} ms, {row['of_copy']:.2f} of the copy", flush=True)
        del grads, params
        gc.collect()


if __name__ == "__main__":
    main()
