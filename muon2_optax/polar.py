"""Orthogonalization by Newton-Schulz iterations: pure functions on (..., m, n).

For X = U S V^T every function here returns about U f(S) V^T, where f is the composition
of the schedule's quintics on the normalized singular values and f(s) is near 1 for all
but the smallest s: an approximation of the polar factor U V^T.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muon2_optax import coefficients, dtypes, hopper
from muon2_optax.coefficients import AOL, Normalization, Plan

# From this ratio of the sides on, iterating on the small Gram matrix takes fewer
# operations than iterating on X: (10 K - 10 + 4 r) m^3 against K (4 r + 2) m^3.
GRAM_ASPECT = 1.5
# Rounding gives a Gram matrix small negative eigenvalues, and each step multiplies them
# by a^2. A fresh X X^T is taken before they grow by more than this: three steps of
# Keller's triple (11.9^2 = 141), two of the steeper schedules.
GRAM_GROWTH = 150.0


def newton_schulz(
    x: jax.Array,
    ns_steps: int = 3,
    ns_coeffs: Any = "keller",
    *,
    ns_dtype: Any = None,
) -> jax.Array:
    """Approximate polar factor of every matrix of a stack.

    Args:
      x: array (..., m, n) of any float or complex dtype; each of the leading indices is
        a matrix of its own. A zero matrix gives exactly zero. A matrix with a
        non-finite entry gives NaN and leaves the others of the stack alone.
      ns_steps: iterations K; 0 only normalizes.
      ns_coeffs: name of a schedule, a ``Schedule``, a triple or a (K, 3) table; see
        ``coefficients.resolve``.
      ns_dtype: dtype of the iteration's products. None: float16 on GPU, bfloat16 on
        TPU, float32 on CPU, by the platform that the program is compiled for; float64
        and complex inputs keep their own precision. The norm is taken in float32 or
        better in any case, and float32 products never use TF32 or bfloat16 passes.

    Returns:
      Array of the shape and dtype of ``x``.

    Raises:
      ValueError: fewer than two axes, an unsuitable schedule, or a dtype that is not
        floating point.

    References:
      Jordan et al. 2024, github.com/KellerJordan/Muon; the paper's eq. for Q_NS.
    """
    if x.ndim < 2:
        raise ValueError(f"newton_schulz needs (..., m, n), got shape {x.shape}")
    plan = coefficients.resolve(ns_coeffs, ns_steps)
    return orthogonalize([x], plan, ns_dtype)[0]


def orthogonalize(
    matrices: Sequence[jax.Array], plan: Plan, ns_dtype: Any = None
) -> list[jax.Array]:
    """Orthogonalizes stacks (..., m, n) of one shape, or of its transpose."""
    run = functools.partial(run_batch, plan=plan)
    return list(per_platform(run, matrices, ns_dtype))


def per_platform(
    fn: Callable[..., tuple[jax.Array, ...]], xs: Sequence[jax.Array], ns_dtype: Any
) -> tuple[jax.Array, ...]:
    """``fn(*xs, dtype=...)`` with ``ns_dtype``, or the default where it is None.

    The default is that of the platform the program is compiled for, which need not be
    the process's default backend.
    """
    dtype = dtypes.canonical("ns_dtype", ns_dtype)
    source = jnp.result_type(*xs)
    if not jnp.issubdtype(source, jnp.inexact):
        raise ValueError(f"Newton-Schulz needs floating point values, got {source}")
    if jnp.issubdtype(source, jnp.complexfloating) or (
        dtype is None and source == jnp.float64
    ):
        dtype = source
    if dtype is not None:
        fixed = functools.partial(fn, dtype=dtype)
        if not hopper.available():
            return fixed(*xs)
        return jax.lax.platform_dependent(
            *xs, cuda=hopper.for_cuda(fixed), default=fixed
        )
    half, brain, full = map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32))
    return jax.lax.platform_dependent(
        *xs,
        cpu=functools.partial(fn, dtype=full),
        cuda=hopper.for_cuda(functools.partial(fn, dtype=half)),
        rocm=functools.partial(fn, dtype=half),
        default=functools.partial(fn, dtype=brain),
    )


def run_batch(
    *matrices: jax.Array, plan: Plan, dtype: jnp.dtype
) -> tuple[jax.Array, ...]:
    """One batch through one iteration: wide side last, 16-bit before stacking."""
    count = sum(math.prod(x.shape[:-2]) for x in matrices)
    m, n = sorted(matrices[0].shape[-2:])
    size = hopper.chunk_size(count, (m, n), plan, dtype)
    if size is not None:
        return hopper.run(matrices, plan, _chunks(plan, m, n, dtype), size, dtype)
    ready, floors, restore = [], [], []
    for x in matrices:
        # One-sided scaling of a square matrix acts on its outputs.
        square = x.shape[-2] == x.shape[-1]
        one_sided = isinstance(plan.normalization, AOL)
        tall = x.shape[-2] > x.shape[-1] or (square and one_sided)
        y, floor = normalize(x, plan.normalization)
        y = y.astype(dtype)
        ready.append(adjoint(y) if tall else y)
        floors.append(floor)
        restore.append((x, tall))
    if len(ready) == 1:
        outputs = [iterate(ready[0], floors[0], plan)]
    else:
        stack = jnp.concatenate([y.reshape(-1, *y.shape[-2:]) for y in ready])
        floor = jnp.concatenate([f.reshape(-1, 1, 1) for f in floors])
        counts = np.cumsum([math.prod(y.shape[:-2]) for y in ready])
        parts = jnp.split(iterate(stack, floor, plan), counts[:-1])
        outputs = [p.reshape(y.shape) for p, y in zip(parts, ready)]
    return tuple(
        (adjoint(o) if tall else o).astype(x.dtype)
        for o, (x, tall) in zip(outputs, restore)
    )


def normalize(x: jax.Array, how: Normalization) -> tuple[jax.Array, jax.Array]:
    """Divides each matrix by its norm, for magnitudes from 1e-38 to 1e38 in float32.

    The largest magnitude is divided out first: a square of the result can neither
    overflow nor, where it matters, underflow.

    Returns:
      The result, at least float32, and AOL's eps in its units, (..., 1, 1).
    """
    x = x.astype(dtypes.compute_dtype(x.dtype))
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0.0)
    largest = jnp.where(largest == 0, 1, largest)
    # XLA divides by multiplying with the reciprocal, which is flushed to zero for the
    # largest numbers; a power of two first brings them down exactly.
    down = jnp.where(largest > 1e30, 2.0**-64, 1).astype(largest.dtype)
    x = (x * down) / (largest * down)
    square = dtypes.squared_magnitude(x)
    norm = jnp.sqrt(jnp.sum(square, axis=(-2, -1), keepdims=True))
    if isinstance(how, AOL):
        norm = jnp.where(norm == 0, 1, norm)
        root = how.eps**0.5 / largest / norm
        return x / norm, root * root
    norm = jnp.maximum(how.factor * norm + how.eps / largest, how.floor / largest)
    return x / jnp.where(norm == 0, 1, norm), jnp.zeros_like(norm)


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
    for chunk in _chunks(plan, m, n, x.dtype):
        gram = product(x, adjoint(x)) if gram is None else gram
        x = _step(x, gram, *chunk[0]) if len(chunk) == 1 else _gram(x, gram, chunk)
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


def _chunks(plan: Plan, m: int, n: int, dtype: jnp.dtype) -> list[list[Any]]:
    """The steps, in runs that go through one Gram matrix."""
    # bfloat16 keeps 8 bits: accumulating the factor loses more than it saves there.
    wide = n >= GRAM_ASPECT * m and dtype != jnp.bfloat16
    return _gram_chunks(plan.rows) if wide else [[row] for row in plan.rows]


def _gram_chunks(rows: Sequence[Any]) -> list[list[Any]]:
    """Splits the steps into runs that one Gram matrix can carry."""
    chunks: list[list[Any]] = []
    growth = math.inf
    for row, before in zip(rows, [None, *rows]):
        if before is not None:
            # Traced coefficients have no known growth: a fresh Gram matrix each step.
            known = isinstance(before[0], float)
            growth = growth * before[0] ** 2 if known else math.inf
        if growth > GRAM_GROWTH:
            chunks.append([])
            growth = 1.0
        chunks[-1].append(row)
    return chunks


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
