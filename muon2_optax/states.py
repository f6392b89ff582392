"""Checks what ``init`` and ``update`` are given: parameters, updates and states."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from muon2_optax import trees

_FOR_PARAMS = (
    "update() needs one update for each parameter, under the same path and in the same"
    " order; a parameter without gradient needs zeros, not None"
)


def require_kind(state: Any, kind: Any) -> None:
    """Refuses a state that is not of this class of named tuples.

    A class with the same fields will do. So does one that has counters beside them,
    because nothing is lost with these.

    Raises:
      ValueError: it names both classes.
    """
    if not _has_fields(state, kind._fields):
        raise ValueError(
            f"this state is {describe(state)} where this transform keeps"
            f" {describe_fields(kind)}: it is of another one, and cannot be converted."
            " Make a new one with init(params), and call update(updates, state, params)"
            " in this order"
        )


def require_statistic(
    name: str, x: Any, shape: Sequence[int], what: str, options: str
) -> None:
    """Refuses a statistic of another shape than the arguments of a transform give it.

    Arithmetic may broadcast the one to the other, and no error would follow.

    Args:
      name: the path of the leaf that it belongs to.
      x: the statistic, as the state holds it.
      shape: the one that ``init`` would give it.
      what: what it is, for the error.
      options: which arguments its shape depends on, ``"another rank_fraction"``.

    Raises:
      ValueError: it names the leaf, both shapes and the options.
    """
    if tuple(x.shape) != tuple(shape):
        raise ValueError(
            f"the {what} of {trees.quote(name)} has shape {tuple(x.shape)} in this"
            f" state, and must have {tuple(shape)}: the state is of {options} or"
            " parameters, or of another optimizer. Go on with the arguments that it was"
            " made with, or make a new state with init(params): its statistics start"
            " anew, the parameters stay"
        )


def first_difference(state: Any, like: Any) -> tuple[Any, Any] | None:
    """The first part of a state that has another form than ``like``, and its model.

    Args:
      state: of ``optax.chain`` and of the transforms in it.
      like: what ``init`` makes of a tree without leaves, so that empty dictionaries
        stand for trees of parameters, whose leaves are not compared here.

    Returns:
      The two parts, or None where the state can be used.
    """
    if hasattr(like, "_fields"):
        if not _has_fields(state, like._fields):
            return state, like
        pairs = [(getattr(state, name), getattr(like, name)) for name in like._fields]
    elif isinstance(like, tuple):
        if not isinstance(state, tuple | list) or hasattr(state, "_fields"):
            return state, like
        if len(state) != len(like):
            return state, like
        pairs = list(zip(state, like))
    elif isinstance(like, Mapping) and like:
        if not isinstance(state, Mapping) or not like.keys() <= state.keys():
            return state, like
        pairs = [(state[key], like[key]) for key in like]
    else:
        return None
    found = (first_difference(*pair) for pair in pairs)
    return next((pair for pair in found if pair is not None), None)


def require_arrays(params: Any) -> None:
    """Refuses parameters with leaves that are no arrays, numbers or shapes.

    Raises:
      TypeError: it names the first such leaf and says how to filter the model.
    """
    if all(map(_is_array, jax.tree.leaves(params))):
        return
    for name, x in trees.named_leaves(params):
        if not trees.is_empty(x) and not _is_array(x):
            what = "a function" if callable(x) else f"of type {type(x).__name__}"
            raise TypeError(
                f"the parameters hold {trees.quote(name)}, which is {what} and no"
                " array: give the model's arrays only, to init and to update; of an"
                " Equinox model, eqx.filter(model, eqx.is_array)"
            )


def require_updates_of(updates: Any, params: Any) -> None:
    """Refuses updates whose leaves have other paths or shapes than the parameters.

    Leaves that are absent from both trees (None, ``optax.MaskedNode``) do not count,
    and a box is the same leaf as what is in it.

    Raises:
      ValueError: it names the first leaf that differs.
    """
    (new, structure), (old, other) = jax.tree.flatten(updates), jax.tree.flatten(params)
    if structure != other:
        trees.require_same_paths(updates, params, "parameters", _FOR_PARAMS)
    if list(map(_shape, new)) == list(map(_shape, old)):
        return
    names = [
        name for name, leaf in trees.named_leaves(updates) if not trees.is_empty(leaf)
    ]
    for name, u, p in zip(names, new, old):
        require_shape(name, u, p, "parameter")


def require_shape(name: str, update: Any, other: Any, what: str) -> None:
    """Refuses an update of another shape than ``what`` belongs to it.

    Arithmetic would broadcast the one to the other where it can.

    Raises:
      ValueError: it names the leaf and both shapes.
    """
    if _shape(update) != _shape(other):
        raise ValueError(
            f"the update of {trees.quote(name)} has shape {_shape(update)}, but its"
            f" {what} has shape {_shape(other)}: give update() the gradients of the"
            " parameters that init() saw"
        )


def describe(state: Any) -> str:
    """The classes of a state, for an error: ``(MomentumState(mu), EmptyState())``."""
    if hasattr(state, "_fields"):
        return describe_fields(type(state))
    if isinstance(state, tuple | list):
        return f"({', '.join(map(describe, state))})"
    return f"of type {type(state).__name__}"


def describe_fields(kind: Any) -> str:
    """A class of named tuples with its fields, ``MomentumState(mu)``."""
    return f"{kind.__name__}({', '.join(kind._fields)})"


def _has_fields(state: Any, fields: tuple[str, ...]) -> bool:
    """Whether a state has these fields, and besides them at most counters."""
    if hasattr(state, "_fields"):
        others = (getattr(state, name) for name in state._fields if name not in fields)
        return set(fields) <= set(state._fields) and all(
            map(_holds_counters_only, others)
        )
    if not fields:
        return _holds_counters_only(state)
    # Plain tuples and lists have no fields, but a method ``count``, which ``hasattr``
    # would take for the field of that name.
    return not isinstance(state, tuple | list) and all(
        hasattr(state, name) for name in fields
    )


def _holds_counters_only(state: Any) -> bool:
    return all(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(state))


def _shape(x: Any) -> tuple[int, ...]:
    """The shape of an array, a shape or a number."""
    return tuple(getattr(x, "shape", ()))


def _is_array(x: Any) -> bool:
    number = isinstance(x, bool | int | float | complex)
    return number or (hasattr(x, "shape") and hasattr(x, "dtype"))
