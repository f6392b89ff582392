"""How the axes of one parameter form matrices."""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muon2_optax import trees

Axis = int | Sequence[int]


def _tuple(axis: Any) -> tuple[int, ...]:
    several = isinstance(axis, Sequence) and not isinstance(axis, str | bytes)
    many: Any = axis if several else (axis,)
    if any(isinstance(a, bool) for a in many):  # operator.index takes these
        raise TypeError("a bool is no integer")
    return tuple(operator.index(a) for a in many)


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """Which axes of a parameter are a matrix's inputs, which its outputs.

    The layer computes ``sum over in_axis of input * parameter``. Several axes on a
    side are given as a tuple and flattened together; axes on neither side are batch
    axes: each index along them is a matrix of its own (stacked layers, experts, heads).

    ===========================  ======================  =============================
    parameter                    shape                   axes
    ===========================  ======================  =============================
    flax / Haiku kernel          (in, out)               ``MatrixAxes(-2, -1)``
    torch / Equinox weight       (out, in)               ``MatrixAxes(-1, -2)``
    DenseGeneral q, k, v         (d, heads, k)           ``MatrixAxes(-3, (-2, -1))``
    DenseGeneral out             (heads, k, d)           ``MatrixAxes((-3, -2), -1)``
    one matrix per head          (d, heads, k)           ``MatrixAxes(-3, -1)``
    convolution HWIO             (h, w, in, out)         ``MatrixAxes((0, 1, 2), 3)``
    convolution OIHW             (out, in, h, w)         ``MatrixAxes((1, 2, 3), 0)``
    1-D convolution, Flax        (w, in, out)            ``MatrixAxes((0, 1), 2)``
    1-D convolution, torch       (out, in, w)            ``MatrixAxes((1, 2), 0)``
    fused q, k, v, axis of 3     (d, 3, d)               ``MatrixAxes(-3, -1)``
    fused q, k, v, flat          (d, dq + dk + dv)       ``MatrixAxes(-2, -1, (dq, dk,
                                                         dv))``
    kernel stacked on axis 1     (in, layers, out)       ``MatrixAxes(0, -1)``
    ===========================  ======================  =============================

    Negative axes also fit the same layer stacked (scanned) over layers or experts in
    front: the axes before the matrix are batch axes then. Axes counted from the front
    do not. Neither do negative ones where layers are stacked on axis 1, as MaxText's
    always are and those of ``nn.scan(variable_axes={"params": 1})``: in a leaf of
    (64, 3, 128) ``MatrixAxes(-2, -1)`` would be 64 matrices of 3 x 128 in place of 3 of
    64 x 128, without any warning. There the inputs are axis 0, the outputs the last:
    ``MatrixAxes(0, -1)``, for heads ``MatrixAxes(0, (-2, -1))`` and
    ``MatrixAxes((0, -2), -1)``. ``MatrixRules.describe`` shows the matrices.

    Attributes:
      in_axis: axis or axes summed over (fan-in); negative counts from the end.
      out_axis: axis or axes of the result (fan-out).
      out_splits: sizes of independent blocks along the single ``out_axis``: a fused
        projection whose parts are matrices of their own. Empty: one block.

    Raises:
      TypeError: an axis or a size that is no integer.
      ValueError: a side without axes, a size below 1, or ``out_splits`` with several
        output axes.
    """

    in_axis: Axis
    out_axis: Axis
    out_splits: Sequence[int] = ()

    def __post_init__(self) -> None:
        for field in ("in_axis", "out_axis", "out_splits"):
            value = getattr(self, field)
            try:
                object.__setattr__(self, field, _tuple(value))
            except TypeError:
                raise TypeError(
                    f"{field} of MatrixAxes must be an integer or a tuple of integers,"
                    f" got {trees.show(value)}"
                ) from None
        if any(n < 1 for n in self.out_splits):
            raise ValueError(f"{self}: out_splits are sizes, 1 or more")
        if not self.in_axis or not self.out_axis:
            raise ValueError(f"{self}: a matrix needs an input and an output axis")
        if self.out_splits and len(_tuple(self.out_axis)) != 1:
            raise ValueError(f"{self}: out_splits needs a single out_axis")

    def resolve(self, shape: tuple[int, ...]) -> "ResolvedAxes":
        """Fits the axes to a shape.

        Raises:
          ValueError: an axis out of range, named twice, or splits that do not add up.
        """
        rank = len(shape)
        sides = []
        for axes in (_tuple(self.in_axis), _tuple(self.out_axis)):
            if any(not -rank <= a < rank for a in axes):
                raise ValueError(f"{self} does not fit rank {rank}")
            sides.append(tuple(a % rank for a in axes))
        ins, outs = sides
        if len(set(ins + outs)) != len(ins + outs):
            raise ValueError(f"{self} uses an axis of shape {shape} twice")
        splits = self.out_splits or (math.prod(shape[a] for a in outs),)
        if self.out_splits and sum(splits) != shape[outs[0]]:
            raise ValueError(
                f"out_splits {self.out_splits} add up to {sum(splits)}, but axis "
                f"{outs[0]} of shape {shape} has {shape[outs[0]]}"
            )
        return ResolvedAxes(tuple(shape), ins, outs, tuple(splits))


