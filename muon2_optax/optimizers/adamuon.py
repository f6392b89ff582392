"""AdaMuon: an elementwise second moment of the orthogonalized sign."""

from typing import Any

import optax
from jax.typing import ArrayLike, DTypeLike

from muon2_optax.decay import decay_weights
from muon2_optax.moments import scale_by_momentum
from muon2_optax.optimizers._route import route
from muon2_optax.optimizers._shared_arguments import optimizer
from muon2_optax.orthogonalize import newton_schulz_orthogonalize
from muon2_optax.output_moments import scale_by_output_second_moment
from muon2_optax.rules import MatrixRules
from muon2_optax.scaling import scale_to_rms
from muon2_optax.schedules.coefficients import NSCoeffs
from muon2_optax.sharding import Shardings


@optimizer(ns_steps=5)
def adamuon(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.95,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    *,
    ns_steps: int | None = None,
    ns_coeffs: NSCoeffs = "keller",
    ns_dtype: DTypeLike | None = None,
    nesterov: bool = True,
    rms: ArrayLike = 0.2,
    nu_dtype: DTypeLike | None = None,
    rules: MatrixRules | None = None,
    shardings: Shardings | None = None,
    weight_decay_mask: Any = None,
    cautious_weight_decay: bool = False,
    mu_dtype: DTypeLike | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps: ArrayLike = 1e-8,
    adam_eps_root: ArrayLike | None = None,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    rest: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdaMuon for the matrices, AdamW for the rest.

    For each matrix with gradient G, following the authors' code::

        M = b1 M + (1 - b1) G
        O = NewtonSchulz(sign(b1 M + (1 - b1) G), K)
        V = b2 V + (1 - b2) O * O
        N = O / (sqrt(V) + eps), scaled to a root mean square of ``rms``
        W = W - learning_rate * (N + weight_decay * W)

    No factor by shape. The paper's form is ``nesterov=False`` (its heavy-ball momentum
    has the same sign); both take b2 = b1. The authors' code has weight decay 0.01.

    Args:
      b2: decay rate of V.
      eps: added to sqrt(V), and to the norm that is divided by.
      rms: root mean square of the update.
      nu_dtype: dtype of V; None: float32.

    Returns:
      The optimizer. Updates have the gradients' dtypes.

    References:
      Si et al. 2025, "AdaMuon", arXiv:2507.11005; github.com/Chongjie-Si/AdaMuon.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    >>> tx = adamuon(learning_rate=0.02, adam_learning_rate=3e-3)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """

    def matrix(rules: MatrixRules) -> optax.GradientTransformation:
        return optax.chain(
            scale_by_momentum(b1, nesterov=nesterov, mu_dtype=mu_dtype),
            optax.scale_by_sign(),
            newton_schulz_orthogonalize(
                ns_steps, ns_coeffs, ns_dtype=ns_dtype, rules=rules, shardings=shardings
            ),
            scale_by_output_second_moment(b2, eps, nu_dtype=nu_dtype),
            scale_to_rms(rms, eps, rules=rules),
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
