"""The API page: every public name of the package, in groups, from its docstring."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import optax

import muon2_optax
from muon2_optax import diagnostics, ready_rules

TITLES = {
    "optimizers": "Optimizers",
    "transforms": "Transforms",
    "functions": "Functions",
    "classes": "Rules, schedules, shardings",
    "constants": "Constants",
    "diagnostics": "Diagnostics",
    "ready_rules": "Ready rules",
}


# Constants that are plain tuples have no docstrings to read.
_PAIRS = "The (pattern, axes) pairs of ``{}()``, for rules with pairs of your own."
CONSTANTS = {name.upper(): _PAIRS.format(name) for name in ("maxtext", "levanter")}


def public_names(module: Any) -> list[str]:
    """What ``module`` offers: its ``__all__``, or what it has imported by name."""
    names = getattr(module, "__all__", None) or vars(module)
    return [
        name
        for name in names
        if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
    ]


def own_names(module: Any) -> list[str]:
    """What ``module`` itself defines for its users: functions and constants."""
    return [
        name
        for name, value in vars(module).items()
        if name.isupper() or getattr(value, "__module__", "") == module.__name__
        if not name.startswith("_")
    ]


def group_of(name: str) -> str:
    value = getattr(muon2_optax, name)
    if name in muon2_optax.REGISTRY:
        return "optimizers"
    if inspect.isclass(value):
        return "classes"
    if not callable(value):
        return "constants"
    annotation = inspect.signature(value).return_annotation
    of_optax = (optax.GradientTransformation, optax.GradientTransformationExtraArgs)
    return "transforms" if annotation in of_optax else "functions"


def _entries(module: Any, names: list[str]) -> Iterator[str]:
    for name in names:
        value, full = getattr(module, name), f"{module.__name__}.{name}"
        if inspect.isclass(value):
            lines = [f".. autoclass:: {full}", "   :members:"]
        elif callable(value):
            lines = [f".. autofunction:: {full}"]
        else:
            # Constants have no docstrings of their own; their types may.
            own = type(value).__module__.startswith("muon2_optax")
            text = (type(value).__doc__ or "") if own else CONSTANTS.get(name, "")
            lines = [f".. py:data:: {full}", "", f"   {text}"]
        yield "\n".join(["```{eval-rst}", *lines, "```"])


def page() -> str:
    """Markdown of the whole page."""
    groups: dict[str, list[str]] = {}
    for name in public_names(muon2_optax):
        groups.setdefault(group_of(name), []).append(name)
    parts = [
        "# API reference",
        "Everything here is `muon2_optax.NAME`; the diagnostics are"
        " `muon2_optax.diagnostics.NAME`, the rules for public projects"
        " `muon2_optax.ready_rules.NAME`. Nothing else is public.",
    ]
    for group in TITLES:
        if group == "diagnostics":
            found = (diagnostics, public_names(diagnostics))
        elif group == "ready_rules":
            found = (ready_rules, own_names(ready_rules))
        else:
            found = (muon2_optax, groups.get(group, []))
        if found[1]:
            parts += [f"## {TITLES[group]}", *_entries(*found)]
    return "\n\n".join(parts) + "\n"


# A page of the site, which help() can only name.
_PAGE = re.compile(r"``docs/(\w+)\.md``")
_LITERAL = re.compile(r"(``[^`]*``)")
# What reStructuredText would read as a reference or as emphasis: |g|^2, x *= y.
_SIGNS = re.compile(r"(?<!\\)(\||\*(?=\w)|(?<=\w)\*)")


def escape_docstring(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings are plain text: bars and stars are mathematics, not markup.

    Comes before napoleon, whose own marks stay.
    """
    indent: int | None = None  # of the paragraph that announced a literal block
    for i, line in enumerate(lines):
        depth = len(line) - len(line.lstrip())
        if indent is not None and line.strip() and depth <= indent:
            indent = None
        if indent is None and not line.lstrip().startswith((">>>", "...")):
            line = _PAGE.sub(r":doc:`/\1`", line)
            parts = _LITERAL.split(line)
            parts[::2] = [_SIGNS.sub(r"\\\1", part) for part in parts[::2]]
            # A letter right after a literal, as in ``NamedSharding``s.
            parts[2::2] = [re.sub(r"^(?=\w)", r"\\ ", part) for part in parts[2::2]]
            lines[i] = "".join(parts)
        if indent is None and line.rstrip().endswith("::"):
            indent = depth
