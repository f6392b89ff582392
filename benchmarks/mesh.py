"""Time of the sharded optimizer step on the GPUs of one host, beside one GPU.

``python -m benchmarks.mesh --model llama_1b`` runs the full step (update and apply,
donated) on one device and on meshes of all, ours and ``optax.contrib.muon`` in one
process and in turns, and prints milliseconds, parallel efficiency t1 / (D tD), what
moves, and for how long that is not hidden.
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
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import muon2_optax as m2
from benchmarks import models, overlap, record, timing, traces
from benchmarks.cost import collectives
from benchmarks.sharded import compile_step


class Contender:
    """One optimizer's compiled step on one mesh; buffers live only while timed."""

    def __init__(self, name: str, model: str, mesh: Mesh):
        self.name, self.mesh = name, mesh
        spec = PartitionSpec(
            *(a if a in mesh.shape else None for a in ("fsdp", "tensor"))
        )
        self.sharding = NamedSharding(mesh, spec)
        self.params = {
            k: jax.ShapeDtypeStruct(s, jnp.float32, sharding=self.sharding)
            for k, s in models.leaves(model).items()
        }
        if name == "optax.contrib.muon":
            self.tx: Any = optax.contrib.muon(0.02)
        else:
            self.tx = m2.REGISTRY[name](0.02, shardings=m2.Shardings.of(self.params))

        start = time.perf_counter()
        self.step, self.state = compile_step(self.tx, self.params, mesh)
        self.compile_s = time.perf_counter() - start
        self.moves = collectives(self.step.as_text())

    def operands(self) -> tuple[Any, Any, list[Any]]:
        """Parameters and state of zeros, and normal gradients to take in turn."""
        rng = jax.jit(
            lambda key, shape: jax.random.normal(key, shape),
            static_argnums=1,
            out_shardings=self.sharding,
        )

        def zeros(x: Any) -> jax.Array:
            return jnp.zeros(x.shape, x.dtype, device=x.sharding)

        shapes = {k: p.shape for k, p in self.params.items()}
        params, state = jax.tree.map(zeros, (self.params, self.state))
        return params, state, timing.gradients(rng, shapes)


def mesh_of(name: str) -> Mesh:
    """Of ``fsdp=4`` or ``fsdp=2xtensor=2``, over the first devices."""
    axes = [part.split("=") for part in name.split("x")]
    shape = tuple(int(size) for _, size in axes)
    devices = np.asarray(jax.devices()[: math.prod(shape)])
    return Mesh(
        devices.reshape(shape),
        tuple(axis for axis, _ in axes),
        axis_types=(AxisType.Auto,) * len(axes),
    )


def overlap_of(
    contender: Contender, mesh_name: str, args: argparse.Namespace
) -> dict[str, float]:
    """How long its communication takes, and how much of that nothing hides."""
    if contender.mesh.size == 1:
        return {}
    keep = args.traces and args.traces / f"{contender.name}_{mesh_name}"
    gpus = traces.of_step(contender.step, *contender.operands(), args.chain, keep)
    gc.collect()
    return overlap.milliseconds(gpus, args.chain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama_1b", choices=sorted(models.MODELS))
    parser.add_argument("--optimizers", default="muon2,muon2_f,optax.contrib.muon")
    parser.add_argument("--meshes", default="fsdp=1,fsdp=2", help="or fsdp=2xtensor=2")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--chain", type=int, default=timing.CHAIN, help="steps each")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--traces", type=pathlib.Path, help="where to keep profiles")
    parser.add_argument("--commit", help="recorded where git is not there")
    parser.add_argument(
        "--out", type=pathlib.Path, default=record.RESULTS / "mesh.jsonl"
    )
    args = parser.parse_args()

    made = []
    for mesh_name in args.meshes.split(","):
        mesh = mesh_of(mesh_name)
        for name in args.optimizers.split(","):
            made.append((mesh_name, Contender(name, args.model, mesh)))
            print(
                f"compiled {name} on {mesh_name}: {made[-1][1].compile_s:.1f} s",
                flush=True,
            )
    taken: list[list[float]] = [[] for _ in made]
    for turn in range(args.turns):
        for times, (_, c) in zip(taken, made):
            times += timing.of_step(c.step, *c.operands(), args.repeats, args.chain)
            gc.collect()
        print(f"turn {turn + 1} of {args.turns}", flush=True)
    overlaps = [overlap_of(c, mesh_name, args) for mesh_name, c in made]
    ms = [statistics.median(t) for t in taken]
    single = {c.name: t for t, (_, c) in zip(ms, made) if c.mesh.size == 1}
    rows = []
    for t, times, hidden, (_, c) in zip(ms, taken, overlaps, made):
        devices = c.mesh.size
        efficiency = single[c.name] / (devices * t) if c.name in single else None
        rows.append(
            {
                "benchmark": "mesh",
                "model": args.model,
                "optimizer": c.name,
                "mesh": dict(c.mesh.shape),
                "ms": round(t, 3),
                "efficiency": efficiency and round(efficiency, 4),
                "collectives": {k: n for k, (n, _) in c.moves.items()},
                "mb_per_device": round(sum(b for _, b in c.moves.values()) / 1e6, 2),
                **hidden,
                "compile_s": round(c.compile_s, 1),
                "samples": len(times),
                "chain": args.chain,
                **record.environment(args.commit),
            }
        )
        last = list(rows[-1]).index("compile_s")
        print({k: rows[-1][k] for k in list(rows[-1])[2:last]}, flush=True)
    record.write(args.out, rows)


if __name__ == "__main__":
    main()
