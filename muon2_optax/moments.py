"""First and second moments: what stands before the orthogonalization.

All arithmetic is in float32 or better whatever the gradients' dtype; the states keep
the dtypes that ``init`` gave them, and updates come back in the gradients' dtype.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muon2_optax import dtypes, trees
from muon2_optax.axes import ResolvedAxes
from muon2_optax.orthogonalize import require_matrix
from muon2_optax.rules import MatrixRules


class MomentumState(NamedTuple):
    """mu: average of the gradients, shaped like the parameters."""

    mu: optax.Updates


class SecondMomentState(NamedTuple):
    """count: int32 scalar; mu, nu: averages of g and |g|^2, in the parameters' shapes."""

    count: jax.Array
    mu: optax.Updates
    nu: optax.Updates


class FactorizedSecondMomentState(NamedTuple):
    """As ``SecondMomentState``, with |g|^2 averaged over outputs and over inputs.

    nu_row has the parameter's shape without the output axes (and one more, last, axis
    of blocks where the rule splits the outputs); nu_col has it without the input axes.
    """

    count: jax.Array
    mu: optax.Updates
    nu_row: optax.Updates
    nu_col: optax.Updates


def scale_by_momentum(
    b1: float = 0.95, *, nesterov: bool = True, mu_dtype: Any = None
) -> optax.GradientTransformation:
    """Moving average of the gradients, ``M = b1 M + (1 - b1) G``, uncorrected.

    Args:
      b1: decay rate.
      nesterov: return ``b1 M + (1 - b1) G`` instead of M (Keller Jordan's Muon).
      mu_dtype: dtype in which M is stored; None: the parameters'.

    Returns:
      The transform, with state ``MomentumState``.
    """
    mu_dtype = dtypes.canonical("mu_dtype", mu_dtype)

    def init_fn(params: optax.Params) -> MomentumState:
        return MomentumState(_zeros(params, mu_dtype))

    def update_fn(
        updates: optax.Updates, state: MomentumState, params: Any = None
    ) -> Any:
        del params

        def leaf(name: str, g: jax.Array, mu: jax.Array) -> tuple[jax.Array, jax.Array]:
            m, numerator = _momentum(g, mu, b1, nesterov)
            return numerator.astype(g.dtype), m.astype(mu.dtype)

        updates, mu = trees.map_leaves(leaf, updates, state.mu)
        return updates, MomentumState(mu)

    return optax.GradientTransformation(init_fn, update_fn)


def scale_by_second_moment(
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-10,
    *,
    nesterov: bool = False,
    bias_correction: bool = False,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
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
      mu_dtype: dtype in which M is stored; None: the parameters'.
      nu_dtype: dtype in which V is stored; None: float32, also for 16-bit parameters (a
        16-bit V stops moving once its steps fall under half a unit in the last place);
        float64 for float64. Real also for complex parameters (|G|^2).

    Returns:
      The transform, with state ``SecondMomentState``. Works on leaves of any rank.

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
            mu=_zeros(params, mu_dtype),
            nu=jax.tree.map(
                lambda p: jnp.zeros_like(p, _nu_dtype(p, nu_dtype)), params
            ),
        )

    def update_fn(
        updates: optax.Updates, state: SecondMomentState, params: Any = None
    ) -> Any:
        del params
        count = optax.safe_increment(state.count)
        mu_scale, nu_scale = _corrections(b1, b2, count, nesterov, bias_correction)

        def leaf(
            name: str, g: jax.Array, mu: jax.Array, nu: jax.Array
        ) -> tuple[jax.Array, ...]:
            m, numerator = _momentum(g, mu, b1, nesterov)
            v = _average(nu, _square(g), b2)
            update = mu_scale * numerator / _divisor(jnp.sqrt(nu_scale * v), eps)
            return update.astype(g.dtype), m.astype(mu.dtype), v.astype(nu.dtype)

        updates, mu, nu = trees.map_leaves(leaf, updates, state.mu, state.nu)
        return updates, SecondMomentState(count, mu, nu)

    return optax.GradientTransformation(init_fn, update_fn)


