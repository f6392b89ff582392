"""How the symmetric products' kernel cuts its work, and how much there is."""

import dataclasses
from typing import Any, NamedTuple


class Work(NamedTuple):
    """What the kernel learns at run time, so that one serves all: int32 each.

    Attributes:
      members: of the stacks, those that are computed.
      panels: of each member in stacks that are kept in panels.
      squares: of each member's result, those that are computed.
      steps: along the columns of A, for each square.
      addends: how many matrices are added.
      plain: whether the product is A B, not the symmetric A B^T.
    """

    members: Any
    panels: Any
    squares: Any
    steps: Any
    addends: Any
    plain: Any


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the kernel cuts its work.

    Attributes:
      rows: rows of a thread block's tile.
      side: rows and columns of a cluster's square, and columns of a block's tile; the
        cluster has side / rows blocks, which read their common columns once.
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

    def squares(self, m: int) -> int:
        """Of the lower triangle of an (m, m) matrix."""
        rows = m // self.side
        return rows * (rows + 1) // 2
