"""Time of the whole optimizer step on one device: update and apply, donated.

``python -m benchmarks.step --model llama_1b`` measures our optimizers beside
``optax.contrib.muon``, ``optax.adamw`` and, where torch is there, ``torch.optim.Muon``,
in one process and in turns, and prints milliseconds and ratios.
"""

import argparse
import gc
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import muon2_optax as m2
from benchmarks import models, record, timing

OURS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "muon2 K=3": lambda: m2.muon2(0.02),
    "muon2_f K=3": lambda: m2.muon2_f(0.02),
    # The parameters are zeros here.
    "muon2_f_h K=3": lambda: m2.muon2_f_h(0.02, radius="init"),
    "muon K=3": lambda: m2.muon(0.02, ns_steps=3),
    "muon K=5": lambda: m2.muon(0.02),
    "muon2 K=3 bf16": lambda: m2.muon2(0.02, ns_dtype=jnp.bfloat16),
}
PEERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "optax.contrib.muon": lambda: optax.contrib.muon(0.02),
    "optax.adamw": lambda: optax.adamw(1e-3),
}
MAKERS = {**OURS, **PEERS}


def abstract(tx: optax.GradientTransformation, model: str) -> tuple[Any, Any]:
    """The jitted, donated step, and the shapes of what it takes."""
    shapes = models.leaves(model).items()
    leaves = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes}
    operands = leaves, jax.eval_shape(tx.init, leaves), leaves
    return jax.jit(timing.full_step(tx), donate_argnums=(0, 1)), operands


class JaxContender:
    """One optimizer's compiled step; buffers live only while it is timed."""

    def __init__(self, name: str, tx: optax.GradientTransformation, model: str):
        self.name, self.tx = name, tx
        self.shapes = models.leaves(model)
        step, operands = abstract(tx, model)
        start = time.perf_counter()
        lowered = step.lower(*operands)
        self.step = lowered.compile()
        self.compile_s = time.perf_counter() - start
        memory = self.step.memory_analysis()
        self.temp_mb = getattr(memory, "temp_size_in_bytes", 0) / 1e6

    def operands(self) -> tuple[Any, Any, list[Any]]:
        """Parameters and state at the start, and normal gradients."""
        normal = jax.jit(jax.random.normal, static_argnums=1)
        params = {k: jnp.zeros(s) for k, s in self.shapes.items()}
        return params, self.tx.init(params), timing.gradients(normal, self.shapes)

    def times(self, repeats: int, chain: int) -> list[float]:
        """Milliseconds of a step."""
        return timing.of_step(self.step, *self.operands(), repeats, chain)


class TorchContender:
    """``torch.optim.Muon`` as shipped."""

    compile_s, temp_mb = 0.0, 0.0

    def __init__(self, name: str, model: str, steps: int):
        self.name, self.model, self.steps = name, model, steps

    def times(self, repeats: int, chain: int) -> list[float]:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        params = []
        for shape in models.leaves(self.model).values():
            # Experts are separate 2-D parameters there.
            stack = shape[:-2]
            for _ in range(stack[0] if stack else 1):
                p = torch.nn.Parameter(torch.zeros(shape[-2:], device=device))
                p.grad = torch.randn_like(p)
                params.append(p)
        tx = torch.optim.Muon(params, lr=0.02, ns_steps=self.steps)
        sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
        taken = timing.milliseconds(tx.step, sync, repeats, chain)
        del params, tx
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        return taken


def contenders(model: str, only: str | None) -> list[Any]:
    made: list[Any] = []
    for name, make in MAKERS.items():
        if only is None or name in only.split(","):
            made.append(JaxContender(name, make(), model))
            print(f"compiled {name}: {made[-1].compile_s:.1f} s", flush=True)
    for steps in (5, 3):
        name = f"torch.optim.Muon K={steps}"
        try:
            from torch.optim import Muon as _  # noqa: F401
        except ImportError:
            print("torch.optim.Muon is not here: left out", flush=True)
            break
        if only is None or name in only.split(","):
            made.append(TorchContender(name, model, steps))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama_1b", choices=sorted(models.MODELS))
    parser.add_argument("--repeats", type=int, default=8, help="samples in one turn")
    parser.add_argument("--chain", type=int, default=timing.CHAIN, help="steps each")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", help="comma-separated names")
    parser.add_argument("--commit", help="recorded where git is not there")
    parser.add_argument(
        "--out", type=pathlib.Path, default=record.RESULTS / "step.jsonl"
    )
    args = parser.parse_args()

    made = contenders(args.model, args.only)
    taken: dict[str, list[float]] = {c.name: [] for c in made}
    for turn in range(args.turns):
        for c in made:
            taken[c.name] += c.times(args.repeats, args.chain)
            gc.collect()
        print(f"turn {turn + 1} of {args.turns}", flush=True)
    environment = record.environment(args.commit)
    rows: list[dict[str, Any]] = [
        {
            "benchmark": "step",
            "model": args.model,
            "optimizer": c.name,
            "ms": round(statistics.median(taken[c.name]), 3),
            "ms_min": round(min(taken[c.name]), 3),
            "samples": len(taken[c.name]),
            "chain": args.chain,
            "compile_s": round(c.compile_s, 2),
            "temp_mb": round(c.temp_mb, 1),
            **environment,
        }
        for c in made
    ]
    record.write(args.out, rows)
    base = next((r["ms"] for r in rows if r["optimizer"] == "muon2 K=3"), None)
    print(f"\n{args.model} on {environment['device']}")
    print("| optimizer | ms | ratio to muon2 K=3 | compile s | temporary MB |")
    print("|---|---|---|---|---|")
    for r in rows:
        ratio = f"{r['ms'] / base:.2f}" if base else "-"
        print(
            f"| {r['optimizer']} | {r['ms']:.2f} | {ratio} | {r['compile_s']} |"
            f" {r['temp_mb']} |"
        )


if __name__ == "__main__":
    main()
