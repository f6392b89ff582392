"""What ``MatrixRules.describe`` prints: where each leaf goes, and why."""

import collections
import functools
import inspect
import math
import re
import types
import warnings
from collections.abc import Sequence

from muon2_optax.routing.doubts import names_of, text_of
from muon2_optax.routing.leaves import Verdict
from muon2_optax.routing.names import pattern_of
from muon2_optax.shape_scales import ShapeScale, shape_factors
from muon2_optax.trees import count, quote

Row = tuple[str, ...]
WIDTH = 100
# Trees of more leaves than this are shown by pattern: "layers/*/kernel x 48".
FEW_LEAVES = 100
# A warning points at the line of the user's program that led to it. To find that line,
# the stack frames of these packages are skipped.
LIBRARIES = ("muon2_optax", "optax", "jax", "flax", "equinox", "contextlib")
SETTLED = "MatrixRules.of(model) asks the model's modules, or a rule settles each"
NO_MATRIX = (
    "NO LEAF IS A MATRIX: AdamW trains every parameter, and the optimizer that you"
    " chose trains none.\n"
)
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


def warn_of(verdicts: Sequence[Verdict]) -> None:
    """Warns of leaves that no rule covers, and of doubtful ones."""
    paths = [v.path for v in verdicts]
    nothing = "" if any(v.axes for v in verdicts) else NO_MATRIX
    uncovered = [v for v in verdicts if v.uncovered]
    if uncovered:
        names = names_of([(v.path, v.shape) for v in uncovered])
        _warn(
            f"{nothing}no matrix rule for these leaves of rank 3 or more, so AdamW"
            f" trains them: {names}. {SETTLED} (None keeps AdamW and silences this;"
            " strict=True raises instead):\n"
            + text_of([v.case for v in uncovered], paths)
        )
        nothing = ""
    cases = [v.case for v in verdicts if v.doubt]
    if cases:
        settles = "settles it" if len(cases) == 1 else "settles each"
        _warn(
            f"{nothing}{count(cases)} may be with the wrong optimizer; a rule"
            f" {settles}:\n{text_of(cases, paths)}"
        )


def _warn(text: str) -> None:
    """Warns at the line of the user's program that has led here."""
    warnings.warn_explicit(
        text,
        UserWarning,
        *_first_place(text),
        # Filters and Python's memory of what it has shown belong to this module.
        module=__name__,
        registry=globals().setdefault("__warningregistry__", {}),
    )


@functools.lru_cache(maxsize=256)
def _first_place(text: str) -> tuple[str, int]:
    """File and line of the user's call from which a text came first.

    Later it comes from other lines, of ``update`` after ``init``. Python shows a text
    once for each line, so all of them give the first one's.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None and _is_inside(frame):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame else (__file__, 1)


def _is_inside(frame: types.FrameType) -> bool:
    """Whether a library runs here, and not the user's program."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in LIBRARIES


def require_rules(verdicts: Sequence[Verdict]) -> None:
    """Refuses leaves that no rule covers, for ``strict=True``.

    Raises:
      ValueError: it lists all of them, each with the rules that settle it.
    """
    uncovered = [v for v in verdicts if v.uncovered]
    if not uncovered:
        return
    first, others = uncovered[0], len(uncovered) - 1
    have = "has 1 other leaf" if others == 1 else f"have {others} other leaves"
    more = f", nor {have} of rank 3 or more" if others else ""
    cases = [v.case for v in uncovered]
    raise ValueError(
        f"{quote(first.path)} of shape {first.shape} has no matrix rule{more}."
        f" {SETTLED}:\n" + text_of(cases, [v.path for v in verdicts], len(cases))
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