def factorized_second_moment(
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-10,
    *,
    nesterov: bool = False,
    bias_correction: bool = False,
    mu_dtype: Any = None,
    rules: MatrixRules | None = None,
) -> optax.GradientTransformation:
    """As ``scale_by_second_moment``, with V factored into rows and columns.

    Lines 4 to 9 of the paper's Algorithm 2 (line 9 prints V where V-hat is meant)::

        r = b2 r + (1 - b2) mean over outputs of G * G        c: mean over inputs
        V-hat = r c^T / mean(r)
        update = M / (sqrt(V-hat) + eps)

    Means stand for the paper's sums; V-hat is the same and the range is larger. It
    stores fan_in + fan_out numbers per matrix (in float32, or float64 for float64) in
    place of their product, each matrix of a stack and each block of a fused projection
    for itself. V-hat is 0 while no gradient has been seen.

    Args:
      b1, b2, eps, nesterov, bias_correction, mu_dtype: as in
        ``scale_by_second_moment``.
      rules: which axes form the matrices; None: ``MatrixRules()``.

    Returns:
      The transform, with state ``FactorizedSecondMomentState``.

    Raises:
      ValueError: a leaf that is not a matrix under ``rules``.

    References:
      Shazeer and Stern 2018, "Adafactor", for the factored form.
    """
    mu_dtype = dtypes.canonical("mu_dtype", mu_dtype)
    rules = MatrixRules() if rules is None else rules

    def init_fn(params: optax.Params) -> FactorizedSecondMomentState:
        def zeros(which: int) -> Any:
            def leaf(name: str, p: Any) -> jax.Array:
                # Statistics of zeros rather than zeros: on a mesh they come out with
                # the reduced sharding that every later update gives them.
                square = jnp.zeros_like(p, _nu_dtype(p, None))
                return _statistics(square, require_matrix(rules, name, p))[which]

            return trees.map_named(leaf, params)

        return FactorizedSecondMomentState(
            count=jnp.zeros([], jnp.int32),
            mu=_zeros(params, mu_dtype),
            nu_row=zeros(0),
            nu_col=zeros(1),
        )

    def update_fn(
        updates: optax.Updates, state: FactorizedSecondMomentState, params: Any = None
    ) -> Any:
        del params
        count = optax.safe_increment(state.count)
        mu_scale, nu_scale = _corrections(b1, b2, count, nesterov, bias_correction)

        def leaf(
            name: str, g: jax.Array, mu: jax.Array, row: jax.Array, col: jax.Array
        ) -> tuple[jax.Array, ...]:
            axes = require_matrix(rules, name, g)
            m, numerator = _momentum(g, mu, b1, nesterov)
            new_row, new_col = _statistics(_square(g), axes)
            r, c = _average(row, new_row, b2), _average(col, new_col, b2)
            root = jnp.sqrt(nu_scale) * _root_of_outer(r, c, axes)
            update = mu_scale * numerator / _divisor(root, eps)
            states = (m.astype(mu.dtype), r.astype(row.dtype), c.astype(col.dtype))
            return update.astype(g.dtype), *states

        updates, mu, row, col = trees.map_leaves(
            leaf, updates, state.mu, state.nu_row, state.nu_col
        )
        return updates, FactorizedSecondMomentState(count, mu, row, col)

    return optax.GradientTransformation(init_fn, update_fn)


def _zeros(params: optax.Params, dtype: Any) -> optax.Updates:
    return jax.tree.map(lambda p: jnp.zeros_like(p, dtype), params)


def _nu_dtype(p: Any, dtype: Any) -> jnp.dtype:
    return dtype or dtypes.real_dtype(dtypes.compute_dtype(p.dtype))


def _momentum(
    g: jax.Array, mu: jax.Array, b1: Any, nesterov: bool
) -> tuple[jax.Array, jax.Array]:
    """The new average, and what stands in the numerator of the update."""
    g = g.astype(dtypes.compute_dtype(g.dtype))
    m = _average(mu, g, b1)
    return m, _average(m, g, b1) if nesterov else m


def _average(old: jax.Array, new: jax.Array, decay: Any) -> jax.Array:
    return decay * old.astype(new.dtype) + (1 - decay) * new


def _square(g: jax.Array) -> jax.Array:
    return dtypes.squared_magnitude(g.astype(dtypes.compute_dtype(g.dtype)))


def _divisor(root: jax.Array, eps: Any) -> jax.Array:
    return jnp.maximum(root, jnp.finfo(root.dtype).tiny ** 0.5) + eps


def _corrections(
    b1: Any, b2: Any, count: jax.Array, nesterov: bool, bias_correction: bool
) -> tuple[Any, Any]:
    """Factors of the numerator and of V; both 1 without bias correction."""
    if not bias_correction:
        return 1.0, 1.0
    return 1 / (1 - b1 ** (count + nesterov)), 1 / (1 - b2**count)


def _statistics(square: jax.Array, axes: ResolvedAxes) -> tuple[jax.Array, jax.Array]:
    """Means over the output axes (per block) and over the input axes."""
    # Divided before it is summed: a sum of large squares would overflow.
    col = jnp.sum(square / axes.fan_in, axis=axes.ins)
    if len(axes.splits) == 1:
        return jnp.sum(square / axes.splits[0], axis=axes.outs), col
    parts = jnp.split(square, np.cumsum(axes.splits)[:-1], axis=axes.outs[0])
    rows = [jnp.sum(p / n, axis=axes.outs) for p, n in zip(parts, axes.splits)]
    return jnp.stack(rows, axis=-1), col


def _root_of_outer(row: jax.Array, col: jax.Array, axes: ResolvedAxes) -> jax.Array:
    """sqrt(r c^T / mean(r)), broadcastable to the parameter, without 0/0 or r c^T.

    The product of r and c would leave the range long before its root does.
    """
    if len(axes.splits) == 1:
        r = jnp.expand_dims(row, axes.outs)
    else:
        r = jnp.repeat(
            jnp.moveaxis(row, -1, axes.outs[0]),
            np.asarray(axes.splits),
            axis=axes.outs[0],
            total_repeat_length=sum(axes.splits),
        )
    mean = jnp.mean(r, axis=axes.ins, keepdims=True)
    share = r / jnp.maximum(mean, jnp.finfo(row.dtype).tiny)
    return jnp.sqrt(share) * jnp.sqrt(jnp.expand_dims(col, axes.ins))
