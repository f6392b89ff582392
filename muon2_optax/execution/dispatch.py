"""Sends the matrices of a tree to where they run: on their device, or on a mesh."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from muon2_optax import operands
from muon2_optax.arrays.grouping import run_in_groups
from muon2_optax.axes import ResolvedAxes
from muon2_optax.execution import on_device, on_mesh
from muon2_optax.execution.layout import StoredLeaf
from muon2_optax.kernels import hopper
from muon2_optax.schedules.coefficients import AOL
from muon2_optax.schedules.plans import Plan
from muon2_optax.sharding import Shardings, locate


def orthogonalize_leaves(
    names: Sequence[str],
    leaves: Sequence[jax.Array],
    axes: Sequence[ResolvedAxes],
    plan: Plan,
    ns_dtype: Any,
    shardings: Shardings | None,
) -> list[jax.Array]:
    """Orthogonalizes every matrix of every leaf; shapes, dtypes and shardings stay.

    Leaves on a mesh run there (``on_mesh``), and those that are stored alike travel
    together. All others run where they are (``on_device``), and matrices of equal
    shapes run as one batch.
    """
    locations = [locate(name, x, shardings) for name, x in zip(names, leaves)]
    # AOL scales one side only, so under it square matrices must not be transposed.
    either_way = not isinstance(plan.normalization, AOL)
    stored = [
        StoredLeaf.of(a, location, either_way) if location.on_mesh else None
        for a, location in zip(axes, locations)
    ]

    def key(i: int) -> Hashable:
        leaf = stored[i]
        return leaf and (leaf.layout, leaf.location.mesh, leaf.divided, leaves[i].dtype)

    def run(members: list[int]) -> Sequence[jax.Array]:
        xs = [leaves[i] for i in members]
        without_moving = functools.partial(
            orthogonalize_without_moving,
            axes=[axes[i] for i in members],
            plan=plan,
            ns_dtype=ns_dtype,
            undivided=all(locations[i].undivided for i in members),
        )
        known = [leaf for i in members if (leaf := stored[i]) is not None]
        if not known:
            return without_moving(*xs)
        exchange = functools.partial(
            on_mesh.orthogonalize, stored=known, plan=plan, ns_dtype=ns_dtype
        )
        # 16-bit shards travel as integers, which have no derivative.
        return hopper.add_derivative(exchange, without_moving)(*xs)

    return run_in_groups(range(len(leaves)), key, run)


def orthogonalize_without_moving(
    *leaves: jax.Array,
    axes: Sequence[ResolvedAxes],
    plan: Plan,
    ns_dtype: Any,
    undivided: bool,
) -> list[jax.Array]:
    """Orthogonalizes leaves where they are; XLA divides the work if they are divided.

    Args:
      leaves: of any shapes.
      axes: of their matrices.
      plan, ns_dtype: as in ``on_device.orthogonalize``.
      undivided: whether all of them are known to be whole on one device.
    """
    numbers, plan_with = operands.split_plan(plan)

    def run(numbers: Sequence[jax.Array], *xs: jax.Array) -> list[jax.Array]:
        blocks = [a.to_blocks(x) for a, x in zip(axes, xs)]
        matrices, structure = jax.tree.flatten(blocks)
        done = orthogonalize_by_shape(matrices, plan_with(numbers), ns_dtype, undivided)
        blocks = structure.unflatten(done)
        return [a.from_blocks(b) for a, b in zip(axes, blocks)]

    return with_automatic_axes(run, leaves, numbers)


def orthogonalize_by_shape(
    matrices: Sequence[jax.Array], plan: Plan, ns_dtype: Any, undivided: bool
) -> list[jax.Array]:
    """Runs one batched iteration for each dtype and shape, transposed ones included."""

    def key(x: jax.Array) -> Hashable:
        return tuple(sorted(x.shape[-2:])), jnp.dtype(x.dtype).name

    def run(batch: list[jax.Array]) -> list[jax.Array]:
        return on_device.orthogonalize(batch, plan, ns_dtype, undivided)

    return run_in_groups(matrices, key, run)


def with_automatic_axes(
    fn: Callable[..., list[jax.Array]], xs: Sequence[jax.Array], settings: Any = ()
) -> list[jax.Array]:
    """Runs ``fn(settings, *xs)`` and lets the compiler choose the shardings inside.

    On Explicit axes, which ``jax.make_mesh`` makes, each product of sharded operands
    would have to spell out the sharding of its result.
    """
    shardings = [jax.typeof(x).sharding for x in xs]
    types = {
        t for s in shardings if isinstance(s, NamedSharding) for t in s.mesh.axis_types
    }
    # Where some axes are Manual (a partial shard_map) JAX cannot make others automatic.
    if AxisType.Explicit not in types or AxisType.Manual in types:
        return fn(settings, *xs)
    arrays, rebuild = operands.split(settings)

    def run(arrays: Sequence[jax.Array], *xs: jax.Array) -> list[jax.Array]:
        return fn(rebuild(arrays), *xs)

    result: Any = jax.sharding.auto_axes(run, out_sharding=shardings)(arrays, *xs)
    return result
