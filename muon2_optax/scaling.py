"""The transform that scales each update by a function of its matrix's shape."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from muon2_optax import trees
from muon2_optax.axes import SHAPE_SCALES, shape_factors
from muon2_optax.orthogonalize import require_matrix, rules_or_default
from muon2_optax.rules import MatrixRules


def scale_by_shape(
    kind: str = "spectral", *, rules: MatrixRules | None = None
) -> optax.GradientTransformation:
    """Multiplies each matrix by a factor of its fan-in and fan-out.

    Args:
      kind: one of

        - ``"spectral"``: sqrt(fan_out / fan_in), line 8 of the paper's Algorithm 1
          (sqrt(m/n) of an n x m kernel; Bernstein and Newhouse 2025),
        - ``"keller"``: sqrt(max(1, fan_out / fan_in)), Keller Jordan's Muon,
        - ``"match_rms"``: 0.2 sqrt(max(fan_in, fan_out)), the RMS of an AdamW update
          (Liu et al. 2025, "Muon is scalable for LLM training"),
        - ``"none"``: 1.
      rules: which axes form the matrices; None: ``MatrixRules()``.

    Returns:
      A stateless transform.

    Raises:
      ValueError: an unknown kind; on update, a leaf that is not a matrix.
    """
    rules = rules_or_default(rules)
    if not isinstance(kind, str) or kind not in SHAPE_SCALES:
        raise ValueError(f"unknown shape scale {kind!r}; known: {sorted(SHAPE_SCALES)}")

    def update_fn(updates: optax.Updates, params: Any = None) -> optax.Updates:
        del params

        def leaf(name: str, u: jax.Array) -> tuple[jax.Array]:
            axes = require_matrix(rules, name, u)
            factor = axes.per_output(shape_factors(axes, kind))
            if not isinstance(factor, float):
                factor = jnp.asarray(factor, u.real.dtype)
            elif factor == 1:
                return (u,)
            return (factor * u,)

        return trees.map_leaves(leaf, updates)[0]

    return optax.stateless(update_fn)
