"""Checks of fields, for the frozen classes that hold a user's options."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muon2_optax import trees


def require_field(options: Any, field: str, kinds: Any, wanted: str) -> None:
    """Refuses a field that is of another class.

    Args:
      options: an instance of a frozen class.
      field: the name of its field.
      kinds: a class or a union of classes.
      wanted: what they are, for the error: ``"True or False"``.

    Raises:
      TypeError: it names the class, the field and the value.
    """
    if not isinstance(getattr(options, field), kinds):
        raise _error(options, field, wanted)


def require_items(
    options: Any, field: str, is_item: Callable[[Any], bool], wanted: str
) -> None:
    """Refuses a field that is no tuple or list, or holds what is no item of it.

    Raises:
      TypeError: as ``require_field``.
    """
    value = getattr(options, field)
    if not isinstance(value, tuple | list) or not all(map(is_item, value)):
        raise _error(options, field, wanted)


def require_flags(options: Any, *fields: str) -> None:
    """Refuses fields that are no bools.

    Raises:
      TypeError: as ``require_field``.
    """
    for field in fields:
        require_field(options, field, bool | np.bool_, "True or False")


def _error(options: Any, field: str, wanted: str) -> TypeError:
    shown = trees.show(getattr(options, field))
    return TypeError(
        f"{field} of {type(options).__name__} must be {wanted}, got {shown}"
    )


def is_real_number(value: Any) -> bool:
    """Whether a value is one real number, known or traced; a bool is none."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        kinds = (jnp.integer, jnp.floating)  # with bfloat16, which NumPy does not count
        return value.shape == () and any(jnp.issubdtype(value.dtype, k) for k in kinds)
    return isinstance(value, float | int) and not isinstance(value, bool)
