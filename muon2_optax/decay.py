"""Weight decay: of all weights, or only of those that the update shrinks as well."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muon2_optax import states
from muon2_optax.arguments import check_arguments


class CautiousWeightDecayState(NamedTuple):
    """count: int32 scalar, for a schedule."""

    count: jax.Array


@check_arguments
def add_cautious_weight_decay(
    weight_decay: optax.ScalarOrSchedule = 0.0, mask: Any = None
) -> optax.GradientTransformation:
    """Weight decay of the entries that the update shrinks as well.

    Stands where ``optax.add_decayed_weights`` stands, before the learning rate: the
    update u that will be subtracted from the parameter p becomes ``u + weight_decay p``
    where u and p have the same sign, and stays u elsewhere. For complex entries, the
    same sign is ``Re(conj(u) p) > 0``, which a common phase does not change.

    Args:
      weight_decay: rate or schedule.
      mask: tree of bools, or function from parameters to one, as in
        ``optax.add_decayed_weights``.

    Returns:
      The transform. Without a schedule its state is empty.

    Raises:
      ValueError: on update, no ``params``, or updates of other shapes.
      TypeError: a mask that is one bool.

    References:
      Chen et al. 2025, "Cautious Weight Decay", arXiv:2510.12402.

    >>> import jax.numpy as jnp
    >>> tx = add_cautious_weight_decay(0.5)
    >>> p, u = jnp.array([2.0, -2.0, 2.0]), jnp.array([1.0, 1.0, 0.0])
    >>> tx.update(u, tx.init(p), p)[0].tolist()
    [2.0, 1.0, 0.0]
    """

    def init_fn(params: optax.Params) -> Any:
        del params
        if callable(weight_decay):
            return CautiousWeightDecayState(jnp.zeros([], jnp.int32))
        return optax.EmptyState()

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        if params is None:
            raise ValueError(
                "add_cautious_weight_decay needs the parameters: call"
                " update(updates, state, params)"
            )
        rate, new = weight_decay, state
        if callable(weight_decay):
            states.require_kind(state, CautiousWeightDecayState)
            rate = weight_decay(state.count)
            count = jnp.asarray(optax.safe_increment(state.count))
            new = CautiousWeightDecayState(count)
        elif isinstance(weight_decay, (int, float)) and weight_decay == 0:
            return updates, new

        def leaf(path: Any, u: Any, p: Any) -> Any:
            if u is None:
                return None
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            states.require_shape(name, u, p, "parameter")
            return u + jnp.where(_agree(u, p), rate * p, 0)

        decayed = jax.tree_util.tree_map_with_path(
            leaf, updates, params, is_leaf=lambda x: x is None
        )
        return decayed, new

    tx = optax.GradientTransformation(init_fn, update_fn)
    return tx if mask is None else optax.masked(tx, mask)


def decay_weights(
    weight_decay: optax.ScalarOrSchedule, mask: Any, cautious: bool
) -> optax.GradientTransformation:
    """Decays all weights, or with ``cautious`` those that the update shrinks as well.

    Where the decay is 0, ``update`` needs no parameters.
    """
    add = add_cautious_weight_decay if cautious else optax.add_decayed_weights
    inner = add(weight_decay, mask)
    # A schedule or a traced number that is 0 now may be another number later.
    number = not callable(weight_decay) and not isinstance(weight_decay, jax.Array)
    none = number and weight_decay == 0

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        if params is None and none:
            return updates, state
        if params is None:
            raise ValueError(
                f"weight decay of {weight_decay} needs the parameters: call"
                " update(updates, state, params)"
            )
        return inner.update(updates, state, params)

    def init_fn(params: optax.Params) -> Any:
        if mask is None or jax.tree.leaves(params):
            return inner.init(params)
        # A mask made for a tree with leaves does not fit one without.
        return optax.MaskedState(add(weight_decay).init(params))

    return optax.GradientTransformation(init_fn, update_fn)


def _agree(u: jax.Array, p: jax.Array) -> jax.Array:
    """Where a small step along -u shrinks p."""
    if jnp.iscomplexobj(u) or jnp.iscomplexobj(p):
        return (jnp.conj(u) * p).real > 0
    # No product: it may be too small for the dtype.
    return ((u > 0) & (p > 0)) | ((u < 0) & (p < 0))
