"""First and second moments of the gradients, which precede the orthogonalization.

All arithmetic is in float32 or better, whatever the dtype of the gradients. States keep
the dtypes that ``init`` gave them, and updates come back in the gradients' dtype.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from muon2_optax import averages, dtypes, roots, states, trees
from muon2_optax.arguments import check_arguments
from muon2_optax.arrays import tracing


class MomentumState(NamedTuple):
    """mu: average of the gradients, shaped like the parameters."""

    mu: optax.Updates


class CorrectedMomentumState(NamedTuple):
    """count: int32 scalar; mu: average of the gradients, not yet corrected."""

    count: jax.Array
    mu: optax.Updates


class SecondMomentState(NamedTuple):
    """count: int32 scalar; mu, nu: averages of g and |g|^2."""

    count: jax.Array
    mu: optax.Updates
    nu: optax.Updates


@check_arguments
def scale_by_momentum(
    b1: ArrayLike = 0.95,
    *,
    nesterov: bool = True,
    dampening: ArrayLike | None = None,
    bias_correction: bool = False,
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Momentum, ``M = b1 M + (1 - dampening) G``.

    Args:
      b1: decay rate.
      nesterov: return ``b1 M + (1 - dampening) G`` instead of M.
      dampening: None: b1, the moving average of Keller Jordan's Muon; 0: the
        heavy-ball sum of Moonlight. The two differ by the factor 1 - b1 only.
      bias_correction: return what ``optax.contrib.muon`` does. In step t, M divided by
        ``1 - b1^t``; with nesterov, as NAdam mixes,
        ``b1 M / (1 - b1^(t+1)) + (1 - b1) G / (1 - b1^t)``. It goes with
        ``dampening=None``.
      mu_dtype: dtype in which M is stored; None: the parameters'.

    Returns:
      The transform, with state ``MomentumState``, or ``CorrectedMomentumState`` with
      bias correction.

    Raises:
      ValueError: ``bias_correction`` together with a ``dampening``. On update, the
        state of another transform, or updates of other paths or shapes than it has.
    """
    mu_dtype = dtypes.canonical("mu_dtype", mu_dtype)
    if bias_correction:
        if dampening is not None:
            raise ValueError(
                "bias_correction corrects the moving average, which dampening=None"
                f" makes; got dampening={dampening}"
            )
        return _corrected_momentum(b1, nesterov, mu_dtype)

    def init_fn(params: optax.Params) -> MomentumState:
        return MomentumState(averages.zeros_like(params, mu_dtype))

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        del params
        states.require_kind(state, MomentumState)

        def leaf(name: str, g: jax.Array, mu: jax.Array) -> tuple[jax.Array, jax.Array]:
            states.require_shape(name, g, mu, "momentum")
            return _update_first(g, mu, b1=b1, nesterov=nesterov, dampening=dampening)

        updates, mu = trees.map_leaves(leaf, updates, state.mu)
        return updates, MomentumState(mu)

    return optax.GradientTransformation(init_fn, update_fn)


def _corrected_momentum(
    b1: Any, nesterov: bool, mu_dtype: Any
) -> optax.GradientTransformation:
    """The momentum of ``scale_by_momentum`` with ``bias_correction``."""

    def init_fn(params: optax.Params) -> CorrectedMomentumState:
        count = jnp.zeros([], jnp.int32)
        return CorrectedMomentumState(count, averages.zeros_like(params, mu_dtype))

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        del params
        states.require_kind(state, CorrectedMomentumState)
        count = jnp.asarray(optax.safe_increment(state.count))
        now = 1 / (1 - averages._power(b1, count))
        after = 1 / (1 - averages._power(b1, count + 1))

        def leaf(name: str, g: jax.Array, mu: jax.Array) -> tuple[jax.Array, jax.Array]:
            states.require_shape(name, g, mu, "momentum")
            wide = dtypes.widen(g)
            m, _ = averages.momentum_step(g, mu, b1, nesterov=False)
            update = now * m
            if nesterov:
                update = b1 * after * m + (1 - b1) * now * wide
            return dtypes.narrow(update, g.dtype), dtypes.narrow_average(m, mu)

        updates, mu = trees.map_leaves(leaf, updates, state.mu)
        return updates, CorrectedMomentumState(count, mu)

    return optax.GradientTransformation(init_fn, update_fn)


