"""How the matrices of a tree run: equal shapes as one batch, on any kind of mesh."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from muon2_optax import polar
from muon2_optax.axes import ResolvedAxes
from muon2_optax.coefficients import Plan


def orthogonalize_leaves(
    leaves: Sequence[jax.Array],
    axes: Sequence[ResolvedAxes],
    plan: Plan,
    ns_dtype: Any,
) -> list[jax.Array]:
    """Orthogonalizes every matrix of every leaf; shapes, dtypes and shardings stay."""

    def run(*xs: jax.Array) -> list[jax.Array]:
        blocks = [a.to_blocks(x) for a, x in zip(axes, xs)]
        flat = [b for leaf in blocks for b in leaf]
        done = iter(by_shape(flat, plan, ns_dtype))
        return [a.from_blocks([next(done) for _ in bs]) for a, bs in zip(axes, blocks)]

    return automatic(run, leaves)


def by_shape(
    matrices: Sequence[jax.Array], plan: Plan, ns_dtype: Any
) -> list[jax.Array]:
    """One batched iteration per shape (up to transposition) and dtype."""
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(matrices):
        key = (tuple(sorted(x.shape[-2:])), jnp.dtype(x.dtype).name)
        groups.setdefault(key, []).append(i)
    results: list[Any] = [None] * len(matrices)
    for members in groups.values():
        batch = [matrices[i] for i in members]
        for i, y in zip(members, polar.orthogonalize(batch, plan, ns_dtype)):
            results[i] = y
    return results


def automatic(
    fn: Callable[..., list[jax.Array]], xs: Sequence[jax.Array]
) -> list[jax.Array]:
    """Runs fn with the compiler choosing the shardings inside.

    On a mesh with Explicit axes (what ``jax.make_mesh`` makes) a product of sharded
    operands would need a sharding spelled out for each result.
    """
    shardings = [jax.typeof(x).sharding for x in xs]
    if not any(
        isinstance(s, NamedSharding) and AxisType.Explicit in s.mesh.axis_types
        for s in shardings
    ):
        return fn(*xs)
    return jax.sharding.auto_axes(fn, out_sharding=shardings)(*xs)
