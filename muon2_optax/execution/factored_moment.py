"""The factored second moment of all leaves: averages r and c, and sqrt(V-hat)."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muon2_optax import averages, roots, sharding
from muon2_optax.arrays import limits
from muon2_optax.arrays.grouping import even_size, run_in_groups
from muon2_optax.axes import ResolvedAxes
from muon2_optax.execution import mean_squares
from muon2_optax.sharding import Location, Shardings, locate


class Leaf(NamedTuple):
    """A leaf of the updates, the axes of its matrices, and its averages r and c."""

    name: str
    axes: ResolvedAxes
    g: jax.Array
    row: jax.Array
    col: jax.Array


class Moment(NamedTuple):
    """The new averages, and the root of V-hat = r c^T / mean(r).

    The root has the rank of the leaf and broadcasts to its shape.
    """

    row: jax.Array
    col: jax.Array
    root: jax.Array


def zero_averages(p: Any, axes: ResolvedAxes) -> tuple[jax.Array, jax.Array]:
    """The averages r and c of a parameter that has seen no gradient.

    They are computed from a leaf of zeros, so that on a mesh they have the reduced
    shardings that every later update gives them.
    """
    zeros = sharding.zeros_like(p, averages.second_dtype(p))
    return mean_squares.in_two_passes(zeros, axes)


def average_shapes(axes: ResolvedAxes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the averages r and c of a leaf."""
    row, col = (
        tuple(n for a, n in enumerate(axes.shape) if a not in gone)
        for gone in (axes.outs, axes.ins)
    )
    blocks = len(axes.splits)
    return (row if blocks == 1 else (*row, blocks)), col


def update_moments(
    leaves: Sequence[Leaf], b2: Any, shardings: Shardings | None
) -> list[Moment]:
    """Averages the squared gradients of every leaf into r and c.

    The statistics are small: a program for one leaf keeps few of a GPU's
    multiprocessors busy and takes microseconds to start. So equal leaves run together
    where the kernel takes them and all are on one device.
    """
    locations = [locate(x.name, x.g, shardings) for x in leaves]
    stackable = [
        mean_squares.can_stack(x.g, x.axes, location)
        for x, location in zip(leaves, locations)
    ]

    def key(i: int) -> Hashable:
        x = leaves[i]
        if not stackable[i]:
            return i
        # Inside a shard_map a type also holds the mesh axes over which its leaf varies.
        return *map(jax.typeof, (x.g, x.row, x.col)), x.axes

    def run(members: list[int]) -> list[Moment]:
        first = members[0]
        if not stackable[first]:
            return [_update_one(leaves[first], b2, locations[first])]
        size = even_size(len(members), limits.LEAVES_IN_STATISTICS)
        few = (members[i : i + size] for i in range(0, len(members), size))
        return [y for some in few for y in _update_equal([leaves[i] for i in some], b2)]

    return run_in_groups(range(len(leaves)), key, run)


def _update_one(x: Leaf, b2: Any, location: Location) -> Moment:
    """Updates the averages of one leaf, where it is."""
    row, col = mean_squares.of_leaf(x.g, x.axes, location)
    r, c = averages.average(x.row, row, b2), averages.average(x.col, col, b2)
    return Moment(r, c, root_of_outer(r, c, x.axes))


def _update_equal(leaves: Sequence[Leaf], b2: Any) -> list[Moment]:
    """Updates the averages of leaves of equal shapes and dtypes, as stacks of them."""
    axes = leaves[0].axes
    news = mean_squares.of_equal_leaves([x.g for x in leaves], axes)
    olds = jnp.stack([x.row for x in leaves]), jnp.stack([x.col for x in leaves])
    r, c = (averages.average(old, new, b2) for old, new in zip(olds, news))
    factors = jax.vmap(lambda r, c: root_factors(r, c, axes))(r, c)
    # Without the barriers XLA would cut the stacks into leaves again and run programs
    # for each. Indices that it does not know keep it from fusing the passes over
    # several leaves of a stack.
    stacks = jax.lax.optimization_barrier((r, c, *factors))
    places = jax.lax.optimization_barrier([jnp.int32(k) for k in range(len(leaves))])
    parts = jax.lax.optimization_barrier([
        [jax.lax.dynamic_index_in_dim(s, k, keepdims=False) for s in stacks]
        for k in places
    ])  # fmt: skip
    return [Moment(r, c, along * across) for r, c, along, across in parts]


def root_of_outer(row: jax.Array, col: jax.Array, axes: ResolvedAxes) -> jax.Array:
    """sqrt(r c^T / mean(r)), which broadcasts to the parameter.

    It is the product of two roots: that of r and c would leave the range of the dtype
    long before its root does. Where r and c are 0 the result is 0.
    """
    along, across = root_factors(row, col, axes)
    return along * across


def root_factors(
    row: jax.Array, col: jax.Array, axes: ResolvedAxes
) -> tuple[jax.Array, jax.Array]:
    """sqrt(r) and sqrt(c / mean(r)), which broadcast to the parameter."""
    blocks = len(axes.splits)
    rows = [row] if blocks == 1 else [row[..., k] for k in range(blocks)]
    rows = [jnp.expand_dims(r, axes.outs) for r in rows]
    # Divide before summing, because the sum of large squares would overflow.
    means = [jnp.sum(r / axes.fan_in, axis=axes.ins, keepdims=True) for r in rows]
    mean = jnp.maximum(axes.by_block(means), jnp.finfo(row.dtype).tiny)
    share = roots.sqrt(roots.divide(jnp.expand_dims(col, axes.ins), mean))
    return axes.by_block([roots.sqrt(r) for r in rows]), share
