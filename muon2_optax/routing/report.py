"""What ``MatrixRules.describe`` prints: where each leaf goes, and why."""

import collections
import math
import re
from collections.abc import Sequence

from muon2_optax.routing.doubts import text_of
from muon2_optax.routing.leaves import Verdict
from muon2_optax.routing.names import pattern_of
from muon2_optax.shape_scales import ShapeScale, shape_factors
from muon2_optax.trees import count

Row = tuple[str, ...]
WIDTH = 100
# Trees of more leaves than this are shown by pattern: "layers/*/kernel x 48".
FEW_LEAVES = 100
HEADER = (
    "path",
    "shape",
    "group",
    "matrices",
    "axes",
    "factor",
    "parameters",
    "because of",
)


def report(
    verdicts: Sequence[Verdict], shape_scale: ShapeScale, unused: Sequence[str] = ()
) -> str:
    """The whole text: unused patterns, doubts, a table, and totals."""
    verdicts = sorted(verdicts, key=lambda v: not v.doubtful)
    parts = []
    if unused:
        shown = "\n".join(f"  {pattern!r}" for pattern in unused)
        parts.append(
            "Rules that match no parameter; init raises, unless allow_unused=True:\n"
            f"{shown}\n"
        )
    doubtful = [v.case for v in verdicts if v.doubtful]
    if doubtful:
        parts.append(
            "Doubtful, listed first below; a rule settles each:\n"
            + text_of(doubtful, [v.path for v in verdicts])
            + "\n"
        )
    parts.append(_table([HEADER, *_rows(verdicts, shape_scale)]))
    parts.append(_totals(verdicts))
    return "\n".join(parts)


def _rows(verdicts: Sequence[Verdict], shape_scale: ShapeScale) -> list[Row]:
    groups: dict[tuple[object, ...], list[Verdict]] = collections.defaultdict(list)
    for v in verdicts:
        key = v.path if len(verdicts) <= FEW_LEAVES else pattern_of(v.path)
        groups[key, v.shape, v.axes, v.reason, v.doubt, v.guessed].append(v)
    return [_row(alike, shape_scale) for alike in groups.values()]


def _row(alike: Sequence[Verdict], shape_scale: ShapeScale) -> Row:
    first = alike[0]
    path = _common([v.path for v in alike])
    if len(alike) > 1:
        path += f" x {len(alike)}"
    matrices = axes = factor = "-"
    if first.axes is not None:
        count = math.prod(first.axes.shape[a] for a in first.axes.batch)
        outs = _short([str(n) for n in first.axes.splits], "+")
        outs = f"({outs})" if len(first.axes.splits) > 1 else outs
        matrices = f"{count} x {first.axes.fan_in}x{outs}"
        axes = f"{_axes(first.axes.ins)} -> {_axes(first.axes.outs)}"
        factor = _short(
            [f"{f:.4g}" for f in shape_factors(first.axes, shape_scale)], ", "
        )
    size = _count(len(alike) * math.prod(first.shape))
    reason = first.reason + (" (DOUBTFUL)" if first.doubtful else "")
    shape = str(first.shape)
    return path, shape, first.group, matrices, axes, factor, size, reason


def _table(rows: Sequence[Row]) -> str:
    """Rows in aligned columns; a path that is too long has a line of its own."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rest = sum(widths[1:-1]) + 2 * (len(widths) - 1) + min(widths[-1], 24)
    widths[0] = min(widths[0], max(WIDTH - rest, 24))
    lines = []
    for path, *cells in rows:
        if len(path) > widths[0]:
            lines.append(path)
            path = ""
        padded = [c.ljust(w) for c, w in zip([path, *cells], widths)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _totals(verdicts: Sequence[Verdict]) -> str:
    lines = []
    for group, title in (("matrix", "matrix (Muon)"), ("adam", "adam (AdamW)")):
        chosen = [v for v in verdicts if v.group == group]
        size = sum(math.prod(v.shape) for v in chosen)
        lines.append(f"total of {title}: {count(chosen)}, {size:,} parameters")
    return "\n" + "\n".join(lines)


def _common(paths: Sequence[str]) -> str:
    """The paths as one, "*" for a number in which they differ."""
    columns = zip(*(re.split(r"(\d+)", path) for path in paths))
    return "".join(c[0] if len(set(c)) == 1 else "*" for c in columns)


def _axes(axes: tuple[int, ...]) -> str:
    return str(axes[0]) if len(axes) == 1 else f"({','.join(map(str, axes))})"


def _short(parts: Sequence[str], separator: str) -> str:
    if len(set(parts)) == 1 and len(parts) > 3:
        return f"{parts[0]} each"
    return separator.join(parts)


def _count(n: int) -> str:
    return f"{n:,}"
