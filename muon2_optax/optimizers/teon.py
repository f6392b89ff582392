"""TEON: layers of one kind orthogonalized together."""

from typing import Any

import optax

from muon2_optax.joint import ATTENTION_INPUTS, orthogonalize_jointly
from muon2_optax.moments import scale_by_momentum
from muon2_optax.optimizers._routed import routed
from muon2_optax.orthogonalize import rules_or_default
from muon2_optax.rules import MatrixRules
from muon2_optax.scaling import scale_by_shape


def teon(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.95,
    weight_decay: float = 0.0,
    *,
    joint: str = ATTENTION_INPUTS,
    group_size: int = 2,
    ns_steps: int = 5,
    ns_coeffs: Any = "polar_express",
    ns_dtype: Any = None,
    nesterov: bool = True,
    shape_scale: str = "spectral",
    rules: MatrixRules | None = None,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_eps: float = 1e-8,
    adam_weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """TEON for the matrices, AdamW for the rest.

    Momenta of ``group_size`` consecutive layers of one kind (by default the query, key
    and value projections) are laid side by side along their inputs and orthogonalized
    as one matrix; all others are orthogonalized alone, as in Muon. See
    ``orthogonalize_jointly``.

    Args:
      joint: regular expression of the paths that are joined.
      group_size: the paper's K, 2.

    The others, and the return value, are those of ``muon``. Whether the momentum is
    Nesterov's is not stated; the default is Muon's.

    References:
      Zhang et al. 2026, "TEON", arXiv:2601.23261 (no published code).

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    >>> tx = teon(learning_rate=0.02, adam_learning_rate=3e-3)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """
    rules = rules_or_default(rules)
    matrix = optax.chain(
        scale_by_momentum(b1, nesterov=nesterov, mu_dtype=mu_dtype),
        orthogonalize_jointly(
            joint, group_size, ns_steps, ns_coeffs, ns_dtype=ns_dtype, rules=rules
        ),
        scale_by_shape(shape_scale, rules=rules),
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    return routed(
        matrix,
        rules,
        learning_rate=learning_rate,
        adam_learning_rate=adam_learning_rate,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps=adam_eps,
        adam_weight_decay=adam_weight_decay,
        weight_decay_mask=weight_decay_mask,
        mu_dtype=mu_dtype,
    )
