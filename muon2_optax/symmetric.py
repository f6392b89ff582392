"""Products of stacks that are known to be symmetric, on NVIDIA Hopper.

``alpha A B^T + beta C + ...`` where the result is symmetric: A B^T with A = B, or with A
and B symmetric matrices that commute. Only the tiles of the lower triangle are computed,
and each is stored twice: half the operations of a plain product. No library that XLA
calls has this product for stacks of 16-bit matrices, so it is a Pallas kernel.
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
      a: (L, m, k), float16 or bfloat16.
      b: (L, m, k); A B^T must be symmetric.
      *addends: pairs (beta, C) with C symmetric, (L, m, m).
      alpha: factor of the product.
      tiles: m must be a multiple of ``tiles.side``.
      interpret: ``pallas.mosaic_gpu.InterpretGPUParams()`` runs it on a CPU.

    Returns:
      (L, m, m) in the dtype of ``a``; accumulated, scaled and added in float32.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu

    tiles = tiles or Tiles()
    stack, m, k = a.shape
    if m % tiles.side or b.shape != a.shape:
        raise ValueError(f"no tiles of {tiles.side} for {a.shape} and {b.shape}")
    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            tiles=tiles,
            stack=stack,
            alpha=alpha,
            betas=[beta for beta, _ in addends],
        ),
        out_type=jax.ShapeDtypeStruct((stack * m, m), a.dtype),
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
        **({} if interpret is None else {"interpret": interpret}),
    )
    flat = [x.reshape(stack * m, -1) for x in (a, b, *(c for _, c in addends))]
    return kernel(*flat).reshape(stack, m, m)


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
    a_hbm: Any,
    b_hbm: Any,
    *rest: Any,
    tiles: Tiles,
    stack: int,
    alpha: float,
    betas: Sequence[float],
) -> None:
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    *c_hbm, out_hbm = rest
    m, k = a_hbm.shape[0] // stack, a_hbm.shape[1]
    count = m // tiles.side
    squares = count * (count + 1) // 2
    by_rows = tiles.split == "rows"
    rows = tiles.rows // 2 if by_rows else tiles.rows
    columns = tiles.side if by_rows else tiles.side // 2
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    group, part = lax.axis_index("group"), lax.axis_index("part")
    mine = pl.ds(group * (rows if by_rows else columns), rows if by_rows else columns)

    def pipeline(body: Any, context: Any) -> Any:
        spec = functools.partial(
            plgpu.BlockSpec,
            index_map=lambda step: (0, step),
            transforms=swizzled,
            memory_space=plgpu.SMEM,
            delay_release=tiles.delay,
        )
        shared = ("part",) if tiles.cluster > 1 else ()
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(pl.cdiv(k, tiles.depth),),
            memory_registers=40,
            in_specs=[
                spec((tiles.rows, tiles.depth)),
                spec((tiles.side, tiles.depth), collective_axes=shared),
            ],
            wg_axis="group",
            num_compute_wgs=2,
            max_concurrent_steps=tiles.stages,
            compute_context=context,
        )

    def scope(allocations: Any, blocks: Any, mirrors: Any, arrived: Any) -> None:
        @plgpu.nd_loop((stack * squares,), collective_axes="clusters")
        def _(loop: Any) -> None:
            (index,) = loop.index
            member = lax.div(index, squares)
            i, j = _triangle(lax.rem(index, squares), count)
            top = i * tiles.side + part * tiles.rows
            left = j * tiles.side
            base = member * m

            def context(multiply: Any) -> None:
                def finish(acc: Any) -> None:
                    multiply(acc)
                    value = acc[...]
                    _store(
                        plgpu, pl, value, alpha, betas, c_hbm, out_hbm, blocks,
                        mirrors, arrived, group, base,
                        top + (group * rows if by_rows else 0),
                        left + (0 if by_rows else group * columns),
                        i != j,
                    )  # fmt: skip

                pl.run_scoped(finish, plgpu.ACC((rows, columns), jnp.float32))

            def body(_: Any, a: Any, b: Any, acc: Any) -> Any:
                a = a.at[mine] if by_rows else a
                b = b if by_rows else b.at[mine]
                plgpu.wgmma(acc, a, b.T)
                plgpu.wgmma_wait(tiles.delay)
                return acc

            pipeline(body, context)(
                a_hbm.at[pl.ds(base + top, tiles.rows), :],
                b_hbm.at[pl.ds(base + left, tiles.side), :],
                allocations=allocations,
            )

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    ignore = lambda *_: None  # noqa: E731
    pl.run_scoped(
        scope,
        allocations=pipeline(ignore, ignore).get_allocations(a_hbm, b_hbm),
        blocks=plgpu.SMEM(
            (2, 2, max(1, len(c_hbm)), BLOCK, BLOCK), out_hbm.dtype, transforms=swizzled
        ),
        mirrors=plgpu.SMEM((2, BLOCK, BLOCK), out_hbm.dtype, transforms=swizzled),
        arrived=plgpu.Barrier(num_arrivals=max(1, len(c_hbm)), num_barriers=4),
        collective_axes="group",
    )


def _store(
    plgpu: Any, pl: Any, value: Any, alpha: Any, betas: Any, c_hbm: Any, out_hbm: Any,
    blocks: Any, mirrors: Any, arrived: Any, group: Any, base: Any, top: Any, left: Any,
    off_diagonal: Any,
) -> None:  # fmt: skip
    rows, columns = value.shape
    pieces = [(r, c) for r in range(0, rows, BLOCK) for c in range(0, columns, BLOCK)]

    def fetch(n: int) -> None:
        r, c = pieces[n]
        for which, source in enumerate(c_hbm):
            plgpu.copy_gmem_to_smem(
                source.at[pl.ds(base + top + r, BLOCK), pl.ds(left + c, BLOCK)],
                blocks.at[group, n % 2, which],
                arrived.at[group * 2 + n % 2],
            )

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if betas:
        fetch(0)
        fetch(1)
    for n, (r, c) in enumerate(pieces):
        piece = value[r : r + BLOCK, c : c + BLOCK]
        if alpha != 1:
            piece = piece * alpha
        if betas:
            plgpu.barrier_wait(arrived.at[group * 2 + n % 2])
            for which, beta in enumerate(betas):
                addend = blocks[group, n % 2, which].astype(jnp.float32)
                piece = piece + (addend if beta == 1 else beta * addend)
        piece = piece.astype(out_hbm.dtype)
        # The mirror has one buffer; the last block's copies must have left it.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if betas and n > 0 and n + 1 < len(pieces):
            fetch(n + 1)
        blocks[group, n % 2, 0] = piece
        mirrors.at[group].T[...] = piece
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            blocks.at[group, n % 2, 0],
            out_hbm.at[pl.ds(base + top + r, BLOCK), pl.ds(left + c, BLOCK)],
            commit_group=False,
        )

        @pl.when(off_diagonal)
        def _() -> None:
            plgpu.copy_smem_to_gmem(
                mirrors.at[group],
                out_hbm.at[pl.ds(base + left + c, BLOCK), pl.ds(top + r, BLOCK)],
                commit_group=False,
            )

        plgpu.commit_smem_to_gmem_group()
