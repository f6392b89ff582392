"""The second moment in factored form: one number per row and one per column."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muon2_optax import dtypes, means, moments, placement, trees
from muon2_optax.axes import ResolvedAxes
from muon2_optax.orthogonalize import require_matrix, rules_or_default
from muon2_optax.placement import Shardings
from muon2_optax.rules import MatrixRules


class FactorizedSecondMomentState(NamedTuple):
    """As ``SecondMomentState``, with |g|^2 averaged over outputs and over inputs.

    nu_row has the parameter's shape without the output axes (and one more, last, axis
    of blocks where the rule splits the outputs); nu_col has it without the input axes.
    """

    count: jax.Array
    mu: optax.Updates
    nu_row: optax.Updates
    nu_col: optax.Updates


def factorized_second_moment(
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-10,
    *,
    nesterov: bool = False,
    bias_correction: bool = False,
    mu_dtype: Any = None,
    rules: MatrixRules | None = None,
    shardings: Shardings | None = None,
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
      shardings: where the parameters live, as in ``newton_schulz_orthogonalize``. Only
        the speed depends on it.

    Returns:
      The transform, with state ``FactorizedSecondMomentState``.

    Raises:
      ValueError: a leaf that is not a matrix under ``rules``.

    References:
      Shazeer and Stern 2018, "Adafactor", for the factored form.
    """
    mu_dtype = dtypes.canonical("mu_dtype", mu_dtype)
    rules, shardings = rules_or_default(rules), placement.checked(shardings)

    def init_fn(params: optax.Params) -> FactorizedSecondMomentState:
        def statistic(which: int) -> Any:
            def leaf(name: str, p: Any) -> jax.Array:
                # Statistics of zeros rather than zeros: on a mesh they come out with
                # the reduced sharding that every later update gives them.
                empty = placement.zeros_like(p, moments.second_dtype(p))
                return means.plain(empty, require_matrix(rules, name, p))[which]

            return trees.map_named(leaf, params)

        return FactorizedSecondMomentState(
            count=jnp.zeros([], jnp.int32),
            mu=moments.zeros_like(params, mu_dtype),
            nu_row=statistic(0),
            nu_col=statistic(1),
        )

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        mu_scale, nu_scale = moments.corrections(
            b1, b2, count, nesterov, bias_correction
        )

        def leaf(
            name: str, g: jax.Array, mu: jax.Array, row: jax.Array, col: jax.Array
        ) -> tuple[jax.Array, ...]:
            axes = require_matrix(rules, name, g)
            m, numerator = moments.momentum_step(g, mu, b1, nesterov)
            new_row, new_col = means.of_squares(name, g, axes, shardings)
            r = moments.average(row, new_row, b2)
            c = moments.average(col, new_col, b2)
            root = jnp.sqrt(nu_scale) * root_of_outer(r, c, axes)
            update = mu_scale * numerator / moments.divisor(root, eps)
            states = (
                dtypes.narrow(m, mu.dtype),
                r.astype(row.dtype),
                c.astype(col.dtype),
            )
            return dtypes.narrow(update, g.dtype), *states

        updates, mu, row, col = trees.map_leaves(
            leaf, updates, state.mu, state.nu_row, state.nu_col
        )
        return updates, FactorizedSecondMomentState(count, mu, row, col)

    return optax.GradientTransformation(init_fn, update_fn)


def root_of_outer(row: jax.Array, col: jax.Array, axes: ResolvedAxes) -> jax.Array:
    """sqrt(r c^T / mean(r)), broadcastable to the parameter, without 0/0 or r c^T.

    The product of r and c would leave the range long before its root does. The mean
    divides c: so the rows' roots do not wait for it.
    """
    blocks = len(axes.splits)
    rows = [row] if blocks == 1 else [row[..., k] for k in range(blocks)]
    rows = [jnp.expand_dims(r, axes.outs) for r in rows]
    # Divided before it is summed, as everywhere here.
    means = [jnp.sum(r / axes.fan_in, axis=axes.ins, keepdims=True) for r in rows]
    mean = jnp.maximum(axes.by_block(means), jnp.finfo(row.dtype).tiny)
    share = jnp.sqrt(jnp.expand_dims(col, axes.ins) / mean)
    return axes.by_block([jnp.sqrt(r) for r in rows]) * share
