"""The mathematics of the Newton-Schulz iteration: the normalization and the steps.

Pure functions on stacks (..., m, n). With A = X X^H, a step maps X to
a X + b A X + c A^2 X, and so every singular value s of X to a s + b s^3 + c s^5.
Several steps may also run on the Gram matrix A alone, which is small if X is wide.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from muon2_optax import dtypes, roots
from muon2_optax.schedules.coefficients import (
    AOL,
    Frobenius,
    Normalization,
    Schatten,
    Spectral,
)
from muon2_optax.schedules.plans import Plan

# Matrices whose sides have at least this ratio r are iterated on their Gram matrices:
# K steps take (10 K - 10 + 4 r) m^3 operations there, against K (4 r + 2) m^3 on X.
GRAM_ASPECT = 1.5
# Rounding gives a Gram matrix small negative eigenvalues, and each step multiplies them
# by a^2. Before they have grown by more than this, X X^H is computed anew: after three
# steps of Keller's triple (11.9^2 = 141), or two of the steeper schedules.
GRAM_GROWTH = 150.0


def normalize(x: jax.Array, how: Normalization) -> tuple[jax.Array, jax.Array]:
    """Divides each matrix by its norm, for magnitudes from 1e-38 to 1e38 in float32.

    Each matrix is first divided by its largest magnitude, so that the squares of the
    result neither overflow nor, where it matters, underflow.

    Returns:
      The normalized matrices in float32 or better, and ``floor``, (..., 1, 1). Under
      AOL and Schatten ``iterate`` scales them once more, by sums or a norm of the Gram
      matrix, which it computes anyway. Their eps bounds these from below; ``floor`` is
      that bound for the normalized matrices, and zero under other normalizations.
    """
    x = dtypes.widen(x)
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0.0)
    # A zero matrix is divided by infinity, so that its derivative is 0 as well.
    largest = jnp.where(largest == 0, jnp.inf, largest)
    # XLA divides by multiplying with the reciprocal, and flushes that of the largest
    # numbers to zero. A power of two brings them down first, without rounding.
    down = jnp.where(largest > 1e30, 2.0**-64, 1).astype(largest.dtype)
    x = (x * down) / (largest * down)
    square = dtypes.squared_magnitude(x)
    norm = roots.sqrt(jnp.sum(square, axis=(-2, -1), keepdims=True))
    if isinstance(how, Spectral):
        norm = _largest_singular_value(x) + how.eps / largest
        return x / jnp.where(norm == 0, 1, norm), jnp.zeros_like(norm)
    if isinstance(how, AOL | Schatten):
        norm = jnp.where(norm == 0, 1, norm)
        root = how.eps**0.5 / largest / norm
        return x / norm, root * root
    norm = frobenius_divisor(norm, how, largest)
    return x / jnp.where(norm == 0, 1, norm), jnp.zeros_like(norm)


def _largest_singular_value(x: jax.Array) -> jax.Array:
    """The largest singular value of each matrix, (..., 1, 1)."""
    if x.size == 0:
        return jnp.zeros((*x.shape[:-2], 1, 1), dtypes.real_dtype(x.dtype))
    rows, columns = x.shape[-2:]
    wide = x if rows <= columns else adjoint(x)
    # They are in ascending order. Squaring costs the small ones digits, not the last.
    squares = jnp.linalg.eigvalsh(product(wide, adjoint(wide)))
    return roots.sqrt(jnp.maximum(squares[..., -1:], 0))[..., None]


def frobenius_divisor(norm: jax.Array, how: Frobenius, unit: Any = 1) -> jax.Array:
    """The number that a matrix of this norm is divided by, both in units of ``unit``.

    It is 0 for a zero matrix under ``Frobenius()``.
    """
    return jnp.maximum(how.factor * norm + how.eps / unit, how.floor / unit)


def iterate(x: jax.Array, floor: jax.Array, plan: Plan) -> jax.Array:
    """Runs the steps of ``plan`` on normalized wide matrices (..., m, n), m <= n.

    ``floor`` is what ``normalize`` returns beside x.
    """
    m, n = x.shape[-2:]
    if x.size == 0:
        return x
    gram = None
    if isinstance(plan.normalization, AOL | Schatten):
        x, gram = _scale_by_gram(x, floor, isinstance(plan.normalization, AOL))
    if not plan.static:
        return _loop(x, plan)
    for triples in gram_runs(plan, m, n, x.dtype):
        gram = product(x, adjoint(x)) if gram is None else gram
        if len(triples) > 1:
            x = _steps_on_gram(x, gram, triples)
        else:
            x = _step(x, gram, *triples[0])
        gram = None
    return x


def _scale_by_gram(
    x: jax.Array, floor: jax.Array, by_row: bool
) -> tuple[jax.Array, jax.Array]:
    """Scales wide matrices as AOL (``by_row``) or Schatten does, by their Gram matrix.

    Returns the result and its own Gram matrix, which serves the first step.
    """
    wide = dtypes.compute_dtype(x.dtype)
    gram = product(x, adjoint(x)).astype(wide)
    if by_row:
        total = jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)
    else:
        square = dtypes.squared_magnitude(gram)
        total = roots.sqrt(jnp.sum(square, axis=(-2, -1), keepdims=True))
    total = jnp.maximum(total, floor)
    scale = 1 / jnp.sqrt(jnp.where(total == 0, 1, total))
    gram = scale * gram * jnp.swapaxes(scale, -1, -2)
    return (scale * x.astype(wide)).astype(x.dtype), gram.astype(x.dtype)


def gram_runs(plan: Plan, m: int, n: int, dtype: jnp.dtype) -> list[list[Any]]:
    """Splits the steps into runs, each of which starts from a new Gram matrix X X^H.

    A run of one step is carried out on X, a longer one on the Gram matrix.
    """
    # The 8 bits of bfloat16 are too few for a factor that is gathered over many steps.
    wide = n >= GRAM_ASPECT * m and dtype != jnp.bfloat16
    return _split_runs(plan.triples) if wide else [[triple] for triple in plan.triples]


def _split_runs(triples: Sequence[Any]) -> list[list[Any]]:
    """Starts a new run before rounding errors have grown by ``GRAM_GROWTH``."""
    done: list[list[Any]] = []
    growth = math.inf
    for triple, before in zip(triples, [None, *triples]):
        if before is not None:
            # The growth by traced coefficients is unknown, so every step is a run.
            known = isinstance(before[0], float)
            growth = growth * before[0] ** 2 if known else math.inf
        if growth > GRAM_GROWTH:
            done.append([])
            growth = 1.0
        done[-1].append(triple)
    return done


def _step(x: jax.Array, gram: jax.Array, a: Any, b: Any, c: Any) -> jax.Array:
    """X <- a X + (b A + c A^2) X with A = X X^H."""
    a, b, c = _coefficients((a, b, c), x.dtype)
    return a * x + product(b * gram + c * product(gram, gram), x)


def _steps_on_gram(x: jax.Array, r: jax.Array, triples: Sequence[Any]) -> jax.Array:
    """Several steps, evaluated on the m x m Gram matrix r.

    Step t multiplies X by h_t(R) = a I + Z with Z = b R + c R^2 and R = X X^H. All
    these factors commute, so their product Q is gathered as an m x m matrix while R
    follows R <- h R h, and X is read only at both ends (Dao-AILab, "Gram
    Newton-Schulz", 2026). Q is kept as alpha I + P: the identity's part, which 16
    bits would round to a multiple of 0.03 by the third step, stays an exact scalar.
    """
    a, b, c = triples[0]
    alpha, p = a, b * r + c * product(r, r)
    z = p
    for next_a, b, c in triples[1:]:
        t = a * r + product(r, z)
        r = a * t + product(z, t)
        a = next_a
        z = b * r + c * product(r, r)
        p = alpha * z + a * p + product(p, z)
        alpha = alpha * a
    return alpha * x + product(p, x)


def _loop(x: jax.Array, plan: Plan) -> jax.Array:
    """Runs a traced number of steps in a loop over the rows of an array of triples."""
    table = plan.triples
    last = table.shape[0] - 1

    def body(i: jax.Array, x: jax.Array) -> jax.Array:
        a, b, c = table[jnp.minimum(i, last)]
        return _step(x, product(x, adjoint(x)), a, b, c)

    return jax.lax.fori_loop(0, plan.steps, body, x)


def _coefficients(row: Sequence[Any], dtype: jnp.dtype) -> Sequence[Any]:
    """Casts traced coefficients to the dtype of the iteration, as JAX casts floats."""
    if isinstance(row[0], float):
        return row
    return [jnp.asarray(v, dtypes.real_dtype(dtype)) for v in row]


def adjoint(x: jax.Array) -> jax.Array:
    """Conjugate transpose of the last two axes."""
    x = jnp.swapaxes(x, -1, -2)
    return x.conj() if jnp.iscomplexobj(x) else x


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The matrix product of stacks, at no less than the precision of the operands."""
    # HIGHEST keeps float32 out of TF32 and of single-pass bfloat16; products of 16-bit
    # operands accumulate in float32 on every backend.
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def lone_product(
    a: jax.Array, b: jax.Array, adjoint_of: Literal["a", "b"] | None = None
) -> jax.Array:
    """As ``product``, of the adjoint of a or b if ``adjoint_of`` names it.

    XLA must not fuse it with the operations around it. XLA for GPUs times dozens of
    kernels for each product that is unlike all others, and products that are fused with
    different operations are unlike. Unfused, those of equal shapes are timed once.
    """
    a, b = jax.lax.optimization_barrier((a, b))
    a, b = (
        adjoint(a) if adjoint_of == "a" else a,
        adjoint(b) if adjoint_of == "b" else b,
    )
    return jax.lax.optimization_barrier(product(a, b))
