"""How a mesh stores the matrices of a leaf: which leaves may travel together."""

import dataclasses
import math
from typing import Any

from muon2_optax.axes import ResolvedAxes
from muon2_optax.sharding import Axes, Location

Side = tuple[tuple[int, Axes], ...]


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """How a mesh stores the matrices of a leaf. Leaves of one layout travel together.

    Attributes:
      rows, cols: for each dimension of this side of the matrices, its local size and
        the mesh axes that divide it. Rows are the inputs, or the outputs of a leaf that
        is transposed.
      splits: the sizes of independent blocks along the columns.
    """

    rows: Side
    cols: Side
    splits: tuple[int, ...]

    @property
    def axes(self) -> Axes:
        return tuple(a for _, axes in self.rows + self.cols for a in axes)

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of a shard: row dimensions, then column dimensions."""
        return tuple(n for n, _ in self.rows + self.cols)


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """A leaf on a mesh: where it lives, and how its matrices are stored there.

    Attributes:
      axes: the axes of its matrices.
      location: where it lives.
      layout: how its matrices are stored.
      transposed: whether they run transposed, so that more leaves share a layout.
    """

    axes: ResolvedAxes
    location: Location
    layout: ShardLayout
    transposed: bool

    @classmethod
    def of(
        cls, axes: ResolvedAxes, location: Location, either_way: bool
    ) -> "StoredLeaf":
        """Chooses the orientation in which most leaves share a layout.

        Tall matrices run transposed. So do square ones that are divided along their
        outputs only, if they may run ``either_way``: then they have the layout of those
        that are divided along their inputs.
        """
        ins, outs = (_side(axes, location, dims) for dims in (axes.ins, axes.outs))
        if len(axes.splits) > 1:
            return cls(axes, location, ShardLayout(ins, outs, axes.splits), False)
        fan_out = axes.splits[0]
        square = either_way and axes.fan_in == fan_out
        turned = square and not any(a for _, a in ins) and any(a for _, a in outs)
        if axes.fan_in > fan_out or turned:
            return cls(axes, location, ShardLayout(outs, ins, (axes.fan_in,)), True)
        return cls(axes, location, ShardLayout(ins, outs, (fan_out,)), False)

    @property
    def divided(self) -> bool:
        """Whether mesh axes divide any dimension; if not, the leaf is replicated."""
        return any(self.location.dims)

    @property
    def order(self) -> tuple[int, ...]:
        """The leaf's dimensions: batch, then rows, then columns."""
        sides = self.axes.ins, self.axes.outs
        first, second = sides[::-1] if self.transposed else sides
        return self.axes.batch + first + second


def _side(axes: ResolvedAxes, location: Location, dims: tuple[int, ...]) -> Side:
    side = [
        (
            axes.shape[d] // device_count(location.mesh, location.dims[d]),
            location.dims[d],
        )
        for d in dims
    ]
    if not any(divided for _, divided in side[1:]):
        # Only the outermost dimension is divided: flattened, shards stay contiguous.
        side = [(math.prod(n for n, _ in side), side[0][1])]
    return tuple(side)


def device_count(mesh: Any, axes: Axes) -> int:
    """The number of devices along these axes of a mesh."""
    return math.prod(mesh.shape[a] for a in axes)
