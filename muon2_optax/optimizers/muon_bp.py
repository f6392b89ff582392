"""MuonBP: blocks between periodic full orthogonalizations."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from muon2_optax import states, trees
from muon2_optax.arguments import check_arguments, check_names
from muon2_optax.axes import MatrixAxes, ResolvedAxes
from muon2_optax.decay import decay_weights
from muon2_optax.execution import dispatch
from muon2_optax.matrices import flatten_matrices, rules_or_default
from muon2_optax.moments import scale_by_momentum
from muon2_optax.optimizers._route import route
from muon2_optax.optimizers._shared_arguments import optimizer
from muon2_optax.orthogonalize import newton_schulz_orthogonalize
from muon2_optax.rules import MatrixRules
from muon2_optax.scaling import scale_by_shape
from muon2_optax.schedules.coefficients import NSCoeffs
from muon2_optax.shape_scales import ShapeScale

# Every leaf that a block transform sees is a stack of blocks.
_BLOCK_RULES = MatrixRules((("", MatrixAxes(-2, -1)),))


class PeriodicState(NamedTuple):
    """count: int32 scalar; often, seldom: states of the two transforms."""

    count: jax.Array
    often: Any
    seldom: Any


@check_arguments
def periodically(
    seldom: optax.GradientTransformation,
    often: optax.GradientTransformation,
    period: ArrayLike,
) -> optax.GradientTransformationExtraArgs:
    """Runs ``seldom`` on steps 0, period, 2 period, ..., ``often`` on the others.

    Args:
      seldom: the transform of one step in ``period``.
      often: that of the others.
      period: a whole number, 1 or more. Traced ones below 1 count as 1.

    Returns:
      The transform, with state ``PeriodicState``. Updates keep their dtype.

    Raises:
      TypeError: ``seldom`` or ``often`` is no transformation.
      ValueError: a period that is not whole, or one known while tracing below 1.
    """
    seldom, often = map(optax.with_extra_args_support, (seldom, often))
    period = _whole_steps(period)

    def init_fn(params: optax.Params) -> PeriodicState:
        zero = jnp.zeros([], jnp.int32)
        return PeriodicState(zero, often.init(params), seldom.init(params))

    def update_fn(updates: optax.Updates, state: Any, params: Any = None, **extra: Any):
        states.require_kind(state, PeriodicState)

        # Both branches must return the same dtypes, which a traced factor could change.
        def run_seldom(updates: Any, state: Any) -> Any:
            new, inner = seldom.update(updates, state.seldom, params, **extra)
            return optax.tree.cast_like(new, updates), state._replace(seldom=inner)

        def run_often(updates: Any, state: Any) -> Any:
            new, inner = often.update(updates, state.often, params, **extra)
            return optax.tree.cast_like(new, updates), state._replace(often=inner)

        turn = state.count % period == 0
        if isinstance(turn, jax.core.Tracer):
            updates, state = jax.lax.cond(turn, run_seldom, run_often, updates, state)
        else:  # outside of jax.jit, where a cond would be compiled in every step
            updates, state = (run_seldom if turn else run_often)(updates, state)
        return updates, state._replace(
            count=jnp.asarray(optax.safe_increment(state.count))
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _whole_steps(period: Any) -> Any:
    traced = isinstance(period, jax.core.Tracer)
    if traced and jnp.issubdtype(period.dtype, jnp.integer):
        return jnp.maximum(period, 1)
    if traced or period % 1 or period < 1:
        raise ValueError(f"period must be a whole number of steps, 1 or more: {period}")
    return period


@check_names
def in_blocks(
    make: Callable[[MatrixRules], optax.GradientTransformation],
    grid: Sequence[int],
    *,
    rules: MatrixRules | None = None,
) -> optax.GradientTransformation:
    """Runs a stateless transform on a grid of blocks of every matrix.

    Args:
      make: from the rules under which blocks are matrices to the transform.
      grid: number of blocks along (inputs, outputs). A side that does not divide is
        padded with zeros, which the last blocks contain.
      rules: which axes form the matrices; None: ``MatrixRules()``.

    Returns:
      A stateless transform.

    Raises:
      ValueError: a ``grid`` other than two whole numbers of 1 or more; on update, a
        leaf that is not a matrix.
      TypeError: on update, a leaf of integers.
    """
    rules = rules_or_default(rules)
    if np.shape(grid) != (2,) or not all(n >= 1 and n % 1 == 0 for n in grid):
        raise ValueError(
            "block_grid must be two whole numbers, 1 or more each, got"
            f" {trees.show(grid)}"
        )
    along_inputs, along_outputs = map(int, grid)
    inner = make(_BLOCK_RULES)

    def update_fn(updates: optax.Updates, params: Any = None) -> optax.Updates:
        del params

        _, axes, leaves, _, rebuild = flatten_matrices(rules, updates)

        def on_grid(_: Any, *xs: jax.Array) -> list[jax.Array]:
            return _on_grid(xs, axes, (along_inputs, along_outputs), inner)

        return rebuild(dispatch.with_automatic_axes(on_grid, leaves))[0]

    return optax.stateless(update_fn)


def _on_grid(
    xs: Sequence[jax.Array],
    axes: Sequence[ResolvedAxes],
    grid: tuple[int, int],
    inner: optax.GradientTransformation,
) -> list[jax.Array]:
    """All blocks of all leaves in one update, so that equal ones run together."""
    matrices = [a.to_blocks(x) for a, x in zip(axes, xs)]
    cuts = jax.tree.map(lambda m: _cut(m, grid), matrices)
    done, _ = inner.update(cuts, inner.init(cuts))
    joined = jax.tree.map(lambda y, m: _join(y, m.shape), done, matrices)
    return [a.from_blocks(blocks) for a, blocks in zip(axes, joined)]


def _cut(x: jax.Array, grid: tuple[int, int]) -> jax.Array:
    """(..., m, n) to (..., grid 0, grid 1, block rows, block columns)."""
    pads = [(-side) % parts for side, parts in zip(x.shape[-2:], grid)]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, pad) for pad in pads])
    rows, cols = (side // parts for side, parts in zip(x.shape[-2:], grid))
    x = x.reshape(*x.shape[:-2], grid[0], rows, grid[1], cols)
    return jnp.swapaxes(x, -3, -2)


def _join(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverse of ``_cut``; drops the padding."""
    x = jnp.swapaxes(x, -3, -2)
    rows, cols = x.shape[-4] * x.shape[-3], x.shape[-2] * x.shape[-1]
    x = x.reshape(*x.shape[:-4], rows, cols)
    return x[..., : shape[-2], : shape[-1]]


