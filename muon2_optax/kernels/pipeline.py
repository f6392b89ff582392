"""Brings tiles of A and B to the warpgroups that multiply them, for ``mosaic``.

A pipeline of Pallas copies tiles of one shape only to a place in shared memory. This
one copies tiles of either of two shapes, those of a transposed B or those of a plain B,
so that one kernel serves both products.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from muon2_optax.kernels.tile_scheduler import OutputTile
from muon2_optax.kernels.tiles import Tiles, Work

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
# How many warpgroups multiply. One more feeds them.
MULTIPLY = 2


def buffers(tiles: Tiles, dtype: Any) -> list[Any]:
    """The first four attributes of a ``Pipeline``."""

    def tile(*shape: int) -> Any:
        return plgpu.SMEM((tiles.stages, *shape), dtype, transforms=SWIZZLED)

    each = {"num_barriers": tiles.stages, "num_arrivals": MULTIPLY}
    if tiles.cluster > 1:
        freed = plgpu.ClusterBarrier(collective_axes=("part",), **each)
    else:
        freed = plgpu.Barrier(**each)
    return [
        tile(tiles.rows, tiles.depth),
        plgpu.RefUnion(tile(tiles.side, tiles.depth), tile(tiles.depth, tiles.side)),
        plgpu.Barrier(num_barriers=tiles.stages, num_arrivals=2),
        freed,
    ]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Stages in shared memory that are filled, multiplied and freed in turn.

    Attributes:
      a: tiles of A, (stages, rows, depth).
      b: tiles of a transposed B, (stages, side, depth), and in the same place those of
        a plain B, (stages, depth, side).
      filled: one barrier for each stage, where the two copies to it arrive.
      freed: one barrier for each stage, where all warpgroups arrive that have
        multiplied it; those of the whole cluster, because each of its thread blocks
        copies its part of B to all.
    """

    a: Any
    b: Any
    filled: Any
    freed: Any
    tiles: Tiles
    work: Work

    def _stage(self, step: Any) -> Any:
        return lax.rem(step, self.tiles.stages)

    def _free(self, step: Any) -> None:
        plgpu.barrier_arrive(self.freed.at[self._stage(step)])

    def open(self) -> None:
        """Declares all stages free; called once by each warpgroup that multiplies."""
        for stage in range(self.tiles.stages):
            self._free(stage)

    def close(self) -> None:
        """Waits until all stages are free; called by the warpgroup that feeds.

        A thread block must not end while another one of the cluster may still arrive at
        its barriers.
        """
        for stage in range(self.tiles.stages):
            plgpu.barrier_wait(self.freed.at[stage])

    def feed(self, tile: OutputTile, before: Any, a_hbm: Any, b_hbm: Any) -> None:
        """Copies what an output tile needs, after ``before`` steps of other tiles."""
        transposed, plain = self.b
        rows = pl.ds(tile.a[1], self.tiles.rows)
        columns = pl.ds(tile.b[1], self.tiles.side)
        shared = "part" if self.tiles.cluster > 1 else None

        def step(k: Any, _: Any) -> None:
            stage = self._stage(before + k)
            panel, depth = self._along(k, a_hbm.shape[2])
            plgpu.barrier_wait(self.freed.at[stage])

            def copy(source: Any, goal: Any, shared: Any = None) -> None:
                plgpu.copy_gmem_to_smem(
                    source, goal.at[stage], self.filled.at[stage],
                    collective_axes=shared,
                )  # fmt: skip

            copy(a_hbm.at[tile.a[0] + panel, rows, depth], self.a)
            lax.cond(
                self.work.plain,
                lambda: copy(b_hbm.at[tile.b[0], depth, columns], plain, shared),
                lambda: copy(
                    b_hbm.at[tile.b[0] + panel, columns, depth], transposed, shared
                ),
            )

        lax.fori_loop(0, self.work.steps, step, None)

    def _along(self, step: Any, width: int) -> tuple[Any, Any]:
        """The panel, of ``width`` columns, that a step takes, and its columns there."""
        each = width // self.tiles.depth
        start = lax.rem(step, each) * self.tiles.depth
        return lax.div(step, each), pl.ds(start, self.tiles.depth)

    def multiply(self, before: Any, acc: Any, rows: Any) -> None:
        """Adds a tile's product to ``acc``, for these rows of the thread block."""
        transposed, plain = self.b
        lax.cond(
            self.work.plain,
            lambda: self._multiply(before, acc, rows, lambda stage: plain.at[stage]),
            lambda: self._multiply(
                before, acc, rows, lambda stage: transposed.at[stage].T
            ),
        )

    def _multiply(
        self, before: Any, acc: Any, rows: Any, b_at: Callable[[Any], Any]
    ) -> None:
        delay = self.tiles.delay

        def step(k: Any, _: Any) -> None:
            stage = self._stage(before + k)
            plgpu.barrier_wait(self.filled.at[stage])
            plgpu.wgmma(acc, self.a.at[stage, rows], b_at(stage))
            plgpu.wgmma_wait(delay)
            if delay:
                pl.when(k >= delay)(lambda: self._free(before + k - delay))
            else:
                self._free(before + k)

        lax.fori_loop(0, self.work.steps, step, None)
        plgpu.wgmma_wait(0)
        for late in range(delay):
            last = before + self.work.steps - 1 - late
            pl.when(self.work.steps > late)(lambda: self._free(last))  # noqa: B023
