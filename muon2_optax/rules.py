"""Which parameters are matrices, and along which axes.

Rules are data: an ordered list of path patterns, resolved per (path, shape) while
tracing. They hold no arrays and no tree, so the same object serves ``init`` and
``update``, masked and abstract trees, and every wrapper of the parameters.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optax

from muon2_optax import trees
from muon2_optax.axes import MatrixAxes, ResolvedAxes
from muon2_optax.options import require_flags, require_items
from muon2_optax.routing import report, unsettled
from muon2_optax.routing.binding import rules_of_tree
from muon2_optax.routing.dimension_numbers import patterns_from
from muon2_optax.routing.leaves import ADAM as ADAM
from muon2_optax.routing.leaves import MATRIX as MATRIX
from muon2_optax.routing.leaves import LeafRule as LeafRule
from muon2_optax.routing.leaves import Verdict
from muon2_optax.routing.patterns import Pattern, Patterns, check_patterns
from muon2_optax.routing.router import Router
from muon2_optax.shape_scales import ShapeScale


@dataclasses.dataclass(frozen=True)
class MatrixRules:
    """An ordered list of path patterns, first match wins.

    A pattern is a regular expression, searched in the leaf's path as it is printed and
    in its normal form, the same in all frameworks: ``"layers/0/attn/q_proj/kernel"``.
    Its value says which axes form the matrix, or is None for "not a matrix" (AdamW).
    Leaves that no pattern matches follow the defaults. What is called an embedding, a
    head, a norm, a bias, a router or the like goes to AdamW, and so does every leaf of
    rank 0 or 1; other rank-2 leaves are matrices of shape (fan_in, fan_out), unless
    their neighbours say otherwise (``bind``); leaves of higher rank go to AdamW with a
    warning, or raise with ``strict=True``. Leaves without elements always go to AdamW.

    Attributes:
      patterns: ``((regex, MatrixAxes | None), ...)``.
      strict: raise where a leaf of rank 3 or more has no rule.
      by_name: read names. If False, every rank-2 leaf without a rule is a matrix,
        embeddings and heads included, whatever its neighbours are; only leaves that a
        tree of dimension numbers leaves out are doubtful; and patterns are searched
        only in the path as it is printed.
      leaves: what ``of`` and ``bind`` know of single leaves. A pattern that matches
        the leaf comes first, the defaults come after.
      allow_unused: accept patterns that match no leaf, as those for several models.

    Raises:
      TypeError: a pattern that is no pair of a str and ``MatrixAxes`` or None; a field
        of another type than its own.
      ValueError: a pattern that is no regular expression.

    >>> rules = MatrixRules(((r"attn/(q|k|v)/kernel", MatrixAxes(0, (1, 2))),
    ...                      (r"experts/", MatrixAxes(-2, -1))))
    """

    patterns: Sequence[Pattern] = ()
    strict: bool = False
    by_name: bool = True
    leaves: tuple[LeafRule, ...] = ()
    allow_unused: bool = False

    def __post_init__(self) -> None:
        require_flags(self, "strict", "by_name", "allow_unused")
        require_items(
            self,
            "leaves",
            lambda leaf: isinstance(leaf, LeafRule),
            "a tuple of LeafRule",
        )
        object.__setattr__(self, "leaves", tuple(self.leaves))
        object.__setattr__(self, "patterns", check_patterns(self.patterns))

    @classmethod
    def of(
        cls,
        model: Any,
        *inputs: Any,
        patterns: Sequence[Pattern] = (),
        strict: bool = False,
        modules: Mapping[Any, Mapping[str, MatrixAxes | None]] | None = None,
        logical_axes: Mapping[str, str] | None = None,
        **keywords: Any,
    ) -> "MatrixRules":
        """Rules from the model itself, whose modules say what each parameter is.

        Parameters of modules that are not known go by their names; one warning lists
        those whose names say nothing. Shapes are enough: nothing is computed and no
        array is kept.

        Args:
          model: a Flax NNX model; an Equinox model; a Linen module, with example
            ``inputs``; or the variables of a Linen model in boxes with logical axis
            names, as ``jax.eval_shape(module.init, ...)`` gives them.
          *inputs: of a Linen module, what its call takes: arrays or
            ``jax.ShapeDtypeStruct``.
          patterns: rules by path that come before what the model says.
          strict: as in ``MatrixRules``.
          modules: what the parameters of other modules are: for a type of module (or
            its name), the axes of each parameter by its path below the module, None for
            AdamW: ``{MyLinear: {"w": MatrixAxes(-2, -1)}}``.
          logical_axes: what further logical axis names stand for: ``"stack"``, one
            matrix for each index; ``"adam"``, a table or vector; ``"window"``, the taps
            of a convolution; any other word names a space, and neighbouring axes of one
            space form one side of the matrix: ``{"my_heads": "attention"}``.
          **keywords: further arguments of a Linen module's call.

        Raises:
          TypeError: the model is of none of these kinds.
          ValueError: axes in ``modules`` do not fit their parameter.

        >>> from flax import nnx
        >>> model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
        >>> MatrixRules.of(model).resolve("kernel", (4, 8)).fan_in
        4
        """
        from muon2_optax import models

        found, before = models.find(
            model, inputs, keywords, modules or {}, logical_axes or {}
        )
        # Names say nothing about stacking, so they are asked with the shape of a layer.
        named = _bound(cls(), tuple((x.path, x.single or x.shape) for x in found))
        ruled = Patterns([pattern for pattern, _ in patterns], in_normal_form=True)
        leaves = models.leaf_rules(
            found,
            before,
            named._router.decide,
            lambda path: ruled.first(path) is not None,
        )
        return cls(tuple(patterns), strict, leaves=leaves)

    @classmethod
    def from_dimension_numbers(
        cls, dimension_numbers: Any, params: optax.Params | None = None
    ) -> "MatrixRules":
        """Rules from what ``optax.contrib.muon`` takes.

        Args:
          dimension_numbers: None (every rank-2 leaf is a matrix), one
            ``optax.contrib.MuonDimensionNumbers`` for all leaves, a tree or tree prefix
            of them with None for "not a matrix", or a function from ``params`` to
            such a tree. A leaf of rank 2 that the tree leaves out is a matrix, with a
            warning from ``labels`` and ``init``.
          params: parameters (or their shapes); needed for a function only.

        Raises:
          TypeError: a leaf of the tree is neither of these numbers nor None.
          ValueError: a function without ``params``; numbers that are no matrix's axes.
        """
        return cls(patterns_from(dimension_numbers, params), by_name=False)

    def bind(self, params: optax.Params) -> "MatrixRules":
        """These rules, with what this tree as a whole says of its leaves.

        A leaf's neighbours decide where its name and shape do not: vectors of stacked
        layers, biases called ``b``, gates beside experts, weights stored (out, in).
        What they say becomes ``leaves`` of the result. The optimizers bind their rules
        themselves. The transforms of a chain see the matrices without the rest, so give
        them ``rules.bind(params)``; it is needed where neighbours decide, and never
        wrong. Bound rules serve only this tree and parts of it.

        Args:
          params: the parameters, or their shapes.
        """
        leaves = tuple(
            (name, tuple(np.shape(leaf)))
            for name, leaf in trees.named_leaves(params)
            if not trees.is_empty(leaf)
        )
        return _bound(self, leaves)

    def resolve(self, path: str, shape: tuple[int, ...]) -> ResolvedAxes | None:
        """The matrix axes of one leaf, or None where it is not a matrix.

        Raises:
          ValueError: the axes of the matching pattern do not fit the shape, or no
            pattern covers a leaf of rank 3 or more and ``strict`` is set.
        """
        verdict = self._router.decide(path, tuple(shape))
        if self.strict:
            unsettled.require_rules([verdict])
        return verdict.axes

    def labels(self, params: optax.Params) -> Any:
        """Labels ``"matrix"`` or ``"adam"`` for ``optax.partition``.

        Warns, once for a tree, of doubtful leaves and of those of rank 3 or more that
        no rule covers.

        Raises:
          ValueError: axes of a pattern that do not fit; a pattern that matches no leaf
            at all; or, if ``strict`` is set, leaves of rank 3 or more without a rule,
            all of which are listed with the rules that settle them.
        """
        bound = self.bind(params)
        self._require_matches(params)
        verdicts = []

        def label(name: str, leaf: Any) -> str:
            verdicts.append(bound._router.decide(name, tuple(np.shape(leaf))))
            return verdicts[-1].group

        labels = trees.map_named(label, params)
        if self.strict:
            unsettled.require_rules(verdicts)
        unsettled.warn_of(verdicts)
        return labels

    def check(self, params: optax.Params) -> None:
        """Raises where it is doubtful what a leaf is, for scripts.

        Raises:
          ValueError: what ``labels`` refuses; or leaves that are doubtful, that have
            rank 3 or more and no rule, or that ``of`` has warned of. All are listed,
            each with the rules that settle it.
        """
        self._require_matches(params)
        unsettled.require_certainty(self._verdicts(params))

    def describe(
        self, params: optax.Params, shape_scale: ShapeScale = "spectral"
    ) -> str:
        """A table of what happens to each leaf, and why.

        One row for each leaf, or in large trees for all whose paths differ in numbers
        only: group, matrices, axes (in -> out), shape factor, number of parameters,
        and the reason. Doubtful leaves, those that ``check`` refuses, come first, with
        the rules that settle them; before them patterns that match no leaf, which
        ``init`` refuses. The last lines are the totals of both groups. ``strict`` makes
        no difference here.

        Args:
          params: the parameters, or their shapes.
          shape_scale: what the column ``factor`` shows: the factor of ``muon2`` and
            ``muon2_f`` by default. Give the optimizer's own ``shape_scale`` if it is
            another, as ``"keller"`` of ``muon``; see ``scale_by_shape``.
        """
        unused = [] if self.allow_unused else self._unmatched(params)
        return report.report(self._verdicts(params), shape_scale, unused)

    def _verdicts(self, params: optax.Params) -> list[Verdict]:
        bound = self.bind(params)
        return [
            bound._router.decide(name, tuple(np.shape(leaf)))
            for name, leaf in trees.named_leaves(params)
            if not trees.is_empty(leaf)
        ]

    def _unmatched(self, params: optax.Params) -> list[str]:
        """The patterns that match no leaf; none of a tree without leaves."""
        paths = [name for name, _ in trees.named_leaves(params)]
        return self._router.unmatched(paths) if paths else []

    @functools.cached_property
    def _router(self) -> Router:
        return Router(self.patterns, self.leaves, self.by_name)

    def _require_matches(self, params: optax.Params) -> None:
        """Refuses patterns that match no leaf at all, unless they are allowed."""
        missing = self._unmatched(params)
        if missing and not self.allow_unused:
            paths = [name for name, _ in trees.named_leaves(params)]
            shown = ", ".join(map(repr, paths[:8])) + (", ..." if paths[8:] else "")
            raise ValueError(
                f"rule {missing[0]!r} matches no parameter; the paths are {shown}."
                " allow_unused=True accepts it, as under optax.multi_transform, where"
                " each optimizer sees a part of the tree"
            )


@functools.lru_cache(maxsize=16)
def _bound(
    rules: MatrixRules, leaves: tuple[tuple[str, tuple[int, ...]], ...]
) -> MatrixRules:
    """The rules, and one for each leaf that its neighbours or a doubt decide."""
    if not rules.by_name:
        return rules

    new = rules_of_tree(leaves, rules._router.has_rule)
    return dataclasses.replace(rules, leaves=(*rules.leaves, *new)) if new else rules
