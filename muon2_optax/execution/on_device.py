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

from muon2_optax import dtypes, roots
from muon2_optax.arrays import stacks, tracing
from muon2_optax.iteration import adjoint, iterate, runs
from muon2_optax.kernels import hopper, newton_schulz
from muon2_optax.schedules.coefficients import AOL, Normalization, Plan

# Bytes of matrices, in the dtype of the iteration, that run at once, to bound the
# memory of a step. Smaller lots would make larger programs.
LOT = 1.5e9


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
    """One batch through one iteration, in lots that bound the memory."""
    count = sum(math.prod(x.shape[:-2]) for x in matrices)
    m, n = sorted(matrices[0].shape[-2:])
    size = hopper.chunk_size(count, (m, n), plan, dtype)
    stock = functools.partial(_run_stock, plan=plan, dtype=dtype)
    if size is None:
        return stock(*matrices)
    steps = runs(plan, m, n, dtype)
    fast = hopper.differentiable(
        lambda *xs: newton_schulz.run(xs, plan, steps, size, dtype), stock
    )
    return fast(*matrices)


def _run_stock(
    *matrices: jax.Array, plan: Plan, dtype: jnp.dtype
) -> tuple[jax.Array, ...]:
    """On the products of XLA."""
    count = sum(math.prod(x.shape[:-2]) for x in matrices)
    m, n = matrices[0].shape[-2:]
    lots = math.ceil(count * m * n * dtype.itemsize / LOT)
    if lots <= 1:
        return _run_lot(matrices, plan, dtype)
    run = functools.partial(_run_lot, plan=plan, dtype=dtype)
    flat, size = stacks.as_parts(matrices), -(-count // lots)
    done = stacks.in_lots(lambda _, members: run(members), flat, size)
    return tuple(stacks.all_like(done, matrices))


def _run_lot(
    matrices: Sequence[jax.Array], plan: Plan, dtype: jnp.dtype
) -> tuple[jax.Array, ...]:
    """Wide side last, 16-bit before stacking."""
    how, several = plan.normalization, len(matrices) > 1
    ready, floors = zip(*_entering(matrices, how=how, dtype=dtype, flat=several))
    if several:
        done = iterate(jnp.concatenate(ready), jnp.concatenate(floors), plan)
        parts = jax.lax.split(done, list(map(len, ready)))
    else:
        parts = [iterate(ready[0], floors[0], plan)]
    return tuple(_leaving(parts, matrices, how=how))


@tracing.each
def _entering(
    x: jax.Array, *, how: Normalization, dtype: jnp.dtype, flat: bool
) -> tuple[jax.Array, jax.Array]:
    """A leaf as wide matrices, in one stack if ``flat``, and ``normalize``'s eps."""
    turned = _turned(x, how)
    x, floor = normalize(x.reshape(-1, *x.shape[-2:]) if flat else x, how)
    x = x.astype(dtype)
    return adjoint(x) if turned else x, floor


@tracing.each
def _leaving(y: jax.Array, x: jax.Array, *, how: Normalization) -> jax.Array:
    """Inverse of ``_entering``, without the norm; of x only shape and dtype count."""
    return (adjoint(y) if _turned(x, how) else y).reshape(x.shape).astype(x.dtype)


def _turned(x: jax.Array, how: Normalization) -> bool:
    """Whether the matrices of a leaf run transposed."""
    rows, columns = x.shape[-2:]
    # One-sided scaling of a square matrix acts on its outputs.
    return rows > columns or rows == columns and isinstance(how, AOL)


def normalize(x: jax.Array, how: Normalization) -> tuple[jax.Array, jax.Array]:
    """Divides each matrix by its norm, for magnitudes from 1e-38 to 1e38 in float32.

    The largest magnitude is divided out first: a square of the result can neither
    overflow nor, where it matters, underflow.

    Returns:
      The result, at least float32, and AOL's eps in its units, (..., 1, 1).
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
    if isinstance(how, AOL):
        norm = jnp.where(norm == 0, 1, norm)
        root = how.eps**0.5 / largest / norm
        return x / norm, root * root
    norm = jnp.maximum(how.factor * norm + how.eps / largest, how.floor / largest)
    return x / jnp.where(norm == 0, 1, norm), jnp.zeros_like(norm)
