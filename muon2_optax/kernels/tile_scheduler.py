"""Says which output tiles each cluster of the kernel computes, and in which order."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from muon2_optax.kernels.tiles import Tiles, Work


class OutputTile(NamedTuple):
    """A thread block's part of an output tile, which is a square of the result.

    Attributes:
      a: the first panel of A that it takes, and its first row there.
      b: the first panel of B that it takes, and its first column there, or its first
        row of a transposed B.
      place: its place in the addends: matrix, row and column.
      target: its place in the result.
      mirrored: whether it is stored twice.
    """

    a: tuple[Any, Any]
    b: tuple[Any, Any]
    place: tuple[Any, Any, Any]
    target: tuple[Any, Any, Any]
    mirrored: Any


@dataclasses.dataclass(frozen=True)
class TileScheduler:
    """Deals the output tiles of all members of a stack out to the clusters in turn.

    Attributes:
      work: how much there is to do.
      shapes: the shapes of A, B and the result.
      tiles: how the kernel cuts its work.
      cut: into how many shards a result is cut, along rows and columns.
    """

    work: Work
    shapes: tuple[tuple[int, int, int], ...]
    tiles: Tiles
    cut: tuple[int, int]

    def each(self, run: Callable[[OutputTile, Any], None]) -> None:
        """Calls ``run(tile, before)`` for each tile of this cluster.

        ``before`` is the number of steps that the tiles before it take.
        """
        total = self.work.members * self.work.output_tiles

        @plgpu.nd_loop((total,), collective_axes="clusters")
        def _(loop: Any) -> None:
            run(self._tile(loop.index[0]), loop.local_index * self.work.steps)

    def _tile(self, index: Any) -> OutputTile:
        member, index = (
            lax.div(index, self.work.output_tiles),
            lax.rem(index, self.work.output_tiles),
        )
        choices = self._plain(member, index), self._symmetric(member, index)
        return jax.tree.map(lambda *of: lax.select(self.work.plain, *of), *choices)

    def _top(self, i: Any) -> Any:
        """The first row of this thread block's part of the i-th row of tiles."""
        return i * self.tiles.side + lax.axis_index("part") * self.tiles.rows

    def _symmetric(self, member: Any, index: Any) -> OutputTile:
        i, j = triangle(index, self.shapes[0][1] // self.tiles.side)
        place = member, self._top(i), j * self.tiles.side
        first = member * self.work.panels
        return OutputTile((first, place[1]), (first, place[2]), place, place, i != j)

    def _plain(self, member: Any, index: Any) -> OutputTile:
        """The tile of A B with this index.

        Tiles are taken column by column, because those of a column share their columns
        of B. Every panel and shard begins with a new tile. The last tiles of a shard
        may reach into the next one, but copies end where the shard does.
        """
        rows = self.shapes[0][1] // self.tiles.side
        top, j = self._top(lax.rem(index, rows)), lax.div(index, rows)
        _, m, n = self.shapes[2]
        width = pl.cdiv(n, self.tiles.side)
        right, left = lax.div(j, width), lax.rem(j, width) * self.tiles.side
        if self.cut == (1, 1):
            source = target = member * self.work.panels + right, top, left
        else:
            shard = lax.div(top, m) * self.cut[1] + right
            target = shard * self.shapes[1][0] + member, lax.rem(top, m), left
            source = member, top, right * n + left
        return OutputTile((member, top), (source[0], source[2]), source, target, j < 0)


def triangle(index: Any, count: int) -> tuple[Any, Any]:
    """The row and column of the element of a lower triangle with this index.

    The triangle is folded into a rectangle, so that integer divisions suffice and no
    square root is needed.
    """
    half = (count + 1) // 2
    even = 1 - count % 2
    row, column = lax.div(index, half), lax.rem(index, half)
    below = row >= column + even
    return (
        lax.select(below, row - even, half + column - (1 - even)),
        lax.select(below, column, half + row),
    )
