"""Muon^2-F on the hyperball: constant norms in place of weight decay."""

from typing import Any

import optax
from jax.typing import ArrayLike, DTypeLike

from muon2_optax.optimizers._route import route
from muon2_optax.optimizers._shared_arguments import NOT_ON_SPHERE, ON_SPHERE, optimizer
from muon2_optax.optimizers.muon2_f import factorized_second_moment
from muon2_optax.orthogonalize import newton_schulz_orthogonalize
from muon2_optax.rules import MatrixRules
from muon2_optax.schedules.coefficients import NSCoeffs
from muon2_optax.sharding import Shardings
from muon2_optax.sphere import Radius, hyperball


@optimizer(ns_steps=3, texts=ON_SPHERE, missing=NOT_ON_SPHERE)
def muon2_f_h(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.95,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-10,
    *,
    radius: Radius = None,
    ns_steps: int | None = None,
    ns_coeffs: NSCoeffs = "keller",
    ns_dtype: DTypeLike | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
    rules: MatrixRules | None = None,
    shardings: Shardings | None = None,
    mu_dtype: DTypeLike | None = None,
    adam_h: str | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps: ArrayLike = 1e-8,
    adam_eps_root: ArrayLike | None = None,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    rest: optax.GradientTransformation | None = None,
    weight_decay_mask: Any = None,
    cautious_weight_decay: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Muon^2-F on the hyperball for the matrices, AdamW for the rest.

    ``muon2_f``'s direction O, and ``muon_h``'s step ``W = R n(W - learning_rate R
    n(O))`` from it.

    Returns:
      The optimizer. Updates have the gradients' dtypes.

    References:
      Liu et al. 2026, "Muon^2", arXiv:2604.09967; Wen et al. 2025, "Hyperball
      Optimization".

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    >>> tx = muon2_f_h(learning_rate=0.02, adam_learning_rate=3e-3)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """

    def matrix(rules: MatrixRules) -> optax.GradientTransformation:
        return optax.chain(
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
            hyperball(learning_rate, radius, rules=rules, shardings=shardings),
        )

    return route(
        matrix,
        rules,
        learning_rate=learning_rate,
        adam_learning_rate=adam_learning_rate,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps=adam_eps,
        adam_eps_root=adam_eps_root,
        adam_weight_decay=adam_weight_decay,
        rest=rest,
        weight_decay_mask=weight_decay_mask,
        cautious_weight_decay=cautious_weight_decay,
        mu_dtype=mu_dtype,
        shardings=shardings,
        adam_h=adam_h,
        radius=radius,
    )
