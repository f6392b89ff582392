"""Optimizer states where the updates will keep them."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from muon2_optax import trees
from muon2_optax.sharding import Shardings, typed_mesh


def init_in_place(
    init: Callable[[Any], Any], params: Any, shardings: Shardings | None
) -> Any:
    """Makes ``init(params)``, every leaf of it where the updates will keep it.

    Zeros do not depend on the parameters: under ``jax.jit`` on Auto axes all of a state
    would be made on the first device. Outside, only counters are on no mesh; a jitted
    step returns them on the parameters', and would compile again for its own result.
    """
    state = init(params)
    leaves = jax.tree.leaves(params)
    if all(map(_is_concrete, leaves)):
        meshes = [x.sharding.mesh for x in leaves if _is_named(x.sharding)]
        return _beside(meshes[0], state) if meshes else state
    if not all(isinstance(x, jax.core.Tracer) for x in leaves):
        return state
    current = jax.sharding.get_abstract_mesh().axis_types + tuple(
        t for x in leaves if (m := typed_mesh(x)) is not None for t in m.axis_types
    )
    if shardings is None or any(t != AxisType.Auto for t in current):
        return state
    mesh = shardings.auto_mesh
    # On Explicit axes the same transform says by itself how its state is divided.
    typed = AbstractMesh(
        mesh.axis_sizes,
        mesh.axis_names,
        axis_types=(AxisType.Explicit,) * len(mesh.axis_names),
    )
    names = [n for n, x in trees.named_leaves(params) if not trees.is_empty(x)]
    shapes = [
        jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=NamedSharding(typed, shardings.spec(n)),
        )
        for n, x in zip(names, leaves, strict=True)
    ]
    with jax.sharding.use_abstract_mesh(typed):
        abstract = jax.eval_shape(init, jax.tree.structure(params).unflatten(shapes))

    def place(x: Any, like: Any) -> Any:
        spec = like.sharding.spec if _is_named(like.sharding) else PartitionSpec()
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return jax.tree.map(place, state, abstract)


def _beside(mesh: Any, state: Any) -> Any:
    """The state, with what lives on no mesh replicated on this one."""
    replicated = NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> Any:
        if not _is_concrete(x) or _is_named(x.sharding):
            return x
        return jax.device_put(x, replicated)

    return jax.tree.map(place, state)


def _is_concrete(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _is_named(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding)
