"""Time of the whole training step of the example: tokens per second and MFU.

``python -m benchmarks.train --model llama_350m --batch-size 32`` compiles the step of
``python -m examples.pretrain`` for each optimizer and for none (gradients alone, so
that the difference is the optimizer's share) and runs it on random tokens.
"""

import argparse
import gc
import math
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import muon2_optax as m2
from benchmarks import record, timing
from benchmarks.cost import model_flops, peak_flops
from benchmarks.models import VOCAB_SIZES
from examples import optim, step
from examples.config import Config, ModelConfig, OptimConfig, RunConfig
from examples.mesh import batch_sharding, make_mesh
from examples.models import make_model, matrix_rules

NONE = "none"


class Contender:
    """The compiled training step of one optimizer."""

    def __init__(self, name: str, config: Config, mesh: jax.sharding.Mesh):
        self.name, self.mesh = name, mesh
        vocab_size = VOCAB_SIZES[config.model.architecture]
        graphdef, init = make_model(config.model, vocab_size)
        params = step.abstract_params(init, mesh)
        self.flops = model_flops(config.model, params)
        if name == NONE:
            transform: Any = optax.set_to_zero()
        else:
            (plan,) = optim.plans(
                OptimConfig(optimizer=name),
                steps=1000,
                rules=matrix_rules(config.model),
                shardings=m2.Shardings.of(params) if mesh.size > 1 else None,
            )
            transform = plan.transform
        abstract = step.abstract_state(transform, params, mesh)
        parts = config.run.accumulate
        self.chunks = step.loss_chunks(config, vocab_size, mesh, parts)
        train_step = step.make_train_step(
            graphdef, transform, config, abstract, self.chunks
        )
        shape = (config.run.batch_size, config.model.seq_len + 1)
        rows = batch_sharding(mesh)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
        start = time.perf_counter()
        self.step = train_step.lower(abstract, tokens).compile()
        self.compile_s = time.perf_counter() - start
        memory = self.step.memory_analysis()
        self.temp_mb = getattr(memory, "temp_size_in_bytes", 0) / 1e6

        def start_state() -> Any:
            key = jax.random.key(0)
            return step.initial_state(init, transform, abstract, key)

        self.start = start_state
        draw = jax.jit(jax.random.randint, static_argnums=(1, 2, 3), out_shardings=rows)
        self.tokens = draw(jax.random.key(1), shape, 0, vocab_size)

    def times(self, repeats: int, chain: int) -> list[float]:
        kept = [self.start()]

        def run() -> None:
            kept[0], self.metrics = self.step(kept[0], self.tokens)

        taken = timing.milliseconds(
            run, lambda: jax.block_until_ready(kept), repeats, chain
        )
        if not math.isfinite(float(self.metrics.loss)):
            raise RuntimeError(f"{self.name}: the loss is not finite")
        return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama_350m")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--remat", default="none", choices=("none", "dots", "full"))
    parser.add_argument("--scan-layers", action="store_true")
    parser.add_argument("--loss-chunks", type=int, default=0)
    parser.add_argument("--mesh", default="", help="as in fsdp=4")
    parser.add_argument("--optimizers", default=f"{NONE},adamw,muon2,muon2_f")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chain", type=int, default=timing.CHAIN)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--commit", help="recorded where git is not there")
    parser.add_argument(
        "--out", type=pathlib.Path, default=record.RESULTS / "train.jsonl"
    )
    args = parser.parse_args()

    model = ModelConfig(
        model=args.model,
        remat=args.remat,
        scan_layers=args.scan_layers,
        **({"seq_len": args.seq_len} if args.seq_len else {}),
    )
    run = RunConfig(
        batch_size=args.batch_size,
        accumulate=args.accumulate,
        loss_chunks=args.loss_chunks,
    )
    config = Config(model=model, run=run)
    mesh = make_mesh(args.mesh or "data=1")
    tokens = args.batch_size * model.seq_len
    peak = peak_flops(mesh.size)
    with jax.set_mesh(mesh):
        made = []
        for name in args.optimizers.split(","):
            made.append(Contender(name, config, mesh))
            print(f"compiled {name}: {made[-1].compile_s:.1f} s", flush=True)
        taken: dict[str, list[float]] = {c.name: [] for c in made}
        for _ in range(args.turns):
            for c in made:
                taken[c.name] += c.times(args.repeats, args.chain)
                gc.collect()
    ms = {name: statistics.median(times) for name, times in taken.items()}
    for c in made:
        t = ms[c.name]
        row = {
            "benchmark": "train",
            "model": args.model,
            "seq_len": model.seq_len,
            "batch_size": args.batch_size,
            "accumulate": args.accumulate,
            "remat": args.remat,
            "scan_layers": args.scan_layers,
            "loss_chunks": c.chunks,
            "mesh": dict(mesh.shape),
            "optimizer": c.name,
            "ms": round(t, 3),
            "tokens_per_s": round(1e3 * tokens / t),
            "mfu": peak and round(1e3 * tokens * c.flops / t / peak, 4),
            "optimizer_share": round(1 - ms[NONE] / t, 4) if NONE in ms else None,
            "compile_s": round(c.compile_s, 1),
            "temp_mb": round(c.temp_mb, 1),
            "samples": len(taken[c.name]),
            "chain": args.chain,
            **record.environment(args.commit),
        }
        record.write(args.out, [row])
        shown = ("optimizer", "ms", "tokens_per_s", "mfu", "optimizer_share", "temp_mb")
        print({key: row[key] for key in shown}, flush=True)


if __name__ == "__main__":
    main()
