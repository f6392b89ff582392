"""Newton-Schulz iterations, the mathematics: normalization and steps.

Pure functions on stacks (..., m, n). The steps have a standard form and a Gram form.
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
    Plan,
    Schatten,
    Spectral,
)

# From this ratio of the sides on, iterating on the small Gram matrix takes fewer
# operations than iterating on X: (10 K - 10 + 4 r) m^3 against K (4 r + 2) m^3.
GRAM_ASPECT = 1.5
# Rounding gives a Gram matrix small negative eigenvalues, and each step multiplies them
# by a^2. A fresh X X^T is taken before they grow by more than this: three steps of
# Keller's triple (11.9^2 = 141), two of the steeper schedules.
GRAM_GROWTH = 150.0


def normalize(x: jax.Array, how: Normalization) -> tuple[jax.Array, jax.Array]:
    """Divides each matrix by its norm, for magnitudes from 1e-38 to 1e38 in float32.

    The largest magnitude is divided out first: a square of the result can neither
    overflow nor, where it matters, underflow.

    Returns:
      The result, at least float32, and the eps of AOL and Schatten, whose own scaling
      ``iterate`` does, in the result's units squared, (..., 1, 1).
    """
    x = x.astype(dtypes.compute_dtype(x.dtype))
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0.0)
    # A zero matrix is divided by infinity, which makes its derivative 0 as well.
    largest = jnp.where(largest == 0, jnp.inf, largest)
    # XLA divides by multiplying with the reciprocal, which is flushed to zero for the
    # largest numbers; a power of two first brings them down exactly.
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
    """Of each matrix, (..., 1, 1)."""
    if x.size == 0:
        return jnp.zeros((*x.shape[:-2], 1, 1), dtypes.real_dtype(x.dtype))
    rows, columns = x.shape[-2:]
    wide = x if rows <= columns else adjoint(x)
    # Ascending. Squaring costs the small ones digits, not the largest.
    squares = jnp.linalg.eigvalsh(product(wide, adjoint(wide)))
    return roots.sqrt(jnp.maximum(squares[..., -1:], 0))[..., None]


def frobenius_divisor(norm: jax.Array, how: Frobenius, unit: Any = 1) -> jax.Array:
    """What matrices of these norms are divided by, both in units of ``unit``.

    0 for a zero matrix under ``Frobenius()``.
    """
    return jnp.maximum(how.factor * norm + how.eps / unit, how.floor / unit)


def iterate(x: jax.Array, floor: jax.Array, plan: Plan) -> jax.Array:
    """The steps of ``plan`` on normalized wide matrices (..., m, n), m <= n."""
    m, n = x.shape[-2:]
    if x.size == 0:
        return x
    gram = None
    if isinstance(plan.normalization, AOL | Schatten):
        x, gram = _scaled_by_gram(x, floor, isinstance(plan.normalization, AOL))
    if not plan.static:
        return _dynamic(x, plan)
    for triples in gram_runs(plan, m, n, x.dtype):
        gram = product(x, adjoint(x)) if gram is None else gram
        x = _gram(x, gram, triples) if len(triples) > 1 else _step(x, gram, *triples[0])
        gram = None
    return x


def _scaled_by_gram(
    x: jax.Array, floor: jax.Array, by_row: bool
) -> tuple[jax.Array, jax.Array]:
    """AOL (by row) or Schatten scaling of wide matrices, and the result's Gram matrix.

    ``floor`` is what ``normalize`` returns with x.
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
    """The steps' triples, in runs that each start from a fresh Gram matrix X X^H.

    A run of one step is in standard form, a longer one in Gram form.
    """
    # bfloat16 keeps 8 bits: accumulating the factor loses more than it saves there.
    wide = n >= GRAM_ASPECT * m and dtype != jnp.bfloat16
    return _split_runs(plan.rows) if wide else [[triple] for triple in plan.rows]


def _split_runs(triples: Sequence[Any]) -> list[list[Any]]:
    """Starts a new run before rounding errors have grown by ``GRAM_GROWTH``."""
    done: list[list[Any]] = []
    growth = math.inf
    for triple, before in zip(triples, [None, *triples]):
        if before is not None:
            # Traced coefficients have no known growth: a fresh Gram matrix each step.
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


def _gram(x: jax.Array, r: jax.Array, triples: Sequence[Any]) -> jax.Array:
    """The same polynomial, evaluated on the m x m Gram matrix.

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


def _dynamic(x: jax.Array, plan: Plan) -> jax.Array:
    """Steps whose number is traced: a loop over the rows of an array."""
    table = plan.rows
    last = table.shape[0] - 1

    def body(i: jax.Array, x: jax.Array) -> jax.Array:
        a, b, c = table[jnp.minimum(i, last)]
        return _step(x, product(x, adjoint(x)), a, b, c)

    return jax.lax.fori_loop(0, plan.steps, body, x)


def _coefficients(row: Sequence[Any], dtype: jnp.dtype) -> Sequence[Any]:
    """Traced coefficients in the dtype of the iteration; floats already follow it."""
    if isinstance(row[0], float):
        return row
    return [jnp.asarray(v, dtypes.real_dtype(dtype)) for v in row]


def adjoint(x: jax.Array) -> jax.Array:
    """Conjugate transpose of the last two axes."""
    x = jnp.swapaxes(x, -1, -2)
    return x.conj() if jnp.iscomplexobj(x) else x


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Matrix product of stacks, at no less than the operands' precision."""
    # HIGHEST keeps float32 out of TF32 and of single-pass bfloat16; products of 16-bit
    # operands accumulate in float32 on every backend.
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def lone_product(
    a: jax.Array, b: jax.Array, adjoint_of: Literal["a", "b"] | None = None
) -> jax.Array:
    """As ``product``, of one's adjoint if so asked, fused with nothing around it.

    XLA for GPUs times dozens of kernels for every product that differs, and what is
    fused with it makes it differ. Those of equal shapes share the result here.
    """
    a, b = jax.lax.optimization_barrier((a, b))
    a, b = (
        adjoint(a) if adjoint_of == "a" else a,
        adjoint(b) if adjoint_of == "b" else b,
    )
    return jax.lax.optimization_barrier(product(a, b))
