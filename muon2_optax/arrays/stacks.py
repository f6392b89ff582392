"""Stacks of matrices that are kept in parts, one after the other along axis 0."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType

from muon2_optax.arrays import tracing
from muon2_optax.arrays.grouping import consecutive, even_size

# Arrays that are joined before anything is done to them: from 11 on, XLA for GPUs
# writes one element per thread, at a third of the bandwidth, and takes long to compile
# what joins many.
TOGETHER = 8


def joined(parts: Sequence[jax.Array]) -> list[jax.Array]:
    """The parts, some in one, so that their stack can be written fast.

    That holds where something is done to the results before they are joined in turn:
    XLA makes one of two joints in a row.
    """
    if not parts:
        return []
    size = even_size(len(parts), TOGETHER)
    return [jnp.concatenate(parts[i : i + size]) for i in range(0, len(parts), size)]


@tracing.each
def as_parts(x: jax.Array) -> jax.Array:
    """Parts (count, m, n) of a list of matrices (..., m, n)."""
    return x.reshape(-1, *x.shape[-2:])


@tracing.each
def all_like(y: jax.Array, x: jax.Array) -> jax.Array:
    """Values of a list, each in the shape and dtype of another list's."""
    return y.reshape(x.shape).astype(x.dtype)


def take(parts: Sequence[jax.Array], low: int, high: int) -> list[jax.Array]:
    """Members ``low`` to ``high`` of the whole, as slices of the parts they are in."""
    found, start = [], 0
    for part in parts:
        first, last = max(low - start, 0), min(high - start, len(part))
        if first < last:
            whole = (first, last) == (0, len(part))
            found.append(part if whole else part[first:last])
        start += len(part)
    return found


def in_lots(
    fn: Callable[[int, list[jax.Array]], Sequence[jax.Array]],
    parts: Sequence[jax.Array],
    size: int,
) -> list[jax.Array]:
    """``fn(first, members)`` on ``size`` members after the other, as parts again.

    ``fn`` may return its members in other parts than it was given. Lots bound the
    memory of what is done to all: compilers finish one, or two, before they go on.
    """
    count = sum(map(len, parts))
    done: list[jax.Array] = []
    for low in range(0, count, size):
        done += fn(low, take(parts, low, low + size))
    # As most often: no part was cut, and none has to be looked for among all.
    if list(map(len, done)) == list(map(len, parts)):
        return done
    results, start = [], 0
    for part in parts:
        # A part without members comes back as it is.
        found = take(done, start, start + len(part)) or [part]
        results.append(found[0] if len(found) == 1 else jnp.concatenate(found))
        start += len(part)
    return results


def totals(parts: Sequence[jax.Array]) -> jax.Array:
    """Sums along axis 1 of all parts (count, length), which differ in length.

    Gathered first, a few in a row that have one length at a time, so that small
    programs serve many.
    """
    sums = []
    for few in consecutive(parts, lambda p: p.shape[1], lambda _: TOGETHER):
        sums.append(jnp.sum(jnp.concatenate(few), axis=1))
    return jnp.concatenate(sums)


def rows_major(x: jax.Array) -> jax.Array:
    """Keeps XLA from storing ``x`` transposed, and all it is made of with it."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def varying_like(x: jax.Array, *operands: jax.Array) -> jax.Array:
    """A kernel's result, as varying over a ``shard_map``'s axes as its operands are.

    JAX does not tell so of kernels, and a ``shard_map`` that checks would refuse it.
    """
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        for y in operands:
            # XLA sees that both are the same; JAX that the choice depends on y.
            x = jnp.where(y[(0,) * y.ndim] > 0, x, x)
    return x
