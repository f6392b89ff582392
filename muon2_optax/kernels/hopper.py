"""Decides which programs use the kernels for NVIDIA Hopper, and the size of stacks."""

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

# The input is multiplied by the product of the leading coefficients, which must stay
# below this and above its inverse to fit 16 bits.
LARGEST = 8192.0
_forced: contextvars.ContextVar[bool | None] = contextvars.ContextVar(
    "forced", default=None
)


@contextlib.contextmanager
def kernels(on: bool | None) -> Generator[None]:
    """Turns the kernels off, or on for a GPU that is not here.

    It acts on what is traced inside, not on what ``jax.jit`` has already traced.

    Args:
      on: whether programs use the kernels; None leaves it to the device.

    Raises:
      RuntimeError: where a kernel is traced under a JAX before 0.11.
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
    if jax.__version_info__ < symmetric.OLDEST_JAX:
        return False
    if jax.default_backend() != "gpu":
        return False
    capability = getattr(jax.devices()[0], "compute_capability", "")
    return str(capability).startswith("9.")


def usable(undivided: bool) -> bool:
    """Whether programs may use the kernels on arrays that live where tracing knows.

    XLA cannot divide a kernel: it would gather the operands and run it on all devices.

    Args:
      undivided: whether XLA is known to leave the arrays on one device, see
        ``Location.undivided``. ``kernels(True)`` overrules it.
    """
    return available() and (undivided or _forced.get() is True)


def add_derivative(
    fast: Callable[..., Any], plain: Callable[..., Any]
) -> Callable[..., Any]:
    """Gives ``fast``, which has no derivative, the derivative of ``plain``."""
    run = jax.custom_jvp(fast)
    run.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return run


def stack_size(
    count: int, shape: tuple[int, int], plan: Plan, dtype: jnp.dtype
) -> newton_schulz.StackSize | None:
    """The size of stacks of matrices (m, n), m <= n; None if they run on stock XLA.

    The kernel pays where its tiles fill the multiprocessors: where m is a multiple of
    128 and at least 768 (smaller ones were not measured), and where there are tiles for
    most clusters of thread blocks. Other shapes, dtypes and normalizations run on stock
    XLA, and so do traced coefficients.
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
    """The size of stacks for ``count`` matrices (m, n).

    Each matrix takes its panels and, beside them, four (m, m) matrices for the Gram
    matrix and products of it. ``room`` is how many (m, m) matrices fit in all; one
    matrix always runs. Where it costs little, a stack has as many Gram matrices as
    panels, and the same number for all n, so that matrices of all widths share their
    kernels. Otherwise as many matrices as fit run at once.
    """
    each = symmetric.panels(m, n)
    few = 2 ** (count - 1).bit_length()
    # Stacks with up to four panels a matrix have one size, and so share the kernel for
    # products of Gram matrices.
    own = cheapest(max(1, min(limits.MATRICES_IN_STACK, room // (max(each, 4) + 4))), m)
    # A shared stack may be a tenth larger, because a few of its panels may stay empty.
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
    """The number of members, above ``most`` / 2 and up to ``most``, of least cost."""
    return min(range(most, most // 2, -1), key=lambda members: cost(members, m))


def cost(members: int, m: int) -> float:
    """The cost per matrix of a product of stacks of (m, m), in rounds of output tiles.

    In the last round some multiprocessors may have no tile, and starting a kernel costs
    about a third of a round.
    """
    tiles = newton_schulz.tiles_for(m)
    at_once = symmetric.clusters(tiles)
    return (-(-members * tiles.triangle_tiles(m) // at_once) + 1 / 3) / members


def takes_sums(shape: tuple[int, ...], dtype: jnp.dtype, axes: ResolvedAxes) -> bool:
    """Whether the kernel gives the sums of squares of a leaf along both axes.

    The matrices must be in the last two axes, real, in one block and not too small. For
    the kernel's copies, the number of rows must be a multiple of 8, and the bytes of a
    row one of 128.

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
    """Whether the kernels run matrices that come in a grid of shards.

    The rows of a shard must be whole tiles. The kernel pads its columns, and as the
    padding travels back there must be little of it.
    """
    (m, n), (down, right) = shard, grid
    padding = -n % newton_schulz.COLUMNS
    if m * down > n * right or m % newton_schulz.SMALL.side or padding > n / 32:
        return False
    return stack_size(count, (m * down, n * right), plan, dtype) is not None
