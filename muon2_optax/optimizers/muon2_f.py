"""Muon^2-F: Muon^2 with the second moment factored (Algorithm 2)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muon2_optax import dtypes, moments, roots, sharding, trees
from muon2_optax.arrays import tracing
from muon2_optax.arrays.stacks import even
from muon2_optax.axes import ResolvedAxes
from muon2_optax.execution import mean_squares
from muon2_optax.optimizers._routed import decayed, routed
from muon2_optax.optimizers._steps import NS_STEPS
from muon2_optax.orthogonalize import (
    newton_schulz_orthogonalize,
    require_matrix,
    required_matrices,
    rules_or_default,
)
from muon2_optax.rules import MatrixRules
from muon2_optax.scaling import scale_by_shape
from muon2_optax.sharding import Shardings
from muon2_optax.static_arguments import check_static

# Leaves whose statistics are joined: XLA fuses that for no more than about as many (96
# operands, two for each).
JOINED = 47


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
    rules, shardings = rules_or_default(rules), sharding.checked(shardings)

    def init_fn(params: optax.Params) -> FactorizedSecondMomentState:
        def statistic(which: int) -> Any:
            def leaf(name: str, p: Any) -> tuple[jax.Array, list[int | None]]:
                axes = require_matrix(rules, name, p)
                gone = (axes.outs, axes.ins)[which]
                dims: list[int | None] = [d for d in range(p.ndim) if d not in gone]
                if which == 0 and len(axes.splits) > 1:
                    dims.append(None)  # one mean for each block
                # Statistics of zeros rather than zeros: on a mesh they come out with
                # the reduced sharding that every later update gives them.
                empty = sharding.zeros_like(p, moments.second_dtype(p))
                return mean_squares.plain(empty, axes)[which], dims

            return trees.map_reduced(leaf, params)

        return FactorizedSecondMomentState(
            count=jnp.zeros([], jnp.int32),
            mu=moments.zeros_like(params, mu_dtype),
            nu_row=statistic(0),
            nu_col=statistic(1),
        )

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        scales = moments.corrections(b1, b2, count, nesterov, bias_correction)
        columns = required_matrices(rules, updates, state.nu_row, state.nu_col)
        leaves = [_Leaf(*row) for row in zip(*columns)]
        moment = iter(_second_moments(leaves, b2, shardings))

        def leaf(
            name: str, g: jax.Array, mu: jax.Array, row: jax.Array, col: jax.Array
        ) -> tuple[jax.Array, ...]:
            r, c, root = next(moment)
            update, m = _divided(g, mu, root, scales, b1=b1, eps=eps, nesterov=nesterov)
            return update, m, r.astype(row.dtype), c.astype(col.dtype)

        updates, mu, row, col = trees.map_leaves(
            leaf, updates, state.mu, state.nu_row, state.nu_col
        )
        return updates, FactorizedSecondMomentState(count, mu, row, col)

    return optax.GradientTransformation(init_fn, update_fn)


@tracing.once
def _divided(
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
    m, numerator = moments.momentum_step(g, mu, b1, nesterov)
    if scales[1] is not None:
        root = jnp.sqrt(scales[1]) * root
    numerator = moments.scaled(numerator, scales[0])
    update = roots.divide(numerator, moments.divisor(root, eps))
    return dtypes.narrow(update, g.dtype), dtypes.stored(m, mu)


class _Leaf(NamedTuple):
    name: str
    axes: ResolvedAxes
    g: jax.Array
    row: jax.Array
    col: jax.Array


def _second_moments(
    leaves: Sequence[_Leaf], b2: Any, shardings: Shardings | None
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """Of every leaf the new r and c, and ``root_of_outer`` of them."""
    done: list[Any] = [None] * len(leaves)
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        place = sharding.placement(x.name, x.g, shardings)
        whole = place is None and sharding.undivided(x.g, shardings)
        if mean_squares.in_stacks(x.g, x.axes, whole):
            # Types tell over which axes of a shard_map leaves vary.
            key = (*map(jax.typeof, (x.g, x.row, x.col)), x.axes)
            groups.setdefault(key, []).append(i)
        else:
            row, col = mean_squares.of_squares(x.g, x.axes, place, whole)
            r, c = moments.average(x.row, row, b2), moments.average(x.col, col, b2)
            done[i] = r, c, root_of_outer(r, c, x.axes)
    for group in groups.values():
        size = even(len(group), JOINED)
        for low in range(0, len(group), size):
            some = group[low : low + size]
            for i, found in zip(some, _stacked([leaves[i] for i in some], b2)):
                done[i] = found
    return done


def _stacked(
    leaves: Sequence[_Leaf], b2: Any
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """The same for leaves alike, in a few programs for all: each takes a GPU
    microseconds to start, and one leaf's statistics keep few multiprocessors busy."""
    axes = leaves[0].axes
    news = mean_squares.of_alike([x.g for x in leaves], axes)
    olds = jnp.stack([x.row for x in leaves]), jnp.stack([x.col for x in leaves])
    r, c = (moments.average(old, new, b2) for old, new in zip(olds, news))
    factors = jax.vmap(lambda r, c: root_factors(r, c, axes))(r, c)
    # Behind barriers, and at places that XLA does not know: it would cut the stacks
    # into leaves again, with programs for each, and make passes over several leaves of
    # those that share a stack.
    stacks = jax.lax.optimization_barrier((r, c, *factors))
    places = jax.lax.optimization_barrier([jnp.int32(k) for k in range(len(leaves))])
    parts = jax.lax.optimization_barrier([
        [jax.lax.dynamic_index_in_dim(s, k, keepdims=False) for s in stacks]
        for k in places
    ])  # fmt: skip
    return [(r, c, along * across) for r, c, along, across in parts]


