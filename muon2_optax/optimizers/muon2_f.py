"""Muon^2-F: Muon^2 with the second moment factored (Algorithm 2)."""

from typing import Any

import optax

from muon2_optax.factored import factorized_second_moment
from muon2_optax.optimizers._routed import routed
from muon2_optax.orthogonalize import (
    newton_schulz_orthogonalize,
    rules_or_default,
)
from muon2_optax.placement import Shardings
from muon2_optax.rules import MatrixRules
from muon2_optax.scaling import scale_by_shape


def muon2_f(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    *,
    ns_steps: int = 3,
    ns_coeffs: Any = "keller",
    ns_dtype: Any = None,
    nesterov: bool = False,
    bias_correction: bool = False,
    shape_scale: str = "spectral",
    rules: MatrixRules | None = None,
    shardings: Shardings | None = None,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_eps: float = 1e-8,
    adam_weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Muon^2-F for the matrices, AdamW for the rest: Muon^2 at Muon's memory.

    For each matrix W with gradient G (the paper's Algorithm 2)::

        M = b1 M + (1 - b1) G
        r = b2 r + (1 - b2) mean over outputs of G * G        c: mean over inputs
        O = NewtonSchulz(M / (sqrt(r c^T / mean(r)) + eps), K)
        W = W - learning_rate * (sqrt(fan_out / fan_in) * O + weight_decay * W)

    Args and returns are those of ``muon2``, without ``nu_dtype``: the row and column
    statistics are float32 (float64 for float64 parameters) and need no saving.

    References:
      Liu et al. 2026, "Muon^2", arXiv:2604.09967.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    >>> tx = muon2_f(learning_rate=0.02, adam_learning_rate=3e-3)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """
    rules = rules_or_default(rules)
    matrix = optax.chain(
        factorized_second_moment(
            b1,
            b2,
            eps,
            nesterov=nesterov,
            bias_correction=bias_correction,
            mu_dtype=mu_dtype,
            rules=rules,
            shardings=shardings,
        ),
        newton_schulz_orthogonalize(
            ns_steps, ns_coeffs, ns_dtype=ns_dtype, rules=rules, shardings=shardings
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
        shardings=shardings,
    )
