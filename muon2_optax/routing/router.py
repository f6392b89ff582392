"""Decides where a leaf goes, and why."""

import collections
import dataclasses
import math
from collections.abc import Sequence

from muon2_optax import trees
from muon2_optax.axes import MatrixAxes
from muon2_optax.routing import names
from muon2_optax.routing.kinds import kind_of
from muon2_optax.routing.leaves import LEFT_OUT, UNCOVERED, LeafRule, Verdict
from muon2_optax.routing.orientation import IN_OUT, RANK_2
from muon2_optax.routing.patterns import Pattern, Patterns


class Router:
    """Decides about one leaf at a time; see ``MatrixRules`` for what it is made of."""

    def __init__(
        self,
        patterns: Sequence[Pattern],
        leaves: Sequence[LeafRule],
        by_name: bool,
    ) -> None:
        self._patterns = patterns
        self._searched = Patterns([pattern for pattern, _ in patterns], by_name)
        self._rule_of_path = _by_path(leaves)
        self._by_name = by_name

    def has_rule(self, path: str) -> bool:
        """Whether a pattern or a rule of its own decides about a leaf."""
        return path in self._rule_of_path or self._searched.first(path) is not None

    def unmatched(self, paths: Sequence[str]) -> list[str]:
        """The patterns that match no path at all."""
        return self._searched.unmatched(paths)

    def decide(self, path: str, shape: tuple[int, ...]) -> Verdict:
        """Where a leaf goes, by the first of these that says something of it.

        No elements; a pattern of the user; a rule for this leaf alone, from its model
        or its neighbours; rank 0 or 1; its name; rank 2. What is left has rank 3 or
        more and no rule.

        Raises:
          ValueError: the axes of a rule do not fit the shape.
        """
        if math.prod(shape) == 0:
            return Verdict(path, shape, None, "no elements")
        number = self._searched.first(path)
        if number is not None:
            pattern, axes = self._patterns[number]
            rule = f"rule {pattern!r}"
            reason = f"your rule {number + 1} {pattern!r}"
            return _fit(path, shape, axes, rule, reason)
        known = self._rule_of_path.get(path) or self._rule_of_path.get(
            names.normal(path)
        )
        if known is not None:
            verdict = _fit(path, shape, known.axes, known.reason, known.reason)
            return dataclasses.replace(
                verdict, doubt=known.doubt, guessed=known.guessed
            )
        if len(shape) < 2:
            return Verdict(path, shape, None, f"rank {len(shape)}")
        if self._by_name:
            kind = kind_of(names.name_of(path), len(shape))
            if kind is not None and kind.adam:
                return Verdict(path, shape, None, f"name: {kind.label}")
        if len(shape) == 2:
            verdict = _fit(path, shape, IN_OUT, RANK_2, RANK_2)
            left_out = not self._by_name and self._searched.of_tree
            return dataclasses.replace(verdict, doubt=LEFT_OUT if left_out else "")
        return Verdict(path, shape, None, UNCOVERED)


def _fit(
    path: str,
    shape: tuple[int, ...],
    axes: MatrixAxes | None,
    source: str,
    reason: str,
) -> Verdict:
    """The verdict of a rule; ``source`` is what its error calls it."""
    try:
        resolved = None if axes is None else axes.resolve(shape)
    except ValueError as err:
        name = trees.quote(path)
        raise ValueError(f"{name} of shape {shape}, {source}: {err}") from err
    return Verdict(path, shape, resolved, reason)


def _by_path(leaves: Sequence[LeafRule]) -> dict[str, LeafRule]:
    """Rules by the leaf's path, and by its normal form where only one leaf has it."""
    normal = [names.normal(leaf.path) for leaf in leaves]
    count = collections.Counter(normal)
    by_normal = {n: x for n, x in zip(normal, leaves) if count[n] == 1}
    return by_normal | {leaf.path: leaf for leaf in leaves}
