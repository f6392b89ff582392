"""The kernel of ``symmetric``, in Pallas for NVIDIA Hopper.

Persistent: each cluster of thread blocks takes every so many squares of the results.
One warpgroup copies tiles of A and B to shared memory, two multiply them.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from muon2_optax.epilogue import BLOCK, Epilogue
from muon2_optax.stacks import varying_like
from muon2_optax.tiles import Tiles

_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


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
    cut: tuple[int, int] | None = None,
) -> jax.Array:
    """The symmetric product, or A B in pieces where ``cut`` says in how many."""
    run = plgpu.kernel(
        functools.partial(kernel, tiles=tiles, cut=cut),
        out_type=jax.ShapeDtypeStruct(shape, operands[0].dtype),
        grid=(clusters,),
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
    # Its indices are of 32 bits, also where Python's integers would become 64.
    with jax.enable_x64(False):
        return varying_like(run(factors, counts, *operands), *operands)


def kernel(
    factors: Any,
    counts: Any,
    a_hbm: Any,
    b_hbm: Any,
    *rest: Any,
    tiles: Tiles,
    cut: tuple[int, int] | None,
) -> None:
    """A B^T times factors[0], and the first C of ``rest`` times theirs.

    Or A B, not symmetric, where ``cut`` says into how many pieces each result goes,
    along rows and columns: out_hbm is (rows * columns * L, m / rows, n / columns).

    ``counts``: members, panels of each, and of each member's A B^T the steps, of its
    A B the columns of squares; and how many C are added.
    """
    *c_hbm, out_hbm = rest
    full = cut is not None
    group = lax.axis_index("group")
    members, panels, across, addends = (counts[i] for i in range(4))
    rows = a_hbm.shape[1] // tiles.side
    squares = rows * across if full else tiles.squares(a_hbm.shape[1])
    steps = a_hbm.shape[2] // tiles.depth if full else across
    feed = functools.partial(_pipeline, tiles, full, steps, a_hbm.shape[2])
    shape, (down, right) = _share(tiles, group)
    # Read once, not for every block of every tile.
    factors = [factors[i] for i in range(1 + len(c_hbm))]
    mine = pl.ds(right, shape[1]) if tiles.split != "rows" else pl.ds(down, shape[0])

    def scope(allocations: Any, blocks: Any, mirrors: Any, arrived: Any) -> None:
        block, mirror = blocks.at[group], mirrors.at[group]

        @plgpu.nd_loop((members * squares,), collective_axes="clusters")
        def _(loop: Any) -> None:
            member, i, j = _square(loop.index[0], squares, rows, full)
            top = i * tiles.side + lax.axis_index("part") * tiles.rows
            first, source, left = member * panels, member, j * tiles.side
            goal = (member, top, left)
            if cut is not None:
                first, left, goal = _across(
                    member, panels, top, j, b_hbm, out_hbm, tiles, cut
                )
                source = first

            def context(multiply: Any) -> None:
                place = (source, top + down, left + right)
                target = (goal[0], goal[1] + down, goal[2] + right)

                def finish(acc: Any) -> None:
                    epilogue = Epilogue(
                        factors, addends, c_hbm, out_hbm, block, mirror, arrived, group,
                        place, target, shape,
                    )  # fmt: skip
                    epilogue.start()
                    multiply(acc)
                    epilogue.store(acc[...], None if full else i != j)

                pl.run_scoped(finish, plgpu.ACC(shape, jnp.float32))

            def body(_: Any, a: Any, b: Any, acc: Any) -> Any:
                b = b if full else b.T
                a, b = (a.at[mine], b) if tiles.split == "rows" else (a, b.at[:, mine])
                plgpu.wgmma(acc, a, b)
                plgpu.wgmma_wait(tiles.delay)
                return acc

            columns = pl.ds(left, tiles.side)
            feed((member if full else first, first), body, context)(
                a_hbm.at[:, pl.ds(top, tiles.rows), :],
                b_hbm.at[(slice(None), slice(None), columns) if full
                         else (slice(None), columns)],
                allocations=allocations,
            )  # fmt: skip

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    most = max(1, len(c_hbm))

    def buffer(shape: tuple[int, ...]) -> Any:
        return plgpu.SMEM(shape, out_hbm.dtype, transforms=_SWIZZLED)

    pl.run_scoped(
        scope,
        allocations=feed((0, 0), _ignore, _ignore).get_allocations(a_hbm, b_hbm),
        blocks=buffer((2, 2, most, BLOCK, BLOCK)),
        mirrors=buffer((2, BLOCK, BLOCK)),
        arrived=plgpu.Barrier(num_barriers=4 * most),
        collective_axes="group",
    )


def _ignore(*_: Any) -> None:
    """Stands for the bodies where only a pipeline's buffers are asked for."""


