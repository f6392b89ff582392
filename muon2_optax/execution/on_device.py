"""Orthogonalizes batches of matrices on one device: pure functions on (..., m, n).

For X = U S V^T each function returns about U f(S) V^T. Here f composes the quintics of
the schedule on the normalized singular values, and f(s) is near 1 for all but the
smallest s, so the result approximates the polar factor U V^T.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from muon2_optax import dtypes
from muon2_optax.arrays import limits, stacks, tracing
from muon2_optax.iteration import adjoint, gram_runs, iterate, normalize
from muon2_optax.kernels import hopper, newton_schulz
from muon2_optax.schedules.coefficients import AOL, Normalization
from muon2_optax.schedules.plans import Plan


def orthogonalize(
    matrices: Sequence[jax.Array],
    plan: Plan,
    ns_dtype: Any = None,
    undivided: bool = False,
) -> list[jax.Array]:
    """Orthogonalizes stacks (..., m, n) of one shape, or of its transpose.

    Args:
      matrices: the stacks.
      plan: the normalization and the steps.
      ns_dtype: dtype of the products; None: the platform's default.
      undivided: whether the stacks are known to be whole on one device. XLA cannot
        divide a kernel: it would gather the operands and run it everywhere.
    """
    run = functools.partial(orthogonalize_batch, plan=plan)
    return list(run_per_platform(run, matrices, ns_dtype, hopper.usable(undivided)))


def run_per_platform(
    fn: Callable[..., tuple[jax.Array, ...]],
    xs: Sequence[jax.Array],
    ns_dtype: Any,
    kernels: bool,
) -> tuple[jax.Array, ...]:
    """Runs ``fn(*xs, dtype=..., kernels=...)`` with ``ns_dtype`` or a default dtype.

    The default is that of the platform for which the program is compiled, which need
    not be the default backend of the process. On CUDA ``fn`` gets ``kernels``, and
    False elsewhere.
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
        plain = functools.partial(fn, dtype=dtype, kernels=False)
        if not hopper.available():
            return plain(*xs)
        on_cuda = functools.partial(fn, dtype=dtype, kernels=kernels)
        return jax.lax.platform_dependent(*xs, cuda=on_cuda, default=plain)
    half, brain, full = map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32))
    return jax.lax.platform_dependent(
        *xs,
        cpu=functools.partial(fn, dtype=full, kernels=False),
        cuda=functools.partial(fn, dtype=half, kernels=kernels),
        rocm=functools.partial(fn, dtype=half, kernels=False),
        default=functools.partial(fn, dtype=brain, kernels=False),
    )


def orthogonalize_batch(
    *matrices: jax.Array, plan: Plan, dtype: jnp.dtype, kernels: bool
) -> tuple[jax.Array, ...]:
    """Runs the iteration on one batch, in chunks that bound the memory.

    Args:
      matrices: stacks (..., m, n) of one shape, or of its transpose.
      plan: the normalization and the steps.
      dtype: of the iteration.
      kernels: whether this program may use the kernels for Hopper GPUs.
    """
    count = sum(math.prod(x.shape[:-2]) for x in matrices)
    m, n = sorted(matrices[0].shape[-2:])
    size = hopper.stack_size(count, (m, n), plan, dtype) if kernels else None
    stock = functools.partial(_orthogonalize_on_xla, plan=plan, dtype=dtype)
    if size is None:
        return stock(*matrices)
    runs = gram_runs(plan, m, n, dtype)
    fast = hopper.add_derivative(
        lambda *xs: newton_schulz.run(xs, plan, runs, size, dtype), stock
    )
    return fast(*matrices)


def _orthogonalize_on_xla(
    *matrices: jax.Array, plan: Plan, dtype: jnp.dtype
) -> tuple[jax.Array, ...]:
    """Runs the batch on XLA's own products."""
    count = sum(math.prod(x.shape[:-2]) for x in matrices)
    m, n = matrices[0].shape[-2:]
    chunks = math.ceil(count * m * n * dtype.itemsize / limits.BYTES_ON_DEVICE)
    if chunks <= 1:
        return _orthogonalize_chunk(matrices, plan, dtype)
    run = functools.partial(_orthogonalize_chunk, plan=plan, dtype=dtype)
    flat, size = stacks.to_stacks(matrices), -(-count // chunks)
    done = stacks.run_in_chunks(lambda _, members: run(members), flat, size)
    return tuple(stacks.reshape_like(done, matrices))


def _orthogonalize_chunk(
    matrices: Sequence[jax.Array], plan: Plan, dtype: jnp.dtype
) -> tuple[jax.Array, ...]:
    """Runs all of these at once, as one stack in ``dtype``."""
    how, several = plan.normalization, len(matrices) > 1
    ready, floors = zip(*_prepare(matrices, how=how, dtype=dtype, flat=several))
    if several:
        done = iterate(jnp.concatenate(ready), jnp.concatenate(floors), plan)
        parts = jax.lax.split(done, list(map(len, ready)))
    else:
        parts = [iterate(ready[0], floors[0], plan)]
    return tuple(_restore(parts, matrices, how=how))


@tracing.each
def _prepare(
    x: jax.Array, *, how: Normalization, dtype: jnp.dtype, flat: bool
) -> tuple[jax.Array, jax.Array]:
    """Normalizes a leaf; returns wide matrices, and the floor of ``normalize``.

    The matrices are one stack (count, m, n) if ``flat``.
    """
    transposed = _is_transposed(x, how)
    x, floor = normalize(x.reshape(-1, *x.shape[-2:]) if flat else x, how)
    x = x.astype(dtype)
    return adjoint(x) if transposed else x, floor


@tracing.each
def _restore(y: jax.Array, x: jax.Array, *, how: Normalization) -> jax.Array:
    """Gives the result y the orientation, shape and dtype of the leaf x."""
    return (
        (adjoint(y) if _is_transposed(x, how) else y).reshape(x.shape).astype(x.dtype)
    )


def _is_transposed(x: jax.Array, how: Normalization) -> bool:
    """Whether a leaf's matrices run transposed: the iteration takes wide ones."""
    rows, columns = x.shape[-2:]
    # AOL scales square matrices along their outputs, which are the columns.
    return rows > columns or rows == columns and isinstance(how, AOL)
