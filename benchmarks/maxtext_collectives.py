"""What the optimizer adds to the traffic of a MaxText training step.

``python -m benchmarks.maxtext_collectives`` builds MaxText's own models, shrunk, on 8
simulated devices, trains a few steps with MaxText's own ``train_step``, and counts the
collectives of the compiled programs. Only the optimizer differs between rows. The CPU's
compiler does not merge collectives as those of GPU and TPU do, so the counts compare
optimizers with each other.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse  # noqa: E402
import functools  # noqa: E402
import importlib.metadata  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402

import jax  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import muon2_optax as m2  # noqa: E402
from benchmarks import record  # noqa: E402
from benchmarks.cost import collectives  # noqa: E402
from benchmarks.sharded import compile_step  # noqa: E402

try:
    from flax.core.spmd import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.optimizers import optimizers
    from maxtext.trainers.pre_train.train import train_step
    from maxtext.utils import train_utils
    from maxtext.utils.globals import MAXTEXT_PKG_DIR
    from maxtext.utils.muon_utils import get_muon_weight_dimension_numbers
except ModuleNotFoundError as error:
    raise SystemExit(
        f"This benchmark needs MaxText and what its training module imports ({error}): "
        "pip install maxtext, with Python 3.12 or later."
    ) from None

STEPS = 5
RESULTS = record.RESULTS / "maxtext_collectives.jsonl"
COMMON = (
    "skip_jax_distributed_system=True override_model_config=True hardware=cpu "
    "attention=dot_product dataset_type=synthetic enable_checkpointing=False "
    "log_config=False run_name=collectives base_output_directory=/tmp/maxtext "
    "max_target_length=64 per_device_batch_size=1 steps=10 learning_rate=0.02 "
    "warmup_steps_fraction=0.1"
)
CASES = {
    "llama2": (
        "model_name=llama2-7b base_emb_dim=64 base_num_query_heads=4 head_dim=16 "
        "base_num_kv_heads=4 base_mlp_dim=160 base_num_decoder_layers=4 vocab_size=512 "
        "ici_fsdp_parallelism=4 ici_tensor_parallelism=2"
    ),
    "deepseek3-tiny": (
        "model_name=deepseek3-tiny base_num_decoder_layers=7 vocab_size=512 "
        "sparse_matmul=False megablox=False "
        "ici_fsdp_parallelism=4 ici_expert_parallelism=2"
    ),
}


def muon2_of(
    config: Any, learning_rate: Any, model: Any, optimizer: Any = m2.muon2
) -> Any:
    """Muon² with MaxText's configuration; ``model`` is abstract, with shardings."""
    _, params, _ = nnx.split(model, nnx.Param, ...)
    dims = get_muon_weight_dimension_numbers(model, config)
    rms = config.muon_consistent_rms
    return optimizer(
        learning_rate,
        b1=config.muon_beta,
        shape_scale="spectral" if rms is None else m2.MatchRMS(rms),
        weight_decay=config.muon_weight_decay,
        rules=m2.MatrixRules.from_dimension_numbers(dims),
        shardings=m2.Shardings.of(params),
        mu_dtype=config.mu_dtype,
        adam_b1=config.adam_b1,
        adam_b2=config.adam_b2,
        adam_eps=config.adam_eps,
        adam_eps_root=config.adam_eps_root,
        adam_weight_decay=config.adam_weight_decay,
    )


def muon_of(config: Any, learning_rate: Any, model: Any) -> Any:
    """Our Muon with the arguments for which it is Optax's, ready rules included."""
    _, params, _ = nnx.split(model, nnx.Param, ...)
    return m2.muon(
        learning_rate,
        b1=config.muon_beta,
        bias_correction=True,
        weight_decay=config.muon_weight_decay,
        rules=m2.ready_rules.maxtext(),
        shardings=m2.Shardings.of(params),
        mu_dtype=config.mu_dtype,
        rest=optax.nadamw(
            learning_rate,
            b1=config.adam_b1,
            b2=config.adam_b2,
            eps=config.adam_eps,
            eps_root=config.adam_eps_root,
            weight_decay=config.adam_weight_decay,
        ),
    )


MUON = "opt_type=muon muon_type"
# For each row MaxText's options, and who makes the optimizer if not MaxText.
OPTIMIZERS: dict[str, tuple[str, Callable[..., Any] | None]] = {
    "sgd": ("opt_type=sgd", None),
    "optax.contrib.muon": (f"{MUON}=optax", None),
    "MaxText muon": (f"{MUON}=maxtext", None),
    "MaxText muon, a2a": (f"{MUON}=maxtext muon_use_all_to_all=True", None),
    "muon": (f"{MUON}=optax", muon_of),
    "muon2": (f"{MUON}=optax", muon2_of),
    "muon2_f": (f"{MUON}=optax", functools.partial(muon2_of, optimizer=m2.muon2_f)),
}


def configure(options: str) -> Any:
    base = os.path.join(MAXTEXT_PKG_DIR, "configs", "base.yml")
    return pyconfig.initialize([None, base, *COMMON.split(), *options.split()])


def environment() -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("maxtext", "flax")}
    return versions | record.environment()


def measure(case: str, name: str) -> dict[str, Any]:
    """One row: the optimizer's step alone, MaxText's whole step, and its losses."""
    options, make = OPTIMIZERS[name]
    config = configure(f"{CASES[case]} {options}")
    factory = optimizers.get_optimizer  # where a user adds a branch
    if make is not None:
        factory = lambda config, rate, model, mesh: make(config, rate, model)  # noqa: E731
    with mock.patch.object(optimizers, "get_optimizer", factory):
        loop = train_utils.setup_train_loop(config, recorder=None)
    _, _, shardings, _, mesh, _, _, batches, _, _, train_state = loop
    tx = train_state.optimizer.tx
    params = nnx.state(train_state.model, nnx.Param)
    alone, _ = compile_step(tx, nnx.as_pure(params), mesh)

    graph, state = nnx.split(train_state)
    step, _ = train_utils.jit_train_and_eval_step(
        config, graph, mesh, state, shardings, train_step
    )
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        batch = batches.load_next_batch()
        start = time.perf_counter()
        whole = step.lower(state, batch).compile()
        taken = time.perf_counter() - start
        losses = []
        for _ in range(STEPS):
            state, metrics = whole(state, batch)
            losses.append(round(float(metrics["scalar"]["learning/loss"]), 5))
    return {
        "benchmark": "maxtext_collectives",
        "model": case,
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "optimizer": name,
        "optimizer_alone": traffic(alone),
        "whole_step": traffic(whole),
        "losses": losses,
        "compile_s": round(taken, 1),
    }


def traffic(compiled: Any) -> dict[str, Any]:
    """Collectives as often as one run executes them, loops included; memory in MB."""
    runs = collectives(compiled.as_text())
    return {
        "collectives": sum(count for count, _ in runs.values()),
        "kinds": {kind: count for kind, (count, _) in sorted(runs.items())},
        "mb_per_device": round(sum(size for _, size in runs.values()) / 1e6, 3),
        "temporaries_mb": round(compiled.memory_analysis().temp_size_in_bytes / 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--only", choices=list(OPTIMIZERS), action="append")
    args = parser.parse_args()
    for case in args.case or CASES:
        for name in args.only or OPTIMIZERS:
            row = measure(case, name)
            print(row, flush=True)
            record.write(RESULTS, [row | environment()])


if __name__ == "__main__":
    main()
