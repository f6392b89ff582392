"""Whether two commits lower the same optimizer steps: StableHLO of every program.

``python -m benchmarks.compare_programs --out /tmp/before`` writes one text file for
each optimizer, model, platform and number of devices. Run it at two commits, then
``python -m benchmarks.compare_programs --compare /tmp/before /tmp/after`` names the
programs that differ. No accelerator is needed: JAX lowers for CUDA on any machine, and
from version 0.11 on those programs hold the Hopper kernels, whose modules (all that
their PTX is made of) are written beside them. Source locations are left out of both.
"""

import argparse
import hashlib
import inspect
import itertools
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

MODELS = ("gpt_small", "llama_1b")
OPTIMIZERS = ("muon", "muon2", "muon2_f")
PLATFORMS = ("cpu", "cuda")
# Number of devices, and the kind of mesh axes that divide the parameters over them.
MESHES = ((1, "Auto"), (8, "Auto"), (8, "Explicit"))
# JAX prints a kernel's module as bytecode, escaped.
_MODULE = re.compile(r'kernel_hash = "[^"]*", module = "([^"]*)"')


def lower(optimizer: str, model: str, platform: str, devices: int, axes: str) -> str:
    """The StableHLO of one step, update and apply, with donated parameters."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import muon2_optax as m2
    from benchmarks import models, timing

    options: dict[str, Any] = {}
    sharding = None
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("fsdp",), axis_types=(AxisType[axes],))
        sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    params = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for path, shape in models.leaves(model).items()
    }
    takes = inspect.signature(m2.REGISTRY[optimizer]).parameters
    if sharding is not None and axes == "Auto" and "shardings" in takes:
        options["shardings"] = m2.Shardings.of(params)
    tx = m2.REGISTRY[optimizer](0.02, **options)
    step = jax.jit(timing.full_step(tx), donate_argnums=(0, 1))
    traced = step.trace(params, jax.eval_shape(tx.init, params), params)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def separate_kernels(text: str) -> tuple[str, dict[str, str]]:
    """The program with kernels named by their content, and the kernels by name."""
    kernels: dict[str, str] = {}

    def replace(match: re.Match[str]) -> str:
        module = module_text(match.group(1))
        name = f"kernel_{hashlib.sha256(module.encode()).hexdigest()[:16]}"
        kernels[name] = module
        return f'module = "{name}"'

    return _MODULE.sub(replace, text), kernels


def module_text(escaped: str) -> str:
    """A kernel's bytecode as MLIR text without source locations."""
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    code = re.sub(
        rb'\\([0-9A-F]{2}|[\\"])',
        lambda m: bytes.fromhex(m[1].decode()) if len(m[1]) == 2 else m[1],
        escaped.encode("latin-1"),
    )
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        return ir.Module.parse(code).operation.get_asm(enable_debug_info=False)


def write_programs(
    out: pathlib.Path, devices: int, optimizers: Sequence[str], models: Sequence[str]
) -> None:
    """Lowers all programs for this many devices, which this process must have."""
    import jax

    from muon2_optax.kernels import hopper, symmetric

    # As on a machine with Hopper GPUs. Older versions of JAX cannot trace the kernels.
    new_enough = jax.__version_info__ >= symmetric.OLDEST_JAX
    hopper.available = lambda: new_enough
    out.mkdir(parents=True, exist_ok=True)
    for count, axes in MESHES:
        if count != devices:
            continue
        for optimizer, model, platform in itertools.product(
            optimizers, models, PLATFORMS
        ):
            text = lower(optimizer, model, platform, devices, axes)
            program, kernels = separate_kernels(text)
            name = f"{optimizer}_{model}_{platform}_{devices}_{axes}"
            (out / f"{name}.mlir").write_text(program)
            for kernel, module in kernels.items():
                (out / f"{kernel}.mlir").write_text(module)
            print(f"{name}: {len(kernels)} kernels", flush=True)


def number_functions(text: str) -> str:
    """The program with its inner functions numbered: their names are the code's."""
    names = re.findall(r"func\.func private @(\w+)", text)
    numbers = {name: f"@function_{i}" for i, name in enumerate(names)}
    return re.sub(r"@(\w+)", lambda m: numbers.get(m[1], m[0]), text)


def compare(before: pathlib.Path, after: pathlib.Path) -> list[str]:
    """Names of the files that only one folder has, or that differ."""
    names = {p.name for folder in (before, after) for p in folder.glob("*.mlir")}

    def content(path: pathlib.Path) -> str | None:
        return number_functions(path.read_text()) if path.exists() else None

    return sorted(n for n in names if content(before / n) != content(after / n))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--out", type=pathlib.Path, help="where to write the programs")
    group.add_argument("--compare", type=pathlib.Path, nargs=2, metavar="FOLDER")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--devices", type=int, help="only for this many devices")
    args = parser.parse_args()
    if args.compare:
        different = compare(*args.compare)
        print("\n".join(different) or "identical")
        sys.exit(bool(different))
    if args.devices:
        names = args.optimizers.split(","), args.models.split(",")
        write_programs(args.out, args.devices, *names)
        return
    for devices in sorted({count for count, _ in MESHES}):
        # The number of devices is fixed once JAX has started.
        flags = f"--xla_force_host_platform_device_count={devices}"
        subprocess.run(
            [sys.executable, "-m", "benchmarks.compare_programs"]
            + ["--out", str(args.out), "--devices", str(devices)]
            + ["--optimizers", args.optimizers, "--models", args.models],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            check=True,
        )


if __name__ == "__main__":
    main()
