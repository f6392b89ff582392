"""Checks of fields, for the frozen classes that hold a user's options."""

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
    value = getattr(options, field)
    if not isinstance(value, kinds):
        raise TypeError(
            f"{field} of {type(options).__name__} must be {wanted}, got"
            f" {trees.show(value)}"
        )


def require_flags(options: Any, *fields: str) -> None:
    """Refuses fields that are no bools.

    Raises:
      TypeError: as ``require_field``.
    """
    for field in fields:
        require_field(options, field, bool | np.bool_, "True or False")


def is_real_number(value: Any) -> bool:
    """Whether a value is one real number, known or traced; a bool is none."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        kinds = (jnp.integer, jnp.floating)  # with bfloat16, which NumPy does not count
        return value.shape == () and any(jnp.issubdtype(value.dtype, k) for k in kinds)
    return isinstance(value, float | int) and not isinstance(value, bool)
