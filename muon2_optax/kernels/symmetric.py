"""Products of stacks that are known to be symmetric, on NVIDIA Hopper.

``alpha A B^T + beta C + ...`` is symmetric if A = B, or if A and B are symmetric and
commute. Then only the tiles of the lower triangle need to be computed, and each is
stored twice: half the operations of a plain product. No library that XLA calls has this
product for stacks of 16-bit matrices, so it is a Pallas kernel.

A panel is some successive columns of a matrix. A stack may hold wide matrices in panels
of k columns: first those of the first matrix, then those of the second. The last panel
of each matrix is filled up with columns of zeros.
"""

from typing import Any

import jax
import jax.numpy as jnp

from muon2_optax.kernels.tiles import Tiles as Tiles
from muon2_optax.kernels.tiles import Work

# How many addends the kernel for products of square matrices has room for.
ADDENDS = 2
# The first JAX whose Pallas has the loads and stores that the kernel uses.
OLDEST_JAX = (0, 11)


def product(
    a: jax.Array,
    b: jax.Array,
    *addends: tuple[float, jax.Array],
    alpha: float = 1.0,
    members: int | None = None,
    columns: int | None = None,
    results: int | None = None,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """``alpha A B^T + sum of beta C``, symmetric, for stacks of 16-bit matrices.

    Args:
      a: (L, m, k), float16 or bfloat16, k a multiple of 64.
      b: (L, m, k); A B^T must be symmetric.
      *addends: pairs (beta, C) with C symmetric, (L, m, m).
      alpha: the factor of the product.
      members: how many matrices of the stack are multiplied, the first ones; None:
        all. The rest of the result is undefined.
      columns: how many columns each matrix has, if A and B hold panels of k columns;
        None: k. One kernel serves any number of columns.
      results: how many matrices the returned stack has; None: L.
      tiles: m must be a multiple of ``tiles.side``.
      interpret: ``pallas.mosaic_gpu.InterpretGPUParams()`` runs it on a CPU.

    Returns:
      (results, m, m) in the dtype of ``a``; accumulated, scaled and added in float32.
    """
    tiles = tiles or Tiles()
    if a.shape[1] % tiles.side or a.shape[2] % tiles.depth or b.shape != a.shape:
        raise ValueError(f"no tiles {tiles} for {a.shape} and {b.shape}")
    m = a.shape[1]
    shape = (len(a) if results is None else results, m, m)
    count = len(addends)
    if a.shape == shape:
        # Fill up with arrays of the right shape, which the kernel does not read.
        addends += ((0.0, a),) * (ADDENDS - count)
    # Factors are operands, not constants, so that one compiled kernel serves every step
    # of a schedule. Each kernel takes about a second to compile.
    factors = jnp.asarray([alpha, *(beta for beta, _ in addends)], jnp.float32)
    steps = -(-(columns or a.shape[2]) // tiles.depth)
    members, each = _check_fit(a, members, columns, shape[0])
    work = Work(members, each, tiles.triangle_tiles(m), steps, count, plain=False)
    return _call(
        factors, work, a, b, *(c for _, c in addends), shape=shape, cut=(1, 1),
        tiles=tiles, how=interpret,
    )  # fmt: skip


def add_product(
    p: jax.Array,
    x: jax.Array,
    *,
    shards: tuple[int, int] | None = None,
    members: int | None = None,
    columns: int | None = None,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """``X + P X`` for P (L, m, m). The result is not symmetric.

    The kernel adds X where it writes the product. XLA would add X in a separate pass,
    because it does not fold a sum into a product whose operand comes from a kernel.

    Args:
      p: (L, m, m), float16 or bfloat16.
      x: (L, m, n), of the same dtype, or panels of n columns.
      shards: into how many shards the result is cut, along its rows and along its
        columns. X must then not be in panels.
      members: as in ``product``.
      columns: as in ``product``. Where a matrix has several panels, n must be a
        multiple of ``tiles.side``.
      tiles: ``tiles.side`` must divide the rows of a shard.
      interpret: as in ``product``.

    Returns:
      Like x, or with ``shards`` (rows, columns, L, m / rows, n / columns).
    """
    tiles = tiles or Tiles()
    down, right = shards or (1, 1)
    stack, m, n = x.shape
    if m % (down * tiles.side) or n % (right * tiles.depth):
        raise ValueError(f"no tiles {tiles} for {x.shape} in {down} x {right} shards")
    if columns is not None and (shards or n < columns and n % tiles.side):
        raise ValueError(f"no tiles {tiles} for panels {x.shape}, shards {shards}")
    across = right * -(-(columns or n) // right // tiles.side)
    output_tiles = across * (m // tiles.side)
    members, each = _check_fit(x, members, columns, len(p))
    work = Work(members, each, output_tiles, m // tiles.depth, addends=1, plain=True)
    shape = (down * right * stack, m // down, n // right)
    # Pass as many addends as ``product`` does: if all shapes are equal, one kernel then
    # serves both functions.
    addends = (x,) * ADDENDS
    out = _call(
        jnp.ones(1 + ADDENDS, jnp.float32), work, p, x, *addends, shape=shape,
        cut=(down, right), tiles=tiles, how=interpret,
    )  # fmt: skip
    return out.reshape(down, right, stack, m // down, n // right) if shards else out


def panels(n: int, columns: int | None) -> int:
    """How many panels of n columns a matrix of ``columns`` takes; 1 if that is None."""
    return 1 if columns is None else -(-columns // n)


def _check_fit(
    stack: jax.Array, members: int | None, columns: int | None, beside: int
) -> tuple[int, int]:
    """Returns how many members are multiplied, and how many panels each has.

    Raises:
      ValueError: there are more members than fit the stack, or than fit the other
        stack, of ``beside`` matrices.
    """
    each = panels(stack.shape[-1], columns)
    most = min(len(stack) // each, beside)
    members = most if members is None else members
    if not members <= most or most == 0 != len(stack):
        raise ValueError(
            f"{members} matrices of {each} panels do not fit stacks of {len(stack)} and"
            f" {beside}"
        )
    return members, each


def _call(
    factors: jax.Array, work: Work, *operands: jax.Array, tiles: Tiles, **options: Any
) -> jax.Array:
    _require_jax()
    # Import Pallas only where a kernel is used: the import takes a second, and fails
    # where JAX comes without Pallas. Do it before the kernel is traced: during tracing,
    # the import would make JAX forget the trace and lower the kernel twice.
    from muon2_optax.kernels import mosaic

    return mosaic.launch(
        factors, jnp.asarray(work, jnp.int32), *operands,
        tiles=tiles, clusters=clusters(tiles), **options,
    )  # fmt: skip


def _require_jax() -> None:
    """Refuses versions of JAX whose Pallas lacks what the kernel takes.

    Raises:
      RuntimeError: it names the version that is needed.
    """
    if jax.__version_info__ < OLDEST_JAX:
        oldest = ".".join(map(str, OLDEST_JAX))
        raise RuntimeError(
            f"the kernels for Hopper GPUs need JAX {oldest} or later, and this is"
            f" {jax.__version__}: update JAX, or leave out"
            " muon2_optax.kernels.hopper.kernels(True)"
        )


def clusters(tiles: Tiles) -> int:
    """How many clusters of thread blocks run at once."""
    return _processors() // tiles.cluster


def _processors() -> int:
    """The number of the GPU's multiprocessors; without a GPU, that of an H100."""
    device = jax.devices()[0]
    return getattr(device, "core_count", 0) if device.platform == "gpu" else 132
