"""Inner products of whole matrices, for all leaves of a tree at once.

On a mesh every device sums over its parts of all leaves. One all-reduce of a few
numbers per matrix then adds up these sums, however many leaves there are.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from muon2_optax import dtypes
from muon2_optax.arrays import tracing
from muon2_optax.arrays.grouping import run_in_groups
from muon2_optax.axes import ResolvedAxes
from muon2_optax.sharding import Location, Shardings, locate


class InnerProducts(NamedTuple):
    """|x|^2, Re <x, y> and |y|^2, with one number per matrix as in ``per_matrix``."""

    xx: jax.Array
    xy: jax.Array
    yy: jax.Array


def per_matrix(values: jax.Array, axes: ResolvedAxes) -> jax.Array:
    """Shapes one number per matrix to multiply the parameter.

    Args:
      values: of ``axes.shape_per_matrix``.
      axes: of the leaf.
    """
    blocks = len(axes.splits)
    single = [values] if blocks == 1 else [values[..., k] for k in range(blocks)]
    sides = tuple(sorted(axes.ins + axes.outs))
    return axes.by_block([jnp.expand_dims(v, sides) for v in single])


def squared_norms(x: jax.Array, axes: ResolvedAxes) -> jax.Array:
    """|x|^2 of every matrix of one leaf, in float32 or better."""
    return _sums((_square(dtypes.widen(x)),), axes, _owners(axes))[0]


def of_equal_leaves(
    xs: Sequence[jax.Array], ys: Sequence[jax.Array], axes: ResolvedAxes
) -> InnerProducts:
    """The inner products of equal leaves on one device, stacked along a new axis 0.

    One program reads each leaf, as elsewhere. But one program for all of them adds up
    what was read and does what follows: starting one for each leaf would take a GPU
    microseconds each time.
    """
    owners = _owners(axes)
    entries = [_by_block(_products(x, y), axes, owners) for x, y in zip(xs, ys)]
    parts = [[[_first_sums(x, axes) for x in blocks] for blocks in leaf]
             for leaf in entries]  # fmt: skip
    flat = jnp.stack([x for leaf in parts for blocks in leaf for x in blocks])
    total = _then_sums(flat, axes, 1)
    total = total.reshape(len(xs), 3, len(axes.splits), *total.shape[1:])
    if owners is None:
        total = total[:, :, 0]
    else:
        total = jnp.moveaxis(total, 2, -1)
    return InnerProducts(total[:, 0], total[:, 1], total[:, 2])


def of_pairs(
    names: Sequence[str],
    xs: Sequence[jax.Array],
    ys: Sequence[jax.Array],
    axes: Sequence[ResolvedAxes],
    shardings: Shardings | None,
) -> list[InnerProducts]:
    """The inner products of the matrices of x and y, leaf by leaf.

    Args:
      names, axes: paths of the leaves and the axes of their matrices.
      xs, ys: leaves of equal shapes and shardings, each pair of any dtypes.
      shardings: where they live, on Auto axes.
    """
    locations = [locate(name, x, shardings) for name, x in zip(names, xs)]

    def mesh(i: int) -> Any:
        """The mesh that divides a leaf's matrices, if one does."""
        dims, sides = locations[i].dims, axes[i].ins + axes[i].outs
        divided = locations[i].on_mesh and any(dims[a] for a in sides)
        return locations[i].mesh if divided else None

    def run(members: list[int]) -> list[InnerProducts]:
        if mesh(members[0]) is None:
            return [_of_pair(xs[i], ys[i], axes=axes[i]) for i in members]
        found = _across_devices(
            [(xs[i], ys[i]) for i in members],
            tuple(axes[i] for i in members),
            tuple(locations[i] for i in members),
        )
        return [InnerProducts(*products) for products in found]

    return run_in_groups(range(len(xs)), mesh, run)