@optimizer(ns_steps=5)
def muon_bp(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    *,
    period: ArrayLike | None = None,
    block_grid: Sequence[int] = (1, 4),
    block_scale: ArrayLike = 1.0,
    ns_steps: int | None = None,
    ns_coeffs: NSCoeffs = "keller",
    ns_dtype: DTypeLike | None = None,
    nesterov: bool = True,
    shape_scale: ShapeScale = "match_rms",
    rules: MatrixRules | None = None,
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
    """MuonBP for the matrices, AdamW for the rest.

    Every ``period``-th step (the first included) is Muon's. On the others each matrix
    is cut into a grid of blocks, and every block is orthogonalized and scaled by its
    own shape. In the paper the blocks are the shards, so that such a step needs no
    communication; here they are an argument, so that the numbers do not depend on how
    the parameters are sharded.

    Args:
      period: steps from one full orthogonalization to the next; 1 is Muon, None: 5.
      block_grid: number of blocks along (inputs, outputs); sides that do not divide are
        padded with zeros.
      block_scale: learning rate of the block steps as a multiple of the full steps';
        the best lies between 1 / sqrt(number of blocks) and 1.

    Returns:
      The optimizer. Updates have the gradients' dtypes.

    Raises:
      ValueError: a ``period`` that is not whole, or one known while tracing below 1; a
        ``block_grid`` other than two whole numbers of 1 or more.

    References:
      Khaled et al. 2025, "MuonBP", arXiv:2510.16981 (no published code).

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    >>> tx = muon_bp(learning_rate=0.02, adam_learning_rate=3e-3)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """
    period = 5 if period is None else period

    def matrix(rules: MatrixRules) -> optax.GradientTransformation:
        whole = _orthogonalize(rules, ns_steps, ns_coeffs, ns_dtype, shape_scale)

        def blocks(block_rules: MatrixRules) -> optax.GradientTransformation:
            return _orthogonalize(
                block_rules, ns_steps, ns_coeffs, ns_dtype, shape_scale
            )

        in_grid = _scale(in_blocks(blocks, block_grid, rules=rules), block_scale)
        return optax.chain(
            scale_by_momentum(b1, nesterov=nesterov, mu_dtype=mu_dtype),
            periodically(whole, in_grid, period),
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
    )


def _scale(
    inner: optax.GradientTransformation, factor: Any
) -> optax.GradientTransformation:
    """``inner`` with its updates times a factor.

    The factor may be traced, and so must stay outside of the function on blocks.
    """

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        new, state = inner.update(updates, state, params)
        return optax.scale(factor).update(new, optax.EmptyState())[0], state

    return optax.GradientTransformation(inner.init, update_fn)


def _orthogonalize(
    rules: MatrixRules,
    ns_steps: int | None,
    ns_coeffs: NSCoeffs,
    ns_dtype: DTypeLike | None,
    shape_scale: ShapeScale,
) -> optax.GradientTransformation:
    return optax.chain(
        newton_schulz_orthogonalize(
            ns_steps, ns_coeffs, ns_dtype=ns_dtype, rules=rules
        ),
        scale_by_shape(shape_scale, rules=rules),
    )
