"""The Newton-Schulz iteration on the kernel for symmetric products, on NVIDIA Hopper.

The polynomials are those of ``iteration``, arranged so that every scaling and addition
happens where a product is written. For this the input is multiplied beforehand by the
product of all leading coefficients a of the schedule (the gain). Then each run of steps
is X <- X + P X, with P a polynomial of the Gram matrix.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muon2_optax.arrays import stacks, tracing
from muon2_optax.iteration import frobenius_divisor
from muon2_optax.kernels import packing, symmetric
from muon2_optax.schedules.coefficients import Frobenius
from muon2_optax.schedules.plans import Plan

# The kernel reads its operands in this many columns at a time.
COLUMNS = 64
# Gram matrices are multiplied by this factor before they are stored. Most of their
# entries are small, and float16 has fewer bits for numbers below 6e-5. With a factor of
# 512 the entries stay below 65504, the end of float16, as long as the singular values
# of X are below 11.
GRAIN = 512.0
# These tiles are for matrices whose sides are no multiple of the larger tiles' side, or
# have room for too few of those.
SMALL = symmetric.Tiles(side=128, stages=4, delay=1)


class StackSize(NamedTuple):
    """How many panels a stack has, and how many Gram matrices there are beside it."""

    panels: int
    grams: int


def run(
    matrices: Sequence[jax.Array],
    plan: Plan,
    runs: Sequence[Sequence[Any]],
    size: StackSize,
    dtype: jnp.dtype,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Normalizes and iterates matrices, in chunks that each fill a stack of panels.

    A panel has as many columns as rows, so that stacks of matrices of all widths may
    have the shape of their Gram matrices and share their kernels. A chunk with fewer
    members has a stack of the same size, whose last panels are not computed, so that
    chunks of all lengths share the kernels.
    """
    m, n = sorted(matrices[0].shape[-2:])
    each = symmetric.panels(m, n)
    # Tall and wide ones are kept apart, so that fewer programs write them. Tall ones
    # come first: if they fill a stack, they need not be copied into it.
    order = sorted(range(len(matrices)), key=lambda i: matrices[i].shape[-2] == m)
    ordered = [matrices[i] for i in order]
    flat = stacks.to_stacks(ordered)
    assert isinstance(plan.normalization, Frobenius)
    factors = _factors(flat, plan.normalization, gain(plan.triples))
    # Fill up the last chunk's factors, so that chunks that are alike share programs.
    most = size.panels // each
    factors = jnp.pad(factors, (0, -len(factors) % most))

    def run_chunk(first: int, members: Sequence[jax.Array]) -> list[jax.Array]:
        filled = sum(map(len, members))
        mine = factors[first : first + most]
        stack = packing.write_panels(
            members, mine, gain(plan.triples) < 0, size.panels, dtype
        )
        outputs = iterate(
            stack, runs, interpret, members=filled, columns=n, grams=size.grams
        )
        return packing.read_panels(outputs, members)

    done = dict(
        zip(
            order,
            stacks.reshape_like(stacks.run_in_chunks(run_chunk, flat, most), ordered),
        )
    )
    return tuple(done[i] for i in range(len(matrices)))


def run_shards(
    values: jax.Array,
    sizes: jax.Array,
    plan: Plan,
    runs: Sequence[Sequence[Any]],
    interpret: Any = None,
) -> jax.Array:
    """Normalizes and iterates matrices that come in equal shards.

    Args:
      values: (rows, columns, L, m, n) of 16 bits: L matrices of rows x columns shards.
      sizes: (rows, columns, L) float32, the shards' root mean squares; the entries of
        the matrices are ``sizes * values``.

    Returns:
      The results as shards, (rows, columns, L, m, k) with k >= n; the columns after the
      n-th mean nothing. The last product writes shards, so that no further pass has to
      divide the results.
    """
    down, right, stack, m, n = values.shape
    assert isinstance(plan.normalization, Frobenius)
    with jax.enable_x64(True):
        wide = sizes.astype(jnp.float64)
        norm = jnp.sqrt(jnp.sum(jnp.square(wide), axis=(0, 1)) * (m * n))
        norm = _divisor(norm, plan.normalization)
        factors = (gain(plan.triples) * wide / norm[None, None]).astype(jnp.float32)
    x = values.astype(jnp.float32) * factors[..., None, None]
    x = jnp.pad(x.astype(values.dtype), [(0, 0)] * 4 + [(0, -n % COLUMNS)])
    x = jnp.transpose(x, (2, 0, 3, 1, 4)).reshape(stack, down * m, -1)
    return iterate(x, runs, interpret, shards=(down, right))


