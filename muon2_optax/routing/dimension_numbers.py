"""Rules from the dimension numbers of ``optax.contrib.muon``."""

import re
from typing import Any

import optax

from muon2_optax import trees
from muon2_optax.axes import MatrixAxes

Patterns = tuple[tuple[str, MatrixAxes | None], ...]


def patterns_from(dimension_numbers: Any, params: optax.Params | None) -> Patterns:
    """The patterns of the rules that ``MatrixRules.from_dimension_numbers`` returns."""
    if dimension_numbers is None:
        return ()
    if _is_spec(dimension_numbers):
        return ((r"", _from_spec(dimension_numbers)),)
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
                f"{trees.quote(name)}: want MuonDimensionNumbers or None, got {spec!r}"
            )
        axes = None if spec is None else _from_spec(spec)
        patterns.append((f"^{re.escape(name)}(/|$)" if name else r"", axes))
    return tuple(patterns)


def _is_spec(x: Any) -> bool:
    return hasattr(x, "reduction_axis") and hasattr(x, "output_axis")


def _from_spec(spec: Any) -> MatrixAxes:
    return MatrixAxes(spec.reduction_axis, spec.output_axis)
