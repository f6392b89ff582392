"""Which parameters are matrices, and along which axes.

Rules are data: an ordered list of path patterns, resolved per (path, shape) while
tracing. They hold no arrays and no tree, so the same object serves ``init`` and
``update``, masked and abstract trees, and every wrapper of the parameters.
"""

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optax

from muon2_optax import trees
from muon2_optax.axes import MatrixAxes, ResolvedAxes, shape_factors

MATRIX, ADAM = "matrix", "adam"

# Rank-2 (or stacked) leaves that are tables or vectors rather than maps between
# activations. Embeddings and heads see one-hot inputs or outputs, for which a spectral
# step is the wrong geometry (Bernstein & Newhouse, "Modular duality", 2024).
_NOT_MATRICES = tuple(
    (label, re.compile(pattern, re.IGNORECASE))
    for label, pattern in (
        ("embedding", r"embed|(^|/)(wte|wpe|emb)(/|$)|(tok(en)?|pos(ition)?)_?emb"),
        ("position table", r"pos(ition(al)?)?_(table|enc|bias)|rel(ative)?_pos"),
        # "output" only at the top: below, it is a projection inside a layer.
        (
            "head",
            r"lm_?head|(^|/)(head|classifier)(/|$)|^(params/)?output/\w+$|logits|unembed",
        ),
        ("norm", r"norm(?!al)|(^|/)ln(_?\w*)?(/|$)|(^|/)(scale|gain|gamma|beta)(/|$)"),
        ("bias", r"bias(/|$)"),
        ("router", r"router|moe[^/]*/gate(/|$)"),
        ("state space", r"(^|/)(a_log|dt_proj|conv1d)(/|$)"),
    )
)


@dataclasses.dataclass(frozen=True)
class LeafRule:
    """What one leaf is, known from its model or its neighbours rather than its name.

    Attributes:
      path: the leaf's path, ``"layers/0/kernel"``.
      axes: the axes that form its matrices, or None for AdamW.
      reason: a short phrase for ``MatrixRules.describe``: ``"module Linear"``.
    """

    path: str
    axes: MatrixAxes | None
    reason: str


