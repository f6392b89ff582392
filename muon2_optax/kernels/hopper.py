"""When programs use the kernel for NVIDIA Hopper, and on how many matrices at once."""

import contextlib
import contextvars
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp

from muon2_optax.arrays import limits
from muon2_optax.axes import ResolvedAxes
from muon2_optax.kernels import newton_schulz, symmetric
from muon2_optax.kernels.tiles import Tiles
from muon2_optax.schedules.coefficients import Frobenius
from muon2_optax.schedules.plans import Plan

# Largest product of leading coefficients that the input may be multiplied by.
LARGEST = 8192.0
_forced: contextvars.ContextVar[bool | None] = contextvars.ContextVar(
    "forced", default=None
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


def usable(undivided: bool) -> bool:
    """Whether programs may use the kernels on arrays that XLA leaves on one device.

    It cannot divide a kernel: it would gather the operands and run it everywhere.

    Args:
      undivided: whether the arrays are known to be so, see ``Location.undivided``. It
        does not count where ``kernels(True)`` turns the kernels on.
    """
    return available() and (undivided or _forced.get() is True)


def add_derivative(
    fast: Callable[..., Any], plain: Callable[..., Any]
) -> Callable[..., Any]:
    """``fast``, which has no derivative, with that of ``plain``."""
    run = jax.custom_jvp(fast)
    run.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return run


def stack_size(
    count: int, shape: tuple[int, int], plan: Plan, dtype: jnp.dtype
) -> newton_schulz.StackSize | None:
    """How large stacks of matrices (m, n), m <= n, are; None where stock XLA serves.

    The kernel pays where its tiles fill the multiprocessors: m a multiple of 128 from
    768 on (smaller ones were not measured), and tiles for nearly all thread blocks.
    Other shapes, dtypes, normalizations, and coefficients that are traced, take the
    plain path.
    """
    m, n = shape
    if jnp.dtype(dtype).itemsize != 2 or m % 128 or m < 768:
        return None
    if not (plan.static and isinstance(plan.normalization, Frobenius) and plan.triples):
        return None
    known = all(isinstance(v, float) for triple in plan.triples for v in triple)
    if not known or not 1 / LARGEST < abs(newton_schulz.gain(plan.triples)) < LARGEST:
        return None
    if any(triple[0] == 0 for triple in plan.triples):
        return None
    if count * Tiles().triangle_tiles(m) < 48:
        return None
    return _fit_stack(count, m, n, int(limits.BYTES_IN_KERNELS / (2 * m * m)))


def _fit_stack(count: int, m: int, n: int, room: int) -> newton_schulz.StackSize:
    """The stack of ``count`` matrices (m, n) where so many (m, m) have ``room``.

    Each matrix takes its panels, and four Gram matrices and products of them. One
    matrix always fits. Where it costs little, a stack has as many Gram matrices as
    panels, and the same number for all n: then matrices of all widths share their
    kernels. Otherwise as many matrices as fit run at once.
    """
    each = symmetric.panels(m, n)
    few = 2 ** (count - 1).bit_length()
    # Stacks of no more than four panels a matrix share the products of Gram matrices.
    own = cheapest(max(1, min(limits.MATRICES_IN_STACK, room // (max(each, 4) + 4))), m)
    # A few panels may stay empty.
    shared = cheapest(max(1, min(int(1.1 * limits.MATRICES_IN_STACK), room // 5)), m)

    def pays(panels: int) -> bool:
        members = shared // panels
        filled = members * panels >= 0.9 * shared
        return filled and cost(members, m) <= 1.05 * cost(own, m)

    # Use the shared stack size only if there are enough matrices to fill it, and if it
    # costs at most 5 % for this shape and for matrices of three panels, the most common
    # wide ones.
    if few >= min(shared // each, limits.MATRICES_IN_STACK) and pays(3) and pays(each):
        return newton_schulz.StackSize(shared, shared)
    members = min(few, own)
    return newton_schulz.StackSize(members * each, members)


def cheapest(most: int, m: int) -> int:
    """The number of members, from half of ``most`` up to it, that cost the least."""
    return min(range(most, most // 2, -1), key=lambda members: cost(members, m))


def cost(members: int, m: int) -> float:
    """Rounds of output tiles per matrix, in products of stacks of (m, m) matrices.

    The last round may leave multiprocessors without a tile, and starting a kernel costs
    about a third of a round.
    """
    tiles = newton_schulz.tiles_for(m)
    at_once = symmetric.clusters(tiles)
    return (-(-members * tiles.triangle_tiles(m) // at_once) + 1 / 3) / members


def takes_sums(shape: tuple[int, ...], dtype: jnp.dtype, axes: ResolvedAxes) -> bool:
    """Whether one pass over a leaf gives its sums of squares along both axes.

    It takes matrices in the last two axes, real and in one block, of rows that the
    kernel can copy.

    Args:
      shape: of each device's part of the leaf.
      dtype: of the leaf.
      axes: of its matrices.
    """
    last = {(len(shape) - 2,), (len(shape) - 1,)}
    if not available() or {axes.ins, axes.outs} != last or len(axes.splits) > 1:
        return False
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return False
    m, n = shape[-2:]
    whole_rows = m % 8 == 0 and n * dtype.itemsize % 128 == 0
    return whole_rows and m * n >= limits.ENTRIES_FOR_SUMS_KERNEL


def takes_shards(
    count: int,
    shard: tuple[int, int],
    grid: tuple[int, int],
    plan: Plan,
    dtype: jnp.dtype,
) -> bool:
    """Whether matrices in a grid of shards run without being assembled first.

    A shard's rows must be whole tiles, and few of its columns the kernel's padding,
    which travels back.
    """
    (m, n), (down, right) = shard, grid
    padding = -n % newton_schulz.COLUMNS
    if m * down > n * right or m % newton_schulz.SMALL.side or padding > n / 32:
        return False
    return stack_size(count, (m * down, n * right), plan, dtype) is not None
