"""Which dtype things are stored and computed in."""

from typing import Any

import jax
import jax.numpy as jnp


def compute_dtype(dtype: Any) -> jnp.dtype:
    """At least float32 (or complex64): what 16-bit values are computed in."""
    return jnp.promote_types(dtype, jnp.float32)


def real_dtype(dtype: Any) -> jnp.dtype:
    """The dtype of magnitudes: float32 for complex64, float64 for complex128."""
    return jnp.finfo(dtype).dtype


def canonical(name: str, dtype: Any) -> jnp.dtype | None:
    """Checks a dtype argument; None stays None.

    Raises:
      TypeError: not a dtype. ``optax.inject_hyperparams`` calls every callable
        argument as a schedule, and dtypes such as ``jnp.bfloat16`` are callable.
    """
    if dtype is None:
        return None
    if isinstance(dtype, jax.Array):
        raise TypeError(
            f"{name} arrived as an array, not a dtype; under optax.inject_hyperparams"
            f" pass static_args=({name!r},) or give it as a string"
        )
    return jnp.dtype(dtype)


def squared_magnitude(x: jax.Array) -> jax.Array:
    """|x|^2 as a real array, held below overflow so that sums stay finite."""
    square = (x * x.conj()).real if jnp.iscomplexobj(x) else x * x
    # NaN passes through jnp.minimum; only finite values too large to square are
    # held back. The factor leaves room for sums of the moving average.
    return jnp.minimum(square, jnp.finfo(square.dtype).max / 4)
