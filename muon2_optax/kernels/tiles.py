"""How the kernel for symmetric products cuts its work, and how much there is."""

import dataclasses
from typing import Any, NamedTuple


class Work(NamedTuple):
    """What the kernel learns at run time, so that one kernel serves all; int32 each.

    Attributes:
      members: how many matrices of the stacks are computed.
      panels: how many panels each of them has.
      output_tiles: how many tiles of each result are computed.
      steps: how many steps along the columns of A an output tile takes.
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
      rows: the rows of a thread block's part of an output tile.
      side: the rows and columns of an output tile. A cluster of side / rows thread
        blocks computes it, and reads their common columns of B once.
      depth: how many columns of A and B a stage of the pipeline holds.
      stages: how many stages there are.
      delay: how many products of a warpgroup may still run when it frees a stage.
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