@dataclasses.dataclass(frozen=True)
class MatrixRules:
    """An ordered list of path patterns, first match wins.

    A pattern is a regular expression searched in the leaf's path, written
    ``"layers/0/attn/q_proj/kernel"``. Its value says which axes form the matrix, or is
    None for "not a matrix" (AdamW). Leaves that no pattern matches follow the defaults:
    embeddings, position tables, heads, norms, biases and routers (by name), and every
    leaf of rank 0 or 1, go to AdamW; other rank-2 leaves are matrices of shape
    (fan_in, fan_out); leaves of higher rank go to AdamW with a warning, or raise with
    ``strict=True``. Leaves without elements always go to AdamW.

    Attributes:
      patterns: ``((regex, MatrixAxes | None), ...)``.
      strict: raise where a leaf of rank 3 or more has no rule.
      by_name: apply the defaults that go by name; if False, every rank-2 leaf without
        a rule is a matrix, embeddings and heads included.
      leaves: what is known of single leaves, one ``LeafRule`` each. A pattern that
        matches the leaf comes first, the defaults come after.

    >>> rules = MatrixRules(((r"attn/(q|k|v)/kernel", MatrixAxes(0, (1, 2))),
    ...                      (r"experts/", MatrixAxes(-2, -1))))
    """

    patterns: tuple[tuple[str, MatrixAxes | None], ...] = ()
    strict: bool = False
    by_name: bool = True
    leaves: tuple[LeafRule, ...] = ()

    def __post_init__(self) -> None:
        pairs: list[tuple[str, MatrixAxes | None]] = []
        for pair in self.patterns:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TypeError(f"a rule is a (pattern, MatrixAxes) pair, got {pair!r}")
            pattern, axes = pair
            if not isinstance(pattern, str):
                raise TypeError(f"a pattern is a str, got {pattern!r}")
            if axes is not None and not isinstance(axes, MatrixAxes):
                raise TypeError(
                    f"rule {pattern!r}: want MatrixAxes or None, got {axes!r}"
                )
            try:
                re.compile(pattern)
            except (re.error, TypeError) as err:
                raise ValueError(
                    f"rule {pattern!r} is no regular expression: {err}"
                ) from err
            pairs.append((pattern, axes))
        object.__setattr__(self, "patterns", tuple(pairs))

    @classmethod
    def of(
        cls,
        model: Any,
        *inputs: Any,
        patterns: Sequence[tuple[str, MatrixAxes | None]] = (),
        strict: bool = False,
        modules: Mapping[Any, Mapping[str, MatrixAxes | None]] | None = None,
        logical_axes: Mapping[str, str] | None = None,
        **keywords: Any,
    ) -> "MatrixRules":
        """Rules from the model itself, whose modules say what each parameter is.

        Parameters of modules that are not known go by their names; one warning lists
        them. Shapes are enough: nothing is computed and no array is kept.

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
          logical_axes: what further logical axis names stand for, as in
            ``muon2_optax.models.logical_axes.LOGICAL_AXES``.
          **keywords: further arguments of a Linen module's call.

        Raises:
          TypeError: the model is of none of these kinds.
          ValueError: axes in ``modules`` do not fit their parameter.

        >>> rules = MatrixRules.of(nnx_model)
        >>> rules = MatrixRules.of(linen_module, jax.ShapeDtypeStruct((1, 8), int))
        """
        from muon2_optax import models

        found, before = models.find(
            model, inputs, keywords, modules or {}, logical_axes or {}
        )
        named = cls()

        def by_name(path: str, shape: tuple[int, ...]) -> Any:
            axes, reason = named._decide(path, shape)
            if reason == _UNCOVERED:
                return None
            return axes and MatrixAxes(axes.ins, axes.outs), reason

        decisions, unknown = models.settle(found, by_name)
        leaves = [
            LeafRule(prefix + path, axes, reason)
            for path, axes, reason in decisions
            for prefix in before
        ]
        models.warn_of(
            [x for x in unknown if not any(re.search(p, x.path) for p, _ in patterns)]
        )
        return cls(tuple(patterns), strict, leaves=tuple(leaves))

    @classmethod
    def from_dimension_numbers(
        cls, dimension_numbers: Any, params: optax.Params | None = None
    ) -> "MatrixRules":
        """Rules from what ``optax.contrib.muon`` takes.

        Args:
          dimension_numbers: None (every rank-2 leaf is a matrix), one
            ``optax.contrib.MuonDimensionNumbers`` for all leaves, a tree or tree prefix
            of them with None for "not a matrix", or a function from ``params`` to
            such a tree.
          params: parameters (or their shapes); needed for a function only.
        """
        if _is_spec(dimension_numbers) or dimension_numbers is None:
            if dimension_numbers is None:
                return cls(by_name=False)
            return cls(((r"", _from_spec(dimension_numbers)),), by_name=False)
        if callable(dimension_numbers):
            if params is None:
                raise ValueError("a function of the parameters needs params=...")
            dimension_numbers = dimension_numbers(params)
        named = trees.named_leaves(
            dimension_numbers, is_leaf=lambda x: x is None or _is_spec(x)
        )
        patterns = []
        for name, spec in named:
            if isinstance(spec, optax.MaskedNode):
                continue
            if spec is not None and not _is_spec(spec):
                raise TypeError(
                    f"{name!r}: want MuonDimensionNumbers or None, got {spec!r}"
                )
            axes = None if spec is None else _from_spec(spec)
            patterns.append((f"^{re.escape(name)}(/|$)" if name else r"", axes))
        return cls(tuple(patterns), by_name=False)

    def resolve(self, path: str, shape: tuple[int, ...]) -> ResolvedAxes | None:
        """The matrix axes of one leaf, or None where it is not a matrix.

        Raises:
          ValueError: the axes of the matching pattern do not fit the shape, or no
            pattern covers a leaf of rank 3 or more and ``strict`` is set.
        """
        return self._decide(path, shape)[0]

    def labels(self, params: optax.Params) -> Any:
        """Labels ``"matrix"`` or ``"adam"`` for ``optax.partition``.

        Raises:
          ValueError: as ``resolve``, or a pattern that matches no leaf at all.
        """
        named = trees.named_leaves(params)
        self._check_patterns([name for name, _ in named])
        uncovered = []

        def label(name: str, leaf: Any) -> str:
            axes, reason = self._decide(name, np.shape(leaf))
            if reason == _UNCOVERED:
                uncovered.append(f"{name} {np.shape(leaf)}")
            return ADAM if axes is None else MATRIX

        labels = trees.map_named(label, params)
        if uncovered:
            warnings.warn(
                "no matrix rule for these leaves of rank 3 or more, so AdamW trains"
                f" them: {', '.join(uncovered)}. Add rules to MatrixRules (None keeps"
                " AdamW and silences this), or set strict=True to raise instead.",
                stacklevel=1,  # one place, so that Python shows it once, not per step
            )
        return labels

    def describe(self, params: optax.Params, shape_scale: str = "spectral") -> str:
        """A table of what happens to each leaf: group, axes, shape factor, reason."""
        rows = [("path", "shape", "group", "matrices", "factor", "because of")]
        for name, leaf in trees.named_leaves(params):
            if trees.is_empty(leaf):
                continue
            axes, reason = self._decide(name, np.shape(leaf))
            if axes is None:
                matrices = factor = "-"
            else:
                count = math.prod(axes.shape[a] for a in axes.batch)
                matrices = " + ".join(
                    f"{count} x {axes.fan_in}x{n}" for n in axes.splits
                )
                factor = ", ".join(f"{f:.4g}" for f in shape_factors(axes, shape_scale))
            group = ADAM if axes is None else MATRIX
            rows.append((name, str(np.shape(leaf)), group, matrices, factor, reason))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(r, widths)).rstrip() for r in rows
        ]
        return "\n".join(lines)

    def _decide(
        self, path: str, shape: tuple[int, ...]
    ) -> tuple[ResolvedAxes | None, str]:
        if math.prod(shape) == 0:
            return None, "no elements"
        for pattern, axes in self.patterns:
            if re.search(pattern, path):
                if axes is None:
                    return None, f"rule {pattern!r}"
                try:
                    return axes.resolve(tuple(shape)), f"rule {pattern!r}"
                except ValueError as err:
                    raise ValueError(
                        f"{path!r} of shape {tuple(shape)}, rule {pattern!r}: {err}"
                    ) from err
        known = self._rule_of_path.get(path)
        if known is not None:
            if known.axes is None:
                return None, known.reason
            try:
                return known.axes.resolve(tuple(shape)), known.reason
            except ValueError as err:
                raise ValueError(
                    f"{path!r} of shape {tuple(shape)}, {known.reason}: {err}"
                ) from err
        if len(shape) < 2:
            return None, f"rank {len(shape)}"
        if self.by_name:
            for label, regex in _NOT_MATRICES:
                if regex.search(path):
                    return None, f"default: {label}"
        if len(shape) == 2:
            return MatrixAxes(0, 1).resolve(tuple(shape)), "default: rank 2"
        if self.strict:
            raise ValueError(
                f"{path!r} of shape {tuple(shape)} has no matrix rule; add one to"
                " MatrixRules, for example (pattern, MatrixAxes(-2, -1)) for a stack of"
                " matrices, or (pattern, None) for AdamW"
            )
        return None, _UNCOVERED

    @functools.cached_property
    def _rule_of_path(self) -> dict[str, LeafRule]:
        return {leaf.path: leaf for leaf in self.leaves}

    def _check_patterns(self, names: Sequence[str]) -> None:
        for pattern, _ in self.patterns if names else ():
            if not any(re.search(pattern, name) for name in names):
                shown = ", ".join(map(repr, names[:8])) + (", ..." if names[8:] else "")
                raise ValueError(
                    f"rule {pattern!r} matches no parameter; the paths are {shown}"
                )


_UNCOVERED = "NO RULE (rank 3 or more)"


def _is_spec(x: Any) -> bool:
    return hasattr(x, "reduction_axis") and hasattr(x, "output_axis")


def _from_spec(spec: Any) -> MatrixAxes:
    return MatrixAxes(spec.reduction_axis, spec.output_axis)