@dataclasses.dataclass(frozen=True)
class ResolvedAxes:
    """``MatrixAxes`` fitted to one shape; all axes are non-negative."""

    shape: tuple[int, ...]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    splits: tuple[int, ...]

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(a for a in range(len(self.shape)) if a not in self.ins + self.outs)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[a] for a in self.batch)

    @property
    def shape_per_matrix(self) -> tuple[int, ...]:
        """(*batch), and a last axis of blocks where the rule splits the outputs."""
        blocks = len(self.splits)
        return self.batch_shape if blocks == 1 else (*self.batch_shape, blocks)

    @property
    def fan_in(self) -> int:
        return math.prod(self.shape[a] for a in self.ins)

    def to_blocks(self, x: jax.Array) -> list[jax.Array]:
        """The matrices of ``x``: one array (*batch, fan_in, fan_out) per split."""
        order = self.batch + self.ins + self.outs
        if order != tuple(range(x.ndim)):
            x = jnp.transpose(x, order)
        matrix = x.reshape(*self.batch_shape, self.fan_in, sum(self.splits))
        if len(self.splits) == 1:
            return [matrix]
        return jnp.split(matrix, np.cumsum(self.splits)[:-1], axis=-1)

    def from_blocks(self, blocks: list[jax.Array]) -> jax.Array:
        """Inverse of ``to_blocks``."""
        matrix = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=-1)
        order = self.batch + self.ins + self.outs
        x = matrix.reshape(tuple(self.shape[a] for a in order))
        if order != tuple(range(x.ndim)):
            x = jnp.transpose(x, tuple(np.argsort(order).tolist()))
        return x

    def sums(self, x: jax.Array, axis: tuple[int, ...]) -> list[jax.Array]:
        """For each block its sums along ``axis``, which must hold the outputs.

        Blocks are masked rather than cut out: where a mesh divides the outputs, cutting
        would move them between devices.
        """
        if len(self.splits) == 1:
            return [jnp.sum(x, axis=axis, keepdims=True)]
        return [
            jnp.sum(jnp.where(mask, x, 0), axis=axis, keepdims=True)
            for mask in self._masks()
        ]

    def by_block(self, values: list[jax.Array]) -> jax.Array:
        """The blocks' values, of size 1 along the outputs, as a factor of the leaf."""
        whole = values[0]
        if len(values) > 1:
            for mask, value in zip(self._masks()[1:], values[1:]):
                whole = jnp.where(mask, value, whole)
        return whole

    def _masks(self) -> list[np.ndarray]:
        """Per block, which outputs are its own, shaped like the parameter."""
        blocks = range(len(self.splits))
        owner = np.asarray(self.per_output(blocks))
        return [owner == block for block in blocks]

    def per_output(self, values: Sequence[float]) -> float | np.ndarray:
        """One number per block, shaped to multiply the parameter elementwise."""
        if len(values) == 1:
            return values[0]
        shape = [1] * len(self.shape)
        shape[self.outs[0]] = -1
        return np.repeat(np.asarray(values), self.splits).reshape(shape)
