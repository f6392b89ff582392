"""Muon^2-F: Muon^2 with the second moment factored (Algorithm 2)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from muon2_optax import averages, dtypes, roots, sharding, states, trees
from muon2_optax.arguments import check_arguments
from muon2_optax.arrays import tracing
from muon2_optax.decay import decay_weights
from muon2_optax.execution import factored_moment
from muon2_optax.matrices import flatten_matrices, require_matrix, rules_or_default
from muon2_optax.optimizers._route import route
from muon2_optax.optimizers._shared_arguments import optimizer
from muon2_optax.orthogonalize import newton_schulz_orthogonalize
from muon2_optax.rules import MatrixRules
from muon2_optax.scaling import scale_by_shape
from muon2_optax.schedules.coefficients import NSCoeffs
from muon2_optax.shape_scales import ShapeScale
from muon2_optax.sharding import Shardings


class FactorizedSecondMomentState(NamedTuple):
    """As ``SecondMomentState``, with |g|^2 averaged over outputs and over inputs.

    nu_row has the parameter's shape without the output axes (and one more, last, axis
    of blocks where the rule splits the outputs); nu_col has it without the input axes.
    """

    count: jax.Array
    mu: optax.Updates
    nu_row: optax.Updates
    nu_col: optax.Updates


@check_arguments
def factorized_second_moment(
    b1: ArrayLike = 0.95,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-10,
    *,
    nesterov: bool = False,
    bias_correction: bool = False,
    mu_dtype: DTypeLike | None = None,
    rules: MatrixRules | None = None,
    shardings: Shardings | None = None,
) -> optax.GradientTransformation:
    """As ``scale_by_second_moment``, with V factored into rows and columns.

    Lines 4 to 9 of the paper's Algorithm 2 (line 9 prints V where V-hat is meant)::

        r = b2 r + (1 - b2) mean over outputs of G * G        c: mean over inputs
        V-hat = r c^T / mean(r)
        update = M / (sqrt(V-hat) + eps)

    The paper takes sums where these are means: V-hat is the same, and means overflow
    later. The state holds fan_in + fan_out numbers in place of fan_in * fan_out, in
    float32 (float64 for float64), for each matrix of a stack and each block of a fused
    projection. V-hat is 0 while no gradient has been seen.

    Args:
      b1: decay rate of the momentum M.
      b2: decay rate of r and c.
      eps: added to sqrt(V-hat), which is held above 1e-19 (in float32) as in
        ``scale_by_second_moment``.
      nesterov: use ``b1 M + (1 - b1) G`` in place of M; r and c are unchanged.
      bias_correction: divide M by ``1 - b1^t`` (with nesterov ``1 - b1^(t+1)``) and
        V-hat by ``1 - b2^t``.
      mu_dtype: dtype in which M is stored; None: the parameters'.
      rules: which axes form the matrices; None: ``MatrixRules()``.
      shardings: where the parameters live, as in ``newton_schulz_orthogonalize``. Only
        the speed depends on it.

    Returns:
      The transform, with state ``FactorizedSecondMomentState``.

    Raises:
      ValueError: a leaf that is not a matrix under ``rules``; a decay rate outside of
        [0, 1); a negative ``eps``.

    References:
      Shazeer and Stern 2018, "Adafactor", for the factored form.
    """
    mu_dtype = dtypes.canonical("mu_dtype", mu_dtype)
    rules, shardings = rules_or_default(rules), sharding.check_shardings(shardings)

    def init_fn(params: optax.Params) -> FactorizedSecondMomentState:
        def statistic(which: int) -> Any:
            def leaf(name: str, p: Any) -> tuple[jax.Array, list[int | None]]:
                axes = require_matrix(rules, name, p)
                gone = (axes.outs, axes.ins)[which]
                dims: list[int | None] = [d for d in range(p.ndim) if d not in gone]
                if which == 0 and len(axes.splits) > 1:
                    dims.append(None)  # one mean for each block
                return factored_moment.zero_averages(p, axes)[which], dims

            return trees.map_reduced(leaf, params)

        return FactorizedSecondMomentState(
            count=jnp.zeros([], jnp.int32),
            mu=averages.zeros_like(params, mu_dtype),
            nu_row=statistic(0),
            nu_col=statistic(1),
        )

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        del params
        states.require_kind(state, FactorizedSecondMomentState)
        count = jnp.asarray(optax.safe_increment(state.count))
        scales = averages.corrections(b1, b2, count, nesterov, bias_correction)
        names, axes, gs, (mus, rows, cols), rebuild = flatten_matrices(
            rules, updates, state.mu, state.nu_row, state.nu_col
        )
        for name, g, mu in zip(names, gs, mus):
            states.require_shape(name, g, mu, "momentum")
        leaves = list(map(factored_moment.Leaf, names, axes, gs, rows, cols))
        for x in leaves:
            row, col = factored_moment.average_shapes(x.axes)
            states.require_statistic(x.name, x.row, row, "nu_row", "other rules")
            states.require_statistic(x.name, x.col, col, "nu_col", "other rules")
        second = factored_moment.update_moments(leaves, b2, shardings)

        def leaf(x: Any, mu: jax.Array, moment: Any) -> tuple[jax.Array, ...]:
            r, c, root = moment
            update, m = _divide_by_root(
                x.g, mu, root, scales, b1=b1, eps=eps, nesterov=nesterov
            )
            return update, m, r.astype(x.row.dtype), c.astype(x.col.dtype)

        done = list(map(leaf, leaves, mus, second))
        lists = zip(*done) if done else ([],) * 4
        updates, mu, row, col = rebuild(*lists)
        return updates, FactorizedSecondMomentState(count, mu, row, col)

    return optax.GradientTransformation(init_fn, update_fn)


@tracing.once
def _divide_by_root(
    g: jax.Array,
    mu: jax.Array,
    root: jax.Array,
    scales: tuple[Any, Any],
    *,
    b1: Any,
    eps: Any,
    nesterov: bool,
) -> tuple[jax.Array, jax.Array]:
    """The update of a leaf and its new momentum, from the root of its V."""
    m, numerator = averages.momentum_step(g, mu, b1, nesterov)
    if scales[1] is not None:
        root = jnp.sqrt(scales[1]) * root
    numerator = averages.scale(numerator, scales[0])
    update = roots.divide(numerator, averages.divisor(root, eps))
    return dtypes.narrow(update, g.dtype), dtypes.narrow_average(m, mu)


@optimizer(ns_steps=3)
def muon2_f(
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
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps: ArrayLike = 1e-8,
    adam_eps_root: ArrayLike | None = None,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    rest: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon^2-F for the matrices, AdamW for the rest: Muon^2 at Muon's memory.

    For each matrix W with gradient G (the paper's Algorithm 2)::

        M = b1 M + (1 - b1) G
        r = b2 r + (1 - b2) mean over outputs of G * G        c: mean over inputs
        O = NewtonSchulz(M / (sqrt(r c^T / mean(r)) + eps), K)
        W = W - learning_rate * (sqrt(fan_out / fan_in) * O + weight_decay * W)

    There is no ``nu_dtype``: the row and column statistics are float32 (float64 for
    float64 parameters) and need no saving.

    Returns:
      The optimizer. Updates have the gradients' dtypes.

    References:
      Liu et al. 2026, "Muon^2", arXiv:2604.09967.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    >>> tx = muon2_f(learning_rate=0.02, adam_learning_rate=3e-3)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """

    def matrix(rules: MatrixRules) -> optax.GradientTransformation:
        return optax.chain(
            # Lines 4 to 9 of Algorithm 2: M, r, c and M / (sqrt(V-hat) + eps).
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
            # Line 10: O.
            newton_schulz_orthogonalize(
                ns_steps, ns_coeffs, ns_dtype=ns_dtype, rules=rules, shardings=shardings
            ),
            # Line 11: the step, here with weight decay.
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
