"""Spectra, ranks and orthogonality of matrices, by singular value decomposition.

Pure functions on stacks (..., m, n), inside or outside of ``jax.jit``, computed in
float32 or better. Arrays on a mesh with Explicit axes come back replicated.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from muon2_optax import dtypes, iteration, roots
from muon2_optax.schedules.coefficients import Frobenius
from muon2_optax.sharding import replicate

_HIGHEST = jax.lax.Precision.HIGHEST


def singular_values(x: jax.Array) -> jax.Array:
    """Singular values of each matrix, (..., min(m, n)), descending.

    Raises:
      ValueError: x has fewer than two axes.
    """
    x, largest = _scale_to_unit(x)
    return largest[..., 0] * jnp.linalg.svd(x, compute_uv=False)


def effective_rank(x: jax.Array) -> jax.Array:
    """exp of the entropy of the singular values' shares of their sum, (...).

    From 1 (rank one) to min(m, n) (all equal); 0 for a zero matrix.

    Raises:
      ValueError: x has fewer than two axes.

    References:
      Roy and Vetterli 2007, "The effective rank", EUSIPCO.
    """
    return entropy_rank(singular_values(x))


def stable_rank(x: jax.Array) -> jax.Array:
    """Squared Frobenius norm over squared spectral norm, (...); 0 for a zero matrix.

    Raises:
      ValueError: x has fewer than two axes.
    """
    s = singular_values(x)
    return jnp.sum(jnp.square(s / roots.replace_zero(s[..., :1])), axis=-1)


def cosine_to_polar(o: jax.Array, x: jax.Array, rtol: float | None = None) -> jax.Array:
    """Cosine similarity of o to the exact polar factor of x, the paper's eq. 9.

    For x = U S V^H of rank r it is ``Re <o, U V^H> / (||o||_F sqrt(r))`` with the r
    columns of U and V that belong to singular values above 0.

    Args:
      o: array (..., m, n), an approximate polar factor of any size.
      x: array (..., m, n), what it approximates the polar factor of.
      rtol: singular values up to ``rtol`` times the largest count as 0; None: ten units
        of rounding, about what the SVD leaves of zeros.

    Returns:
      Real array (...); 0 where o or x is zero.

    Raises:
      ValueError: x has fewer than two axes.
    """
    u, s, vh = jnp.linalg.svd(_scale_to_unit(x)[0], full_matrices=False)
    rtol = 10 * float(jnp.finfo(s.dtype).eps) if rtol is None else rtol
    kept = s > rtol * s[..., :1]
    exact = jnp.matmul(u * kept[..., None, :], vh, precision=_HIGHEST)
    direction = iteration.normalize(replicate(o), Frobenius())[0]
    inner = jnp.sum((direction.conj() * exact).real, axis=(-2, -1))
    return inner / jnp.sqrt(jnp.maximum(jnp.sum(kept, axis=-1), 1))


def orthogonality_error(
    q: jax.Array, norm: Literal["mean", "frobenius", "spectral"] = "mean"
) -> jax.Array:
    """How far q q^H is from the identity of the shorter side, (...).

    Args:
      q: array (..., m, n).
      norm: the ``"frobenius"`` or ``"spectral"`` norm of the difference, or the
        ``"mean"`` of the distances of squared singular values from 1. The mean does not
        grow with the matrix, and it is what the paper's appendix quotes.

    Returns:
      Real array (...).

    Raises:
      ValueError: an unknown norm.
    """
    if norm not in ("mean", "frobenius", "spectral"):
        raise ValueError(f"unknown norm {norm!r}; want mean, frobenius or spectral")
    q = dtypes.widen(replicate(q))
    q = iteration.adjoint(q) if q.shape[-2] > q.shape[-1] else q
    gram = jnp.matmul(q, iteration.adjoint(q), precision=_HIGHEST)
    error = jnp.abs(jnp.linalg.eigvalsh(gram) - 1)
    if norm == "mean":
        return jnp.mean(error, axis=-1)
    if norm == "spectral":
        return jnp.max(error, axis=-1)
    return jnp.sqrt(jnp.sum(jnp.square(error), axis=-1))


def _scale_to_unit(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x with a largest magnitude of 1, out of reach of under- and overflow."""
    if x.ndim < 2:
        raise ValueError(f"want matrices (..., m, n), got shape {x.shape}")
    x = dtypes.widen(replicate(x))
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0.0)
    return x / roots.replace_zero(largest), largest


def entropy_rank(s: jax.Array) -> jax.Array:
    """``effective_rank`` from singular values (..., k)."""
    total = jnp.sum(s, axis=-1, keepdims=True)
    entropy = jnp.sum(jax.scipy.special.entr(s / roots.replace_zero(total)), axis=-1)
    return jnp.where(total[..., 0] == 0, 0, jnp.exp(entropy))
