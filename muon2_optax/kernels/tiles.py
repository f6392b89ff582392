"""How the symmetric products' kernel cuts its work, and how much there is."""

import dataclasses
from typing import Any, NamedTuple


class Work(NamedTuple):
    """What the kernel learns at run time, so that one serves all: int32 each.

    Attributes:
      members: of the stacks, those that are computed.
      panels: of each member in stacks that are kept in panels.
      output_tiles: of each member's result, those that are computed.
      steps: along the columns of A, for each output tile.
      addends: how many matrices are added.
      plain: whether the product is A B, not the symmetric A B^T.
    """

    members: Any
    panels: Any
    output_tiles: Any
    steps: Any
    addends: Any
    plain: Any


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the kernel cuts its work.

    Attributes:
      rows: rows of a thread block's part of an output tile.
      side: rows and columns of an output tile, which a cluster of side / rows thread
        blocks computes; they read their common columns once.
      depth: columns of A and B per stage of the pipeline.
      stages: stages in flight.
      delay: products of a warpgroup that may still run when it asks for more tiles.
    """

    rows: int = 128
    side: int = 256
    depth: int = 64
    stages: int = 3
    delay: int = 0

    @property
    def cluster(self) -> int:
        return self.side // self.rows

    def triangle_tiles(self, m: int) -> int:
        """How many output tiles the lower triangle of an (m, m) matrix has."""
        rows = m // self.side
        return rows * (rows + 1) // 2
