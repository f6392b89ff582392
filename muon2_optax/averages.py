"""The arithmetic of moving averages of gradients and of their squares.

Pure functions of one leaf, under the transforms in ``moments`` and all others that
average. They compute in float32 or better.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from muon2_optax import dtypes, sharding, trees


def zeros_like(params: optax.Params, dtype: Any) -> optax.Updates:
    """Zeros like the parameters; dtype None: in theirs.

    A complex leaf takes a complex dtype only, and ignores a real one.

    Raises:
      TypeError: a complex dtype for a leaf that is real, or a leaf that is no array.
    """
    trees.require_arrays(params)
    given = dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)

    def leaf(path: Any, p: Any) -> jax.Array:
        needed = jnp.iscomplexobj(p)
        if given and not needed:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(
                f"mu_dtype={dtype.name} is complex, but {trees.quote(name)} is real;"
                " give a real mu_dtype, which complex parameters do not follow"
            )
        if not jnp.issubdtype(
            jnp.result_type(p), jnp.inexact
        ):  # averages are not whole
            return sharding.zeros_like(p, dtype or jnp.float32)
        return sharding.zeros_like(p, dtype if given == needed else None)

    return jax.tree_util.tree_map_with_path(leaf, params)


def second_dtype(p: Any, dtype: Any = None) -> jnp.dtype:
    """What V is stored in: real, and float32 or better unless asked otherwise."""
    return dtype or dtypes.real_dtype(dtypes.compute_dtype(jnp.result_type(p)))


def zero_squares(params: optax.Params, dtype: Any = None) -> optax.Updates:
    """Second moments of parameters that have seen no gradient, in ``second_dtype``."""
    return jax.tree.map(
        lambda p: sharding.zeros_like(p, second_dtype(p, dtype)), params
    )


def momentum_step(
    g: jax.Array, mu: jax.Array, b1: Any, nesterov: bool, dampening: Any = None
) -> tuple[jax.Array, jax.Array]:
    """The new momentum, and what stands in the numerator of the update."""
    g = dtypes.widen(g)
    share = (1 - (b1 if dampening is None else dampening)) * g
    m = b1 * mu.astype(g.dtype) + share
    return m, b1 * m + share if nesterov else m


def average(old: jax.Array, new: jax.Array, decay: Any) -> jax.Array:
    """decay * old + (1 - decay) * new, in the dtype of new."""
    return decay * old.astype(new.dtype) + (1 - decay) * new


def square(g: jax.Array) -> jax.Array:
    """|g|^2 in float32 or better."""
    return dtypes.squared_magnitude(dtypes.widen(g))


def divisor(root: jax.Array, eps: Any) -> jax.Array:
    """sqrt(V) + eps, positive also where the squares have underflowed to V = 0."""
    numbers = jnp.finfo(root.dtype)
    floor = numbers.tiny**0.5
    if type(eps) is float and eps > 4 * floor / numbers.eps:
        # The floor is less than half of the sum's last place.
        return root + eps
    return jnp.maximum(root, floor) + eps


def corrections(
    b1: Any, b2: Any, count: jax.Array, nesterov: bool, bias_correction: bool
) -> tuple[Any, Any]:
    """Factors of the numerator and of V; None without bias correction."""
    if not bias_correction:
        return None, None
    return 1 / (1 - _power(b1, count + nesterov)), 1 / (1 - _power(b2, count))


@functools.partial(jax.jit, inline=True)
def _power(base: Any, count: jax.Array) -> jax.Array:
    """Compiled once: outside of ``jax.jit``, JAX compiles a power for every count."""
    return base**count


def scale(x: jax.Array, factor: Any) -> jax.Array:
    """Times a factor, or as it is where that is None."""
    return x if factor is None else factor * x
