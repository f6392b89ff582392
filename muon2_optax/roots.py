"""Roots and quotients whose derivatives are finite at zero.

The values are those of ``jnp``. At zero the derivative of a root is infinite; times the
derivative of a square under the root, which is zero, it would give NaN. Here it is 0.
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
def fourth_root(x: jax.Array) -> jax.Array:
    """``x ** 0.25`` of numbers that are not negative."""
    return x**0.25


@fourth_root.defjvp
def _fourth_root_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    root = fourth_root(*primals)
    slope = 0.25 * root / jnp.where(primals[0] == 0, 1, primals[0])
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


def replace_zero(x: jax.Array) -> jax.Array:
    """x with 1 in place of 0, as a divisor: 0 divided by 0 is then 0."""
    return jnp.where(x == 0, 1, x)
