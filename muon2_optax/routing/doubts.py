"""Leaves that may be with the wrong optimizer, and the rule that settles each."""

import collections
import dataclasses
import re
import statistics
from collections.abc import Sequence

from muon2_optax.routing.kinds import Kind
from muon2_optax.routing.leaves import Case
from muon2_optax.routing.names import components, pattern_of
from muon2_optax.routing.neighbours import UNORIENTED

Shape = tuple[int, ...]
# Matrices of hidden layers have more inputs and outputs than this, and are less oblong.
SMALLEST_SIDE, LARGEST_RATIO = 8, 64
# Where no side is larger, the tree is a toy and its sizes mean nothing.
TOY = 64
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
        """Of all leaves, and those of rank 2 that are matrices or tables by default.

        A single matrix with an embedding's transposed shape is probably a head; hidden
        layers come in numbers.
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
    if short < SMALLEST_SIDE and sizes.largest_side >= TOY:
        reasons.append(f"a side is {short}")
    elif long > LARGEST_RATIO * short:
        reasons.append(f"one side is {long / short:.0f} times the other")
    return " and ".join(reasons)


def doubt_of_adam(shape: Shape, kind: Kind, sizes: Sizes) -> str:
    """What speaks against sending a large leaf to AdamW for its name."""
    size = 1
    for side in shape:
        size *= side
    if kind.label == "head" and len(set(shape)) == 1 and shape[0] >= TOY:
        return "it is a square, as heads are not"
    if kind.sure or min(shape) < SMALLEST_SIDE or size < sizes.median:
        return ""
    return f"its name only half says {kind.label}, and it is as large as a matrix"


def settling_lines(path: str, shape: Shape, doubt: str) -> list[str]:
    """The rules that settle a doubt, one line for each answer."""
    if doubt == FLATTENED:
        return [
            "leave optax.flatten out: Muon needs to see the matrices",
            '(r"^$", None)  # AdamW',
        ]
    digits = re.sub(r"\d+", r"\\d+", "/".join(components(path)))
    answers = {"MatrixAxes(-2, -1)": "Muon, (in, out)", "None": "AdamW"}
    if len(shape) != 2:
        answers = {"MatrixAxes(<in>, <out>)": "Muon", "None": "AdamW"}
    elif UNORIENTED in doubt:
        answers = {"MatrixAxes(-1, -2)": "Muon, (out, in)", **answers}
    return [f'(r"^{digits}$", {axes}),  # {group}' for axes, group in answers.items()]


def text_of(cases: Sequence[Case], most: int = 20) -> str:
    """Two lines for each group of doubtful leaves: the doubt, and what settles it."""
    groups: dict[tuple[object, ...], list[Case]] = collections.defaultdict(list)
    for case in cases:
        groups[pattern_of(case.path), case.shape, case.group, case.doubt].append(case)
    lines = []
    for number, group in enumerate(groups.values()):
        if number == most:
            lines.append(f"  and {len(groups) - most} more, see rules.describe(params)")
            break
        case = group[0]
        paths = [f"{c.path!r}" for c in group]
        names = ", ".join(
            paths if len(paths) <= 3 else [f"{paths[0]} and {len(paths) - 1} like it"]
        )
        lines.append(f"  {names} {case.shape} goes to {case.group}, but {case.doubt}:")
        settling = settling_lines(case.path, case.shape, case.doubt)
        lines.extend(f"    {line}" for line in settling)
    return "\n".join(lines)


def names_of(paths: Sequence[tuple[str, Shape]]) -> str:
    """Paths and shapes in a line, layers alike as one."""
    groups: dict[tuple[str, Shape], list[str]] = collections.defaultdict(list)
    for path, shape in paths:
        groups[pattern_of(path), shape].append(path)
    shown = []
    for (_, shape), alike in groups.items():
        if len(alike) <= 3:
            shown.extend(f"{path} {shape}" for path in alike)
        else:
            shown.append(f"{alike[0]} and {len(alike) - 1} like it {shape}")
    return ", ".join(shown)