def root_of_outer(row: jax.Array, col: jax.Array, axes: ResolvedAxes) -> jax.Array:
    """sqrt(r c^T / mean(r)), broadcastable to the parameter, without 0/0 or r c^T.

    The product of r and c would leave the range long before its root does.
    """
    along, across = root_factors(row, col, axes)
    return along * across


def root_factors(
    row: jax.Array, col: jax.Array, axes: ResolvedAxes
) -> tuple[jax.Array, jax.Array]:
    """sqrt(r) and sqrt(c / mean(r)), each broadcastable to the parameter."""
    blocks = len(axes.splits)
    rows = [row] if blocks == 1 else [row[..., k] for k in range(blocks)]
    rows = [jnp.expand_dims(r, axes.outs) for r in rows]
    # Divided before it is summed, as everywhere here.
    means = [jnp.sum(r / axes.fan_in, axis=axes.ins, keepdims=True) for r in rows]
    mean = jnp.maximum(axes.by_block(means), jnp.finfo(row.dtype).tiny)
    share = roots.sqrt(roots.divide(jnp.expand_dims(col, axes.ins), mean))
    return axes.by_block([roots.sqrt(r) for r in rows]), share


def muon2_f(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    *,
    ns_steps: int | None = None,
    ns_coeffs: Any = "keller",
    ns_dtype: Any = None,
    nesterov: bool = False,
    bias_correction: bool = False,
    shape_scale: str = "spectral",
    rules: MatrixRules | None = None,
    shardings: Shardings | None = None,
    weight_decay_mask: Any = None,
    cautious_weight_decay: bool = False,
    mu_dtype: Any = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_eps: float = 1e-8,
    adam_weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Muon^2-F for the matrices, AdamW for the rest: Muon^2 at Muon's memory.

    For each matrix W with gradient G (the paper's Algorithm 2)::

        M = b1 M + (1 - b1) G
        r = b2 r + (1 - b2) mean over outputs of G * G        c: mean over inputs
        O = NewtonSchulz(M / (sqrt(r c^T / mean(r)) + eps), K)
        W = W - learning_rate * (sqrt(fan_out / fan_in) * O + weight_decay * W)

    Args and returns are those of ``muon2``, without ``nu_dtype``: the row and column
    statistics are float32 (float64 for float64 parameters) and need no saving.

    References:
      Liu et al. 2026, "Muon^2", arXiv:2604.09967.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    >>> tx = muon2_f(learning_rate=0.02, adam_learning_rate=3e-3)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """
    check_static(
        ns_steps=ns_steps,
        ns_coeffs=ns_coeffs,
        ns_dtype=ns_dtype,
        mu_dtype=mu_dtype,
        weight_decay_mask=weight_decay_mask,
    )
    ns_steps = NS_STEPS["muon2_f"] if ns_steps is None else ns_steps
    rules = rules_or_default(rules)

    def matrix(rules: MatrixRules) -> optax.GradientTransformation:
        return optax.chain(
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
            newton_schulz_orthogonalize(
                ns_steps, ns_coeffs, ns_dtype=ns_dtype, rules=rules, shardings=shardings
            ),
            scale_by_shape(shape_scale, rules=rules),
            decayed(weight_decay, weight_decay_mask, cautious_weight_decay),
            optax.scale_by_learning_rate(learning_rate),
        )

    return routed(
        matrix,
        rules,
        learning_rate=learning_rate,
        adam_learning_rate=adam_learning_rate,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps=adam_eps,
        adam_weight_decay=adam_weight_decay,
        weight_decay_mask=weight_decay_mask,
        cautious_weight_decay=cautious_weight_decay,
        mu_dtype=mu_dtype,
        shardings=shardings,
    )
