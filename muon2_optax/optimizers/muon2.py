"""Muon^2: momentum over the root of a second moment, orthogonalized (Algorithm 1)."""

from typing import Any

import optax
from jax.typing import ArrayLike, DTypeLike

from muon2_optax.decay import decay_weights
from muon2_optax.moments import scale_by_second_moment
from muon2_optax.optimizers._route import route
from muon2_optax.optimizers._shared_arguments import optimizer
from muon2_optax.orthogonalize import newton_schulz_orthogonalize
from muon2_optax.rules import MatrixRules
from muon2_optax.scaling import scale_by_shape
from muon2_optax.schedules.coefficients import NSCoeffs
from muon2_optax.shape_scales import ShapeScale
from muon2_optax.sharding import Shardings


@optimizer(ns_steps=3)
def muon2(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.95,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-10,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    *,
    ns_steps: int | None = None,
    ns_coeffs: NSCoeffs = "keller",
    ns_dtype: DTypeLike | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
    shape_scale: ShapeScale = "spectral",
    rules: MatrixRules | None = None,
    shardings: Shardings | None = None,
    weight_decay_mask: Any = None,
    cautious_weight_decay: bool = False,
    mu_dtype: DTypeLike | None = None,
    nu_dtype: DTypeLike | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps: ArrayLike = 1e-8,
    adam_eps_root: ArrayLike | None = None,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    rest: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon^2 for the matrices, AdamW for the rest.

    For each matrix W with gradient G (the paper's Algorithm 1)::

        M = b1 M + (1 - b1) G
        V = b2 V + (1 - b2) G * G
        O = NewtonSchulz(M / (sqrt(V) + eps), K)
        W = W - learning_rate * (sqrt(fan_out / fan_in) * O + weight_decay * W)

    The paper gives neither b1, b2 nor eps; these are the values of a public run,
    modded-nanogpt's pull request 266. The weight decay is 0 here, and 0.0125 there.

    Returns:
      The optimizer. Updates have the gradients' dtypes.

    References:
      Liu et al. 2026, "Muon^2", arXiv:2604.09967.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    >>> tx = muon2(learning_rate=0.02, adam_learning_rate=3e-3)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """

    def matrix(rules: MatrixRules) -> optax.GradientTransformation:
        return optax.chain(
            # Lines 4 to 6 of Algorithm 1: M, V and M / (sqrt(V) + eps).
            scale_by_second_moment(
                b1,
                b2,
                eps,
                nesterov=nesterov,
                bias_correction=bias_correction,
                mu_dtype=mu_dtype,
                nu_dtype=nu_dtype,
            ),
            # Line 7: O.
            newton_schulz_orthogonalize(
                ns_steps, ns_coeffs, ns_dtype=ns_dtype, rules=rules, shardings=shardings
            ),
            # Line 8: the step, here with weight decay.
            scale_by_shape(shape_scale, rules=rules),
            decay_weights(weight_decay, weight_decay_mask, cautious_weight_decay),
            optax.scale_by_learning_rate(learning_rate),
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
    )
