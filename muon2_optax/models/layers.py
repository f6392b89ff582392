"""What a module says of one parameter, and where stacking has moved its axes."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from muon2_optax.axes import MatrixAxes

Shape = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter as its module declares it, before any stacking.

    Attributes:
      axes: the axes of ``shape`` that form the matrix, or None for AdamW.
      shape: the declared sizes, None where the module does not say one. None in place
        of the tuple: nothing is declared, and ``axes`` are those of the leaf itself.
      note: what else the reason should say: ``"2 groups"``.
      dense: whether it is a plain linear map, which may serve as the model's head.
      given_as: where the user has said it: the type of module and the path below it.
    """

    axes: MatrixAxes | None
    shape: Shape | None = None
    note: str = ""
    dense: bool = False
    given_as: tuple[Any, str] | None = None


@dataclasses.dataclass(frozen=True)
class Found:
    """One leaf of a model.

    Attributes:
      path: its path in the tree that the optimizer gets.
      shape: its shape there.
      owner: the type of the module that it belongs to, for reasons and warnings.
      weight: what is known of it, None if nothing is.
      source: how it is known: ``"module Linear"``, ``"logical axes (embed, mlp)"``.
      single: its shape before stacking, if the framework tells.
      variable: the same number for leaves that are one variable under several paths.
    """

    path: str
    shape: tuple[int, ...]
    owner: str
    weight: Weight | None = None
    source: str = ""
    single: tuple[int, ...] | None = None
    variable: int | None = None


def matrix(
    shape: Iterable[int | None],
    ins: Iterable[int],
    outs: Iterable[int],
    splits: tuple[int, ...] = (),
    *,
    note: str = "",
    dense: bool = False,
) -> Weight:
    """A parameter that is a matrix between these axes of its declared shape."""
    return Weight(
        MatrixAxes(tuple(ins), tuple(outs), splits), tuple(shape), note, dense
    )


def adam(shape: Iterable[int | None] | None = None, note: str = "") -> Weight:
    """A parameter for AdamW."""
    return Weight(None, None if shape is None else tuple(shape), note)


def convolution(
    kernel: Sequence[int],
    channels: tuple[int | None, int | None],
    groups: int = 1,
    *,
    out_first: bool = False,
    channels_first: bool = False,
    strides: Sequence[int] | None = None,
) -> Weight:
    """The kernel of a convolution.

    Args:
      kernel: the sizes of the window.
      channels: input channels (of one group) and output channels.
      groups: with more than one, the kernel is for AdamW: each group is a small matrix
        of its own, in a depthwise convolution a vector.
      out_first: the output channels are stored before the input channels.
      channels_first: the channels are stored before the window.
      strides: of a transposed convolution. Where the stride reaches over the whole
        window, each tap makes an output of its own and counts as one; elsewhere the
        layer sums over the taps, as a convolution does.
    """
    pair = channels[::-1] if out_first else channels
    shape = (*pair, *kernel) if channels_first else (*kernel, *pair)
    if groups != 1:
        return adam(shape, f"{groups} groups")
    first = 0 if channels_first else len(kernel)
    window = range(2, len(shape)) if channels_first else range(len(kernel))
    apart = [
        axis
        for i, axis in enumerate(window)
        if strides is not None and strides[i] >= kernel[i] > 1
    ]
    summed = [axis for axis in window if axis not in apart]
    return matrix(
        shape, [*summed, first + out_first], [*apart, first + (not out_first)]
    )


def einsum(equation: str, shape: Iterable[int | None]) -> Weight | None:
    """The kernel of ``einsum(equation, inputs, kernel)``; None if it is not clear.

    Kernel axes that the inputs share and the result lacks are summed over; axes that
    only kernel and result have are outputs; axes that all three have hold matrices
    side by side. So do output axes that the result puts before every axis of the
    inputs ("BSD,CDKH->CBSKH" makes C results, such as keys and values).
    """
    shape = tuple(shape)
    operands, _, result = equation.replace(" ", "").partition("->")
    inputs, _, kernel = operands.partition(",")
    letters = set(kernel)
    if len(kernel) != len(shape) or len(letters) != len(kernel) or "." in kernel:
        return None
    if not letters <= set(inputs) | set(result):
        return None  # summed without an input
    kept = [letter for letter in result if letter in inputs or letter == "."]
    leading = set(itertools.takewhile(lambda c: c in letters - set(inputs), result))
    ins = [i for i, c in enumerate(kernel) if c not in result]
    made = [i for i, c in enumerate(kernel) if c not in inputs]
    # Where all outputs are in front, the result is only transposed.
    outs = [i for i in made if not (kept and kernel[i] in leading)] or made
    if not ins or not outs:
        return adam(shape, "no sum over inputs" if not ins else "one output")
    return matrix(shape, ins, outs, dense=True)


