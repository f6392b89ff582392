"""How the symmetric products' kernel cuts its work."""

import dataclasses


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

    def squares(self, m: int) -> int:
        """Of the lower triangle of an (m, m) matrix."""
        rows = m // self.side
        return rows * (rows + 1) // 2
