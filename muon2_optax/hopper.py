"""Newton-Schulz iterations on NVIDIA Hopper, on the symmetric products' kernel.

The same polynomials as in ``iteration``, arranged so that every scaling and addition
happens where a product is written: the input enters multiplied by the product of the
schedule's leading coefficients a, which leaves X <- X + P X for each run of steps.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType

from muon2_optax import symmetric
from muon2_optax.coefficients import Frobenius, Plan
from muon2_optax.stacks import in_lots

# The kernel's operand A B^T counts in columns of this many elements.
COLUMNS = 64
# Bytes of a chunk's 16-bit matrices: what bounds the memory of a step.
CHUNK = 420e6
# Gram matrices are kept times this, out of the range where float16 loses bits.
GRAIN = 512.0
# Largest product of leading coefficients that the input may be multiplied by.
LARGEST = 8192.0

_forced: contextvars.ContextVar[bool | None] = contextvars.ContextVar(
    "forced", default=None
)
_cuda: contextvars.ContextVar[bool] = contextvars.ContextVar("cuda", default=False)
_undivided: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "undivided", default=False
)


@contextlib.contextmanager
def kernels(on: bool | None) -> Generator[None]:
    """Turns the kernels off, or on for a GPU that is not here; None: by the device.

    It acts on what is traced inside, not on what ``jax.jit`` has already traced.
    """
    token = _forced.set(on)
    try:
        yield
    finally:
        _forced.reset(token)


def available() -> bool:
    """Whether programs traced now will run on a GPU that the kernels are for."""
    forced = _forced.get()
    if forced is not None:
        return forced
    if jax.__version_info__ < (0, 11):
        return False
    if jax.default_backend() != "gpu":
        return False
    capability = getattr(jax.devices()[0], "compute_capability", "")
    return str(capability).startswith("9.")


def _unpartitioned() -> bool:
    """Whether XLA will leave the program traced now on one device.

    It cannot divide a kernel: it would gather the operands and run it everywhere.
    """
    if _forced.get() or _undivided.get() or jax.device_count() == 1:
        return True
    types = jax.sharding.get_abstract_mesh().axis_types
    return bool(types) and all(t == AxisType.Manual for t in types)


@contextlib.contextmanager
def undivided(known: bool) -> Generator[None]:
    """Says that what is traced inside runs on one device of several."""
    token = _undivided.set(known)
    try:
        yield
    finally:
        _undivided.reset(token)


def for_cuda(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` as the branch of a program that runs on CUDA."""

    @functools.wraps(fn)
    def branch(*args: Any) -> Any:
        token = _cuda.set(available())
        try:
            return fn(*args)
        finally:
            _cuda.reset(token)

    return branch


