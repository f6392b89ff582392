"""NorMuon: Muon with a second moment per output neuron."""

from typing import Any

import optax
from jax.typing import ArrayLike, DTypeLike

from muon2_optax.decay import decay_weights
from muon2_optax.moments import scale_by_momentum
from muon2_optax.optimizers._route import route
from muon2_optax.optimizers._shared_arguments import optimizer
from muon2_optax.orthogonalize import newton_schulz_orthogonalize
from muon2_optax.output_moments import scale_by_neuron_second_moment
from muon2_optax.rules import MatrixRules
from muon2_optax.scaling import keep_norm, scale_by_shape
from muon2_optax.schedules.coefficients import NSCoeffs
from muon2_optax.shape_scales import ShapeScale
from muon2_optax.sharding import Shardings


@optimizer(ns_steps=5)
def normuon(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.95,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-10,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    *,
    ns_steps: int | None = None,
    ns_coeffs: NSCoeffs = "keller",
    ns_dtype: DTypeLike | None = None,
    nesterov: bool = True,
    shape_scale: ShapeScale = "keller",
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
    """NorMuon for the matrices, AdamW for the rest.

    For each matrix with gradient G, following the authors' code::

        M = b1 M + (1 - b1) G
        O = NewtonSchulz(b1 M + (1 - b1) G, K)
        v = b2 v + (1 - b2) mean over inputs of O * O           one number per output
        N = O / (sqrt(v) + eps), scaled to the Frobenius norm of O
        W = W - learning_rate * (sqrt(max(1, fan_out / fan_in)) * N + weight_decay * W)

    The paper's form differs from the code: no Nesterov momentum, eps under the root,
    and an RMS of 0.2 in place of norm and shape factor. It is the chain
    ``scale_by_momentum(b1, nesterov=False)``, ``newton_schulz_orthogonalize(5)``,
    ``scale_by_neuron_second_moment(b2, 0.0, eps_root=eps)``, ``scale_to_rms(0.2,
    0.0)``.

    Args:
      b2: decay rate of v.
      eps: added to sqrt(v).

    Returns:
      The optimizer. Updates have the gradients' dtypes.

    References:
      Li et al. 2025, "NorMuon", arXiv:2510.05491; github.com/zichongli5/NorMuon.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    >>> tx = normuon(learning_rate=0.02, adam_learning_rate=3e-3)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """

    def matrix(rules: MatrixRules) -> optax.GradientTransformation:
        return optax.chain(
            scale_by_momentum(b1, nesterov=nesterov, mu_dtype=mu_dtype),
            newton_schulz_orthogonalize(
                ns_steps, ns_coeffs, ns_dtype=ns_dtype, rules=rules, shardings=shardings
            ),
            keep_norm(scale_by_neuron_second_moment(b2, eps, rules=rules), rules=rules),
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
