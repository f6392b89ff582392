"""Prepares the shards of matrices that the devices of a mesh send each other.

A device's part of a leaf holds one shard of each of the leaf's matrices. The functions
here cut shards out of leaves and put them back; narrow and pack them before they travel
and unpack them where they arrive; and assemble whole matrices and divide them again.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muon2_optax.arrays import limits
from muon2_optax.arrays.stacks import (
    concatenate_few,
    slice_parts,
    store_row_major,
    sum_rows,
)
from muon2_optax.axes import ResolvedAxes
from muon2_optax.execution.layout import ShardLayout, StoredLeaf, device_count

# Long packed rows are filled up to a multiple of so many 16-bit numbers, which are 128
# bytes: rows that begin at a multiple of that in memory are moved faster.
ALIGNMENT = 64


def cut_shards(x: jax.Array, leaf: StoredLeaf) -> jax.Array:
    """Cuts a device's part of a leaf into shards (count, *row, *column dimensions)."""
    return jnp.transpose(x, leaf.order).reshape(-1, *leaf.layout.local)


def restore_part(shards: jax.Array, like: jax.Array, leaf: StoredLeaf) -> jax.Array:
    """The inverse of ``cut_shards``, in the shape and dtype of ``like``."""
    x = shards.reshape([like.shape[d] for d in leaf.order])
    back = tuple(np.argsort(leaf.order).tolist())
    x = jnp.transpose(x, back)
    if x.dtype == jnp.float16 and back != tuple(range(x.ndim)):
        # Transpose in a separate pass. XLA for GPUs would fuse it with the update of
        # the parameter, and could then not update the parameter in place.
        x = store_row_major(x)
    return x.astype(like.dtype)