@tracing.once
def _of_pair(x: jax.Array, y: jax.Array, *, axes: ResolvedAxes) -> InnerProducts:
    return InnerProducts(*_sums(_products(x, y), axes, _owners(axes)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _across_devices(
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    axes: Sequence[ResolvedAxes],
    places: Sequence[Location],
) -> list[tuple[jax.Array, ...]]:
    """Sums each device's parts of all leaves, and adds the sums in one all-reduce."""
    mesh = places[0].mesh
    specs = [PartitionSpec(*_full_spec(p, len(p.dims))) for p in places]

    def local(pairs: Sequence[tuple[jax.Array, jax.Array]]) -> list[Any]:
        sums = [
            jnp.stack(_sums(_products(x, y), a, _local_owners(a, p)))
            for (x, y), a, p in zip(pairs, axes, places)
        ]
        return _add_up(sums, axes, places, mesh)

    out = [(_batch_spec(a, p),) * 3 for a, p in zip(axes, places)]
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=([(s, s) for s in specs],),
        out_specs=out,
        check_vma=False,
    )
    return run(list(pairs))


def _add_up(
    sums: Sequence[jax.Array],
    axes: Sequence[ResolvedAxes],
    places: Sequence[Location],
    mesh: Any,
) -> list[tuple[jax.Array, ...]]:
    """Adds the devices' sums, each (3, *batch, blocks), in one all-reduce.

    Leaves may be divided over different axes of the mesh, but the sum runs over all of
    its axes. So the sums of copies are divided by the number of copies, and each device
    has zeros for the matrices that only others hold.
    """
    vectors, corners = [], []
    for x, a, place in zip(sums, axes, places):
        used = {name for dim in place.dims for name in dim}
        copies = math.prod(n for name, n in mesh.shape.items() if name not in used)
        whole = list(x.shape)
        corner = [jnp.int32(0)] * x.ndim
        for k, axis in enumerate(a.batch, start=1):
            names = place.dims[axis]
            whole[k] = a.shape[axis]
            if names:
                corner[k] = jax.lax.axis_index(names) * x.shape[k]
        empty = jnp.zeros(whole, x.dtype)
        vectors.append(jax.lax.dynamic_update_slice(empty, x / copies, corner))
        corners.append(corner)
    dtype = jnp.result_type(*vectors)
    flat = jnp.concatenate([v.astype(dtype).ravel() for v in vectors])
    flat = jax.lax.psum(flat, tuple(mesh.axis_names))
    found, start = [], 0
    for x, vector, corner in zip(sums, vectors, corners):
        total = flat[start : start + vector.size].reshape(vector.shape)
        start += vector.size
        mine = jax.lax.dynamic_slice(total, corner, x.shape).astype(x.dtype)
        found.append(tuple(mine))
    return found


def _products(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    """|x|^2, Re(conj(x) y) and |y|^2 of every entry."""
    x, y = dtypes.widen(x), dtypes.widen(y)
    product = (x.conj() * y).real if jnp.iscomplexobj(x) else x * y
    return _square(x), product, _square(y)


def _square(x: jax.Array) -> jax.Array:
    return (x.conj() * x).real if jnp.iscomplexobj(x) else x * x


def _sums(
    entries: Sequence[jax.Array], axes: ResolvedAxes, owners: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Sums over each matrix: (*batch), or (*batch, blocks) where there are several.

    Args:
      entries: arrays of the leaf's rank.
      axes: of the leaf.
      owners: which block each output belongs to, broadcastable to the leaf.
    """
    found = [
        [_then_sums(_first_sums(x, axes), axes) for x in blocks]
        for blocks in _by_block(entries, axes, owners)
    ]
    if owners is None:
        return tuple(blocks[0] for blocks in found)
    return tuple(jnp.stack(blocks, axis=-1) for blocks in found)


def _by_block(
    entries: Sequence[jax.Array], axes: ResolvedAxes, owners: jax.Array | None
) -> list[list[jax.Array]]:
    """Copies each array for each block, with zeros outside of the block."""
    if owners is None:
        return [[x] for x in entries]
    blocks = range(len(axes.splits))
    return [[jnp.where(owners == k, x, 0) for k in blocks] for x in entries]


def _first_sums(x: jax.Array, axes: ResolvedAxes) -> jax.Array:
    """The first of two stages of a sum: means along the last axis of the matrices.

    XLA on a CPU adds up one by one, and a float32 sum of millions of squares in one
    stage would be off by more than a norm may be. The division between the stages keeps
    XLA from merging them. Where the last axis is no side of the matrices, or their only
    one, this stage takes the whole sum.
    """
    sides, last = axes.ins + axes.outs, len(axes.shape) - 1
    if last not in sides or len(sides) == 1:
        return jnp.sum(x, axis=sides)
    return jnp.sum(x, axis=last) / axes.shape[last]


def _then_sums(x: jax.Array, axes: ResolvedAxes, first: int = 0) -> jax.Array:
    """The second stage: sums over matrices, from what ``_first_sums`` returns.

    ``first`` is the number of axes in front of the leaf's own.
    """
    sides, last = axes.ins + axes.outs, len(axes.shape) - 1
    if last not in sides or len(sides) == 1:
        return x
    rest = tuple(a + first for a in sides if a != last)
    return jnp.sum(x, axis=rest) * axes.shape[last]


def _owners(axes: ResolvedAxes) -> jax.Array | None:
    """Which block each output belongs to; None where there is one."""
    blocks = range(len(axes.splits))
    return None if len(blocks) == 1 else jnp.asarray(axes.per_output(blocks))


def _local_owners(axes: ResolvedAxes, place: Location) -> jax.Array | None:
    """As ``_owners``, for the outputs that this device holds."""
    owners = _owners(axes)
    out = axes.outs[0]
    if owners is None or not place.dims[out]:
        return owners
    size = place.local_shape(axes.shape)[out]
    start = jax.lax.axis_index(place.dims[out]) * size
    return jax.lax.dynamic_slice_in_dim(owners, start, size, axis=out)


def _full_spec(place: Location, rank: int) -> tuple[Any, ...]:
    return tuple(place.spec) + (None,) * (rank - len(place.spec))


def _batch_spec(axes: ResolvedAxes, place: Location) -> PartitionSpec:
    """The spec of one number per matrix, which is divided as the batch axes are."""
    spec = _full_spec(place, len(axes.shape))
    return PartitionSpec(*(spec[a] for a in axes.batch))
