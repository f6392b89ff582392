"""Leaves that may be with the wrong optimizer, and the rule that settles each."""

import collections
import dataclasses
import re
import statistics
from collections.abc import Collection, Sequence

from muon2_optax.routing.kinds import Kind
from muon2_optax.routing.leaves import Case
from muon2_optax.routing.names import name_of, normal, pattern_of
from muon2_optax.routing.orientation import UNORIENTED

Shape = tuple[int, ...]
# Matrices of hidden layers have longer sides than this, and are less oblong. A leaf of
# exactly this side or ratio is doubtful.
SMALL_SIDE, LARGE_RATIO = 8, 64
# Where all sides are smaller, the tree is a toy and its sizes mean nothing.
TOY = 64
# Names, as words joined by "_", of the projections into heads and out of them.
_TO_HEADS = re.compile(r"(to_)?(q|k|v|query|key|value)(_?proj(ection)?)?|w_?[qkv]")
_ATTENTION = re.compile(r"attn|attention|(^|_)(att|mha|mhsa)(_|$)")
_FROM_HEADS = re.compile(r"(to_)?(o|out|output)(_?proj(ection)?)?|w_?o|c_proj")
FLATTENED = "all parameters arrive as one vector, as optax.flatten makes of them"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is large and what is small in one tree."""

    largest_side: int
    median: float
    heads: frozenset[Shape]

    @classmethod
    def of(
        cls,
        shapes: Sequence[Shape],
        matrices: Sequence[Shape],
        tables: Sequence[Shape],
    ) -> "Sizes":
        """From the shapes of all leaves, and of rank-2 matrices and tables by default.

        A single matrix with an embedding's transposed shape is probably a head: of the
        shape of a hidden layer there are several.
        """
        alone = collections.Counter(matrices)
        heads = {(d, v) for v, d in tables if v > max(d, TOY) and alone[d, v] == 1}
        return cls(
            max((max(s) for s in shapes if len(s) > 1), default=0),
            statistics.median([a * b for a, b in matrices] or [0]),
            frozenset(heads),
        )


def doubt_of_matrix(shape: Shape, kind: Kind | None, sizes: Sizes) -> str:
    """What speaks against taking a leaf of rank 2 for a matrix; "" if nothing does."""
    short, long = sorted(shape)
    reasons = []
    if shape in sizes.heads:
        reasons.append("its shape is that of a head, an embedding's transposed")
    if kind is not None:
        reasons.append(
            f"its name is half that of a kind that AdamW trains: {kind.label}"
        )
    if short <= SMALL_SIDE and sizes.largest_side >= TOY:
        reasons.append(f"a side is {short}")
    elif long >= LARGE_RATIO * short:
        reasons.append(f"one side is {long / short:.0f} times the other")
    return " and ".join(reasons)


def doubt_of_adam(
    shape: Shape, kind: Kind, sizes: Sizes, bias: Shape | None = None
) -> str:
    """What speaks against sending a large leaf to AdamW for its name.

    Args:
      shape: the shape of the leaf.
      kind: what its name says.
      sizes: those of the whole tree.
      bias: the shape of the bias beside it, if there is one.
    """
    size = 1
    for side in shape:
        size *= side
    if kind.label == "head" and len(set(shape)) == 1 and shape[0] >= TOY:
        return "it is a square, as heads are not"
    if kind.sure and kind.label == "embedding" and bias is not None:
        fits = len(shape) == 2 and bias[0] in shape and min(shape) > SMALL_SIDE
        return "a bias is beside it, as beside a linear map" if fits else ""
    if kind.sure or min(shape) <= SMALL_SIDE or size < sizes.median:
        return ""
    return f"its name only half says {kind.label}, and it is as large as a matrix"


def settling_lines(pattern: str, case: Case) -> list[str]:
    """The rules that settle a doubt, one line for each answer.

    Where a matrix is known to be (out, in), the answer "Muon" keeps that layout: it
    must not transpose the matrix as a side effect.
    """
    if case.doubt == FLATTENED:
        return [
            "leave optax.flatten out: Muon needs to see the matrices",
            '(r"^$", None)  # AdamW',
        ]
    answers = {}
    if len(case.shape) != 2:
        answers |= _of_attention(case)
        answers["MatrixAxes(<in>, <out>)"] = "Muon; several axes of a side as a tuple"
    else:
        out_first = case.axes is not None and case.axes.ins == (1,)
        unknown = case.axes is None and normal(case.path).endswith("weight")
        if out_first or unknown or UNORIENTED in case.doubt:
            answers["MatrixAxes(-1, -2)"] = "Muon, (out, in)"
        if not out_first:
            answers["MatrixAxes(-2, -1)"] = "Muon, (in, out)"
    answers["None"] = "AdamW"
    return [f'(r"{pattern}", {axes}),  # {group}' for axes, group in answers.items()]


def _of_attention(case: Case) -> dict[str, str]:
    """The axes of kernels with an axis of heads, as Flax's attention stores them.

    Only their names tell: the shape could be that of stacked (in, out) kernels.
    """
    name = name_of(case.path)
    owner = name.owner if name.leaf in ("kernel", "weight", "w") else name.leaf
    attention = any(map(_ATTENTION.search, (*name.above, name.owner)))
    if _TO_HEADS.fullmatch(owner):
        return {"MatrixAxes(-3, (-2, -1))": "Muon, (in, heads, width of a head)"}
    if owner == "o_proj" or (attention and _FROM_HEADS.fullmatch(owner)):
        return {"MatrixAxes((-3, -2), -1)": "Muon, (heads, width of a head, out)"}
    return {}


def pattern_for(paths: Sequence[str], alike: Collection[str]) -> str:
    """A regular expression that matches these paths and no other leaf of the tree.

    Args:
      paths: normal forms that differ in numbers only.
      alike: all normal forms in the tree that differ from them in numbers only.
    """
    if set(paths) == set(alike):
        return "^" + re.sub(r"\d+", r"\\d+", paths[0]) + "$"
    columns = [sorted(set(c), key=_by_size) for c in zip(*map(_NUMBERS.split, paths))]
    pattern = "".join(c[0] if len(c) == 1 else f"({'|'.join(c)})" for c in columns)
    if any(re.fullmatch(pattern, path) for path in set(alike) - set(paths)):
        pattern = f"({'|'.join(dict.fromkeys(paths))})"
    return f"^{pattern}$"


_NUMBERS = re.compile(r"(\d+)")


def _by_size(number: str) -> tuple[int, str]:
    return len(number), number


def text_of(cases: Sequence[Case], paths: Sequence[str], most: int = 20) -> str:
    """Two lines for each group of doubtful leaves: the doubt, and what settles it.

    Args:
      cases: the doubtful leaves.
      paths: those of all leaves of the tree. A rule for the doubtful ones must leave
        the others alone: the first layer of a stack may be doubtful, the next not.
      most: how many groups are shown.
    """
    alike = collections.defaultdict(set)
    for path in paths:
        alike[pattern_of(normal(path))].add(normal(path))
    groups: dict[tuple[object, ...], list[Case]] = collections.defaultdict(list)
    for case in cases:
        key = pattern_of(case.path), case.shape, case.group, case.doubt, case.axes
        groups[key].append(case)
    lines = []
    for number, group in enumerate(groups.values()):
        if number == most:
            lines.append(f"  and {len(groups) - most} more, see rules.describe(params)")
            break
        case = group[0]
        shown = [f"{c.path!r}" for c in group]
        names = ", ".join(
            shown if len(shown) <= 3 else [f"{shown[0]} and {len(shown) - 1} like it"]
        )
        lines.append(f"  {names} {case.shape} goes to {case.group}, but {case.doubt}:")
        forms = [normal(c.path) for c in group]
        pattern = pattern_for(forms, alike[pattern_of(forms[0])])
        settling = settling_lines(pattern, case)
        lines.extend(f"    {line}" for line in settling)
    return "\n".join(lines)


def names_of(paths: Sequence[tuple[str, Shape]], most: int = 100) -> str:
    """Paths and shapes in a line, layers alike as one, ``most`` of them at most."""
    groups: dict[tuple[str, Shape], list[str]] = collections.defaultdict(list)
    for path, shape in paths:
        groups[pattern_of(path), shape].append(path)
    shown = []
    for number, ((_, shape), alike) in enumerate(groups.items()):
        if number == most:
            shown.append(f"and {len(groups) - most} more, see rules.describe(params)")
            break
        if len(alike) <= 3:
            shown.extend(f"{path} {shape}" for path in alike)
        else:
            shown.append(f"{alike[0]} and {len(alike) - 1} like it {shape}")
    return ", ".join(shown)