@check_arguments
def scale_by_second_moment(
    b1: ArrayLike = 0.95,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-10,
    *,
    nesterov: bool = False,
    bias_correction: bool = False,
    eps_root: ArrayLike | None = None,
    mu_dtype: DTypeLike | None = None,
    nu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Momentum divided by the root of an Adam-style second moment.

    Lines 4 to 6 of the paper's Algorithm 1::

        M = b1 M + (1 - b1) G
        V = b2 V + (1 - b2) G * G
        update = M / (sqrt(V) + eps)

    With ``bias_correction=True`` this is Adam's scaling. sqrt(V) is held above the root
    of the smallest normal number (1e-19 in float32): gradients too small to square get
    one constant divisor, so that what follows sees plain momentum, and no update is
    ever 0/0. Gradients too large to square (above 1e19) enter V as 1e38.

    Args:
      b1: decay rate of the momentum M.
      b2: decay rate of the second moment V.
      eps: added to sqrt(V). The update does not depend on the size of the gradients
        while these are large against eps (for eps=0: from 1e-15 to 1e15 in float32).
      nesterov: use ``b1 M + (1 - b1) G`` in place of M; V is unchanged.
      bias_correction: divide M by ``1 - b1^t`` (with nesterov ``1 - b1^(t+1)``, the sum
        of its weights) and V by ``1 - b2^t``.
      eps_root: added to V under the root, after its correction; None: nothing.
      mu_dtype: dtype in which M is stored; None: the parameters'.
      nu_dtype: dtype in which V is stored; None: float32, also for 16-bit parameters (a
        16-bit V stops moving once its steps fall under half a unit in the last place);
        float64 for float64. Real also for complex parameters (|G|^2).

    Returns:
      The transform, with state ``SecondMomentState``. Works on leaves of any rank.

    Raises:
      TypeError: a ``mu_dtype`` or ``nu_dtype`` that cannot hold the average.
      ValueError: a decay rate outside of [0, 1), a negative ``eps`` or ``eps_root``. On
        update, as ``scale_by_momentum``.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_second_moment(b1=0.95, b2=0.95)
    >>> g = {"w": jnp.array([[2e-3, -5.0]])}
    >>> updates, _ = tx.update(g, tx.init(g))   # first step: sqrt(0.05) * sign(g)
    >>> bool(jnp.allclose(updates["w"], jnp.array([[0.05**0.5, -(0.05**0.5)]])))
    True
    """
    mu_dtype = dtypes.canonical("mu_dtype", mu_dtype)
    nu_dtype = dtypes.canonical("nu_dtype", nu_dtype)

    def init_fn(params: optax.Params) -> SecondMomentState:
        return SecondMomentState(
            count=jnp.zeros([], jnp.int32),
            mu=averages.zeros_like(params, mu_dtype),
            nu=averages.zero_squares(params, nu_dtype),
        )

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        del params
        states.require_kind(state, SecondMomentState)
        count = jnp.asarray(optax.safe_increment(state.count))
        scales = averages.corrections(b1, b2, count, nesterov, bias_correction)

        def leaf(
            name: str, g: jax.Array, mu: jax.Array, nu: jax.Array
        ) -> tuple[jax.Array, ...]:
            states.require_shape(name, g, mu, "momentum")
            return _update_both(
                g,
                mu,
                nu,
                scales,
                b1=b1,
                b2=b2,
                eps=eps,
                eps_root=eps_root,
                nesterov=nesterov,
            )

        updates, mu, nu = trees.map_leaves(leaf, updates, state.mu, state.nu)
        return updates, SecondMomentState(count, mu, nu)

    return optax.GradientTransformation(init_fn, update_fn)


@tracing.once
def _update_first(
    g: jax.Array, mu: jax.Array, *, b1: Any, nesterov: bool, dampening: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the update of a leaf and its new momentum."""
    m, numerator = averages.momentum_step(g, mu, b1, nesterov, dampening)
    return dtypes.narrow(numerator, g.dtype), dtypes.narrow_average(m, mu)


@tracing.once
def _update_both(
    g: jax.Array,
    mu: jax.Array,
    nu: jax.Array,
    scales: tuple[Any, Any],
    *,
    b1: Any,
    b2: Any,
    eps: Any,
    eps_root: Any,
    nesterov: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the update of a leaf and its two new moments.

    ``scales`` are the factors of ``averages.corrections``.
    """
    m, numerator = averages.momentum_step(g, mu, b1, nesterov)
    v = averages.average(nu, averages.square(g), b2)
    v_hat = averages.scale(v, scales[1])
    root = roots.sqrt(v_hat if eps_root is None else v_hat + eps_root)
    update = roots.divide(
        averages.scale(numerator, scales[0]), averages.divisor(root, eps)
    )
    return (
        dtypes.narrow(update, g.dtype),
        dtypes.narrow_average(m, mu),
        dtypes.narrow_average(v, nu),
    )