def _factors(parts: Sequence[jax.Array], how: Frobenius, scale: float) -> jax.Array:
    """The roots of abs(scale) / norm of each matrix, (total count,).

    They are roots because the quotient itself may be out of the range of float32. The
    squares of entries are summed in float64, which holds those of any float32.
    """
    wide = jnp.result_type(jnp.float32, *parts)
    with jax.enable_x64(True):
        norm = _divisor(jnp.sqrt(stacks.sum_rows(_row_squares(parts))), how)
        return jnp.sqrt(abs(scale) / norm).astype(wide)


@tracing.each
def _row_squares(x: jax.Array) -> jax.Array:
    """Sums of squares along rows: (count, m) from (count, m, n).

    They are in float64, which the caller must have enabled.
    """
    return jnp.sum(jnp.square(x.astype(jnp.float64)), axis=-1)


def _divisor(norm: jax.Array, how: Frobenius) -> jax.Array:
    """The numbers that matrices of these norms are divided by, which are never 0."""
    norm = frobenius_divisor(norm, how)
    # An infinite entry makes its matrix NaN.
    return jnp.where(norm == 0, 1, jnp.where(jnp.isinf(norm), jnp.nan, norm))


def gain(triples: Sequence[Any]) -> float:
    """The product of the leading coefficients."""
    return math.prod(triple[0] for triple in triples)


def iterate(
    x: jax.Array,
    runs: Sequence[Sequence[Any]],
    interpret: Any = None,
    shards: tuple[int, int] | None = None,
    members: int | None = None,
    columns: int | None = None,
    grams: int | None = None,
) -> jax.Array:
    """Runs the steps on normalized matrices (L, m, n) that are multiplied by the gain.

    Args:
      x: the matrices, or their panels.
      runs: the triples of the steps, as ``gram_runs`` splits them.
      interpret: as in ``symmetric.product``.
      shards: into how many shards each result is cut, along its rows and columns.
      members: how many of the matrices are iterated, the first ones; None: all.
      columns: how many columns each matrix has, if x holds panels.
      grams: how many matrices a stack of Gram matrices has room for; None: L.

    Returns:
      (L, m, n), or with ``shards`` (rows, columns, L, m / rows, n / columns).
    """
    scale = gain(list(itertools.chain(*runs)))
    m = x.shape[-2]
    options = {"members": members, "interpret": interpret}
    product = functools.partial(symmetric.product, tiles=tiles_for(m), **options)
    down, _ = shards or (1, 1)
    wide = symmetric.Tiles() if m // down % 256 == 0 else SMALL
    add_product = functools.partial(symmetric.add_product, tiles=wide, **options)
    for i, triples in enumerate(runs):
        r = product(x, x, alpha=GRAIN / scale**2, columns=columns, results=grams)
        p = _factor(r, triples, product)
        last = shards if i + 1 == len(runs) else None
        x = add_product(p, x, columns=columns, shards=last)
        scale /= gain(triples)
    return x


def tiles_for(m: int) -> symmetric.Tiles:
    """The tiles for products of (m, m) matrices."""
    return SMALL if m % 256 or m < 1024 else symmetric.Tiles()


def _factor(
    r: jax.Array, triples: Sequence[Any], product: Callable[..., jax.Array]
) -> jax.Array:
    """Computes P from r = GRAIN R, so that the run multiplies X by gain (I + P).

    One step multiplies X by h(R) = a (I + Z) with Z = (b R + c R^2) / a, and the Gram
    matrix R becomes h R h. The identity, which 16 bits would round, is never stored.
    """
    p = None
    for i, (a, b, c) in enumerate(triples):
        z = product(r, r, (b / a / GRAIN, r), alpha=c / a / GRAIN**2)
        p = z if p is None else product(p, z, (1.0, p), (1.0, z))
        if i + 1 < len(triples):
            t = product(r, z, (1.0, r))
            r = product(z, t, (a * a, t), alpha=a * a)
    assert p is not None
    return p
