"""Stacks of matrices (count, m, n) that are kept as lists of parts along axis 0."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType

from muon2_optax.arrays import limits, tracing
from muon2_optax.arrays.grouping import consecutive, even_size


def concatenate_few(parts: Sequence[jax.Array]) -> list[jax.Array]:
    """Concatenates the parts a few at a time, which XLA does faster.

    Something must be done to the results before they are concatenated in turn, because
    XLA merges back-to-back concatenates.
    """
    if not parts:
        return []
    size = even_size(len(parts), limits.ARRAYS_IN_CONCATENATION)
    return [jnp.concatenate(parts[i : i + size]) for i in range(0, len(parts), size)]


@tracing.each
def to_stacks(x: jax.Array) -> jax.Array:
    """Reshapes a list of leaves (..., m, n) to stacks (count, m, n)."""
    return x.reshape(-1, *x.shape[-2:])


@tracing.each
def reshape_like(y: jax.Array, x: jax.Array) -> jax.Array:
    """Gives each array of one list the shape and dtype of the other list's array."""
    return y.reshape(x.shape).astype(x.dtype)


def run_concatenated(
    fn: Callable[..., Sequence[jax.Array]], rows: Sequence[Sequence[jax.Array]]
) -> list[tuple[jax.Array, ...]]:
    """Runs ``fn`` once on rows of stacks, concatenated, and splits its results.

    The stacks of a row have equal lengths, and so have the results. Barriers keep the
    copies out of the programs of ``fn``, which would have all stacks for operands.
    """
    ends = np.cumsum([len(row[0]) for row in rows])[:-1]
    whole = jax.lax.optimization_barrier([_concatenate(c) for c in zip(*rows)])
    done = jax.lax.optimization_barrier(list(fn(*whole)))
    return list(zip(*(jnp.split(x, ends) for x in done)))


def _concatenate(parts: Sequence[jax.Array]) -> jax.Array:
    """Concatenates a few at a time until there is one."""
    parts = list(parts)
    while len(parts) > 1:
        parts = jax.lax.optimization_barrier(concatenate_few(parts))
    return parts[0]


def slice_parts(parts: Sequence[jax.Array], low: int, high: int) -> list[jax.Array]:
    """Cuts members ``low`` to ``high`` of the whole stack out of its parts."""
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

    ``fn`` may return its members in other parts than it was given; the results come
    back in parts like ``parts``. Chunks bound the memory, because XLA finishes one or
    two of them before it goes on. They are written out one after the other, because a
    loop would need all members in one array first.
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
    """Sums all parts (count, length), which may differ in length, along axis 1.

    Successive parts of one length are concatenated first, a few at a time, so that a
    few small programs serve many parts.
    """
    sums = []
    for few in consecutive(
        parts, lambda p: p.shape[1], lambda _: limits.ARRAYS_IN_CONCATENATION
    ):
        sums.append(jnp.sum(jnp.concatenate(few), axis=1))
    return jnp.concatenate(sums)


def store_row_major(x: jax.Array) -> jax.Array:
    """Keeps XLA from storing ``x``, and what it is computed from, transposed."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def vary_like(x: jax.Array, *operands: jax.Array) -> jax.Array:
    """Marks a kernel's result as varying over the axes over which the operands vary.

    JAX does not mark the results of kernels, and a ``shard_map`` with ``check_vma``
    would refuse them.
    """
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        for y in operands:
            # JAX sees a choice that depends on y; XLA sees that both values are equal.
            x = jnp.where(y[(0,) * y.ndim] > 0, x, x)
    return x
