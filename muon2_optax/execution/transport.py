"""What changes hands on a mesh: local pieces of matrices, 16 bits wide where they can.

A leaf's local part holds one piece of each of its matrices. Here pieces are cut out of
leaves and put back, narrowed for the journey and widened after it, and joined to whole
matrices and divided again.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muon2_optax.arrays.stacks import TOGETHER, joined, rows_major, take, totals
from muon2_optax.axes import ResolvedAxes
from muon2_optax.sharding import Axes, Placement

Side = tuple[tuple[int, Axes], ...]
# 16-bit numbers after which values begin anew, where that is a small part of the whole:
# whole rows of memory are moved faster.
ALIGNMENT = 64


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

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of a piece: row dimensions, then column dimensions."""
        return tuple(n for n, _ in self.rows + self.cols)


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
        (axes.shape[d] // size(place.mesh, place.dims[d]), place.dims[d]) for d in dims
    ]
    if not any(divided for _, divided in side[1:]):
        # Only the outermost dimension is divided: flattened, pieces stay contiguous.
        side = [(math.prod(n for n, _ in side), side[0][1])]
    return tuple(side)


def size(mesh: Any, axes: Axes) -> int:
    """Devices along these axes of a mesh."""
    return math.prod(mesh.shape[a] for a in axes)


def cut(x: jax.Array, axes: ResolvedAxes, swapped: bool, kind: Stored) -> jax.Array:
    """A local leaf as pieces (count, *row dimensions, *column dimensions)."""
    x = jnp.transpose(x, _order(axes, swapped))
    return x.reshape(-1, *kind.local)


def put_back(
    x: jax.Array, like: jax.Array, axes: ResolvedAxes, swapped: bool
) -> jax.Array:
    """Inverse of ``cut``."""
    order = _order(axes, swapped)
    x = x.reshape([like.shape[d] for d in order])
    back = tuple(np.argsort(order).tolist())
    x = jnp.transpose(x, back)
    if x.dtype == jnp.float16 and back != tuple(range(x.ndim)):
        # On GPUs: transposed in a pass of its own. Joined to the update of a parameter
        # it would keep that from being done in place.
        x = rows_major(x)
    return x.astype(like.dtype)


def _order(axes: ResolvedAxes, swapped: bool) -> tuple[int, ...]:
    first, second = (axes.outs, axes.ins) if swapped else (axes.ins, axes.outs)
    return axes.batch + first + second


