"""What a training step takes per device, for devices that need not be there.

`python -m benchmarks.plan --model llama_13b --mesh fsdp=64 --optimizer muon2_f`
compiles the step of `python -m examples.pretrain` for 64 devices without allocating
anything.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.models import VOCAB_SIZES
from examples import options
from examples.config import Config, ModelConfig, OptimConfig, RunConfig
from examples.options import Options, check, option


@dataclasses.dataclass(frozen=True)
class PlanConfig(Options):
    """The devices and the batch that are planned for."""

    mesh: str = option("", "devices, as in fsdp=64,tensor=2; without it, one")
    topology: str | None = option(
        None, "compile with the TPU compiler (libtpu) for this slice, as in v5e:8x8"
    )
    here: bool = option(
        False, "compile for the devices of this machine instead of imagined CPUs"
    )
    batch_size: int | None = option(
        None, "sequences per step (default: one for each part of the mesh)", "[1, ]"
    )
    accumulate: int = option(1, "micro-batches that a step is cut into", "[1, ]")
    vocab_size: int | None = option(
        None, "vocabulary (default: that of the model's size in the paper)", "[1, ]"
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
        super().__post_init__()
        check(
            not (self.here and self.topology),
            "--here and --topology exclude each other",
        )
        check(
            self.state_dtype in (None, "float32", "bfloat16"),
            f"--state-dtype must be float32 or bfloat16, got {self.state_dtype}",
        )


GIB = 2**30


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


class _Planner:
    """The mesh of a plan; measures steps on it and writes down what it finds."""

    def __init__(self, plan: PlanConfig):
        from benchmarks.devices import devices
        from examples.mesh import make_mesh

        self._plan = plan
        self.mesh = make_mesh(
            plan.mesh or "data=1", devices(plan.mesh, plan.topology, plan.here)
        )

    def config(self, model: ModelConfig, optim: OptimConfig) -> Config:
        """The run that is planned: by default one sequence for each part of a batch."""
        from examples.mesh import batch_sharding

        plan, rows = self._plan, batch_sharding(self.mesh)
        parts = self.mesh.size // rows.shard_shape((self.mesh.size, 1))[0]
        parts *= plan.accumulate
        size = plan.batch_size or parts
        check(
            size % parts == 0,
            f"--batch-size {size} cannot be divided into {parts} parts "
            "(mesh, accumulate)",
        )
        run = RunConfig(batch_size=size, accumulate=plan.accumulate, mesh=plan.mesh)
        return Config(model=model, optim=optim, run=run)

    def vocab_size(self, model: ModelConfig) -> int:
        return self._plan.vocab_size or VOCAB_SIZES[model.architecture]

    def measure(self, config: Config, name: str) -> dict[str, Any]:
        """One optimizer's step; its numbers are in the file when this returns."""
        from benchmarks import footprint

        plan = self._plan
        row = footprint.measure(
            config, name, self.vocab_size(config.model), self.mesh, plan.state_dtype
        )
        if plan.jsonl is not None:
            from benchmarks import record

            where = record.environment()
            if plan.topology is not None:
                where["device"] = plan.topology
            row_there = {"benchmark": "plan", **row, "state_dtype": plan.state_dtype}
            record.write(Path(plan.jsonl), [row_there | where])
        return row


def _show(model: ModelConfig, optim: OptimConfig, plan: PlanConfig) -> None:
    planner = _Planner(plan)
    config, mesh = planner.config(model, optim), planner.mesh
    device = mesh.devices.flat[0]
    print(
        f"{model.model}: vocabulary {planner.vocab_size(model):,}, "
        f"{config.run.batch_size} x {model.seq_len} tokens a step, "
        f"{model.dtype}, remat {model.remat}, for {device.device_kind}"
    )
    if device.platform == "cpu" and model.dtype != "float32":
        print("CPUs compute bfloat16 in float32: temporaries and traffic are too high")
    for name in optim.names():
        print(*_lines(planner.measure(config, name)), sep="\n", flush=True)


def _show_paper_table(plan: PlanConfig) -> None:
    from benchmarks import paper_table

    plan = dataclasses.replace(plan, mesh="", state_dtype="bfloat16", batch_size=1)
    planner = _Planner(plan)

    def measure(model: ModelConfig, name: str) -> dict[str, Any]:
        optim = OptimConfig(optimizer=name)
        return planner.measure(planner.config(model, optim), name)

    paper_table.show(measure)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan; returns the exit code (2: the user can fix it)."""
    sections = {"model": ModelConfig, "optim": OptimConfig, "plan": PlanConfig}

    def run() -> None:
        given = options.parse(
            sections,
            argv,
            module="benchmarks.plan",
            description="Memory, operations and traffic of a step, by compiling it.",
            defaults={"optimizer": "muon2"},
        )
        if given["plan"].paper_table:
            _show_paper_table(given["plan"])
        else:
            _show(**given)

    return options.run_command("plan", run)


if __name__ == "__main__":
    sys.exit(main())
