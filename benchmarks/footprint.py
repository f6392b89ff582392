"""A training step, compiled without allocating anything, and what it takes."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import muon2_optax as m2
from benchmarks import cost
from examples import optim, step
from examples.config import Config
from examples.mesh import batch_sharding
from examples.models import make_model, matrix_rules
from examples.options import UserError

KINDS = ("parameters", "momentum", "second moment", "AdamW states", "other states")


def _bytes(leaf: Any) -> int:
    """Of the part of an array that one device holds."""
    shape = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def memory_by_kind(abstract: Any) -> dict[str, int]:
    """Bytes of a train state on one device, by what they are for."""
    kinds = dict.fromkeys(KINDS, 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
        parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        matrix = "matrix" in parts
        if parts[0] == "params":
            kind = "parameters"
        elif matrix and "mu" in parts:
            kind = "momentum"
        elif matrix and any(part.startswith("nu") for part in parts):
            kind = "second moment"
        elif not matrix and ("mu" in parts or "nu" in parts):
            kind = "AdamW states"
        else:
            kind = "other states"
        kinds[kind] += _bytes(leaf)
    return kinds


def _cast(tree: Any, dtype: str | None) -> Any:
    """The same shapes with every float of another dtype."""

    def cast(x: Any) -> Any:
        if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype), sharding=x.sharding)

    return jax.tree.map(cast, tree)


def _compile(
    config: Config, name: str, vocab_size: int, mesh: Mesh, state_dtype: str | None
) -> tuple[Any, jax.stages.Traced, jax.stages.Compiled]:
    """The abstract state of one optimizer, and its step, traced and compiled."""
    model, run = config.model, config.run
    graphdef, init = make_model(model, vocab_size)
    params = _cast(step.abstract_params(init, mesh), state_dtype)
    (plan,) = optim.plans(
        dataclasses.replace(config.optim, optimizer=name),
        steps=100,
        rules=matrix_rules(model),
        shardings=m2.Shardings.of(params) if mesh.size > 1 else None,
    )
    abstract = step.abstract_state(plan.transform, params, mesh)
    abstract = _cast(abstract, state_dtype)
    chunks = step.loss_chunks(config, vocab_size, mesh, run.accumulate)
    train_step = step.make_train_step(
        graphdef, plan.transform, config, abstract, chunks
    )
    rows = batch_sharding(mesh)
    shape = (run.batch_size, model.seq_len + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
    # Only here, since on devices that are not there nothing can run.
    with jax.set_mesh(mesh):
        traced = train_step.trace(abstract, tokens)
        try:
            return abstract, traced, traced.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            said = str(error).split("\n")[0][:300]
            raise UserError(f"{name} does not fit on these devices: {said}") from None


def measure(
    config: Config, name: str, vocab_size: int, mesh: Mesh, state_dtype: str | None
) -> dict[str, Any]:
    """Memory of one device by kind, operations and traffic of one optimizer's step.

    With `state_dtype`, parameters and states are of that dtype whatever the optimizer
    would choose.
    """
    abstract, traced, compiled = _compile(config, name, vocab_size, mesh, state_dtype)
    model, batch_size = config.model, config.run.batch_size
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError("this compiler does not tell how much memory it needs")
    kept = memory.argument_size_in_bytes
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    tokens = batch_size * model.seq_len
    return {
        "model": model.model,
        "optimizer": name,
        "mesh": dict(mesh.shape),
        "batch": [batch_size, model.seq_len],
        "remat": model.remat,
        "bytes": memory_by_kind(abstract),
        "gradient_bytes": sum(map(_bytes, jax.tree.leaves(abstract.params))),
        "temporary_bytes": memory.temp_size_in_bytes,
        "total_bytes": kept + new + memory.temp_size_in_bytes,
        "model_flops": cost.model_flops(model, abstract.params) * tokens,
        "product_flops": cost.product_flops(traced.jaxpr.jaxpr),
        "collectives": cost.collectives(compiled.as_text() or ""),
    }
