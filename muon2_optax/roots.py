"""Roots and quotients whose derivatives are finite at zero.

The values are those of ``jnp``. At zero the derivative of a root is infinite, and times
the zero derivative of a square below it, it is NaN; here it is 0.
"""

import jax
import jax.numpy as jnp


@jax.custom_jvp
def sqrt(x: jax.Array) -> jax.Array:
    """``jnp.sqrt`` of numbers that are not negative."""
    return jnp.sqrt(x)


@sqrt.defjvp
def _sqrt_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    root = sqrt(*primals)
    slope = jnp.where(root == 0, 0, 0.5 / jnp.where(root == 0, 1, root))
    return root, slope * tangents[0]


@jax.custom_jvp
def divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x / y``; its derivative takes no square of y, which may be out of the range."""
    return x / y


@divide.defjvp
def _divide_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    ratio = divide(*primals)
    return ratio, (tangents[0] - ratio * tangents[1]) / primals[1]