def _pipeline(
    tiles: Tiles,
    full: bool,
    steps: Any,
    width: int,
    first: tuple[Any, Any],
    body: Any,
    context: Any,
) -> Any:
    """Along the columns of A, from its panel ``first[0]`` on, and of B, or its rows."""
    spec = functools.partial(
        plgpu.BlockSpec,
        transforms=_SWIZZLED,
        memory_space=plgpu.SMEM,
        delay_release=tiles.delay,
    )
    shared = ("part",) if tiles.cluster > 1 else ()
    each = width // tiles.depth

    def along(panel: Any, step: Any) -> tuple[Any, Any, Any]:
        return panel + lax.div(step, each), 0, lax.rem(step, each)

    return plgpu.emit_pipeline_warp_specialized(
        body,
        grid=(steps,),
        memory_registers=40,
        in_specs=[
            spec((None, tiles.rows, tiles.depth), functools.partial(along, first[0])),
            spec(
                (None, tiles.depth, tiles.side), lambda step: (first[1], step, 0),
                collective_axes=shared,
            )
            if full
            else spec(
                (None, tiles.side, tiles.depth), functools.partial(along, first[1]),
                collective_axes=shared,
            ),
        ],
        wg_axis="group",
        num_compute_wgs=2,
        max_concurrent_steps=tiles.stages,
        compute_context=context,
    )  # fmt: skip


def _share(tiles: Tiles, group: Any) -> tuple[tuple[int, int], tuple[Any, Any]]:
    """Size of a warpgroup's part of its block's tile, and where it begins."""
    if tiles.split == "rows":
        return (tiles.rows // 2, tiles.side), (group * (tiles.rows // 2), 0)
    return (tiles.rows, tiles.side // 2), (0, group * (tiles.side // 2))


def _square(index: Any, squares: Any, rows: int, full: bool) -> tuple[Any, Any, Any]:
    """Member of the stack, row and column of the squares' ``index``-th."""
    member, square = lax.div(index, squares), lax.rem(index, squares)
    if full:
        # A column of squares at a time: they share their columns of X.
        return member, lax.rem(square, rows), lax.div(square, rows)
    return member, *triangle(square, rows)


def _across(
    member: Any,
    panels: Any,
    top: Any,
    j: Any,
    b_hbm: Any,
    out_hbm: Any,
    tiles: Tiles,
    cut: tuple[int, int],
) -> tuple[Any, Any, tuple[Any, Any, Any]]:
    """Where the j-th column of squares begins in B (panel, column) and in the result.

    Squares begin anew with every panel and piece. The last ones of a piece may reach
    into the next; copies end where the piece does.
    """
    _, m, n = out_hbm.shape
    each = pl.cdiv(n, tiles.side)
    right, column = lax.div(j, each), lax.rem(j, each) * tiles.side
    if cut == (1, 1):
        panel = member * panels + right
        return panel, column, (panel, top, column)
    piece = lax.div(top, m) * cut[1] + right
    goal = (piece * b_hbm.shape[0] + member, lax.rem(top, m), column)
    return member, right * n + column, goal


def triangle(index: Any, count: int) -> tuple[Any, Any]:
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