def narrow(
    xs: Sequence[jax.Array], axes: Sequence[ResolvedAxes], dtype: jnp.dtype
) -> tuple[list[jax.Array], jax.Array | None]:
    """Casts leaves to the dtype in which they travel.

    For float16: the values are not normalized yet, and may be out of its range. So each
    shard is divided by its root mean square, from which the receiver also computes the
    norm of the matrix. Leaves of several blocks go in float32 instead, because each
    block is a matrix, and blocks may differ in size by any factor.

    Other dtypes need no division. Leaves in float64 stay as they are.

    Args:
      xs: each device's parts of leaves of one dtype and layout.
      axes: of their matrices.
      dtype: of the iteration.

    Returns:
      The leaves, and the root mean squares (count,) of the shards of all leaves; None
      in their place where nothing was divided.
    """
    if xs[0].dtype == jnp.float64 and dtype != jnp.float64:
        # They are normalized where they arrive, and may need the range of float64.
        return list(xs), None
    if dtype != jnp.float16:
        return [x.astype(dtype) for x in xs], None
    wide = [x.astype(jnp.float32) for x in xs]
    if len(axes[0].splits) > 1:
        return wide, None
    # The squares of any float32 fit float64. Sum first along the last axis of the leaf,
    # which XLA fuses with whatever computes the leaf; then one small program sums the
    # rows of all leaves.
    with jax.enable_x64(True):
        rows = [_row_sums(x, a) for x, a in zip(wide, axes)]
        size = max(1, xs[0].size // max(1, len(rows[0])))
        factors = jnp.sqrt(sum_rows(rows) / size).astype(jnp.float32)
    divisors = jnp.where(factors == 0, 1, factors)
    narrowed, start = [], 0
    for x, a, r in zip(wide, axes, rows):
        shape = [n if d in a.batch else 1 for d, n in enumerate(x.shape)]
        divisor = divisors[start : start + len(r)].reshape(shape)
        narrowed.append((x / divisor).astype(dtype))
        start += len(r)
    return narrowed, factors


def _row_sums(x: jax.Array, axes: ResolvedAxes) -> jax.Array:
    """Sums of squares of the rows of each shard of a leaf: (count, rows), float64."""
    inside = axes.ins + axes.outs
    over = (x.ndim - 1,) if x.ndim - 1 in inside else inside
    rows = jnp.sum(jnp.square(x.astype(jnp.float64)), axis=over, keepdims=True)
    count = math.prod(x.shape[d] for d in axes.batch)
    return jnp.transpose(rows, axes.batch + inside).reshape(count, -1)


def pack(
    shards: Sequence[jax.Array], factors: jax.Array, share: int, rows: int
) -> jax.Array:
    """Packs shards and their factors into rows, one for each device that gets them.

    Row i holds shards i * share to (i + 1) * share - 1, one after the other, and behind
    them their factors, each as two 16-bit integers.

    Args:
      shards: of float16, each (count, *local).
      factors: float32, one for each shard.
      share: how many shards a row has room for.
      rows: how many rows there are.

    Returns:
      (rows, width) of 16-bit integers. Where the shards run out, zeros take the place
      of shards and factors.
    """
    one = math.prod(shards[0].shape[1:])
    fill = -(2 * share) % ALIGNMENT if one * share >= 64 * ALIGNMENT else 0
    parts = []
    for low in range(0, rows * share, share):
        own, here = factors[low : low + share], slice_parts(shards, low, low + share)
        missing = share - len(own)
        ends = jax.lax.bitcast_convert_type(own, jnp.uint16).reshape(-1)
        parts.append([
            *(to_bits(x) for x in concatenate_few([p.reshape(-1) for p in here])),
            *([jnp.zeros(missing * one, jnp.uint16)] if missing else []),
            jnp.pad(ends, (0, 2 * missing + fill)),
        ])  # fmt: skip
    if sum(map(len, parts)) <= limits.ARRAYS_IN_CONCATENATION:
        return jnp.concatenate(sum(parts, [])).reshape(rows, -1)
    # A new axis between the two keeps XLA from merging back-to-back concatenates.
    return jnp.concatenate([jnp.concatenate(row)[None] for row in parts])


def unpack(
    rows: jax.Array, local: tuple[int, ...], share: int
) -> tuple[jax.Array, jax.Array]:
    """The inverse of ``pack``, for rows (devices, ...).

    Returns values (devices, share, *local) and factors (devices, share).
    """
    end = share * math.prod(local)
    values = jax.lax.bitcast_convert_type(rows[:, :end], jnp.float16)
    factors = rows[:, end : end + 2 * share].reshape(len(rows), share, 2)
    factors = jax.lax.bitcast_convert_type(factors, jnp.float32)
    return values.reshape(len(rows), share, *local), factors


def to_bits(x: jax.Array) -> jax.Array:
    """Turns 16-bit values into integers, which no backend widens on the way."""
    narrow = x.dtype.itemsize == 2
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if narrow else x


def from_bits(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The inverse of ``to_bits``."""
    narrow = x.dtype == jnp.uint16
    return jax.lax.bitcast_convert_type(x, dtype) if narrow else x


def assemble(x: jax.Array, layout: ShardLayout, mesh: Any) -> jax.Array:
    """Assembles matrices (share, *dimensions) from shards (devices, share, *local)."""
    sizes = [mesh.shape[a] for a in layout.axes]
    x = x.reshape(*sizes, *x.shape[1:])
    order, shape, axis = [len(sizes)], [x.shape[len(sizes)]], 0
    for i, (n, divided) in enumerate(layout.rows + layout.cols):
        order += [*range(axis, axis + len(divided)), len(sizes) + 1 + i]
        axis += len(divided)
        shape.append(n * device_count(mesh, divided))
    return jnp.transpose(x, order).reshape(shape)


def divide(x: jax.Array, layout: ShardLayout, mesh: Any) -> jax.Array:
    """The inverse of ``assemble``: shards (devices, share, *local)."""
    shape, front, back = [len(x)], [], [0]
    for n, axes in layout.rows + layout.cols:
        front += range(len(shape), len(shape) + len(axes))
        shape += [*(mesh.shape[a] for a in axes), n]
        back.append(len(shape) - 1)
    x = jnp.transpose(x.reshape(shape), (*front, *back))
    return x.reshape(-1, *x.shape[len(front) :])
