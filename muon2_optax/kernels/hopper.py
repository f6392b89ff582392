"""When programs use the kernel for NVIDIA Hopper, and on how many matrices at once."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from muon2_optax.axes import ResolvedAxes
from muon2_optax.kernels import newton_schulz, symmetric
from muon2_optax.kernels.tiles import Tiles
from muon2_optax.schedules.coefficients import Frobenius, Plan
from muon2_optax.sharding import Placement

# Bytes of a stack's 16-bit panels and of the four Gram matrices and products beside
# each: what bounds the memory of a step.
CHUNK = 1.4e9
# Matrices in a stack, about: XLA joins no more (96 operands, up to three for each) in
# the pass that turns tall ones, and stores what is left over once more.
JOINED = 32
# Largest product of leading coefficients that the input may be multiplied by.
LARGEST = 8192.0
# Entries of a matrix from which on its sums of squares have a kernel.
SUMS = 2**20

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


def differentiable(
    fast: Callable[..., Any], plain: Callable[..., Any]
) -> Callable[..., Any]:
    """``fast``, which has no derivative, with that of ``plain``."""
    run = jax.custom_jvp(fast)
    run.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return run


def chunk_size(
    count: int, shape: tuple[int, int], plan: Plan, dtype: jnp.dtype
) -> newton_schulz.Stack | None:
    """How large stacks of matrices (m, n), m <= n, are; None where stock XLA serves.

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
    if not known or not 1 / LARGEST < abs(newton_schulz.gain(plan.rows)) < LARGEST:
        return None
    if any(row[0] == 0 for row in plan.rows):
        return None
    if count * Tiles().squares(m) < 48:
        return None
    return stack_size(count, m, n, int(CHUNK / (2 * m * m)))


def fullest(most: int, m: int) -> int:
    """Members of a stack, of more than half as many as may be, that cost the least."""
    return min(range(most, most // 2, -1), key=lambda size: cost(size, m))


def cost(members: int, m: int) -> float:
    """Rounds of the kernels' squares per matrix, in products of m x m matrices.

    The last round may leave multiprocessors without a square, and starting a kernel
    costs about a third of a round.
    """
    tiles = newton_schulz.tiles_for(m)
    at_once = symmetric.clusters(tiles)
    return (-(-members * tiles.squares(m) // at_once) + 1 / 3) / members


def stack_size(count: int, m: int, n: int, room: int) -> newton_schulz.Stack:
    """Of ``count`` matrices (m, n), with ``room`` for so many (m, m); or one matrix.

    With four Gram matrices and products of them for each. As many Gram matrices as
    panels, and these the same for all n, where that costs little: then all share their
    kernels. Where matrices of three panels, the most common wide ones, do not, none do;
    nor where they are few. Otherwise those of no more than four panels run as many at
    once, and share what multiplies Gram matrices.
    """
    each = symmetric.panels(m, n)
    few = 2 ** (count - 1).bit_length()
    apart = fullest(max(1, min(JOINED, room // (max(each, 4) + 4))), m)
    # A few panels may stay empty.
    size = fullest(max(1, min(int(1.1 * JOINED), room // 5)), m)

    def pays(panels: int) -> bool:
        members = size // panels
        filled = members * panels >= 0.9 * size
        return filled and cost(members, m) <= 1.05 * cost(apart, m)

    if few >= min(size // each, JOINED) and pays(3) and pays(each):
        return newton_schulz.Stack(size, size)
    members = min(few, apart)
    return newton_schulz.Stack(members * each, members)


def takes_sums(g: Any, axes: ResolvedAxes, place: Placement | None) -> bool:
    """Whether one pass over a leaf gives its sums of squares along both axes.

    Of matrices in the last two axes, real and in one block, of rows that the kernel can
    copy, and not so small, on each device, that a second pass costs less than starting
    it.
    """
    last = {(g.ndim - 2,), (g.ndim - 1,)}
    if not available() or {axes.ins, axes.outs} != last or len(axes.splits) > 1:
        return False
    if g.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return False
    m, n = place.local(g.shape)[-2:] if place is not None else g.shape[-2:]
    return m % 8 == 0 and n * g.dtype.itemsize % 128 == 0 and m * n >= SUMS


def takes_pieces(
    count: int,
    piece: tuple[int, int],
    grid: tuple[int, int],
    plan: Plan,
    dtype: jnp.dtype,
) -> bool:
    """Whether matrices in rows x columns pieces run without being put together first.

    A piece's rows must be whole tiles, and few of its columns the kernel's padding,
    which travels back.
    """
    (m, n), (down, right) = piece, grid
    if (
        m * down > n * right
        or m % newton_schulz.SMALL.side
        or -n % newton_schulz.COLUMNS > n / 32
    ):
        return False
    return chunk_size(count, (m * down, n * right), plan, dtype) is not None
