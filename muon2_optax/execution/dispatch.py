"""How the matrices of a tree run: equal shapes as one batch, on any kind of mesh."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from muon2_optax import operands
from muon2_optax.arrays.grouping import grouped
from muon2_optax.axes import ResolvedAxes
from muon2_optax.execution import on_device, on_mesh, transport
from muon2_optax.kernels import hopper
from muon2_optax.schedules.coefficients import AOL, Plan
from muon2_optax.sharding import Shardings, on_one_device, placement


def orthogonalize_leaves(
    names: Sequence[str],
    leaves: Sequence[jax.Array],
    axes: Sequence[ResolvedAxes],
    plan: Plan,
    ns_dtype: Any,
    shardings: Shardings | None,
) -> list[jax.Array]:
    """Orthogonalizes every matrix of every leaf; shapes, dtypes and shardings stay.

    Leaves on a mesh run there, those stored alike together (``on_mesh``); the others
    run in place, those of equal matrix shape together.
    """
    places = [placement(n, x, shardings) for n, x in zip(names, leaves)]
    local = [i for i, place in enumerate(places) if place is None]
    turn_squares = not isinstance(plan.normalization, AOL)
    kinds: list[Hashable] = [
        None
        if p is None
        else (transport.stored(a, p, turn_squares)[0], p.mesh, any(p.dims), x.dtype)
        for a, p, x in zip(axes, places, leaves)
    ]
    results: list[Any] = [None] * len(leaves)
    numbers, plan_with = operands.split_plan(plan)

    def in_place(
        members: Sequence[int], numbers: Sequence[jax.Array], *xs: jax.Array
    ) -> list[jax.Array]:
        blocks = [axes[i].to_blocks(x) for i, x in zip(members, xs)]
        flat, structure = jax.tree.flatten(blocks)
        blocks = structure.unflatten(by_shape(flat, plan_with(numbers), ns_dtype))
        return [axes[i].from_blocks(b) for i, b in zip(members, blocks)]

    def by_compiler(members: Sequence[int], *xs: jax.Array) -> list[jax.Array]:
        return automatic(functools.partial(in_place, members), xs, numbers)

    def exchanged(members: Sequence[int], *xs: jax.Array) -> list[jax.Array]:
        return on_mesh.orthogonalize(
            xs,
            [axes[i] for i in members],
            [p for i in members if (p := places[i]) is not None],
            plan,
            ns_dtype,
        )

    alone = all(on_one_device(leaves[i], shardings) for i in local)
    with hopper.undivided(alone):
        done = by_compiler(local, *(leaves[i] for i in local))
    for i, y in zip(local, done):
        results[i] = y
    for kind in dict.fromkeys(k for k in kinds if k is not None):
        members = [i for i, k in enumerate(kinds) if k == kind]
        # What travels in 16 bits travels as integers, which have no derivative.
        run = hopper.differentiable(
            functools.partial(exchanged, members),
            functools.partial(by_compiler, members),
        )
        for i, y in zip(members, run(*(leaves[i] for i in members))):
            results[i] = y
    return results


def by_shape(
    matrices: Sequence[jax.Array], plan: Plan, ns_dtype: Any
) -> list[jax.Array]:
    """One batched iteration per shape (up to transposition) and dtype."""

    def key(x: jax.Array) -> Hashable:
        return tuple(sorted(x.shape[-2:])), jnp.dtype(x.dtype).name

    return grouped(
        matrices, key, lambda batch: on_device.orthogonalize(batch, plan, ns_dtype)
    )


def automatic(
    fn: Callable[..., list[jax.Array]], xs: Sequence[jax.Array], settings: Any = ()
) -> list[jax.Array]:
    """``fn(settings, *xs)`` with the compiler choosing the shardings inside.

    On a mesh with Explicit axes (what ``jax.make_mesh`` makes) a product of sharded
    operands would need a sharding spelled out for each result.
    """
    shardings = [jax.typeof(x).sharding for x in xs]
    types = {
        t for s in shardings if isinstance(s, NamedSharding) for t in s.mesh.axis_types
    }
    # Where some axes are Manual (a partial shard_map) JAX cannot make others automatic.
    if AxisType.Explicit not in types or AxisType.Manual in types:
        return fn(settings, *xs)
    arrays, rebuilt = operands.split(settings)

    def run(arrays: Sequence[jax.Array], *xs: jax.Array) -> list[jax.Array]:
        return fn(rebuilt(arrays), *xs)

    result: Any = jax.sharding.auto_axes(run, out_sharding=shardings)(arrays, *xs)
    return result
