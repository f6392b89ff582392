"""Writes matrices into a stack of square panels, and reads them out again.

A panel is (m, m). A matrix (m, n), m <= n, takes as many panels as hold its columns, so
that stacks of matrices of all n may have one shape. The programs that write or read a
stack are small, and few of them differ, because XLA takes long to compile large ones.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muon2_optax.arrays import limits, tracing
from muon2_optax.arrays.grouping import consecutive
from muon2_optax.arrays.stacks import store_row_major
from muon2_optax.kernels.symmetric import panels

# Both act along axis 0. No offset is negative here; else each program would check that.
_slice = functools.partial(jax.lax.dynamic_slice_in_dim, allow_negative_indices=False)
_write = functools.partial(
    jax.lax.dynamic_update_slice_in_dim, axis=0, allow_negative_indices=False
)


class Group(NamedTuple):
    """Members of a stack that are alike, each (count, m, n) or (count, n, m).

    ``start`` is the number of matrices before them in the stack. It is hidden from XLA,
    so that groups that are alike share their programs.
    """

    members: Sequence[jax.Array]
    start: jax.Array

    @property
    def total(self) -> int:
        """How many matrices there are."""
        return sum(map(len, self.members))

    @property
    def each(self) -> int:
        """How many panels a matrix has."""
        return panels(*sorted(self.members[0].shape[1:]))


def write_panels(
    members: Sequence[jax.Array],
    factors: jax.Array,
    negative: bool,
    size: int,
    dtype: jnp.dtype,
) -> jax.Array:
    """Writes matrices, times the squares of their factors, as panels (size, m, m).

    Args:
      members: (count, m, n) or (count, n, m) each.
      factors: (total count,), or more that are not used.
      negative: whether the products are negated.
      size: the number of panels in the stack. Panels that the matrices leave free are
        not written.
      dtype: of the stack.
    """
    m = min(members[0].shape[1:])
    stack = jax.lax.empty((size, m, m), dtype)
    # XLA transposes any number of matrices in one fast program.
    groups = _group(members, turned=len(members))
    for group, mine in zip(groups, _hide_equality(factors, groups)):
        mine = _slice(mine, group.start, group.total)
        ready = _make_panels(mine, *group.members, negative=negative, dtype=dtype)
        if len(ready) == size:
            # These are all, so the transposed ones need not be copied into a stack.
            return ready
        stack = _write(stack, ready, group.start * group.each)
    return stack


def read_panels(stack: jax.Array, members: Sequence[jax.Array]) -> list[jax.Array]:
    """Reads the matrices that ``write_panels`` writes, in the order of the members."""
    done = []
    groups = _group(members, turned=1)
    # Treat the stack as rows from here on. XLA would reshape matrices leaf by leaf.
    rows = stack.reshape(-1, stack.shape[-1])
    for group, mine in zip(groups, _hide_equality(rows, groups)):
        high = group.each * stack.shape[-1]
        mine = _slice(mine, group.start * high, group.total * high)
        some = group.members
        done += _split_group(mine, count=len(some), shape=some[0].shape)
    return done


def _group(members: Sequence[jax.Array], turned: int) -> list[Group]:
    """Splits the members into groups of successive ones that are alike.

    Groups are small because XLA takes long to compile large programs. Tall members,
    which are transposed, come in groups of up to ``turned``.
    """

    def most(kind: Any) -> int:
        shape, _ = kind
        few = limits.ENTRIES_IN_PANEL_WRITE // math.prod(shape)
        few = max(1, min(limits.LEAVES_IN_PANEL_WRITE, few))
        return turned if _is_tall(shape) else few

    found = consecutive(members, lambda y: (y.shape, y.dtype), most)
    counts = [sum(map(len, some)) for some in found]
    before = [jnp.int32(k) for k in itertools.accumulate(counts[:-1], initial=0)]
    starts = jax.lax.optimization_barrier(before)
    return [Group(some, start) for some, start in zip(found, starts)]


@tracing.once
def _make_panels(
    factors: jax.Array, *members: jax.Array, negative: bool, dtype: jnp.dtype
) -> jax.Array:
    """The panels of a group, whose matrices are multiplied by their factors' squares.

    If ``negative``, by minus the squares.
    """
    parts = [jnp.concatenate(members)] if _is_tall(members[0].shape) else members
    # Split, because a factor that varies along an array is loaded for each element.
    own = jax.lax.split(factors, list(map(len, parts)))
    how = {"negative": negative, "dtype": dtype}
    rows = jnp.concatenate([_scale_rows(y, f, **how) for y, f in zip(parts, own)])
    return _cut_panels(rows.reshape(-1, *members[0].shape[1:]))


@tracing.once
def _scale_rows(
    y: jax.Array, factors: jax.Array, *, negative: bool, dtype: jnp.dtype
) -> jax.Array:
    """Multiplies matrices as ``_make_panels`` says; returns rows (count * m, n).

    Rows, because XLA would reshape matrices leaf by leaf.
    """
    factor = factors[:, None, None]
    # Multiply twice: the square itself may be out of range where both products fit.
    y = y.astype(factor.dtype) * factor * (-factor if negative else factor)
    return y.astype(dtype).reshape(-1, y.shape[-1])


def _hide_equality(x: jax.Array, groups: Sequence[Group]) -> Sequence[jax.Array]:
    """Copies of x, one for each group, which XLA does not know to be equal.

    It would merge all programs that read the same array into one large program.
    """
    return jax.lax.optimization_barrier((x,) * len(groups))


def _is_tall(shape: Sequence[int]) -> bool:
    return shape[-2] > shape[-1]


def _cut_panels(y: jax.Array) -> jax.Array:
    """Cuts matrices (L, m, n) or (L, n, m) into panels (L * panels, m, m).

    The last panel of a matrix is filled with columns of zeros, which change nothing.
    """
    m, n = sorted(y.shape[1:])
    if m == n:
        return y
    y = store_row_major(y)
    y = jnp.pad(y, [(0, 0), *((0, -k % m) for k in y.shape[1:])])
    if not _is_tall(y.shape):
        return jnp.swapaxes(y.reshape(-1, m, panels(m, n), m), 1, 2).reshape(-1, m, m)
    # Pad before transposing, and transpose in a pass of its own: XLA's fast program for
    # that cannot write into a part of a larger array.
    return jax.lax.optimization_barrier(y.reshape(-1, m, m).mT)


@tracing.once
def _split_group(
    rows: jax.Array, *, count: int, shape: tuple[int, ...]
) -> list[jax.Array]:
    """Splits the rows of a group's panels into its ``count`` members of one shape."""
    whole = _join_panels(rows, shape[1:])
    own = jax.lax.split(whole, [len(whole) // count] * count)
    return [x.reshape(shape) for x in own]


def _join_panels(rows: jax.Array, sides: tuple[int, ...]) -> jax.Array:
    """Joins panels (count * panels * m, m) to matrices (count * sides[0], sides[1]).

    This is the inverse of ``_cut_panels``, on stacks that are kept as rows.
    """
    m, n = sorted(sides)
    if m == n:
        return rows
    each = panels(m, n)
    rows = jnp.swapaxes(rows.reshape(-1, each, m, m), 1, 2)
    rows = rows.reshape(-1, each * m)[:, :n]
    if not _is_tall(sides):
        return rows
    return store_row_major(store_row_major(rows.reshape(-1, m, n)).mT).reshape(-1, m)
