"""Second moments of the orthogonalized updates, as NorMuon and AdaMuon take them.

Both divide the orthogonalized update O by the root of a moving average of its own
squares, then bring the result back to a chosen size (``scaling``).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from muon2_optax import averages, dtypes, roots, sharding, states, trees
from muon2_optax.arguments import check_arguments
from muon2_optax.matrices import require_matrix, rules_or_default
from muon2_optax.rules import MatrixRules


class OutputSecondMomentState(NamedTuple):
    """nu: average of the squared updates, per entry or per output."""

    nu: optax.Updates


@check_arguments
def scale_by_output_second_moment(
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    *,
    eps_root: ArrayLike = 0.0,
    nu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Divides by the root of the average square of each entry (AdaMuon).

    ``V = b2 V + (1 - b2) O * O; update = O / (sqrt(V + eps_root) + eps)``, without bias
    correction.

    Args:
      b2: decay rate.
      eps: added to the root.
      eps_root: added under the root.
      nu_dtype: dtype in which V is stored; None: float32 or better.

    Returns:
      The transform, with state ``OutputSecondMomentState`` in the parameters' shapes.

    Raises:
      TypeError: a ``nu_dtype`` that cannot hold real averages.
      ValueError: ``b2`` outside of [0, 1), a negative ``eps`` or ``eps_root``.
    """
    nu_dtype = dtypes.canonical("nu_dtype", nu_dtype)

    def init_fn(params: optax.Params) -> OutputSecondMomentState:
        return OutputSecondMomentState(averages.zero_squares(params, nu_dtype))

    def statistic(name: str, o: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
        return averages.square(o), ()

    return _divide_by_average_root(init_fn, statistic, b2, eps, eps_root)


@check_arguments
def scale_by_neuron_second_moment(
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-10,
    *,
    eps_root: ArrayLike = 0.0,
    rules: MatrixRules | None = None,
) -> optax.GradientTransformation:
    """Divides by the root of the average square of each output's weights (NorMuon).

    As ``scale_by_output_second_moment``, with O * O replaced by its mean over the input
    axes: one number per output neuron of each matrix.

    Args:
      b2: decay rate.
      eps: added to the root.
      eps_root: added under the root.
      rules: which axes form the matrices; None: ``MatrixRules()``.

    Returns:
      The transform, with state ``OutputSecondMomentState`` in the parameters' shapes
      without the input axes, in float32 or better.

    Raises:
      ValueError: ``b2`` outside of [0, 1), a negative ``eps`` or ``eps_root``; a leaf
        that is not a matrix under ``rules``.
    """
    rules = rules_or_default(rules)

    def statistic(name: str, o: Any) -> tuple[jax.Array, tuple[int, ...]]:
        axes = require_matrix(rules, name, o)
        return jnp.sum(averages.square(o) / axes.fan_in, axis=axes.ins), axes.ins

    def init_fn(params: optax.Params) -> OutputSecondMomentState:
        def leaf(name: str, p: Any) -> tuple[jax.Array, list[int | None]]:
            zeros = sharding.zeros_like(p, averages.second_dtype(p))
            zero, gone = statistic(name, zeros)
            return zero, [d for d in range(p.ndim) if d not in gone]

        return OutputSecondMomentState(trees.map_reduced(leaf, params))

    return _divide_by_average_root(init_fn, statistic, b2, eps, eps_root)


def _divide_by_average_root(
    init_fn: optax.TransformInitFn,
    statistic: Callable[[str, jax.Array], tuple[jax.Array, tuple[int, ...]]],
    b2: Any,
    eps: Any,
    eps_root: Any,
) -> optax.GradientTransformation:
    """Divides each leaf by the root of a moving average of its squares.

    Args:
      init_fn: makes the state, averages of zeros.
      statistic: takes the path of a leaf and its update; returns what is averaged, and
        which axes of the leaf it no longer has.
      b2, eps, eps_root: as in ``scale_by_output_second_moment``.
    """

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        del params
        states.require_kind(state, OutputSecondMomentState)

        def leaf(name: str, o: jax.Array, nu: jax.Array) -> tuple[jax.Array, jax.Array]:
            new, gone = statistic(name, o)
            states.require_statistic(name, nu, new.shape, "average", "other rules")
            v = averages.average(nu, new, b2)
            root = jnp.expand_dims(roots.sqrt(v + eps_root), gone)
            update = dtypes.widen(o) / averages.divisor(root, eps)
            return update.astype(o.dtype), dtypes.narrow_average(v, nu)

        updates, nu = trees.map_leaves(leaf, updates, state.nu)
        return updates, OutputSecondMomentState(nu)

    return optax.GradientTransformation(init_fn, update_fn)
