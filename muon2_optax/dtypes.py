"""Which dtype things are stored and computed in."""

from typing import Any

import jax
import jax.numpy as jnp

# Odd numbers near 2^32 times the golden ratio and the plastic number's inverse square:
# multiples of them are spread evenly over the 32-bit numbers.
_WEYL_OF_STEP, _WEYL_OF_ENTRY = 0x9E3779B9, 0x91E10DA5


def compute_dtype(dtype: Any) -> jnp.dtype:
    """At least float32 (or complex64): what 16-bit values are computed in."""
    return jnp.promote_types(dtype, jnp.float32)


def widen(x: jax.Array) -> jax.Array:
    """x in the dtype in which it is computed with."""
    return x.astype(compute_dtype(x.dtype))


def real_dtype(dtype: Any) -> jnp.dtype:
    """The dtype of magnitudes: float32 for complex64, float64 for complex128."""
    return jnp.finfo(dtype).dtype


def canonical(name: str, dtype: Any) -> jnp.dtype | None:
    """Checks a dtype argument; None stays None.

    Raises:
      TypeError: not a dtype that can hold what ``name`` stands for: for ``ns_dtype`` a
        real one of 16 bits or more, because Newton-Schulz takes differences of numbers
        that are nearly equal; for ``mu_dtype`` and ``nu_dtype`` a signed one of 8 bits
        or more, and complex ones for ``mu_dtype`` only. Or an array:
        ``optax.inject_hyperparams`` calls every callable argument as a schedule, and
        dtypes such as ``jnp.bfloat16`` are callable.
    """
    if dtype is None:
        return None
    if isinstance(dtype, jax.Array):
        raise TypeError(
            f"{name} arrived as an array, not a dtype; under optax.inject_hyperparams"
            f" pass static_args=({name!r},) or give it as a string"
        )
    try:
        known = jnp.dtype(dtype)
    except TypeError as err:
        raise TypeError(f"{name}={dtype!r} is no dtype") from err
    if name == "mu_dtype" and jnp.issubdtype(known, jnp.complexfloating):
        return known
    if not jnp.issubdtype(known, jnp.floating):
        raise TypeError(f"{name} must be a real floating point dtype, got {known}")
    least = 16 if name == "ns_dtype" else 8
    if jnp.finfo(known).bits < least or float(jnp.finfo(known).min) >= 0:
        raise TypeError(
            f"{name}={known.name} has too few bits; give {name} a floating point dtype"
            f" of {least} bits or more, with a sign"
        )
    return known


def narrow(x: jax.Array, dtype: Any) -> jax.Array:
    """Casts for storage; finite values too large for the dtype become its largest.

    float16 ends at 65504, where sums of its own values do not. Infinities and NaN stay.
    """
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.iscomplexobj(x):
        return x.astype(dtype)
    if jnp.finfo(dtype).max >= jnp.finfo(x.dtype).max:
        return x.astype(dtype)
    top = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -top, top), x).astype(dtype)


def round_with_dither(x: jax.Array, dtype: Any, count: jax.Array) -> jax.Array:
    """Rounds to values of a shorter dtype, up or down in proportion to the distances.

    Rounding to the nearest would lose a step of less than half a unit in the last place
    however often it is taken. Here the threshold of every entry takes all values in
    turn, in a Weyl sequence along ``count``, so that the mean over steps is x.

    Args:
      x: float32. Anything else comes back as it is, and so do NaN and infinities.
      dtype: to whose values it is rounded, bfloat16 or float16.
      count: int32 scalar, the step.

    Returns:
      The rounded values, in float32.
    """
    if x.dtype != jnp.float32 or not jnp.issubdtype(dtype, jnp.floating):
        return x
    dropped = jnp.finfo(x.dtype).nmant - jnp.finfo(dtype).nmant
    if dropped <= 0:
        return x
    index = jnp.uint32(_WEYL_OF_STEP) * count.astype(jnp.uint32)
    stride = 1
    for axis in reversed(range(x.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        index = index + along * jnp.uint32(stride * _WEYL_OF_ENTRY % 2**32)
        stride *= x.shape[axis]
    threshold = index >> jnp.uint32(32 - dropped)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + threshold
    kept = (bits >> jnp.uint32(dropped)) << jnp.uint32(dropped)
    rounded = jax.lax.bitcast_convert_type(kept, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x)


def narrow_average(x: jax.Array, old: jax.Array) -> jax.Array:
    """Casts a moving average x to the dtype of its old value, as ``narrow`` does.

    An average that has become smaller must not be rounded back to its old value, or it
    would never reach zero: 0.95 times 10 of float16's smallest numbers is 9.5 of them,
    which rounds to 10. It goes to the next smaller number then. bfloat16 has the range
    of float32, where this takes place below anything that matters, and stays as it is.
    """
    new = narrow(x, old.dtype)
    if (
        jnp.iscomplexobj(new)
        or jnp.finfo(old.dtype).maxexp >= jnp.finfo(jnp.bfloat16).maxexp
    ):
        return new
    stuck = (new == old) & (jnp.abs(x) < jnp.abs(old.astype(x.dtype)))
    # Numbers of one sign are ordered like their bits.
    bits = jax.lax.bitcast_convert_type(new, f"uint{jnp.finfo(old.dtype).bits}")
    smaller = jax.lax.bitcast_convert_type(bits - 1, old.dtype)
    smallest = jnp.finfo(old.dtype).smallest_subnormal
    gone = jnp.abs(x) < smallest.astype(x.dtype)
    return jnp.where(stuck, jnp.where(gone, jnp.zeros_like(new), smaller), new)


def squared_magnitude(x: jax.Array) -> jax.Array:
    """|x|^2 as a real array, kept below overflow so that sums stay finite."""
    square = (x * x.conj()).real if jnp.iscomplexobj(x) else x * x
    # NaN passes through jnp.minimum; only values too large to square are held back. The
    # factor leaves room for the sums of a moving average.
    return jnp.minimum(square, jnp.finfo(square.dtype).max / 4)
