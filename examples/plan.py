"""What a training step takes per device, for devices that need not be there.

`python -m examples.plan --model llama_13b --mesh fsdp=64 --optimizer muon2_f` compiles
the step of `python -m examples.pretrain` for 64 devices without allocating anything.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples import flags
from examples.config import Config, OptimConfig, RunConfig
from examples.flags import UserError, check, check_range, option
from examples.models import ModelConfig, parameter_count
from examples.models.config import VOCAB_SIZES


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """The devices and the batch that are planned for."""

    mesh: str = option("", "devices, as in fsdp=64,tensor=2; without it, one")
    topology: str | None = option(
        None, "compile with the TPU compiler (libtpu) for this slice, as in v5e:8x8"
    )
    here: bool = option(
        False, "compile for the devices of this machine instead of imagined CPUs"
    )
    batch_size: int | None = option(
        None, "sequences per step (default: one for each part of the mesh)"
    )
    accumulate: int = option(1, "micro-batches that a step is cut into")
    vocab_size: int | None = option(
        None, "vocabulary (default: that of the model's parameter count in the paper)"
    )
    state_dtype: str | None = option(
        None, "dtype of parameters and optimizer states, to plan for another trainer"
    )
    paper_table: bool = option(
        False,
        "the memory table of arXiv:2604.09967 beside ours; other options fall away",
    )
    jsonl: str | None = option(None, "also append the numbers to this file")

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulate", "vocab_size"):
            check_range(self, name, 1)
        check(
            not (self.here and self.topology),
            "--here and --topology exclude each other",
        )
        check(
            self.state_dtype in (None, "float32", "bfloat16"),
            f"--state-dtype must be float32 or bfloat16, got {self.state_dtype}",
        )


GIB = 2**30

# GiB, from table "Memory comparison" of arXiv:2604.09967: one H100, 16 bits, one
# sequence of 4096 tokens.
PAPER = {
    "llama_1b": {"adamw": 20.39, "muon": 18.56, "muon2": 20.36, "muon2_f": 18.57},
    "llama_7b": {"adamw": 59.31, "muon": 47.29, "muon2": 60.66, "muon2_f": 47.53},
}
PAPER_NOTES = ""


def _cpu_devices(count: int) -> list[Any]:
    """Imagined devices: enough CPUs, or those that JAX already has."""
    import jax

    os.environ.setdefault("XLA_FLAGS", "")
    name = "--xla_force_host_platform_device_count"
    if name not in os.environ["XLA_FLAGS"]:  # read when the first device is asked for
        os.environ["XLA_FLAGS"] += f" {name}={count}"
    jax.config.update("jax_platforms", "cpu")
    return jax.devices("cpu")


def _tpu_devices(topology: str) -> list[Any]:
    # The compiler looks for a machine that is not there unless told so.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    import jax
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:  # of many kinds, from the plugin
        raise UserError(
            f"--topology {topology}: {error} (the TPU compiler is in the package "
            "libtpu)"
        ) from None
    return list(found.devices)


def _devices(config: PlanConfig) -> list[Any]:
    import jax

    from examples import mesh

    if config.topology is not None:
        return _tpu_devices(config.topology)
    if config.here:
        return jax.devices()
    sizes = mesh.parse(config.mesh)
    check(-1 not in sizes.values(), "--mesh: -1 needs --topology or --here")
    return _cpu_devices(math.prod(sizes.values()))


def _lines(row: dict[str, Any]) -> list[str]:
    """One plan as text."""
    devices = math.prod(row["mesh"].values())
    kinds = {k: n for k, n in row["bytes"].items() if n > 2**20 or k == "parameters"}
    kinds["temporaries"] = row["temporary_bytes"]
    lines = [f"{row['optimizer']}: GiB on each of {devices} devices"]
    lines += [f"  {kind:<16}{size / GIB:>9.3f}" for kind, size in kinds.items()]
    lines[-1] += (
        f"  (activations, and gradients: {row['gradient_bytes'] / GIB:.3f} "
        "where all are there)"
    )
    extra = row["product_flops"] / row["model_flops"] - 1
    lines += [
        f"  {'total':<16}{row['total_bytes'] / GIB:>9.3f}",
        f"  model {row['model_flops'] / devices / 1e12:.2f} TFLOP per device and step; "
        f"products of the program {extra:+.1%} (whole attention, recomputation, "
        "orthogonalization)",
    ]
    for kind, (count, moved) in sorted(row["collectives"].items()):
        lines.append(f"  {count:>5} {kind:<19} {moved / GIB:.3f} GiB of results")
    return lines


def _mesh(plan: PlanConfig) -> Any:
    from examples.mesh import make_mesh

    return make_mesh(plan.mesh, _devices(plan))


def _config(
    model: ModelConfig, optimizers: OptimConfig, plan: PlanConfig, mesh: Any
) -> Config:
    from examples.mesh import batch_sharding

    groups = mesh.size // batch_sharding(mesh).shard_shape((mesh.size, 1))[0]
    parts = groups * plan.accumulate
    size = plan.batch_size or parts
    check(
        size % parts == 0,
        f"--batch-size {size} cannot be divided into {parts} parts (mesh, accumulate)",
    )
    run = RunConfig(batch_size=size, accumulate=plan.accumulate, mesh=plan.mesh)
    return Config(model=model, optim=optimizers, run=run)


def _write(plan: PlanConfig, row: dict[str, Any]) -> None:
    """At once: the next compilation may take long."""
    if plan.jsonl is None:
        return
    from benchmarks import record

    where = record.environment()
    if plan.topology is not None:
        where["device"] = plan.topology
    row = {"benchmark": "plan", **row, "state_dtype": plan.state_dtype, **where}
    record.write(Path(plan.jsonl), [row])


def _plan(model: ModelConfig, optim: OptimConfig, plan: PlanConfig) -> None:
    from examples import footprint

    mesh = _mesh(plan)
    config = _config(model, optim, plan, mesh)
    vocab_size = plan.vocab_size or VOCAB_SIZES[model.architecture]
    print(
        f"{model.model}: {parameter_count(model, vocab_size):,} parameters, "
        f"{config.run.batch_size} x {model.seq_len} tokens a step, {model.dtype}, "
        f"remat {model.remat}, for {mesh.devices.flat[0].device_kind}"
    )
    if mesh.devices.flat[0].platform == "cpu" and model.dtype != "float32":
        print("CPUs compute bfloat16 in float32: temporaries and traffic are too high")
    for name in optim.names():
        row = footprint.measure(config, name, vocab_size, mesh, plan.state_dtype)
        _write(plan, row)
        print(*_lines(row), sep="\n", flush=True)


def _paper_table(plan: PlanConfig) -> None:
    """One line per model and optimizer: GiB of the paper, ours, and ours by kind."""
    from examples import footprint

    plan = dataclasses.replace(plan, mesh="", state_dtype="bfloat16", batch_size=1)
    mesh = _mesh(plan)
    heads = ("paper", "ours", "weights", "states", "temp", "at least")
    print(f"{'':<22}", *(f"{head:>9}" for head in heads))
    for name, numbers in PAPER.items():
        # Scanned: the largest temporaries are the same, and it compiles in a minute.
        model = ModelConfig(model=name, seq_len=4096, scan_layers=True)
        for optimizer, paper in numbers.items():
            config = _config(model, OptimConfig(optimizer=optimizer), plan, mesh)
            row = footprint.measure(config, optimizer, 32_000, mesh, plan.state_dtype)
            row["paper_gib"] = paper
            _write(plan, row)
            weights = row["bytes"]["parameters"]
            states = sum(row["bytes"].values()) - weights
            # What is there at least at some time: weights, states and gradients.
            least = weights + states + row["gradient_bytes"]
            sizes = (row["total_bytes"], weights, states, row["temporary_bytes"], least)
            columns = (paper, *(size / GIB for size in sizes))
            print(f"{name:<12}{optimizer:<10}", *(f"{c:>9.2f}" for c in columns))
    print(PAPER_NOTES)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan; returns the exit code (2: the user can fix it)."""
    sections = {"model": ModelConfig, "optim": OptimConfig, "plan": PlanConfig}
    try:
        options = flags.parse(
            sections,
            argv,
            prog="python -m examples.plan",
            description="Memory, operations and traffic of a step, by compiling it.",
            defaults={"optimizer": "muon2"},
        )
        if options["plan"].paper_table:
            _paper_table(options["plan"])
        else:
            _plan(**options)
    except UserError as error:
        print("plan: error:", *str(error).split(), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
