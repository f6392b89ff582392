"""The kernel of ``symmetric``, in Pallas for NVIDIA Hopper.

It is persistent: each cluster of thread blocks computes one output tile after another.
One of its warpgroups copies tiles of A and B to shared memory, two multiply them.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from muon2_optax.arrays.stacks import vary_like
from muon2_optax.kernels.epilogue import BLOCK, SEMANTICS, Epilogue
from muon2_optax.kernels.pipeline import MULTIPLY, SWIZZLED, Pipeline, buffers
from muon2_optax.kernels.tile_scheduler import OutputTile, TileScheduler
from muon2_optax.kernels.tiles import Tiles, Work

# Registers per thread. The warpgroup that copies needs few, and leaves the others to
# those that multiply.
FEEDS, MULTIPLIES = 40, 232


@functools.partial(
    jax.jit, static_argnames=("shape", "tiles", "clusters", "how", "cut")
)
def launch(
    factors: jax.Array,
    counts: jax.Array,
    *operands: jax.Array,
    shape: tuple[int, int, int],
    tiles: Tiles,
    clusters: int,
    how: Any,
    cut: tuple[int, int],
) -> jax.Array:
    """Runs the kernel: a symmetric product, or A B in the shards that ``cut`` says."""
    run = plgpu.kernel(
        functools.partial(kernel, tiles=tiles, cut=cut),
        out_type=jax.ShapeDtypeStruct(shape, operands[0].dtype),
        grid=(clusters,),
        grid_names=("clusters",),
        cluster=(tiles.cluster,),
        cluster_names=("part",),
        num_threads=MULTIPLY + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(lowering_semantics=SEMANTICS),
        **({} if how is None else {"interpret": how}),
    )
    # Indices in the kernel have 32 bits, also where Python's integers would have 64.
    with jax.enable_x64(False):
        return vary_like(run(factors, counts, *operands), *operands)


def kernel(
    factors: Any,
    counts: Any,
    a_hbm: Any,
    b_hbm: Any,
    *rest: Any,
    tiles: Tiles,
    cut: tuple[int, int],
) -> None:
    """Computes factors[0] A B^T plus factors[i] C for the i-th addend C of ``rest``.

    Or the same with A B, which is not symmetric, in ``cut`` shards along rows and
    columns: out_hbm is then (rows * columns * L, m / rows, n / columns). One kernel
    serves both, because a kernel takes long to compile; they differ in the tiles of B
    and in what is stored twice. ``counts`` are the fields of ``Work``.
    """
    *c_hbm, out_hbm = rest
    group = lax.axis_index("group")
    work = Work(*(counts[i] for i in range(len(Work._fields))))
    work = work._replace(plain=work.plain == 1)
    shapes = a_hbm.shape, b_hbm.shape, out_hbm.shape
    scheduler = TileScheduler(work, shapes, tiles, cut)
    most = max(1, len(c_hbm))
    share = tiles.rows // MULTIPLY, tiles.side
    rows = pl.ds(group * share[0], share[0])

    def scope(pipe: Any, blocks: Any, mirrors: Any, arrived: Any) -> None:
        pipeline = Pipeline(*pipe, tiles=tiles, work=work)

        def feed() -> None:
            plgpu.set_max_registers(FEEDS, action="decrease")
            scheduler.each(
                lambda tile, before: pipeline.feed(tile, before, a_hbm, b_hbm)
            )
            pipeline.close()

        def multiply() -> None:
            plgpu.set_max_registers(MULTIPLIES, action="increase")
            pipeline.open()
            scheduler.each(
                lambda tile, before: pl.run_scoped(
                    functools.partial(finish, tile, before),
                    plgpu.ACC(share, jnp.float32),
                )
            )
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def finish(tile: OutputTile, before: Any, acc: Any) -> None:
            place, target = (
                (at[0], at[1] + rows.start, at[2]) for at in (tile.place, tile.target)
            )
            epilogue = Epilogue(
                factors, work.addends, c_hbm, out_hbm, blocks.at[group],
                mirrors.at[group], arrived, group, place, target, share,
            )  # fmt: skip
            epilogue.start()
            pipeline.multiply(before, acc, rows)
            epilogue.store(acc[...], tile.mirrored)

        lax.cond(group < MULTIPLY, multiply, feed)

    def buffer(shape: tuple[int, ...]) -> Any:
        return plgpu.SMEM(shape, out_hbm.dtype, transforms=SWIZZLED)

    pl.run_scoped(
        scope,
        pipe=buffers(tiles, out_hbm.dtype),
        blocks=buffer((MULTIPLY, 2, most, BLOCK, BLOCK)),
        mirrors=buffer((MULTIPLY, BLOCK, BLOCK)),
        arrived=plgpu.Barrier(num_barriers=2 * MULTIPLY * most),
        collective_axes="group",
    )
