"""The optimizer step of a TPU pod, compiled on any machine: what moves, what it takes.

``python -m benchmarks.pod --topology v5e:16x16 --model llama_1b`` runs the real TPU
compiler (libtpu, the ``pod`` extra) on the step of our optimizer and of
``optax.contrib.muon``, without a TPU, and prints collectives, bytes and memory per
chip. ``--topology h100:8`` does the same for GPUs of one host, with the Hopper kernels
(``pip install jax-cuda12-pjrt jax-cuda12-plugin``, jax 0.11 or later).
"""

import os

# The compiler looks for a machine that is not there unless told so.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import argparse  # noqa: E402
import pathlib  # noqa: E402
import time  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec  # noqa: E402

import muon2_optax as m2  # noqa: E402
from benchmarks import models, record  # noqa: E402
from benchmarks.cost import collectives  # noqa: E402
from benchmarks.sharded import compile_step  # noqa: E402
from muon2_optax.kernels import hopper  # noqa: E402


def devices_of(topology: str) -> np.ndarray:
    """Devices to compile for; they need not be here."""
    kind, _, shape = topology.partition(":")
    if kind != "h100":
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    else:
        config = pathlib.Path(__file__).with_name("h100.txtpb").read_text()
        found = topologies.get_topology_desc(
            kind, platform="cuda", target_config=config, topology=f"1x1x{shape}"
        )
    return np.asarray(found.devices)


def abstract(model: str, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Parameters as a pod holds them: inputs over fsdp, outputs over tensor.

    Where fsdp does not divide the inputs it goes to the outputs, as trainers do.
    """
    params = {}
    for name, shape in models.leaves(model).items():
        axes: list[Any] = [None] * len(shape)
        if len(shape) == 3 and "expert" in mesh.shape:
            axes[0] = "expert"
        for axis, order in (("fsdp", (-2, -1)), ("tensor", (-1, -2))):
            for dim in order:
                size = mesh.shape.get(axis, 1)
                if size > 1 and axes[dim] is None and shape[dim] % size == 0:
                    axes[dim] = axis
                    break
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        params[name] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    return params


def measure(name: str, tx: Any, params: Any) -> dict[str, Any]:
    mesh = next(iter(params.values())).sharding.mesh
    start = time.perf_counter()
    on_gpus = mesh.devices.flat[0].platform == "gpu"
    with hopper.kernels(on_gpus or None):
        compiled, _ = compile_step(tx, params, mesh)
    taken = time.perf_counter() - start
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    found = collectives(text)
    return {
        "optimizer": name,
        "collectives": {k: n for k, (n, _) in found.items()},
        "mb_per_chip": round(sum(b for _, b in found.values()) / 1e6, 2),
        "temp_mb": round(memory.temp_size_in_bytes / 1e6, 1),
        "arguments_mb": round(memory.argument_size_in_bytes / 1e6, 1),
        "compile_s": round(taken, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:16x16")
    parser.add_argument("--model", default="llama_1b", choices=sorted(models.MODELS))
    parser.add_argument("--mesh", default="fsdp", help="fsdp | fsdp=32,tensor=8 | ...")
    parser.add_argument("--optimizers", default="muon2,muon2_f,optax.contrib.muon")
    parser.add_argument(
        "--out", type=pathlib.Path, default=record.RESULTS / "pod.jsonl"
    )
    args = parser.parse_args()

    devices = devices_of(args.topology)
    # What each platform's default is; this process's own is a CPU's.
    half = jnp.float16 if devices.flat[0].platform == "gpu" else jnp.bfloat16
    sizes = [part.split("=") for part in args.mesh.split(",")]
    shape = [int(s[1]) if len(s) > 1 else devices.size for s in sizes]
    mesh = Mesh(
        devices.reshape(shape),
        tuple(s[0] for s in sizes),
        axis_types=(AxisType.Auto,) * len(shape),
    )
    params = abstract(args.model, mesh)
    ours = m2.Shardings.of(params)
    rules = m2.MatrixRules(((r"", m2.MatrixAxes(-2, -1)),))
    dims = jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), params)
    for name in args.optimizers.split(","):
        if name == "optax.contrib.muon":
            tx: Any = optax.contrib.muon(0.02, muon_weight_dimension_numbers=dims)
        else:
            tx = m2.REGISTRY[name](0.02, rules=rules, shardings=ours, ns_dtype=half)
        row = {
            "benchmark": "pod",
            "topology": args.topology,
            "mesh": dict(zip(mesh.axis_names, shape)),
            "model": args.model,
            **measure(name, tx, params),
            **record.environment(),
            "device": args.topology.split(":")[0],
            "devices": int(devices.size),
        }
        record.write(args.out, [row])  # at once: the next compilation may take long
        print(
            {
                k: row[k]
                for k in (
                    "optimizer",
                    "collectives",
                    "mb_per_chip",
                    "temp_mb",
                    "arguments_mb",
                    "compile_s",
                )
            },
            flush=True,
        )


if __name__ == "__main__":
    main()
