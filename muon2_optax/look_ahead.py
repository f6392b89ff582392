"""EMA-Nesterov: gradients are taken ahead of the iterates, along their mean step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from muon2_optax import averages, sharding, trees
from muon2_optax.arguments import check_arguments


class EmaNesterovState(NamedTuple):
    """The state of ``ema_nesterov``.

    Attributes:
      count: int32 scalar.
      beta: float32 scalar, how many mean steps the parameters lead the iterates x.
      step: moving average of the steps, shaped like the parameters, float32 or better.
      base_state: that of the wrapped transform.
    """

    count: jax.Array
    beta: jax.Array
    step: optax.Updates
    base_state: Any


@check_arguments
def ema_nesterov(
    tx: optax.GradientTransformation,
    beta: optax.ScalarOrSchedule,
    decay: ArrayLike = 0.99,
) -> optax.GradientTransformationExtraArgs:
    """Takes the gradients ahead of the iterates x, by beta times their mean step m.

    A(y) is the point that one step of the wrapped optimizer reaches from y::

        x+ = A(x + beta m)
        m+ = decay m + (1 - decay) (x+ - x)

    The parameters that the training loop holds are the points x + beta m, where it
    takes the gradients. ``ema_nesterov_eval_params`` returns x: evaluate x, and keep it
    at the end of a run. With beta = 0 throughout this is ``tx``.

    Every update counts as a step, even with a zero gradient. So wrap
    ``optax.MultiSteps`` and ``optax.apply_if_finite`` around this transform, not the
    other way round: inside of it, x would move by beta m in the steps that they skip.

    Args:
      tx: a complete optimizer, learning rate and decay included.
      beta: how many mean steps ahead of x the gradients are taken; a number, or a
        schedule such as ``ema_nesterov_schedule`` makes. Published: 0.3 to 0.6 in the
        middle of training.
      decay: decay rate of the moving average of the steps.

    Returns:
      The optimizer, with state ``EmaNesterovState``. Updates keep their dtype.

    Raises:
      TypeError: ``tx`` is no transformation.
      ValueError: a negative ``beta``, or a ``decay`` outside of [0, 1).

    References:
      "EMA-Nesterov", arXiv:2605.25395.

    >>> import jax.numpy as jnp
    >>> tx = ema_nesterov(optax.sgd(0.1), beta=0.5)
    >>> params = jnp.array([1.0])
    >>> state = tx.init(params)
    >>> updates, state = tx.update(jnp.array([2.0]), state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> bool(jnp.allclose(ema_nesterov_eval_params(state, params), 0.8))
    True
    """
    tx = optax.with_extra_args_support(tx)

    def beta_at(count: Any) -> jax.Array:
        value = beta(count) if callable(beta) else beta
        return jnp.asarray(value, jnp.float32)

    def init_fn(params: optax.Params) -> EmaNesterovState:
        count = jnp.zeros([], jnp.int32)
        step = jax.tree.map(lambda p: sharding.zeros_like(p, _step_dtype(p)), params)
        return EmaNesterovState(count, beta_at(count), step, tx.init(params))

    def update_fn(
        updates: optax.Updates, state: Any, params: Any = None, **extra: Any
    ) -> Any:
        base, base_state = tx.update(updates, state.base_state, params, **extra)
        count = jnp.asarray(optax.safe_increment(state.count))
        ahead = beta_at(count)

        def leaf(name: str, u: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
            # x+ - x. Its part beta m is in the parameters already.
            taken = u.astype(m.dtype) + state.beta.astype(m.real.dtype) * m
            mean = averages.average(m, taken, decay)
            moved = u.astype(m.dtype) + ahead.astype(m.real.dtype) * mean
            return moved.astype(u.dtype), mean

        moved, step = trees.map_leaves(leaf, base, state.step)
        return moved, EmaNesterovState(count, ahead, step, base_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def ema_nesterov_eval_params(state: Any, params: optax.Params) -> optax.Params:
    """The iterates x, for evaluation, from the parameters that training holds.

    Args:
      state: the ``EmaNesterovState`` that came with the parameters, or the state of an
        optimizer that holds one, such as ``optax.chain`` makes.
      params: the parameters after that update was applied. Those that a mask or
        partition kept from ``ema_nesterov`` come back as they are.

    Returns:
      x, in the shapes and dtypes of ``params``.

    Raises:
      ValueError: the state holds no ``EmaNesterovState``, or more than one.
    """
    is_state = lambda x: isinstance(x, EmaNesterovState)  # noqa: E731
    leaves = jax.tree.leaves(state, is_leaf=is_state)
    found = [x for x in leaves if is_state(x)]
    if len(found) != 1:
        raise ValueError(
            f"the state holds {len(found)} EmaNesterovStates, and exactly one is needed"
        )
    beta, steps = found[0].beta, found[0].step
    empty = trees.is_empty
    masked = any(map(_is_masked, jax.tree.leaves(steps, is_leaf=empty)))
    known = params
    if masked:
        known = jax.tree.map(
            lambda m, p: m if empty(m) else p, steps, params, is_leaf=empty
        )

    def leaf(name: str, p: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
        behind = p.astype(m.dtype) - beta.astype(m.real.dtype) * m
        return behind.astype(p.dtype), m

    iterates = trees.map_leaves(leaf, known, steps)[0]
    if masked:
        return jax.tree.map(
            lambda x, p: p if empty(x) else x, iterates, params, is_leaf=empty
        )
    return iterates


def ema_nesterov_schedule(
    learning_rate: optax.ScalarOrSchedule,
    steps: int,
    peak: float = 0.5,
    *,
    start: float = 0.15,
    stop: float = 0.75,
) -> optax.Schedule:
    """The published schedule of beta for a run of this many steps.

    ``peak * learning_rate(t) / max learning_rate`` between ``start`` and ``stop``, and
    0 before and after.

    Args:
      learning_rate: the optimizer's, a number or a schedule.
      steps: length of the run, at least 1.
      peak: beta at the largest learning rate; published: 0.3 to 0.6.
      start, stop: fractions of the run; published: beta is 0 in the first 15 % and in
        the last 25 %.

    Returns:
      A function from the step count to beta.

    Raises:
      ValueError: not 0 <= start <= stop <= 1; a learning rate that is never positive.

    References:
      "EMA-Nesterov", arXiv:2605.25395; modded-nanogpt, entries 308 and 309.
    """
    if not 0 <= start <= stop <= 1:
        raise ValueError(f"start and stop are fractions in order, got {start}, {stop}")
    rate = learning_rate if callable(learning_rate) else lambda count: learning_rate
    with jax.ensure_compile_time_eval():
        rates = np.asarray(jax.vmap(rate)(jnp.arange(steps)))
    if not rates.size or not rates.max() > 0:
        raise ValueError(f"the learning rate is never positive in {steps} steps")
    top, low, high = float(rates.max()), start * steps, stop * steps

    def beta(count: Any) -> jax.Array:
        inside = (count >= low) & (count < high)
        return jnp.where(inside, peak / top * rate(count), 0.0)

    return beta


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def _step_dtype(p: Any) -> Any:
    """The dtype of the mean step: float32 or better, complex for complex leaves."""
    real = averages.second_dtype(p)
    return jnp.promote_types(real, jnp.complex64) if jnp.iscomplexobj(p) else real
