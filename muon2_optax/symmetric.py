"""Products of stacks that are known to be symmetric, on NVIDIA Hopper.

``alpha A B^T + beta C + ...`` where the result is symmetric: A B^T with A = B, or with
A and B symmetric matrices that commute. Only the tiles of the lower triangle are
computed, and each is stored twice: half the operations of a plain product. No library
that XLA calls has this product for stacks of 16-bit matrices, so it is a Pallas kernel.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the kernel cuts its work.

    Attributes:
      rows: rows of a thread block's tile.
      side: rows and columns of a cluster's square, and columns of a block's tile; the
        cluster has side / rows blocks, which read their common columns once.
      depth: columns of A and B per stage of the pipeline.
      stages: stages in flight.
      split: whether the two warpgroups share a tile by "rows" or by "columns".
    """

    rows: int = 128
    side: int = 256
    depth: int = 64
    stages: int = 3
    split: str = "rows"
    delay: int = 0

    @property
    def cluster(self) -> int:
        return self.side // self.rows


# Side of the blocks in which a tile leaves: 64 columns of 16 bits are the 128 bytes of
# the widest swizzle.
BLOCK = 64


def product(
    a: jax.Array,
    b: jax.Array,
    *addends: tuple[float, jax.Array],
    alpha: float = 1.0,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """``alpha A B^T + sum of beta C``, symmetric, for stacks of 16-bit matrices.

    Args:
      a: (L, m, k), float16 or bfloat16, k a multiple of 64.
      b: (L, m, k); A B^T must be symmetric.
      *addends: pairs (beta, C) with C symmetric, (L, m, m).
      alpha: factor of the product.
      tiles: m must be a multiple of ``tiles.side``.
      interpret: ``pallas.mosaic_gpu.InterpretGPUParams()`` runs it on a CPU.

    Returns:
      (L, m, m) in the dtype of ``a``; accumulated, scaled and added in float32.
    """
    tiles = tiles or Tiles()
    if a.shape[1] % tiles.side or a.shape[2] % tiles.depth or b.shape != a.shape:
        raise ValueError(f"no tiles {tiles} for {a.shape} and {b.shape}")
    # The factors are an operand: one compiled kernel serves every step of a schedule.
    factors = jnp.asarray([alpha, *(beta for beta, _ in addends)], jnp.float32)
    return _call(factors, a, b, *(c for _, c in addends), tiles=tiles, how=interpret)


def added(
    p: jax.Array, x: jax.Array, *, tiles: Tiles | None = None, interpret: Any = None
) -> jax.Array:
    """``X + P X`` for P (L, m, m), not symmetric: the sum costs no pass of its own.

    XLA's choice among its products leaves the sum out of them where P comes from a
    kernel.
    """
    tiles = tiles or Tiles()
    one = jnp.ones(2, jnp.float32)
    return _call(one, p, x, x, tiles=tiles, how=interpret, full=True)


@functools.partial(jax.jit, static_argnames=("tiles", "how", "full"))
def _call(
    factors: jax.Array,
    *operands: jax.Array,
    tiles: Tiles,
    how: Any,
    full: bool = False,
) -> jax.Array:
    import jax.experimental.pallas.mosaic_gpu as plgpu

    stack, m, _ = operands[0].shape
    n = operands[1].shape[-1] if full else m
    kernel = plgpu.kernel(
        functools.partial(_kernel, tiles=tiles, full=full),
        out_type=jax.ShapeDtypeStruct((stack, m, n), operands[0].dtype),
        grid=(_processors() // tiles.cluster,),
        grid_names=("clusters",),
        cluster=(tiles.cluster,),
        cluster_names=("part",),
        # Two warpgroups multiply, a third one feeds them.
        num_threads=3,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **({} if how is None else {"interpret": how}),
    )
    return kernel(factors, *operands)


def _processors() -> int:
    """Multiprocessors of the GPU at hand, or of an H100 where there is none."""
    device = jax.devices()[0]
    return getattr(device, "core_count", 0) if device.platform == "gpu" else 132


def _triangle(index: Any, count: int) -> tuple[Any, Any]:
    """Row and column of a lower triangle's element, from its number.

    The triangle is folded into a rectangle: integer divisions, no square root.
    """
    half = (count + 1) // 2
    even = 1 - count % 2
    row, column = lax.div(index, half), lax.rem(index, half)
    below = row >= column + even
    return (
        lax.select(below, row - even, half + column - (1 - even)),
        lax.select(below, column, half + row),
    )


def _kernel(
    factors: Any, a_hbm: Any, b_hbm: Any, *rest: Any, tiles: Tiles, full: bool
) -> None:
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    *c_hbm, out_hbm = rest
    stack, m, k = a_hbm.shape
    count = m // tiles.side
    squares = count * (count + 1) // 2
    if full:
        squares = count * pl.cdiv(out_hbm.shape[2], tiles.side)
    by_rows = tiles.split == "rows"
    rows = tiles.rows // 2 if by_rows else tiles.rows
    columns = tiles.side if by_rows else tiles.side // 2
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    group, part = lax.axis_index("group"), lax.axis_index("part")
    mine = pl.ds(group * (rows if by_rows else columns), rows if by_rows else columns)

    def pipeline(body: Any, context: Any) -> Any:
        spec = functools.partial(
            plgpu.BlockSpec,
            transforms=swizzled,
            memory_space=plgpu.SMEM,
            delay_release=tiles.delay,
        )
        shared = ("part",) if tiles.cluster > 1 else ()
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(k // tiles.depth,),
            memory_registers=40,
            in_specs=[
                spec((tiles.rows, tiles.depth), lambda step: (0, step)),
                spec(
                    (tiles.depth, tiles.side) if full else (tiles.side, tiles.depth),
                    lambda step: (step, 0) if full else (0, step),
                    collective_axes=shared,
                ),
            ],
            wg_axis="group",
            num_compute_wgs=2,
            max_concurrent_steps=tiles.stages,
            compute_context=context,
        )

    def scope(allocations: Any, blocks: Any, mirrors: Any, arrived: Any) -> None:
        block, mirror = blocks.at[group], mirrors.at[group]

        @plgpu.nd_loop((stack * squares,), collective_axes="clusters")
        def _(loop: Any) -> None:
            (index,) = loop.index
            member = lax.div(index, squares)
            square = lax.rem(index, squares)
            if full:
                # A column of squares at a time: they share their columns of X.
                i, j = lax.rem(square, count), lax.div(square, count)
            else:
                i, j = _triangle(square, count)
            top, left = i * tiles.side + part * tiles.rows, j * tiles.side

            def context(multiply: Any) -> None:
                place = (
                    member,
                    top + (group * rows if by_rows else 0),
                    left + (0 if by_rows else group * columns),
                )

                def finish(acc: Any) -> None:
                    shape = (rows, columns)
                    epilogue = _Epilogue(
                        factors, c_hbm, out_hbm, block, mirror, arrived, group, place,
                        shape,
                    )  # fmt: skip
                    epilogue.start()
                    multiply(acc)
                    epilogue.store(acc[...], None if full else i != j)

                pl.run_scoped(finish, plgpu.ACC((rows, columns), jnp.float32))

            def body(_: Any, a: Any, b: Any, acc: Any) -> Any:
                b = b if full else b.T
                a, b = (a.at[mine], b) if by_rows else (a, b.at[:, mine])
                plgpu.wgmma(acc, a, b)
                plgpu.wgmma_wait(tiles.delay)
                return acc

            pipeline(body, context)(
                a_hbm.at[member, pl.ds(top, tiles.rows), :],
                b_hbm.at[member, :, pl.ds(left, tiles.side)]
                if full
                else b_hbm.at[member, pl.ds(left, tiles.side), :],
                allocations=allocations,
            )

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    addends = max(1, len(c_hbm))
    pl.run_scoped(
        scope,
        allocations=pipeline(_ignore, _ignore).get_allocations(
            a_hbm.at[0], b_hbm.at[0]
        ),
        blocks=plgpu.SMEM(
            (2, 2, addends, BLOCK, BLOCK), out_hbm.dtype, transforms=swizzled
        ),
        mirrors=plgpu.SMEM((2, BLOCK, BLOCK), out_hbm.dtype, transforms=swizzled),
        arrived=plgpu.Barrier(num_arrivals=addends, num_barriers=4),
        collective_axes="group",
    )


def _ignore(*_: Any) -> None:
    """Stands for the bodies where only a pipeline's buffers are asked for."""


@dataclasses.dataclass
class _Epilogue:
    """Scales a warpgroup's tile, adds, and stores it and its mirror image in blocks."""

    factors: Any
    c_hbm: Sequence[Any]
    out_hbm: Any
    blocks: Any
    mirror: Any
    arrived: Any
    group: Any
    place: tuple[Any, Any, Any]
    shape: tuple[int, int]

    def _at(self, n: int) -> tuple[Any, Any]:
        """Row and column in its matrix of the n-th block."""
        row, column = divmod(n, self.shape[1] // BLOCK)
        return self.place[1] + row * BLOCK, self.place[2] + column * BLOCK

    def _window(self, hbm: Any, row: Any, column: Any) -> Any:
        import jax.experimental.pallas as pl

        return hbm.at[self.place[0], pl.ds(row, BLOCK), pl.ds(column, BLOCK)]

    def _fetch(self, n: int) -> None:
        import jax.experimental.pallas.mosaic_gpu as plgpu

        for which, source in enumerate(self.c_hbm):
            plgpu.copy_gmem_to_smem(
                self._window(source, *self._at(n)),
                self.blocks.at[n % 2, which],
                self.arrived.at[self.group * 2 + n % 2],
            )

    def start(self) -> None:
        """Asks for the first addends; they arrive while the tile is multiplied."""
        import jax.experimental.pallas.mosaic_gpu as plgpu

        if self.c_hbm:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._fetch(0)
            self._fetch(1)

    def store(self, value: Any, off_diagonal: Any) -> None:
        import jax.experimental.pallas as pl
        import jax.experimental.pallas.mosaic_gpu as plgpu

        blocks = self.shape[0] * self.shape[1] // BLOCK**2
        for n in range(blocks):
            row, column = divmod(n * BLOCK, self.shape[1])
            row *= BLOCK
            piece = value[row : row + BLOCK, column : column + BLOCK] * self.factors[0]
            if self.c_hbm:
                plgpu.barrier_wait(self.arrived.at[self.group * 2 + n % 2])
            for which in range(len(self.c_hbm)):
                addend = self.blocks[n % 2, which].astype(jnp.float32)
                piece = piece + self.factors[1 + which] * addend
            piece = piece.astype(self.out_hbm.dtype)
            # There is one buffer for mirrors: the last block must have left it.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if self.c_hbm and 0 < n < blocks - 1:
                self._fetch(n + 1)
            self.blocks[n % 2, 0] = piece
            if off_diagonal is not None:
                self.mirror.T[...] = piece
            plgpu.commit_smem()
            row, column = self._at(n)
            plgpu.copy_smem_to_gmem(
                self.blocks.at[n % 2, 0],
                self._window(self.out_hbm, row, column),
                commit_group=False,
            )

            if off_diagonal is not None:

                @pl.when(off_diagonal)
                def _() -> None:
                    plgpu.copy_smem_to_gmem(
                        self.mirror,
                        self._window(self.out_hbm, column, row),  # noqa: B023
                        commit_group=False,
                    )

            plgpu.commit_smem_to_gmem_group()
