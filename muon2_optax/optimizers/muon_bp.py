"""MuonBP: blocks between periodic full orthogonalizations."""

from typing import Any

import optax

from muon2_optax.grids import in_blocks, periodically
from muon2_optax.moments import scale_by_momentum
from muon2_optax.optimizers._routed import routed
from muon2_optax.orthogonalize import (
    newton_schulz_orthogonalize,
    rules_or_default,
)
from muon2_optax.rules import MatrixRules
from muon2_optax.scaling import scale_by_shape


def muon_bp(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.95,
    weight_decay: float = 0.0,
    *,
    period: int = 5,
    block_grid: tuple[int, int] = (1, 4),
    block_scale: float = 1.0,
    ns_steps: int = 5,
    ns_coeffs: Any = "keller",
    ns_dtype: Any = None,
    nesterov: bool = True,
    shape_scale: str = "match_rms",
    rules: MatrixRules | None = None,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_eps: float = 1e-8,
    adam_weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """MuonBP for the matrices, AdamW for the rest.

    Every ``period``-th step (the first included) is Muon's. On the others each matrix
    is cut into a grid of blocks, and every block is orthogonalized and scaled by its
    own shape: with the grid of the mesh, no communication. The blocks are an argument
    here, so the numbers do not depend on how the parameters are sharded.

    Args:
      period: steps from one full orthogonalization to the next; 1 is Muon.
      block_grid: number of blocks along (inputs, outputs); sides that do not divide are
        padded with zeros.
      block_scale: learning rate of the block steps as a multiple of the full steps';
      the
        best lies between 1 / sqrt(number of blocks) and 1.

    The others, and the return value, are those of ``muon``.

    References:
      Khaled et al. 2025, "MuonBP", arXiv:2510.16981 (no published code).

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    >>> tx = muon_bp(learning_rate=0.02, adam_learning_rate=3e-3)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """
    rules = rules_or_default(rules)
    whole = _orthogonalized(rules, ns_steps, ns_coeffs, ns_dtype, shape_scale)

    def blocks(block_rules: MatrixRules) -> optax.GradientTransformation:
        return optax.chain(
            _orthogonalized(block_rules, ns_steps, ns_coeffs, ns_dtype, shape_scale),
            optax.scale(block_scale),
        )

    matrix = optax.chain(
        scale_by_momentum(b1, nesterov=nesterov, mu_dtype=mu_dtype),
        periodically(whole, in_blocks(blocks, block_grid, rules=rules), period),
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


def _orthogonalized(
    rules: MatrixRules, ns_steps: int, ns_coeffs: Any, ns_dtype: Any, shape_scale: str
) -> optax.GradientTransformation:
    return optax.chain(
        newton_schulz_orthogonalize(
            ns_steps, ns_coeffs, ns_dtype=ns_dtype, rules=rules
        ),
        scale_by_shape(shape_scale, rules=rules),
    )
