"""Optimizer states where the updates will keep them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from muon2_optax import trees
from muon2_optax.sharding import Shardings, typed_mesh


def init_in_place(
    init: Callable[[Any], Any], params: Any, shardings: Shardings | None
) -> Any:
    """Makes ``init(params)``, every leaf of it where the updates will keep it.

    Zeros do not depend on the parameters, so under ``jax.jit`` on Auto axes the whole
    state would be made on the first device. Outside of ``jax.jit`` only counters are on
    no mesh. A jitted step returns them on the parameters' mesh, so the second step
    would be compiled again.
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
    names = [n for n, x in trees.named_leaves(params) if not trees.is_empty(x)]
    places = [NamedSharding(mesh, shardings.spec(n)) for n in names]
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        for x, place in zip(leaves, places, strict=True)
    ]
    abstract = abstract_state(init, jax.tree.structure(params).unflatten(shapes), mesh)
    return jax.tree.map(
        lambda x, like: jax.lax.with_sharding_constraint(x, like.sharding),
        state,
        abstract,
    )


def abstract_state(
    init: Callable[[Any], Any], params: Any, mesh: Mesh | AbstractMesh
) -> Any:
    """The shapes of ``init(params)``, and where on an Auto mesh every leaf belongs.

    ``params`` are arrays or shapes with shardings on that mesh. On Auto axes their
    types do not tell where they live, so ``init`` is traced for the same mesh with
    Explicit axes, where the types of the state tell how it is divided.
    """
    explicit = (AxisType.Explicit,) * len(mesh.axis_names)
    typed = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=explicit)

    def on(mesh: Mesh | AbstractMesh, x: Any) -> jax.ShapeDtypeStruct:
        spec = x.sharding.spec if _is_named(x.sharding) else PartitionSpec()
        place = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    with jax.sharding.use_abstract_mesh(typed):
        state = jax.eval_shape(init, jax.tree.map(partial(on, typed), params))
    return jax.tree.map(partial(on, mesh), state)


def _beside(mesh: Any, state: Any) -> Any:
    """The state, its leaves on no mesh replicated over this one."""
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
