"""The arithmetic of moving averages of gradients and of their squares.

Pure functions on one leaf. The transforms in ``moments``, and all others that keep
averages, are made of them. They compute in float32 or better.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from muon2_optax import dtypes, sharding, states, trees


def zeros_like(params: optax.Params, dtype: Any) -> optax.Updates:
    """Zeros in the shapes of the parameters, and in their dtypes if ``dtype`` is None.

    A complex leaf follows a complex ``dtype`` only and keeps its own otherwise.

    Raises:
      TypeError: a complex dtype for a leaf that is real, or a leaf that is no array.
    """
    states.require_arrays(params)
    given = dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)

    def leaf(path: Any, p: Any) -> jax.Array:
        needed = jnp.iscomplexobj(p)
        if given and not needed:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(
                f"mu_dtype={dtype.name} is complex, but {trees.quote(name)} is real;"
                " give a real mu_dtype, which complex parameters do not follow"
            )
        if not jnp.issubdtype(jnp.result_type(p), jnp.inexact):
            # Averages of whole numbers are not whole.
            return sharding.zeros_like(p, dtype or jnp.float32)
        return sharding.zeros_like(p, dtype if given == needed else None)

    return jax.tree_util.tree_map_with_path(leaf, params)


def second_dtype(p: Any, dtype: Any = None) -> jnp.dtype:
    """The dtype in which V is stored: ``dtype``, or a real one of float32 or better."""
    return dtype or dtypes.real_dtype(dtypes.compute_dtype(jnp.result_type(p)))


def zero_squares(params: optax.Params, dtype: Any = None) -> optax.Updates:
    """Second moments of parameters that have seen no gradient, in ``second_dtype``."""
    return jax.tree.map(
        lambda p: sharding.zeros_like(p, second_dtype(p, dtype)), params
    )


def momentum_step(
    g: jax.Array, mu: jax.Array, b1: Any, nesterov: bool, dampening: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the new momentum, and the numerator of the update.

    The numerator is the momentum, or with ``nesterov`` its mixture with the gradient.
    """
    g = dtypes.widen(g)
    share = (1 - (b1 if dampening is None else dampening)) * g
    m = b1 * mu.astype(g.dtype) + share
    return m, b1 * m + share if nesterov else m


def average(old: jax.Array, new: jax.Array, decay: Any) -> jax.Array:
    """``decay * old + (1 - decay) * new``, in the dtype of ``new``."""
    return decay * old.astype(new.dtype) + (1 - decay) * new


def square(g: jax.Array) -> jax.Array:
    """|g|^2 in float32 or better."""
    return dtypes.squared_magnitude(dtypes.widen(g))


def divisor(root: jax.Array, eps: Any) -> jax.Array:
    """``sqrt(V) + eps``, which stays positive where the squares underflow to V = 0.

    Args:
      root: sqrt(V). It is held above the root of the smallest normal number.
      eps: what is added to it.
    """
    numbers = jnp.finfo(root.dtype)
    floor = numbers.tiny**0.5
    if type(eps) is float and eps > 4 * floor / numbers.eps:
        # Beside such an eps the floor would be lost in rounding, so leave it out.
        return root + eps
    return jnp.maximum(root, floor) + eps


def corrections(
    b1: Any, b2: Any, count: jax.Array, nesterov: bool, bias_correction: bool
) -> tuple[Any, Any]:
    """The factors that correct the numerator and V; None without bias correction.

    Both averages start at zero and are too small at first. With ``nesterov`` the
    numerator has the weights of one more step.
    """
    if not bias_correction:
        return None, None
    return 1 / (1 - _power(b1, count + nesterov)), 1 / (1 - _power(b2, count))


@functools.partial(jax.jit, inline=True)
def _power(base: Any, count: jax.Array) -> jax.Array:
    """``base ** count``, under ``jax.jit``.

    Outside of it JAX would compile a new power for every count.
    """
    return base**count


def scale(x: jax.Array, factor: Any) -> jax.Array:
    """``factor * x``, or x itself if the factor is None."""
    return x if factor is None else factor * x
