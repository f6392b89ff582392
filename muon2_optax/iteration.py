"""The steps of a Newton-Schulz iteration, standard and in Gram form: pure functions."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from muon2_optax import dtypes
from muon2_optax.schedules.coefficients import AOL, Plan

# From this ratio of the sides on, iterating on the small Gram matrix takes fewer
# operations than iterating on X: (10 K - 10 + 4 r) m^3 against K (4 r + 2) m^3.
GRAM_ASPECT = 1.5
# Rounding gives a Gram matrix small negative eigenvalues, and each step multiplies them
# by a^2. A fresh X X^T is taken before they grow by more than this: three steps of
# Keller's triple (11.9^2 = 141), two of the steeper schedules.
GRAM_GROWTH = 150.0


def iterate(x: jax.Array, floor: jax.Array, plan: Plan) -> jax.Array:
    """The steps of ``plan`` on normalized wide matrices (..., m, n), m <= n."""
    m, n = x.shape[-2:]
    if x.size == 0:
        return x
    gram = None
    if isinstance(plan.normalization, AOL):
        x, gram = _almost_orthogonal(x, floor)
    if not plan.static:
        return _dynamic(x, plan)
    for rows in runs(plan, m, n, x.dtype):
        gram = product(x, adjoint(x)) if gram is None else gram
        x = _step(x, gram, *rows[0]) if len(rows) == 1 else _gram(x, gram, rows)
        gram = None
    return x


def _almost_orthogonal(x: jax.Array, floor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """AOL scaling of wide matrices, and the Gram matrix of the result."""
    wide = dtypes.compute_dtype(x.dtype)
    gram = product(x, adjoint(x)).astype(wide)
    total = jnp.maximum(jnp.sum(jnp.abs(gram), axis=-1, keepdims=True), floor)
    scale = 1 / jnp.sqrt(jnp.where(total == 0, 1, total))
    gram = scale * gram * jnp.swapaxes(scale, -1, -2)
    return (scale * x.astype(wide)).astype(x.dtype), gram.astype(x.dtype)


def runs(plan: Plan, m: int, n: int, dtype: jnp.dtype) -> list[list[Any]]:
    """The steps, in runs that go through one Gram matrix."""
    # bfloat16 keeps 8 bits: accumulating the factor loses more than it saves there.
    wide = n >= GRAM_ASPECT * m and dtype != jnp.bfloat16
    return _gram_runs(plan.rows) if wide else [[row] for row in plan.rows]


def _gram_runs(rows: Sequence[Any]) -> list[list[Any]]:
    """Splits the steps into runs that one Gram matrix can carry."""
    done: list[list[Any]] = []
    growth = math.inf
    for row, before in zip(rows, [None, *rows]):
        if before is not None:
            # Traced coefficients have no known growth: a fresh Gram matrix each step.
            known = isinstance(before[0], float)
            growth = growth * before[0] ** 2 if known else math.inf
        if growth > GRAM_GROWTH:
            done.append([])
            growth = 1.0
        done[-1].append(row)
    return done


def _step(x: jax.Array, gram: jax.Array, a: Any, b: Any, c: Any) -> jax.Array:
    """X <- a X + (b A + c A^2) X with A = X X^H."""
    a, b, c = _coefficients((a, b, c), x.dtype)
    return a * x + product(b * gram + c * product(gram, gram), x)


def _gram(x: jax.Array, r: jax.Array, rows: Sequence[Any]) -> jax.Array:
    """The same polynomial, evaluated on the m x m Gram matrix.

    Step t multiplies X by h_t(R) = a I + Z with Z = b R + c R^2 and R = X X^H. All
    these factors commute, so their product Q is gathered as an m x m matrix while R
    follows R <- h R h, and X is read only at both ends (Dao-AILab, "Gram
    Newton-Schulz", 2026). Q is kept as alpha I + P: the identity's part, which 16
    bits would round to a multiple of 0.03 by the third step, stays an exact scalar.
    """
    a, b, c = rows[0]
    alpha, p = a, b * r + c * product(r, r)
    z = p
    for next_a, b, c in rows[1:]:
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
