"""Time of Newton-Schulz alone: ours beside plain bfloat16, and the kernel's products.

``python -m benchmarks.newton_schulz`` prints K=3 on stacks of three shapes, and on an
NVIDIA Hopper GPU the products of the symmetric kernel beside those of stock XLA.
"""

import argparse
import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import record
from muon2_optax.execution import on_device
from muon2_optax.kernels import hopper, newton_schulz, symmetric
from muon2_optax.schedules import plans

STACKS = [(18, 2048, 5472), (24, 768, 3072), (48, 2048, 2048)]
PRODUCTS = [(48, 2048, 2048), (18, 2048, 5504), (24, 768, 3072), (96, 768, 768)]
PLAN = plans.resolve("keller", 3)


def einsum(x: jax.Array) -> jax.Array:
    """What published JAX codes run, on a stack."""
    y = x.astype(jnp.float32)
    y = y / jnp.sqrt(jnp.sum(y * y, axis=(-2, -1), keepdims=True))
    y = y.astype(jnp.bfloat16)
    for a, b, c in PLAN.triples:
        gram = jnp.einsum("lij,lkj->lik", y, y)
        poly = b * gram + c * jnp.einsum("lij,ljk->lik", gram, gram)
        y = a * y + jnp.einsum("lij,ljk->lik", poly, y)
    return y.astype(x.dtype)


def ours(x: jax.Array, kernels: bool | None) -> jax.Array:
    with hopper.kernels(kernels):
        return on_device.orthogonalize([x], PLAN)[0]


def exact(x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y / jnp.sqrt(jnp.sum(y * y, axis=(-2, -1), keepdims=True))
    with jax.default_matmul_precision("highest"):
        for a, b, c in PLAN.triples:
            gram = y @ jnp.swapaxes(y, -1, -2)
            y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y


def timed(
    fns: dict[str, Callable[..., Any]], args: tuple[Any, ...], rounds: int, calls: int
) -> dict[str, float]:
    """Median milliseconds of a call, the functions taking turns."""
    taken: dict[str, list[float]] = {name: [] for name in fns}
    for fn in fns.values():
        jax.block_until_ready(fn(*args))
    for _ in range(rounds):
        for name, fn in fns.items():
            start = time.perf_counter()
            out = [fn(*args) for _ in range(calls)][-1]
            jax.block_until_ready(out)
            taken[name].append(1e3 * (time.perf_counter() - start) / calls)
            del out
    return {name: statistics.median(ms) for name, ms in taken.items()}


def iterations(rounds: int, calls: int) -> list[dict[str, Any]]:
    rows = []
    for shape in STACKS:
        x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
        fns: dict[str, Callable[..., Any]] = {
            "plain bfloat16": jax.jit(einsum),
            "ours, stock XLA": jax.jit(functools.partial(ours, kernels=False)),
            "ours": jax.jit(functools.partial(ours, kernels=None)),
        }
        ms = timed(fns, (x,), rounds, calls)
        few = x[:2]
        want = jax.jit(exact)(few)
        for name, fn in fns.items():
            # The whole stack: the path depends on how many there are.
            got = fn(x)[:2].astype(jnp.float32)
            rows.append(
                {
                    "what": "newton_schulz K=3",
                    "stack": list(shape),
                    "name": name,
                    "ms": round(ms[name], 4),
                    "ratio": round(ms["plain bfloat16"] / ms[name], 3),
                    # Results leave in bfloat16, which alone is an error of 2e-3.
                    "error": float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)),
                }
            )
    return rows


def products(rounds: int, calls: int) -> list[dict[str, Any]]:
    rows = []
    for stack, m, k in PRODUCTS:
        x = jax.random.normal(jax.random.key(0), (stack, m, k), jnp.float16)
        c = jnp.matmul(x, jnp.swapaxes(x, -1, -2)) / k
        tiles = newton_schulz.tiles_for(m)

        def kernel(x: jax.Array, c: jax.Array, addends: int, tiles: Any) -> jax.Array:
            pairs = [(0.5, c)] * addends
            return symmetric.product(x, x, *pairs, alpha=1 / x.shape[-1], tiles=tiles)

        fns: dict[str, Callable[..., Any]] = {
            "XLA": jax.jit(lambda x, c: jnp.matmul(x, jnp.swapaxes(x, -1, -2)))
        }
        for addends in (0, 1, 2):
            fns[f"kernel, {addends} addends"] = jax.jit(
                functools.partial(kernel, addends=addends, tiles=tiles)
            )
        ms = timed(fns, (x, c), rounds, calls)
        for name in fns:
            rows.append(
                {
                    "what": "X X^T",
                    "stack": [stack, m, k],
                    "name": name,
                    "ms": round(ms[name], 4),
                    "ratio": round(ms["XLA"] / ms[name], 3),
                    "plain_tflops": round(2e-9 * stack * m * m * k / ms[name]),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=8, help="calls in one turn")
    parser.add_argument("--commit", help="recorded where git is not there")
    parser.add_argument(
        "--out", type=pathlib.Path, default=record.RESULTS / "newton_schulz.jsonl"
    )
    args = parser.parse_args()
    rows = iterations(args.rounds, args.calls)
    if hopper.available():
        rows += products(args.rounds, args.calls)
    environment = record.environment(args.commit)
    record.write(
        args.out, [{"benchmark": "newton_schulz", **r, **environment} for r in rows]
    )
    print(f"{environment['device']}\n| what | stack | | ms | times as fast | error |")
    print("|---|---|---|---|---|---|")
    for r in rows:
        error = f"{r['error']:.1e}" if "error" in r else "-"
        print(
            f"| {r['what']} | {'x'.join(map(str, r['stack']))} | {r['name']} |"
            f" {r['ms']:.3f} | {r['ratio']:.2f} | {error} |"
        )


if __name__ == "__main__":
    main()
