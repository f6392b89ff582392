"""Scales, adds and stores the tiles that the kernel in ``mosaic`` has multiplied."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

# Tiles are stored in blocks of this side: 64 columns of 16 bits are the 128 bytes of
# the widest swizzle.
BLOCK = 64

# Left untyped: its signature is another one in JAX 0.10, where the kernel is not used.
_load: Any = plgpu.load


def _assign(ref: Any, value: Any) -> None:
    ref[...] = value


_put: Any = getattr(plgpu, "store", _assign)  # from JAX 0.12 on
# With lane semantics layouts are spelled out here, so that JAX need not look for them
# when it lowers the kernel. But before ``plgpu.store`` an assignment to shared memory
# would also read what it overwrites.
SEMANTICS = (
    plgpu.LoweringSemantics.Warpgroup
    if _put is _assign
    else plgpu.LoweringSemantics.Lane
)


@dataclasses.dataclass
class Epilogue:
    """Scales a warpgroup's tile, adds to it, and stores it and its mirror image.

    This is written out block after block, although that takes longer to lower; only the
    addends, whose number is known at run time, are in a loop. Registers cannot be
    indexed at run time, so a loop over blocks needs a block of registers beside those
    of the tile. The compiler of JAX 0.12 gives all threads equally many registers,
    which are too few for both: products waited for memory, and an optimizer's step took
    6 % longer.
    """

    # In global memory, and read only where they are used, because they take registers.
    factors: Any
    addends: Any  # how many of c_hbm are added
    c_hbm: Sequence[Any]
    out_hbm: Any
    # Two blocks for each addend, used in turn; the first addend's also for the result.
    blocks: Any
    mirror: Any
    arrived: Any
    group: Any
    place: tuple[Any, Any, Any]  # of the tile in the addends: member, row, column
    target: tuple[Any, Any, Any]  # of the tile in the result
    shape: tuple[int, int]

    def _corner(self, n: int) -> tuple[int, int]:
        """The row and column of a tile where its n-th block begins."""
        row, column = divmod(n, self.shape[1] // BLOCK)
        return row * BLOCK, column * BLOCK

    def _window(self, hbm: Any, n: int, tile: Any, mirrored: bool = False) -> Any:
        """The n-th block of a tile in global memory."""
        row, column = self._corner(n)
        row, column = tile[1] + row, tile[2] + column
        row, column = (column, row) if mirrored else (row, column)
        return hbm.at[tile[0], pl.ds(row, BLOCK), pl.ds(column, BLOCK)]

    def _barrier(self, n: int, which: Any) -> Any:
        return self.arrived.at[4 * which + self.group * 2 + n % 2]

    def _fetch(self, n: int) -> None:
        for which, source in enumerate(self.c_hbm):

            @pl.when(which < self.addends)
            def _() -> None:
                plgpu.copy_gmem_to_smem(
                    self._window(source, n, self.place),  # noqa: B023
                    self.blocks.at[n % 2, which],  # noqa: B023
                    self._barrier(n, which),  # noqa: B023
                )

    def _sum(self, piece: Any, n: int) -> Any:
        """Adds the addends to the n-th block."""

        def plus(which: Any, piece: Any) -> Any:
            beta = self.factors[1 + which]
            plgpu.barrier_wait(self._barrier(n, which))
            block = _load(self.blocks.at[n % 2, which], layout=plgpu.Layout.WGMMA)
            return piece + beta * block.astype(jnp.float32)

        return lax.fori_loop(0, self.addends, plus, piece)

    def start(self) -> None:
        """Requests the addends of the first two blocks, which arrive meanwhile."""
        if self.c_hbm:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for n in range(2):
                self._fetch(n)

    def store(self, tile: Any, mirrored: Any) -> None:
        """Stores a tile (``shape``), and its mirror image where ``mirrored``."""
        count = self.shape[0] * self.shape[1] // BLOCK**2
        alpha = self.factors[0]
        for n in range(count):
            row, column = self._corner(n)
            piece = tile[row : row + BLOCK, column : column + BLOCK] * alpha
            if self.c_hbm:
                piece = self._sum(piece, n)
            # There is one buffer for mirror images, so the last one must have left it.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if self.c_hbm and 0 < n < count - 1:
                self._fetch(n + 1)
            self._leave(n, piece.astype(self.out_hbm.dtype), mirrored)

    def _leave(self, n: int, piece: Any, mirrored: Any) -> None:
        """Sends the n-th block to the result, once or twice."""
        leaving = self.blocks.at[n % 2, 0]
        _put(leaving, piece)

        @pl.when(mirrored)
        def _() -> None:
            _put(self.mirror.T, piece)

        plgpu.commit_smem()
        target = self._window(self.out_hbm, n, self.target)
        plgpu.copy_smem_to_gmem(leaving, target, commit_group=False)

        @pl.when(mirrored)
        def _() -> None:
            twin = self._window(self.out_hbm, n, self.target, mirrored=True)
            plgpu.copy_smem_to_gmem(self.mirror, twin, commit_group=False)

        plgpu.commit_smem_to_gmem_group()
