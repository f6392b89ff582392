"""Muon (Jordan et al. 2024): the baseline, as published."""

from typing import Any

import optax
from jax.typing import ArrayLike, DTypeLike

from muon2_optax.decay import decay_weights
from muon2_optax.moments import scale_by_momentum
from muon2_optax.optimizers._route import route
from muon2_optax.optimizers._shared_arguments import optimizer
from muon2_optax.orthogonalize import newton_schulz_orthogonalize
from muon2_optax.rules import MatrixRules
from muon2_optax.scaling import scale_by_dual_norm, scale_by_shape
from muon2_optax.schedules.coefficients import NSCoeffs
from muon2_optax.shape_scales import ShapeScale
from muon2_optax.sharding import Shardings


@optimizer(ns_steps=5)
def muon(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    *,
    ns_steps: int | None = None,
    ns_coeffs: NSCoeffs = "keller",
    ns_dtype: DTypeLike | None = None,
    nesterov: bool = True,
    bias_correction: bool = False,
    adaptive: bool = False,
    shape_scale: ShapeScale = "keller",
    rules: MatrixRules | None = None,
    shardings: Shardings | None = None,
    weight_decay_mask: Any = None,
    cautious_weight_decay: bool = False,
    mu_dtype: DTypeLike | None = None,
    dampening: ArrayLike | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps: ArrayLike = 1e-8,
    adam_eps_root: ArrayLike | None = None,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    rest: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon for the matrices, AdamW for the rest.

    For each matrix W with gradient G::

        M = b1 M + (1 - b1) G
        O = NewtonSchulz(b1 M + (1 - b1) G, K)
        W = W - learning_rate * (sqrt(max(1, fan_out / fan_in)) * O + weight_decay * W)

    The published code adds 1e-7 to the norm before Newton-Schulz; here nothing is
    added, so the update does not depend on the size of the gradients (1e-30 to 1e30 in
    float32). A ``Schedule`` with ``normalization=Frobenius(eps=1e-7)`` restores it.

    Published relatives are arguments away: PolarExpress is
    ``ns_coeffs="polar_express"``; Turbo-Muon is ``ns_coeffs="turbo", ns_steps=4``;
    Moonlight is ``dampening=0.0, shape_scale="match_rms", weight_decay=0.1``;
    ``torch.optim.Muon`` is ``weight_decay=0.1``; ``optax.contrib.muon`` is
    ``bias_correction=True`` with NAdam as ``rest``.

    Args:
      bias_correction: correct the momentum for its start at zero, and mix as NAdam
        does, which is what ``optax.contrib.muon`` does; see ``scale_by_momentum``.
      adaptive: multiply each update by the dual norm of the momentum, so that its size
        follows the gradients'; see ``scale_by_dual_norm``.

    Returns:
      The optimizer. Updates have the gradients' dtypes.

    References:
      Jordan et al. 2024, github.com/KellerJordan/Muon.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    >>> tx = muon(learning_rate=0.02, adam_learning_rate=3e-3)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """

    def matrix(rules: MatrixRules) -> optax.GradientTransformation:
        orthogonalize = newton_schulz_orthogonalize(
            ns_steps, ns_coeffs, ns_dtype=ns_dtype, rules=rules, shardings=shardings
        )
        if adaptive:
            orthogonalize = scale_by_dual_norm(orthogonalize, rules=rules)
        return optax.chain(
            scale_by_momentum(
                b1,
                nesterov=nesterov,
                dampening=dampening,
                bias_correction=bias_correction,
                mu_dtype=mu_dtype,
            ),
            orthogonalize,
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
