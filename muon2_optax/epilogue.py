"""What the kernel in ``mosaic`` does with a tile once it is multiplied."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

# Side of the blocks in which a tile leaves: 64 columns of 16 bits are the 128 bytes of
# the widest swizzle.
BLOCK = 64


@dataclasses.dataclass
class Epilogue:
    """Scales a warpgroup's tile, adds, and stores it and its mirror image in blocks."""

    factors: Any
    addends: Any  # how many of c_hbm are added
    c_hbm: Sequence[Any]
    out_hbm: Any
    blocks: Any
    mirror: Any
    arrived: Any
    group: Any
    place: tuple[Any, Any, Any]  # of the tile in the addends: member, row, column
    target: tuple[Any, Any, Any]  # and in the result
    shape: tuple[int, int]

    def _window(self, hbm: Any, n: int, tile: Any, mirrored: bool = False) -> Any:
        """The n-th block of a tile."""
        row, column = divmod(n, self.shape[1] // BLOCK)
        row, column = tile[1] + row * BLOCK, tile[2] + column * BLOCK
        row, column = (column, row) if mirrored else (row, column)
        return hbm.at[tile[0], pl.ds(row, BLOCK), pl.ds(column, BLOCK)]

    def _fetch(self, n: int) -> None:
        for which, source in enumerate(self.c_hbm):

            @pl.when(which < self.addends)
            def _() -> None:
                plgpu.copy_gmem_to_smem(
                    self._window(source, n, self.place),  # noqa: B023
                    self.blocks.at[n % 2, which],  # noqa: B023
                    self._barrier(n, which),  # noqa: B023
                )

    def _barrier(self, n: int, which: Any) -> Any:
        return self.arrived.at[4 * which + self.group * 2 + n % 2]

    def _sum(self, piece: Any, n: int) -> Any:
        """The n-th block with its parts of the addends.

        A loop, though there are few: written out, it takes a tenth longer to compile.
        """

        def plus(which: Any, piece: Any) -> Any:
            plgpu.barrier_wait(self._barrier(n, which))
            beta = self.factors[-1]
            for i in reversed(range(len(self.c_hbm) - 1)):
                beta = lax.select(which == i, self.factors[1 + i], beta)
            return piece + beta * self.blocks[n % 2, which].astype(jnp.float32)

        return lax.fori_loop(0, self.addends, plus, piece)

    def start(self) -> None:
        """Asks for the first addends; they arrive while the tile is multiplied."""
        if self.c_hbm:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._fetch(0)
            self._fetch(1)

    def store(self, value: Any, off_diagonal: Any) -> None:
        blocks = self.shape[0] * self.shape[1] // BLOCK**2
        for n in range(blocks):
            row, column = divmod(n * BLOCK, self.shape[1])
            row *= BLOCK
            piece = value[row : row + BLOCK, column : column + BLOCK] * self.factors[0]
            if self.c_hbm:
                piece = self._sum(piece, n)
            piece = piece.astype(self.out_hbm.dtype)
            # There is one buffer for mirrors: the last block must have left it.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if self.c_hbm and 0 < n < blocks - 1:
                self._fetch(n + 1)
            self.blocks[n % 2, 0] = piece
            if off_diagonal is not None:
                self.mirror.T[...] = piece
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                self.blocks.at[n % 2, 0],
                self._window(self.out_hbm, n, self.target),
                commit_group=False,
            )

            if off_diagonal is not None:

                @pl.when(off_diagonal)
                def _() -> None:
                    plgpu.copy_smem_to_gmem(
                        self.mirror,
                        self._window(self.out_hbm, n, self.target, mirrored=True),  # noqa: B023
                        commit_group=False,
                    )

            plgpu.commit_smem_to_gmem_group()