def choose(
    given: tuple[Weight, str] | None,
    named: tuple[Weight, str] | None,
    declared: tuple[Weight, str] | None,
) -> tuple[Weight | None, str]:
    """Chooses between what the user, the axis names and the module say of a leaf.

    The user comes first. Axis names come before the module where they send the leaf to
    AdamW, since they know a vocabulary or a norm whose module is a mere Dense. Which
    axes form the sides of a matrix, the module knows better.
    """
    if given is not None:
        return given
    if named is not None and (named[0].axes is None or declared is None):
        return named
    return declared if declared is not None else (None, "")


def stack_axes(declared: Shape, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The axes of ``shape`` that stacking may have added, in every possible way."""
    extra = len(shape) - len(declared)
    if extra < 0:
        return []
    ways = []
    for added in itertools.combinations(range(len(shape)), extra):
        rest = [n for axis, n in enumerate(shape) if axis not in added]
        if all(want in (None, size) for want, size in zip(declared, rest)):
            ways.append(added)
    return ways


def place(axes: MatrixAxes, rank: int, added: tuple[int, ...]) -> MatrixAxes:
    """Axes of the declared shape as axes of the stacked one, counted from the front."""
    kept = [axis for axis in range(rank) if axis not in added]
    sides = []
    for side in (axes.in_axis, axes.out_axis):
        many = (side,) if isinstance(side, int) else side
        sides.append(tuple(kept[axis] for axis in many))
    return MatrixAxes(sides[0], sides[1], axes.out_splits)


class Stacks:
    """Which axes of each leaf stacking has added, with its neighbours' help.

    A kernel (4, 4, 6) of a Linear(4, 6) may be stacked on axis 0 or 1. Leaves that are
    stacked together are stacked on the same axis, and the sizes of its bias, or of
    another layer in the same block, may allow only one. A module counts as one block
    only if all its leaves are stacked alike; beyond it another stack may begin.
    """

    def __init__(self, found: Sequence[Found]) -> None:
        self._ways: dict[str, list[tuple[int, ...]]] = {}
        self._under: dict[str, list[Found]] = {}
        for leaf in found:
            declared = leaf.single
            if declared is None and leaf.weight is not None:
                declared = leaf.weight.shape
            if declared is None:
                continue
            self._ways[leaf.path] = stack_axes(declared, leaf.shape)
            for parent in _parents(leaf.path):
                self._under.setdefault(parent, []).append(leaf)

    def added_axes(self, leaf: Found) -> tuple[int, ...] | None:
        """The axes that stacking has added, or None if that does not become clear."""
        ways = self._ways.get(leaf.path, [])
        if len(ways) == 1:
            return ways[0]
        if not ways:
            return None
        for parent in _parents(leaf.path):
            together = self._under[parent]
            if any(self._sizes(other) != self._sizes(leaf) for other in together):
                return None  # not all of this is one stack
            answers = self._common(together, leaf)
            if len(answers) < 2:
                return answers.pop() if answers else None
        return None

    def _common(self, together: Sequence[Found], leaf: Found) -> set[tuple[int, ...]]:
        """The axes of ``leaf`` if all these are stacked on the same ones.

        The same counted from the front, or the last (``out_axes=-1``).
        """
        rank = len(leaf.shape)
        front = set.intersection(*(self._axes_counted_from(x, 0) for x in together))
        back = set.intersection(
            *(self._axes_counted_from(x, len(x.shape)) for x in together)
        )
        return front | {
            tuple(axis + rank for axis in way) for way in back if way[-1] == -1
        }

    def _sizes(self, leaf: Found) -> list[int]:
        ways = self._ways[leaf.path]
        return sorted(leaf.shape[axis] for axis in ways[0]) if ways else []

    def _axes_counted_from(self, leaf: Found, offset: int) -> set[tuple[int, ...]]:
        return {tuple(a - offset for a in way) for way in self._ways[leaf.path]}


def _parents(path: str) -> list[str]:
    """The paths above this one, nearest first, "" last."""
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(len(parts) - 1, -1, -1)]