def chunk_size(
    count: int, shape: tuple[int, int], plan: Plan, dtype: jnp.dtype
) -> int | None:
    """How many matrices (m, n), m <= n, run at once; None where stock XLA serves.

    The kernel pays where its tiles fill the multiprocessors: m a multiple of 128 from
    768 on (smaller ones were not measured), and tiles for nearly all thread blocks.
    Other shapes, dtypes, normalizations, and coefficients that are traced, take the
    plain path.
    """
    m, n = shape
    if not (_cuda.get() and _unpartitioned()):
        return None
    if jnp.dtype(dtype).itemsize != 2 or m % 128 or m < 768:
        return None
    if not (plan.static and isinstance(plan.normalization, Frobenius) and plan.rows):
        return None
    known = all(isinstance(v, float) for row in plan.rows for v in row)
    if not known or not 1 / LARGEST < abs(gain(plan.rows)) < LARGEST:
        return None
    if any(row[0] == 0 for row in plan.rows):
        return None
    squares = (m // 256) * (m // 256 + 1) // 2
    if count * squares < 48:
        return None
    most = max(1, int(CHUNK / (2 * m * n)))
    chunks = -(-count // most)
    divisors = [c for c in range(chunks, 2 * chunks) if count % c == 0]
    return -(-count // (divisors[0] if divisors else chunks))


def run(
    matrices: Sequence[jax.Array],
    plan: Plan,
    chunks: Sequence[Sequence[Any]],
    size: int,
    dtype: jnp.dtype,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Normalizes and iterates the matrices of all stacks, ``size`` at a time."""
    m, n = sorted(matrices[0].shape[-2:])
    flat = [x.reshape(-1, *x.shape[-2:]) for x in matrices]
    assert isinstance(plan.normalization, Frobenius)
    factors = _factors(flat, plan.normalization, gain(plan.rows))

    def lot(first: int, members: Sequence[jax.Array]) -> list[jax.Array]:
        ready, start = [], first
        for y in members:
            part, tall = slice(start, start + len(y)), y.shape[1] != m
            start += len(y)
            for f in factors:
                y = y.astype(f.dtype) * f[part, None, None]
            y = _rows_major(y.astype(dtype))
            # Columns of zeros change nothing.
            wide = [(0, 0), (0, 0), (0, -n % COLUMNS)]
            ready.append(jnp.pad(y.mT if tall else y, wide))
        outputs = iterate(jnp.concatenate(ready), chunks, interpret)[..., :n]
        done, start = [], 0
        for y in members:
            o = outputs[start : start + len(y)]
            start += len(y)
            done.append(o if y.shape[1] == m else _rows_major(o.mT))
        return done

    results = in_lots(lot, flat, size)
    return tuple(r.reshape(x.shape).astype(x.dtype) for r, x in zip(results, matrices))


def _factors(
    stacks: Sequence[jax.Array], how: Frobenius, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Two factors (total count,) that normalize each matrix of the stacks to ``scale``.

    Squares are summed in float64, where those of any float32 fit: one pass over the
    values. The sums of rows are gathered, so that one small program serves all. Two
    factors, because 1 / norm may be out of the range of float32.
    """
    wide = jnp.result_type(jnp.float32, *stacks)
    longest = max(x.shape[1] for x in stacks)
    with jax.enable_x64(True):
        rows = [jnp.sum(jnp.square(x.astype(jnp.float64)), axis=-1) for x in stacks]
        rows = [jnp.pad(r, [(0, 0), (0, longest - r.shape[1])]) for r in rows]
        norm = jnp.sqrt(jnp.sum(jnp.concatenate(rows), axis=-1))
        norm = jnp.maximum(how.factor * norm + how.eps, how.floor)
        # An infinite entry makes its matrix NaN.
        norm = jnp.where(norm == 0, 1, jnp.where(jnp.isinf(norm), jnp.nan, norm))
        coarse = (1 / jnp.sqrt(norm)).astype(wide)
        return coarse, (scale / norm / coarse.astype(jnp.float64)).astype(wide)


def _rows_major(x: jax.Array) -> jax.Array:
    """Keeps XLA from storing ``x`` transposed.

    It would store everything that x is made of transposed with it, in float32.
    """
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def gain(rows: Sequence[Any]) -> float:
    """The product of the leading coefficients."""
    return math.prod(row[0] for row in rows)


def iterate(
    x: jax.Array,
    chunks: Sequence[Sequence[Any]],
    interpret: Any = None,
) -> jax.Array:
    """Runs of steps on (L, m, n) matrices that are normalized, times the gain."""
    scale = gain([row for rows in chunks for row in rows])
    m = x.shape[-2]
    product = functools.partial(
        symmetric.product, tiles=tiles_for(m), interpret=interpret
    )
    wide = symmetric.Tiles() if m % 256 == 0 else tiles_for(m)
    added = functools.partial(symmetric.added, tiles=wide, interpret=interpret)
    for rows in chunks:
        r = product(x, x, alpha=GRAIN / scale**2)
        p = _factor(r, rows, product)
        x = added(p, x)
        scale /= gain(rows)
    return x


def tiles_for(m: int) -> symmetric.Tiles:
    if m % 256 or m < 1024:
        return symmetric.Tiles(side=128, stages=4, delay=1)
    return symmetric.Tiles()


def _factor(
    r: jax.Array, rows: Sequence[Any], product: Callable[..., jax.Array]
) -> jax.Array:
    """P with the steps' factor of X equal to gain (I + P); r is GRAIN R.

    A step's factor is h(R) = a (I + Z) with Z = (b R + c R^2) / a, and R follows
    R <- h R h. The identity's part, which 16 bits would round, is never stored.
    """
    p = None
    for i, (a, b, c) in enumerate(rows):
        z = product(r, r, (b / a / GRAIN, r), alpha=c / a / GRAIN**2)
        p = z if p is None else product(p, z, (1.0, p), (1.0, z))
        if i + 1 < len(rows):
            t = product(r, z, (1.0, r))
            r = product(z, t, (a * a, t), alpha=a * a)
    assert p is not None
    return p