def narrowed(
    xs: Sequence[jax.Array], axes: Sequence[ResolvedAxes], dtype: jnp.dtype
) -> tuple[list[jax.Array], jax.Array | None]:
    """Leaves in the dtype that travels, and the factor (count,) of every piece.

    float16 does not reach as far as the values do before they are normalized, so each
    piece is divided by its root mean square, which also says what its matrix's norm is.
    Other dtypes need no factors: None. Neither do leaves of several blocks: those are
    matrices of their own, whose sizes can differ by any factor, and go out in float32;
    nor float64 leaves, which stay as they are.
    """
    if xs[0].dtype == jnp.float64 and dtype != jnp.float64:
        # They are normalized first, where they arrive: few have float32's range.
        return list(xs), None
    if dtype != jnp.float16:
        return [x.astype(dtype) for x in xs], None
    wide = [x.astype(jnp.float32) for x in xs]
    if len(axes[0].splits) > 1:
        return wide, None
    # In float64, where the squares of any float32 fit. Along the leaf's last axis
    # first, which one pass over the leaf serves together with whatever made it, and
    # then all rows of all leaves in one small program.
    with jax.enable_x64(True):
        rows = [_row_sums(x, a) for x, a in zip(wide, axes)]
        piece = max(1, xs[0].size // max(1, len(rows[0])))
        factors = jnp.sqrt(totals(rows) / piece).astype(jnp.float32)
    divisors = jnp.where(factors == 0, 1, factors)
    narrow, start = [], 0
    for x, a, r in zip(wide, axes, rows):
        shape = [n if d in a.batch else 1 for d, n in enumerate(x.shape)]
        divisor = divisors[start : start + len(r)].reshape(shape)
        narrow.append((x / divisor).astype(dtype))
        start += len(r)
    return narrow, factors


def _row_sums(x: jax.Array, axes: ResolvedAxes) -> jax.Array:
    """Sums of squares (count, rows) of the rows of every piece of a leaf, float64."""
    inside = axes.ins + axes.outs
    over = (x.ndim - 1,) if x.ndim - 1 in inside else inside
    rows = jnp.sum(jnp.square(x.astype(jnp.float64)), axis=over, keepdims=True)
    count = math.prod(x.shape[d] for d in axes.batch)
    return jnp.transpose(rows, axes.batch + inside).reshape(count, -1)


def packed(
    pieces: Sequence[jax.Array], factors: jax.Array, share: int, rows: int
) -> jax.Array:
    """(rows, width): in each row the pieces and then the factors of ``share`` matrices.

    The last rows hold fewer, or none, and zeros.
    """
    one = math.prod(pieces[0].shape[1:])
    fill = -(2 * share) % ALIGNMENT if one * share >= 64 * ALIGNMENT else 0
    parts = []
    for low in range(0, rows * share, share):
        own, here = factors[low : low + share], take(pieces, low, low + share)
        missing = share - len(own)
        ends = jax.lax.bitcast_convert_type(own, jnp.uint16).reshape(-1)
        parts.append([
            *(bits(x) for x in joined([p.reshape(-1) for p in here])),
            *([jnp.zeros(missing * one, jnp.uint16)] if missing else []),
            jnp.pad(ends, (0, 2 * missing + fill)),
        ])  # fmt: skip
    if sum(map(len, parts)) <= TOGETHER:
        return jnp.concatenate(sum(parts, [])).reshape(rows, -1)
    # XLA makes one of two joints in a row, but not of these.
    return jnp.concatenate([jnp.concatenate(row)[None] for row in parts])


def unpacked(
    rows: jax.Array, local: tuple[int, ...], share: int
) -> tuple[jax.Array, jax.Array]:
    """Inverse of ``packed`` for rows (devices, ...).

    Returns values (devices, share, *local) and factors (devices, share).
    """
    end = share * math.prod(local)
    values = jax.lax.bitcast_convert_type(rows[:, :end], jnp.float16)
    factors = rows[:, end : end + 2 * share].reshape(len(rows), share, 2)
    factors = jax.lax.bitcast_convert_type(factors, jnp.float32)
    return values.reshape(len(rows), share, *local), factors


def bits(x: jax.Array) -> jax.Array:
    """16-bit values travel as integers, which no backend widens on the way."""
    narrow = x.dtype.itemsize == 2
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if narrow else x


def values(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Inverse of ``bits``."""
    narrow = x.dtype == jnp.uint16
    return jax.lax.bitcast_convert_type(x, dtype) if narrow else x


def assembled(x: jax.Array, kind: Stored, mesh: Any) -> jax.Array:
    """(devices, share, *local dimensions) to (share, *whole dimensions)."""
    sizes = [mesh.shape[a] for a in kind.axes]
    x = x.reshape(*sizes, *x.shape[1:])
    order, shape, axis = [len(sizes)], [x.shape[len(sizes)]], 0
    for i, (n, divided) in enumerate(kind.rows + kind.cols):
        order += [*range(axis, axis + len(divided)), len(sizes) + 1 + i]
        axis += len(divided)
        shape.append(n * size(mesh, divided))
    return jnp.transpose(x, order).reshape(shape)


def divided(x: jax.Array, kind: Stored, mesh: Any) -> jax.Array:
    """Inverse of ``assembled``: the pieces of every device in front."""
    shape, front, back = [len(x)], [], [0]
    for n, axes in kind.rows + kind.cols:
        front += range(len(shape), len(shape) + len(axes))
        shape += [*(mesh.shape[a] for a in axes), n]
        back.append(len(shape) - 1)
    x = jnp.transpose(x.reshape(shape), (*front, *back))
    return x.reshape(-1, *x.shape[len(front) :])
