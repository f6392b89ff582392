"""The frame of every optimizer: matrices to its method, everything else to AdamW."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import optax
from jax.typing import ArrayLike, DTypeLike

from muon2_optax import states, trees
from muon2_optax.axes import MatrixAxes
from muon2_optax.decay import decay_weights
from muon2_optax.matrices import rules_or_default
from muon2_optax.moments import scale_by_second_moment
from muon2_optax.rules import ADAM, MATRIX, MatrixRules
from muon2_optax.sharding import Shardings
from muon2_optax.sphere import Radius, hyperball
from muon2_optax.state_sharding import init_in_place

# The defaults of the arguments for AdamW in all signatures.
ADAM_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "adam_learning_rate": None,
        "adam_b1": 0.9,
        "adam_b2": 0.999,
        "adam_eps": 1e-8,
        "adam_eps_root": None,
        "adam_weight_decay": 0.0,
        "adam_h": None,
    }
)


def _check_rest(rest: Any, **adam: Any) -> None:
    """Refuses what is no transformation, and arguments for AdamW beside it."""
    if not (hasattr(rest, "init") and hasattr(rest, "update")):
        raise TypeError(
            "rest must be an optax.GradientTransformation, such as optax.adamw(1e-3),"
            f" or None; got {trees.show(rest)}"
        )

    def is_given(value: Any, default: Any) -> bool:
        # Under optax.inject_hyperparams defaults other than None arrive as arrays.
        if isinstance(value, jax.Array):
            return default is None
        return bool(value != default)

    given = [name for name, x in adam.items() if is_given(x, ADAM_DEFAULTS[name])]
    if given:
        raise ValueError(
            f"{' and '.join(given)} would have no effect: with rest=..., what is not a"
            " matrix is not trained by AdamW; give these numbers to the"
            " transformation in rest, and leave them out here"
        )


def _require_own_state(state: Any, own: Mapping[str, Any]) -> None:
    """Refuses the state of another optimizer, as one restored from a checkpoint.

    Args:
      state: what ``update`` was given.
      own: for groups that are known, the states of a tree without leaves.
    """
    new = (
        "and cannot be converted. Make a new one with init(params): the momentum starts"
        " anew, the parameters stay"
    )
    groups: Mapping[Any, Any] = getattr(state, "inner_states", {})
    if MATRIX not in groups or ADAM not in groups:
        raise ValueError(
            f"this state, {states.describe(state)}, is of another optimizer: it has no"
            f" groups {MATRIX!r} and {ADAM!r}, {new}. The arguments are"
            " update(updates, state, params), in this order"
        )
    for group, like in own.items():
        different = states.first_difference(groups[group], like)
        if different is not None:
            got, want = map(states.describe, different)
            raise ValueError(
                "this state is of another optimizer, or of the same one with other"
                f" arguments: its group {group!r} holds {got} where this optimizer"
                f" keeps {want}, {new}"
            )


def _adam_h(
    adam: Sequence[optax.GradientTransformation],
    adam_h: str,
    on_sphere: Callable[..., optax.GradientTransformation],
    shardings: Shardings | None,
) -> optax.GradientTransformation:
    """Ends the chain of AdamW on the hyperball for leaves that ``adam_h`` matches."""
    tables = MatrixRules(((adam_h, MatrixAxes(-2, -1)), ("", None)))
    direction, *end = adam
    ends: dict[Hashable, optax.GradientTransformation] = {
        MATRIX: on_sphere(rules=tables, shardings=shardings),
        ADAM: optax.chain(*end),
    }
    return optax.chain(direction, optax.partition(ends, tables.labels))


def _partition(
    matrix: Callable[[MatrixRules], optax.GradientTransformation],
    rest: optax.GradientTransformation,
    unbound: MatrixRules,
    shardings: Shardings | None,
    rest_is_adamw: bool,
) -> optax.GradientTransformationExtraArgs:
    """``optax.partition`` by rules that ``init`` and ``update`` bind to their tree.

    Both refuse trees and states that do not belong together. The state of a ``rest``
    that is not our AdamW is not compared with what its ``init`` makes.
    """

    # Cached, because steps outside of jax.jit compile again for every new function.
    @functools.lru_cache(maxsize=8)
    def partition(rules: MatrixRules) -> optax.GradientTransformationExtraArgs:
        return optax.partition({MATRIX: matrix(rules), ADAM: rest}, rules.labels)

    partition(unbound)  # so that unsuitable arguments are errors here, not in init

    @functools.cache
    def states_of_no_leaves() -> dict[str, Any]:
        known = {MATRIX: matrix(unbound)} | ({ADAM: rest} if rest_is_adamw else {})
        return {
            group: optax.MaskedState(jax.eval_shape(tx.init, {}))
            for group, tx in known.items()
        }

    def init_fn(params: optax.Params) -> Any:
        states.require_arrays(params)
        init = partition(unbound.bind(params)).init
        return init_in_place(init, params, shardings)

    def update_fn(updates: optax.Updates, state: Any, params: Any = None, **extra: Any):
        states.require_arrays(params)
        _require_own_state(state, states_of_no_leaves())
        if params is not None:
            states.require_updates_of(updates, params)
        inner = partition(unbound.bind(updates))
        new, state = inner.update(updates, state, params, **extra)
        return optax.tree.cast_like(new, updates), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def route(
    matrix: Callable[[MatrixRules], optax.GradientTransformation],
    rules: MatrixRules | None,
    *,
    learning_rate: optax.ScalarOrSchedule,
    adam_learning_rate: optax.ScalarOrSchedule | None,
    adam_b1: ArrayLike,
    adam_b2: ArrayLike,
    adam_eps: ArrayLike,
    adam_eps_root: ArrayLike | None,
    adam_weight_decay: optax.ScalarOrSchedule,
    rest: optax.GradientTransformation | None,
    weight_decay_mask: Any,
    cautious_weight_decay: bool,
    mu_dtype: DTypeLike | None,
    shardings: Shardings | None = None,
    adam_h: str | None = None,
    radius: Radius = None,
) -> optax.GradientTransformationExtraArgs:
    """Trains matrices by ``matrix``, and everything else by AdamW or ``rest``.

    This is ``optax.partition`` on the labels of the rules. The rules are first bound to
    the whole tree (``MatrixRules.bind``), because ``matrix``, which makes a transform
    from them, sees the matrices only and not their neighbours.

    AdamW is ``optax.adamw`` made of ``scale_by_second_moment``, whose state keeps its
    dtypes for gradients of any dtype. Updates come back in the gradients' dtypes:
    weight decay promotes those of lower precision than the parameters, and
    ``optax.MultiSteps`` and ``optax.apply_if_finite`` need both branches of their
    ``cond`` to agree. Leaves of the rest whose path matches ``adam_h`` follow AdamW's
    direction on the hyperball, with the learning rate and ``radius`` of the matrices.
    """
    rest_is_adamw = rest is None
    if rest is not None:
        _check_rest(
            rest,
            adam_learning_rate=adam_learning_rate,
            adam_b1=adam_b1,
            adam_b2=adam_b2,
            adam_eps=adam_eps,
            adam_eps_root=adam_eps_root,
            adam_weight_decay=adam_weight_decay,
            adam_h=adam_h,
        )
    else:
        direction = scale_by_second_moment(
            adam_b1,
            adam_b2,
            adam_eps,
            eps_root=adam_eps_root,
            bias_correction=True,
            mu_dtype=mu_dtype,
        )
        rate = learning_rate if adam_learning_rate is None else adam_learning_rate
        adam = [
            direction,
            decay_weights(adam_weight_decay, weight_decay_mask, cautious_weight_decay),
            optax.scale_by_learning_rate(rate),
        ]
        on_sphere = functools.partial(hyperball, learning_rate, radius)
        rest = optax.chain(*adam)
        if adam_h is not None:
            rest = _adam_h(adam, adam_h, on_sphere, shardings)

    return _partition(matrix, rest, rules_or_default(rules), shardings, rest_is_adamw)
