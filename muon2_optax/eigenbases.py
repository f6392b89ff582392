"""The mathematics of eigenbases of Gram matrices: the first one, and steps from it.

Pure functions on stacks (..., n, n) of Hermitian matrices without negative eigenvalues.
"""

import jax
import jax.numpy as jnp

from muon2_optax import roots
from muon2_optax.iteration import lone_product

# A step adds this times the largest eigenvalue to the diagonal of the Gram matrix. So
# directions whose eigenvalue is rounding noise beside the largest (6e-8 per operation
# in float32) stay where they are, and the columns of the product stay independent.
NOISE = 1e-6


def first_basis(gram: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvectors and eigenvalues, the largest first.

    Returns:
      The basis (..., n, n), eigenvectors as columns, and the eigenvalues (..., n)
      divided by their sum, or zeros for a zero matrix.
    """
    values, vectors = jnp.linalg.eigh(_of_trace_one(gram))
    values = jnp.maximum(values[..., ::-1], 0)
    total = jnp.sum(values, -1, keepdims=True)
    return vectors[..., ::-1], values / roots.replace_zero(total)


def next_basis(gram: jax.Array, basis: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of orthogonal iteration: ``qr((gram + NOISE * largest * I) basis)``.

    The columns are sorted by their present eigenvalues first, the largest in front,
    because that is where orthogonal iteration moves them.

    Returns:
      The new basis, and the old positions (..., n) of its columns.
    """
    gram = _of_trace_one(gram)
    moved = lone_product(gram, basis)
    values = jnp.sum((basis.conj() * moved).real, axis=-2)
    order = jnp.argsort(-values, axis=-1)
    largest = jnp.max(values, axis=-1)[..., None, None]
    # A zero matrix leaves every direction where it is.
    moved = moved + jnp.where(largest > 0, NOISE * largest, 1) * basis
    moved = jnp.take_along_axis(moved, order[..., None, :], axis=-1)
    return orthonormal_columns(moved), order


def orthonormal_columns(x: jax.Array) -> jax.Array:
    """The orthonormal factor of the QR decomposition, with a positive diagonal of R.

    By Cholesky decompositions of Gram matrices, x^H x = R^H R, which GPUs compute for a
    whole stack at once: for the sides of a small model the Householder form takes ten
    times as long there. Each pass corrects the rounding errors of the one before. The
    first three enlarge the diagonal by more than these errors, so that no decomposition
    fails. The last one need not: for condition numbers up to 1e6 the columns that it
    gets are nearly orthonormal.
    """
    n = x.shape[-1]
    above_rounding = 4 * n**0.5 * float(jnp.finfo(x.dtype).eps)
    for shift in (above_rounding, above_rounding, above_rounding, 0.0):
        gram = lone_product(x, x, adjoint_of="a")
        gram = jnp.where(jnp.eye(n, dtype=bool), (1 + shift) * gram, gram)
        factor = jax.lax.linalg.cholesky(gram)
        x = jax.lax.linalg.triangular_solve(
            factor, x, left_side=False, lower=True, transpose_a=True, conjugate_a=True
        )
    return x


def _of_trace_one(gram: jax.Array) -> jax.Array:
    """The Gram matrix divided by its trace, so that no norm leaves the range."""
    trace = jnp.trace(gram, axis1=-2, axis2=-1).real
    return gram / roots.replace_zero(trace)[..., None, None]
