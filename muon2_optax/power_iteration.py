"""The mathematics of Dion: one step of a power iteration on stacks of matrices."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from muon2_optax import averages, roots
from muon2_optax.iteration import adjoint, product

# A column of R counts as rounding noise if its norm, relative to that of the largest
# column, is at most this times sqrt(larger side) times the dtype's eps. On matrices of
# ranks 1, 2 and 5 with sides from 8 to 2048, noise measured 1.8 at most.
NOISE = 8.0


def power_iteration(
    b: jax.Array, q: jax.Array, b1: Any, eps: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step on stacks B (L, fan_in, fan_out) with factors Q (L, side, r).

    Args:
      b: the momenta.
      q: the factors on the smaller side of each matrix, fan_in or fan_out; on that of
        the inputs if the matrix is square.
      b1: of the part that is applied, the share 1 - b1 leaves the momentum.
      eps: added to the column norms of R.

    Returns:
      The updates P Q^H and the momenta M that stay, shaped like B, and the new Q.
    """
    on_outputs = b.shape[-1] == q.shape[-2] and b.shape[-2] != q.shape[-2]
    a = b if on_outputs else adjoint(b)
    # Divided out here and multiplied in again below, so that no norm overflows.
    largest = jnp.max(jnp.abs(a), axis=(-2, -1), keepdims=True, initial=0.0)
    empty = largest == 0
    largest = jnp.where(empty, 1, largest)
    whole = a / largest
    # QR has no derivative at a zero matrix. Its result is not used there, so it gets an
    # identity.
    a = jnp.where(empty, jnp.eye(*a.shape[-2:], dtype=a.dtype), whole)
    p = jnp.linalg.qr(product(a, q))[0]
    r = product(adjoint(a), p)
    p, r = jnp.where(empty, 0, p), jnp.where(empty, q, r)
    rest = largest * (whole - (1 - b1) * product(p, adjoint(r)))
    new_q = jnp.where(empty, q, r / _column_divisors(r, a.shape, eps / largest))
    update = product(p, adjoint(new_q))
    if not on_outputs:
        update, rest = adjoint(update), adjoint(rest)
    return update, rest, new_q


def _column_divisors(r: jax.Array, shape: Sequence[int], eps: Any) -> jax.Array:
    """Norms of the columns of R, plus eps; infinity where a column is rounding noise.

    If the rank of the momentum is below r, the columns of R beyond it are 0 up to
    rounding errors. Normalized, these would become as large as the other columns and
    parallel to them.
    """
    norms = roots.sqrt(jnp.sum(averages.square(r), axis=-2, keepdims=True))
    noise = NOISE * math.sqrt(max(shape[-2:])) * float(jnp.finfo(r.dtype).eps)
    largest = jnp.max(norms, axis=-1, keepdims=True, initial=0.0)
    return jnp.where(norms <= noise * largest, jnp.inf, norms + eps)
