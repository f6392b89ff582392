"""Whole matrices on each device: two all-to-alls around a local iteration.

A matrix divided over D devices needs all of them in each of its products. D matrices
divided alike can change hands instead: one all-to-all gives every device one whole
matrix, the iteration runs without communication, and a second all-to-all returns the
pieces. Leaves that are stored alike travel together, in 16 bits where the iteration
runs in 16 bits.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muon2_optax import dtypes, polar
from muon2_optax.axes import ResolvedAxes
from muon2_optax.coefficients import AOL, Plan
from muon2_optax.placement import Axes, Placement

Side = tuple[tuple[int, Axes], ...]


@dataclasses.dataclass(frozen=True)
class Stored:
    """How the matrices of a leaf are stored: leaves that agree travel together.

    Attributes:
      rows, cols: per dimension of the side, its local size and the mesh axes that
      divide
        it. Rows are the inputs, or the outputs where ``swapped`` leaves are turned.
      splits: sizes of independent blocks along the columns.
    """

    rows: Side
    cols: Side
    splits: tuple[int, ...]

    @property
    def axes(self) -> Axes:
        return tuple(a for _, axes in self.rows + self.cols for a in axes)


def stored(
    axes: ResolvedAxes, place: Placement, turn_squares: bool
) -> tuple[Stored, bool]:
    """The storage of one leaf, and whether its sides were swapped to be canonical.

    ``turn_squares``: a square matrix may be turned, so that one divided along either
    side is the same task. Not under a one-sided normalization: there, sides differ.
    """
    ins, outs = (_side(axes, place, dims) for dims in (axes.ins, axes.outs))
    if len(axes.splits) > 1:
        return Stored(ins, outs, axes.splits), False
    fan_out = axes.splits[0]
    tall = axes.fan_in > fan_out
    turned = turn_squares and axes.fan_in == fan_out and not any(a for _, a in ins)
    swapped = tall or (turned and any(a for _, a in outs))
    rows, cols = (outs, ins) if swapped else (ins, outs)
    return Stored(rows, cols, (axes.fan_in if swapped else fan_out,)), swapped


def _side(axes: ResolvedAxes, place: Placement, dims: tuple[int, ...]) -> Side:
    side = [
        (axes.shape[d] // _size(place.mesh, place.dims[d]), place.dims[d]) for d in dims
    ]
    if not any(divided for _, divided in side[1:]):
        # Only the outermost dimension is divided: flattened, pieces stay contiguous.
        side = [(math.prod(n for n, _ in side), side[0][1])]
    return tuple(side)


def orthogonalize(
    leaves: Sequence[jax.Array],
    axes: Sequence[ResolvedAxes],
    places: Sequence[Placement],
    plan: Plan,
    ns_dtype: Any,
) -> list[jax.Array]:
    """Orthogonalizes leaves of one ``Stored`` kind and dtype on their mesh.

    Two all-to-alls over the axes that divide the matrices; one all-gather for a matrix
    alone, which no second one could make use of, and for leaves that are replicated; no
    communication where only stacks are divided.
    """
    mesh = places[0].mesh
    turn_squares = not isinstance(plan.normalization, AOL)
    kind = stored(axes[0], places[0], turn_squares)[0]
    swaps = [stored(a, p, turn_squares)[1] for a, p in zip(axes, places)]
    whole = all(not any(p.dims) for p in places)

    def run(*xs: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, ...]:
        pieces = [_matrices(x, a, s, kind) for x, a, s in zip(xs, axes, swaps)]
        stack = jnp.concatenate(pieces) if len(pieces) > 1 else pieces[0]
        iterate = functools.partial(
            _iterate, kind=kind, mesh=mesh, plan=plan, dtype=dtype
        )
        if kind.axes and len(stack) == 1:
            done = _gathered(stack, kind, mesh, dtype, iterate)
        elif kind.axes:
            done = _exchanged(stack, kind, mesh, dtype, iterate)
        elif whole and len(stack) > 1:
            done = _shared_out(stack, mesh, dtype, iterate)
        else:
            done = iterate(stack)
        parts = jnp.split(done, np.cumsum([len(p) for p in pieces])[:-1])
        rows = zip(parts, xs, axes, swaps)
        return tuple(_leaf(p, x, a, s).astype(x.dtype) for p, x, a, s in rows)

    specs = tuple(p.spec for p in places)

    def on_mesh(*xs: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, ...]:
        # Replication of the result is by construction (every device gathers the same
        # values), which the checker cannot see.
        return jax.shard_map(
            functools.partial(run, dtype=dtype),
            mesh=mesh,
            in_specs=specs,
            out_specs=specs,
            check_vma=False,
        )(*xs)

    return list(polar.per_platform(on_mesh, leaves, ns_dtype))


def _matrices(
    x: jax.Array, axes: ResolvedAxes, swapped: bool, kind: Stored
) -> jax.Array:
    """A local leaf as (count, *row dimensions, *column dimensions)."""
    first, second = (axes.outs, axes.ins) if swapped else (axes.ins, axes.outs)
    x = jnp.transpose(x, axes.batch + first + second)
    return x.reshape(-1, *(n for n, _ in kind.rows + kind.cols))


def _leaf(
    x: jax.Array, like: jax.Array, axes: ResolvedAxes, swapped: bool
) -> jax.Array:
    """Inverse of ``_matrices``."""
    first, second = (axes.outs, axes.ins) if swapped else (axes.ins, axes.outs)
    order = axes.batch + first + second
    x = x.reshape([like.shape[d] for d in order])
    return jnp.transpose(x, tuple(np.argsort(order).tolist()))


def _iterate(
    x: jax.Array, kind: Stored, mesh: Any, plan: Plan, dtype: jnp.dtype
) -> jax.Array:
    """Whole matrices (count, *row dimensions, *column dimensions), all local."""
    shape = x.shape
    rows = math.prod(n * _size(mesh, a) for n, a in kind.rows)
    x = x.reshape(len(x), rows, -1)
    if len(kind.splits) == 1:
        return polar.run_batch(x, plan=plan, dtype=dtype)[0].reshape(shape)
    blocks = jnp.split(x, np.cumsum(kind.splits)[:-1], axis=-1)
    done = [polar.run_batch(b, plan=plan, dtype=dtype)[0] for b in blocks]
    return jnp.concatenate(done, axis=-1).reshape(shape)


def _exchanged(
    x: jax.Array, kind: Stored, mesh: Any, dtype: jnp.dtype, iterate: Any
) -> jax.Array:
    """Runs ``iterate`` on whole matrices, of which each device gets an equal share."""
    count, *local = x.shape
    devices = _size(mesh, kind.axes)
    share = -(-count // devices)
    # Zero matrices fill up the last share; they stay zero.
    x = jnp.pad(x, [(0, devices * share - count)] + [(0, 0)] * len(local))
    sent = _encode(x, dtype).reshape(devices, share, -1)
    here = jax.lax.all_to_all(sent, kind.axes, 0, 0, tiled=True)
    pieces = _decode(here, (devices, share, *local), dtype, x.dtype)
    done = iterate(_assembled(pieces, kind, mesh))
    back = _bits(_divided(done, kind, mesh).astype(dtype))
    back = jax.lax.all_to_all(
        back.reshape(devices, share, -1), kind.axes, 0, 0, tiled=True
    )
    return _values(back, dtype).reshape(devices * share, *local)[:count]


def _gathered(
    x: jax.Array, kind: Stored, mesh: Any, dtype: jnp.dtype, iterate: Any
) -> jax.Array:
    """Every device iterates the whole matrix and keeps its piece of the result."""
    count, *local = x.shape
    devices = _size(mesh, kind.axes)
    here = jax.lax.all_gather(_encode(x, dtype), kind.axes)
    pieces = _decode(here, (devices, count, *local), dtype, x.dtype)
    done = _divided(iterate(_assembled(pieces, kind, mesh)), kind, mesh)
    return jax.lax.dynamic_index_in_dim(
        done, jax.lax.axis_index(kind.axes), keepdims=False
    )


def _shared_out(x: jax.Array, mesh: Any, dtype: jnp.dtype, iterate: Any) -> jax.Array:
    """Each device iterates its share of replicated matrices; all get all results."""
    names = tuple(a for a in mesh.axis_names if mesh.shape[a] > 1)
    devices, count = _size(mesh, names), len(x)
    share = -(-count // devices)
    padded = jnp.pad(x, [(0, devices * share - count)] + [(0, 0)] * (x.ndim - 1))
    mine = jax.lax.axis_index(names) * share
    done = iterate(jax.lax.dynamic_slice_in_dim(padded, mine, share))
    bits = _bits(done.astype(dtype)).reshape(share, -1)
    if count >= devices:
        bits = jax.lax.all_gather(bits, names, tiled=True)[:count]
    else:
        bits = _broadcast_first(bits[0], count, devices, names)
    return _values(bits, dtype).reshape(x.shape)


def _broadcast_first(
    row: jax.Array, count: int, devices: int, names: Axes
) -> jax.Array:
    """Rows (count, size) of the first ``count`` devices, on all.

    Gathering the rows of all devices would move those that nobody needs. Each row is
    first spread over the devices, so that every link carries count rows and one more.
    """
    spread = jnp.pad(row, (0, -row.size % devices)).reshape(devices, -1)
    pieces = jax.lax.all_to_all(spread, names, 0, 0, tiled=True)[:count]
    rows = jax.lax.all_gather(pieces, names, axis=1)
    return rows.reshape(count, -1)[:, : row.size]


def _assembled(x: jax.Array, kind: Stored, mesh: Any) -> jax.Array:
    """(devices, share, *local dimensions) to (share, *whole dimensions)."""
    sizes = [mesh.shape[a] for a in kind.axes]
    x = x.reshape(*sizes, *x.shape[1:])
    order, shape, axis = [len(sizes)], [x.shape[len(sizes)]], 0
    for i, (n, divided) in enumerate(kind.rows + kind.cols):
        order += [*range(axis, axis + len(divided)), len(sizes) + 1 + i]
        axis += len(divided)
        shape.append(n * _size(mesh, divided))
    return jnp.transpose(x, order).reshape(shape)


def _divided(x: jax.Array, kind: Stored, mesh: Any) -> jax.Array:
    """Inverse of ``_assembled``: the pieces of every device in front."""
    shape, front, back = [len(x)], [], [0]
    for n, divided in kind.rows + kind.cols:
        front += range(len(shape), len(shape) + len(divided))
        shape += [*(mesh.shape[a] for a in divided), n]
        back.append(len(shape) - 1)
    x = jnp.transpose(x.reshape(shape), (*front, *back))
    return x.reshape(-1, *x.shape[len(front) :])


def _encode(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """(count, ...) as rows of what travels: the values, and float16's range.

    float16 does not reach as far as the values do before they are normalized, so each
    piece is divided by its largest magnitude, whose bits go with it.
    """
    rows = x.reshape(len(x), -1)
    if dtype != jnp.float16:
        return _bits(rows.astype(dtype))
    rows = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True, initial=0.0)
    values = (rows / jnp.where(largest == 0, 1, largest)).astype(dtype)
    scale = jax.lax.bitcast_convert_type(largest, jnp.uint16).reshape(len(x), 2)
    return jnp.concatenate([_bits(values), scale], axis=-1)


def _decode(
    bits: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype, source: jnp.dtype
) -> jax.Array:
    if dtype != jnp.float16:
        values = _values(bits, dtype)
        return values.astype(dtypes.compute_dtype(source)).reshape(shape)
    largest = jax.lax.bitcast_convert_type(bits[..., -2:], jnp.float32)
    values = _values(bits[..., :-2], dtype).astype(jnp.float32)
    return (values * largest[..., None]).reshape(shape)


def _bits(x: jax.Array) -> jax.Array:
    """16-bit values travel as integers, which no backend widens on the way."""
    narrow = x.dtype.itemsize == 2
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if narrow else x


def _values(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    narrow = bits.dtype == jnp.uint16
    return jax.lax.bitcast_convert_type(bits, dtype) if narrow else bits


def _size(mesh: Any, axes: Axes) -> int:
    return math.prod(mesh.shape[a] for a in axes)
