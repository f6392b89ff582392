"""Newton-Schulz iterations on the kernel for symmetric products, for NVIDIA Hopper.

The same polynomials as in ``iteration``, arranged so that every scaling and addition
happens where a product is written: the input enters multiplied by the product of the
schedule's leading coefficients a, which leaves X <- X + P X for each run of steps.
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

# The kernel's operand A B^T counts in columns of this many elements.
COLUMNS = 64
# Gram matrices are kept times this, out of the range where float16 loses bits.
GRAIN = 512.0
# For sides that larger tiles do not divide, or make too few of.
SMALL = symmetric.Tiles(side=128, stages=4, delay=1)


class StackSize(NamedTuple):
    """How many panels a stack has, and how many Gram matrices are kept beside it."""

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
    """Normalizes and iterates the matrices of all stacks, in stacks of one size.

    A panel has as many columns as rows, so that stacks of matrices of all n may have
    the shape of their Gram matrices, and share their kernels. Where a chunk has fewer
    members, the last panels of its stack are not computed, so that chunks of all
    lengths share the kernels.
    """
    m, n = sorted(matrices[0].shape[-2:])
    each = symmetric.panels(m, n)
    # Tall and wide ones apart, so that fewer programs write them. Tall ones first:
    # where they fill a stack, they are not copied into it.
    order = sorted(range(len(matrices)), key=lambda i: matrices[i].shape[-2] == m)
    ordered = [matrices[i] for i in order]
    flat = stacks.to_stacks(ordered)
    assert isinstance(plan.normalization, Frobenius)
    factors = _factors(flat, plan.normalization, gain(plan.triples))
    # As many for each chunk, so that chunks that are alike share their programs.
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
    """Iterates matrices that come in equal shards, normalized by the shards' sizes.

    Args:
      values: (rows, columns, L, m, n) of 16 bits: L matrices of rows x columns shards.
      sizes: (rows, columns, L) float32, the shards' root mean squares; the entries of
        the matrices are ``sizes * values``.

    Returns:
      The results as shards, (rows, columns, L, m, k) with k >= n; the columns after the
      n-th mean nothing. No pass over the matrices divides them into shards again: the
      last product writes them so.
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
    """Factors (total count,) whose squares normalize each matrix to ``scale``.

    Squares are summed in float64, where those of any float32 fit: one pass over the
    values. Roots, because ``scale`` / norm may be out of the range of float32.
    """
    wide = jnp.result_type(jnp.float32, *parts)
    with jax.enable_x64(True):
        norm = _divisor(jnp.sqrt(stacks.sum_rows(_row_squares(parts))), how)
        return jnp.sqrt(abs(scale) / norm).astype(wide)


@tracing.each
def _row_squares(x: jax.Array) -> jax.Array:
    """Sums of the squares of rows, (count, m) of (count, m, n); float64 with x64."""
    return jnp.sum(jnp.square(x.astype(jnp.float64)), axis=-1)


def _divisor(norm: jax.Array, how: Frobenius) -> jax.Array:
    """What matrices of these norms are divided by, never 0."""
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
    """Runs of steps on (L, m, n) matrices that are normalized, times the gain.

    Only on the first ``members`` of them, if that is given; of ``columns`` in panels of
    n, if that is; with stacks of ``grams`` Gram matrices.

    Returns (L, m, n), or with ``shards`` (rows, columns) that many of each matrix,
    (rows, columns, L, m / rows, n / columns).
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
    """The tiles of products of (m, m) matrices."""
    return SMALL if m % 256 or m < 1024 else symmetric.Tiles()


def _factor(
    r: jax.Array, triples: Sequence[Any], product: Callable[..., jax.Array]
) -> jax.Array:
    """P with the steps' factor of X equal to gain (I + P); r is GRAIN R.

    A step's factor is h(R) = a (I + Z) with Z = (b R + c R^2) / a, and R follows
    R <- h R h. The identity's part, which 16 bits would round, is never stored.
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
