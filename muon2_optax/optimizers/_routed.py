"""What every optimizer shares: matrices one way, everything else to AdamW."""

from typing import Any

import optax

from muon2_optax.moments import scale_by_second_moment
from muon2_optax.rules import ADAM, MATRIX, MatrixRules


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    mask: Any,
    mu_dtype: Any,
) -> optax.GradientTransformation:
    """``optax.adamw`` whose state keeps its dtypes for gradients of any dtype."""
    return optax.chain(
        scale_by_second_moment(b1, b2, eps, bias_correction=True, mu_dtype=mu_dtype),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def routed(
    matrix: optax.GradientTransformation,
    adam: optax.GradientTransformation,
    rules: MatrixRules,
) -> optax.GradientTransformationExtraArgs:
    """``optax.partition`` by the rules; updates keep the gradients' dtypes.

    The cast matters for gradients of lower precision than the parameters, which weight
    decay would promote: ``optax.apply_if_finite`` and ``optax.MultiSteps`` need both
    branches of their ``cond`` to agree.
    """
    inner = optax.partition({MATRIX: matrix, ADAM: adam}, rules.labels)

    def update_fn(updates: optax.Updates, state: Any, params: Any = None, **extra: Any):
        new, state = inner.update(updates, state, params, **extra)
        return optax.tree.cast_like(new, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)
