"""Dion: low-rank orthonormalized updates with error feedback."""

from typing import Any

import optax

from muon2_optax.low_rank import scale_by_low_rank_orthonormal
from muon2_optax.optimizers._routed import routed
from muon2_optax.orthogonalize import rules_or_default
from muon2_optax.rules import MatrixRules
from muon2_optax.scaling import scale_by_shape


def dion(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    rank_fraction: float = 1.0,
    shape_scale: str = "spectral",
    seed: int = 0,
    rules: MatrixRules | None = None,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_eps: float = 1e-8,
    adam_weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Dion for the matrices, AdamW for the rest.

    One power iteration of rank r tracks the dominant subspace of the momentum; what the
    rank-r update leaves out stays in the momentum. No Newton-Schulz: it takes one QR
    decomposition of an m x r matrix, in float32 or better. See
    ``scale_by_low_rank_orthonormal``.

    Args:
      b1: the paper's mu; 1 - b1 of the part just applied leaves the momentum.
      eps: added to the column norms of the right factor.
      rank_fraction: r as a fraction of the smaller side.
      seed: of the first right factor, a normal random matrix.

    The others, and the return value, are those of ``muon``; the authors' defaults are
    learning rate 0.01 and weight decay 0.01.

    References:
      Ahn et al. 2025, "Dion", arXiv:2504.05295; github.com/microsoft/dion.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    >>> tx = dion(learning_rate=0.02, adam_learning_rate=3e-3)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """
    rules = rules_or_default(rules)
    matrix = optax.chain(
        scale_by_low_rank_orthonormal(
            b1,
            eps,
            rank_fraction=rank_fraction,
            seed=seed,
            mu_dtype=mu_dtype,
            rules=rules,
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
