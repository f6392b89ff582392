"""Warnings and errors about leaves that a rule should settle, all of them listed."""

import functools
import inspect
import types
import warnings
from collections.abc import Sequence

from muon2_optax.routing.doubts import names_of, text_of
from muon2_optax.routing.leaves import Verdict
from muon2_optax.trees import count, quote

# A warning points at the line of the user's program that led to it. To find that line,
# the stack frames of these packages are skipped.
LIBRARIES = ("muon2_optax", "optax", "jax", "flax", "equinox", "contextlib")
SETTLED = "MatrixRules.of(model) asks the model's modules, or a rule settles each"
NO_MATRIX = (
    "NO LEAF IS A MATRIX: AdamW trains every parameter, and the optimizer that you"
    " chose trains none.\n"
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


def require_certainty(verdicts: Sequence[Verdict]) -> None:
    """Refuses doubtful leaves, for ``MatrixRules.check``.

    Raises:
      ValueError: it lists all of them, each with the rules that settle it.
    """
    cases = [v.case for v in verdicts if v.doubtful]
    if cases:
        are = "is doubtful; a rule settles it"
        if len(cases) > 1:
            are = "are doubtful; a rule settles each"
        raise ValueError(
            f"{count(cases)} {are}:\n"
            + text_of(cases, [v.path for v in verdicts], most=len(cases))
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
