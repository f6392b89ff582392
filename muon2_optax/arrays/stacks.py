"""Stacks of matrices that are kept as lists of parts, one after the other on axis 0."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType

from muon2_optax.arrays import limits, tracing
from muon2_optax.arrays.grouping import consecutive, even_size


def concatenate_few(parts: Sequence[jax.Array]) -> list[jax.Array]:
    """Concatenates the parts a few at a time, so that a stack of them is written fast.

    It helps only where something is done to the results before they are concatenated in
    turn: XLA merges back-to-back concatenates.
    """
    if not parts:
        return []
    size = even_size(len(parts), limits.ARRAYS_IN_CONCATENATION)
    return [jnp.concatenate(parts[i : i + size]) for i in range(0, len(parts), size)]


@tracing.each
def to_stacks(x: jax.Array) -> jax.Array:
    """Stacks (count, m, n) of a list of leaves (..., m, n)."""
    return x.reshape(-1, *x.shape[-2:])


@tracing.each
def reshape_like(y: jax.Array, x: jax.Array) -> jax.Array:
    """Gives each array of one list the shape and dtype of the other list's array."""
    return y.reshape(x.shape).astype(x.dtype)


def run_concatenated(
    fn: Callable[..., Sequence[jax.Array]], rows: Sequence[Sequence[jax.Array]]
) -> list[tuple[jax.Array, ...]]:
    """Runs ``fn`` once on rows of stacks, concatenated, and splits its results.

    The stacks of a row have equal lengths, and so have the results.
    """
    ends = np.cumsum([len(row[0]) for row in rows])[:-1]
    done = fn(*(jnp.concatenate(column) for column in zip(*rows)))
    return list(zip(*(jnp.split(x, ends) for x in done)))


def slice_parts(parts: Sequence[jax.Array], low: int, high: int) -> list[jax.Array]:
    """Members ``low`` to ``high`` of the whole stack, as slices of the parts."""
    found, start = [], 0
    for part in parts:
        first, last = max(low - start, 0), min(high - start, len(part))
        if first < last:
            whole = (first, last) == (0, len(part))
            found.append(part if whole else part[first:last])
        start += len(part)
    return found


def run_in_chunks(
    fn: Callable[[int, list[jax.Array]], Sequence[jax.Array]],
    parts: Sequence[jax.Array],
    size: int,
) -> list[jax.Array]:
    """Runs ``fn(first, members)`` on ``size`` members at a time.

    ``fn`` may return its members in other parts than it was given; what comes back is
    in the parts of ``parts``. Chunks bound the memory: compilers finish one of them, or
    two, before they go on. They are written out one after the other, because a loop
    would need all members in one array first.
    """
    count = sum(map(len, parts))
    done: list[jax.Array] = []
    for low in range(0, count, size):
        done += fn(low, slice_parts(parts, low, low + size))
    # Usually no chunk boundary cuts a part, and the results are the parts already.
    if list(map(len, done)) == list(map(len, parts)):
        return done
    results, start = [], 0
    for part in parts:
        # A part without members comes back as it is.
        found = slice_parts(done, start, start + len(part)) or [part]
        results.append(found[0] if len(found) == 1 else jnp.concatenate(found))
        start += len(part)
    return results


def sum_rows(parts: Sequence[jax.Array]) -> jax.Array:
    """Sums along axis 1 of all parts (count, length), which may differ in length.

    Parts in a row that have one length are concatenated first, a few at a time: XLA
    compiles small programs that serve many parts.
    """
    sums = []
    for few in consecutive(
        parts, lambda p: p.shape[1], lambda _: limits.ARRAYS_IN_CONCATENATION
    ):
        sums.append(jnp.sum(jnp.concatenate(few), axis=1))
    return jnp.concatenate(sums)


def store_row_major(x: jax.Array) -> jax.Array:
    """Keeps XLA from storing ``x``, and all that it is made of, transposed."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def vary_like(x: jax.Array, *operands: jax.Array) -> jax.Array:
    """Marks a kernel's result as varying over a ``shard_map``'s axes, as operands do.

    JAX does not mark the results of kernels, and a ``shard_map`` that checks would
    refuse them.
    """
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        for y in operands:
            # XLA sees that both values are the same, JAX that the choice depends on y.
            x = jnp.where(y[(0,) * y.ndim] > 0, x, x)
    return x
