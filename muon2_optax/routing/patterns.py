"""An ordered list of patterns, and which of them a path matches first."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from muon2_optax import trees
from muon2_optax.axes import MatrixAxes
from muon2_optax.routing import names

Pattern = tuple[str, MatrixAxes | None]

# What ``dimension_numbers`` writes: one path and all below it.
_BELOW = re.compile(r"\^(.+)\(/\|\$\)", re.DOTALL)


class Patterns:
    """Finds the first of many patterns that a path contains.

    Patterns for one path and all below it, of which a tree of dimension numbers has one
    for each leaf, are looked up; the others are searched one after another.

    Args:
      patterns: regular expressions.
      in_normal_form: search the normal form of a path too.
    """

    def __init__(self, patterns: Sequence[str], in_normal_form: bool) -> None:
        self._patterns = patterns
        self._in_normal_form = in_normal_form
        self._below: dict[str, int] = {}
        self._searches = []
        for number, pattern in enumerate(patterns):
            literal = _literal(pattern)
            if literal is None:
                self._searches.append((number, re.compile(pattern).search))
            else:
                self._below.setdefault(literal, number)

    @property
    def of_tree(self) -> bool:
        """Whether all are for one path and what is below it, as those of a tree."""
        return bool(self._below) and not self._searches

    def first(self, path: str) -> int | None:
        """The number of the first pattern that matches; None: none does."""
        if not self._patterns:
            return None
        forms = self._forms(path)
        found = [
            self._below[part]
            for form in forms
            for part in (_prefixes(form) if self._below else ())
            if part in self._below
        ]
        best = min(found, default=len(self._patterns))
        for number, search in self._searches:
            if number > best:
                break
            if any(map(search, forms)):
                return number
        return best if found else None

    def unmatched(self, paths: Sequence[str]) -> list[str]:
        """The patterns that match no path at all, other patterns or not."""
        forms = [form for path in paths for form in self._forms(path)]
        parts = {p for form in forms for p in _prefixes(form)} if self._below else set()
        missing = [n for n, search in self._searches if not any(map(search, forms))]
        missing += [n for literal, n in self._below.items() if literal not in parts]
        return [self._patterns[n] for n in sorted(missing)]

    def _forms(self, path: str) -> list[str]:
        normal = names.normal(path) if self._in_normal_form else path
        return [path] if normal == path else [path, normal]


def check_patterns(patterns: Sequence[Any]) -> tuple[Pattern, ...]:
    """The patterns of ``MatrixRules`` as a tuple of pairs.

    Raises:
      TypeError: what is no pair of a str and ``MatrixAxes`` or None.
      ValueError: what is no regular expression.
    """
    many = isinstance(patterns, Iterable) and not hasattr(patterns, "dtype")
    if not many or isinstance(patterns, str | bytes | Mapping):
        raise TypeError(
            "patterns of MatrixRules must be a sequence of (pattern, MatrixAxes) pairs,"
            f" got {trees.show(patterns)}"
        )
    pairs: list[Pattern] = []
    for pair in patterns:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(
                f"a rule is a (pattern, MatrixAxes) pair, got {trees.show(pair)}"
            )
        pattern, axes = pair
        if not isinstance(pattern, str):
            raise TypeError(f"a pattern is a str, got {trees.show(pattern)}")
        if axes is not None and not isinstance(axes, MatrixAxes):
            raise TypeError(
                f"rule {pattern!r}: want MatrixAxes or None, got {trees.show(axes)}"
            )
        try:
            re.compile(pattern)
        except (re.error, TypeError) as err:
            raise ValueError(
                f"rule {pattern!r} is no regular expression: {err}"
            ) from err
        pairs.append((pattern, axes))
    return tuple(pairs)


def _literal(pattern: str) -> str | None:
    """The path of a pattern for it and all below it; None for other patterns."""
    found = _BELOW.fullmatch(pattern)
    if found is None:
        return None
    path = re.sub(r"\\(.)", r"\1", found[1], flags=re.DOTALL)
    return path if re.escape(path) == found[1] else None


def _prefixes(path: str) -> Iterator[str]:
    """The path, and all that end before one of its separators."""
    yield path
    for found in re.finditer("/", path):
        yield path[: found.start()]
