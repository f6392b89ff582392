"""The train state: what it holds, where on the mesh it lives, how it starts."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.mesh import param_shardings
from examples.models import build as build_model
from examples.models.config import ModelConfig


class TrainState(NamedTuple):
    """What a training step reads and replaces; also what a checkpoint holds."""

    params: Any
    opt_state: optax.OptState
    step: jax.Array  # steps taken, which is also the position in the data
    skipped: jax.Array  # how many of them changed nothing, not being finite
    skipped_in_a_row: jax.Array
    ema: Any  # averaged parameters; None without --ema


def make_model(config: ModelConfig, vocab_size: int) -> tuple[Any, jax.stages.Wrapped]:
    """The model's structure, and a jitted function from a key to its parameters.

    The parameters are plain nested dictionaries: what Optax, jit and checkpoints take
    without further ado.
    """

    def build(key: jax.Array) -> nnx.Module:
        return build_model(config, vocab_size, rngs=nnx.Rngs(key))

    abstract = nnx.eval_shape(build, jax.random.key(0))
    graphdef, _ = nnx.split(abstract, nnx.Param)

    @jax.jit
    def init(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(build(key), nnx.Param))

    return graphdef, init


def abstract_params(init: Callable[[jax.Array], Any], mesh: Mesh) -> Any:
    """The shapes of the parameters, and where on the mesh they live."""
    shapes = jax.eval_shape(init, jax.random.key(0))

    def placed(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(placed, shapes, param_shardings(shapes, mesh))


def abstract_opt_state(
    transform: optax.GradientTransformation, params: Any, mesh: Mesh
) -> optax.OptState:
    """The shapes of an optimizer's state, and where on the mesh its `init` puts it.

    On Auto axes that cannot be asked, so the question is put on the same mesh with
    Explicit axes.
    """
    explicit = (AxisType.Explicit,) * len(mesh.axis_names)
    typed = Mesh(mesh.devices, mesh.axis_names, axis_types=explicit)

    def on(mesh: Mesh, x: Any) -> jax.ShapeDtypeStruct:
        spec = x.sharding.spec if x.sharding is not None else PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    with jax.set_mesh(typed):
        there = jax.tree.map(partial(on, typed), params)
        return jax.tree.map(partial(on, mesh), jax.eval_shape(transform.init, there))


def abstract_state(
    transform: optax.GradientTransformation, params: Any, mesh: Mesh, *, ema: bool
) -> TrainState:
    """The shapes and shardings of a train state; nothing is allocated."""
    whole = NamedSharding(mesh, PartitionSpec())
    count: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    return TrainState(
        params=params,
        opt_state=abstract_opt_state(transform, params, mesh),
        step=count,
        skipped=count,
        skipped_in_a_row=count,
        ema=params if ema else None,
    )


def initial_state(
    init: Callable[[jax.Array], Any],
    transform: optax.GradientTransformation,
    abstract: TrainState,
    key: jax.Array,
) -> TrainState:
    """The state before the first step, made where it will live."""

    def create(key: jax.Array) -> TrainState:
        params, zero = init(key), jnp.zeros((), jnp.int32)
        ema = None if abstract.ema is None else jax.tree.map(jnp.copy, params)
        return TrainState(params, transform.init(params), zero, zero, zero, ema)

    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(create, out_shardings=shardings)(key)
