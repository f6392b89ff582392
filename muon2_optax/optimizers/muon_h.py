"""Muon on the hyperball: constant norms in place of weight decay."""

from typing import Any

import optax
from jax.typing import ArrayLike, DTypeLike

from muon2_optax.moments import scale_by_momentum
from muon2_optax.optimizers._route import route
from muon2_optax.optimizers._shared_arguments import NOT_ON_SPHERE, ON_SPHERE, optimizer
from muon2_optax.orthogonalize import newton_schulz_orthogonalize
from muon2_optax.rules import MatrixRules
from muon2_optax.schedules.coefficients import NSCoeffs
from muon2_optax.sharding import Shardings
from muon2_optax.sphere import Radius, hyperball


@optimizer(ns_steps=5, texts=ON_SPHERE, missing=NOT_ON_SPHERE)
def muon_h(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.95,
    *,
    radius: Radius = None,
    ns_steps: int | None = None,
    ns_coeffs: NSCoeffs = "keller",
    ns_dtype: DTypeLike | None = None,
    nesterov: bool = True,
    rules: MatrixRules | None = None,
    shardings: Shardings | None = None,
    mu_dtype: DTypeLike | None = None,
    dampening: ArrayLike | None = None,
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
    """Muon on the hyperball for the matrices, AdamW for the rest.

    For each matrix W, of norm R at the start, with gradient G::

        M = b1 M + (1 - b1) G
        O = NewtonSchulz(b1 M + (1 - b1) G, K)
        W = R n(W - learning_rate R n(O))               n(x) = x / ||x||

    There is neither weight decay nor a shape factor: ``n`` takes any factor away.

    Returns:
      The optimizer. Updates have the gradients' dtypes.

    References:
      Wen et al. 2025, "Fantastic Pretraining Optimizers 2.1: Hyperball Optimization".

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    >>> tx = muon_h(learning_rate=0.02, adam_learning_rate=3e-3)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """

    def matrix(rules: MatrixRules) -> optax.GradientTransformation:
        return optax.chain(
            scale_by_momentum(
                b1, nesterov=nesterov, dampening=dampening, mu_dtype=mu_dtype
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
