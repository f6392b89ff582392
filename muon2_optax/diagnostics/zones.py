"""What a schedule makes of one singular value: its scalar map and convergence zones.

The zones are those of the Muon^2 paper (arXiv:2604.09967, "Improves NS Input Spectrum"
and the appendix on PolarExpress). Everything works under ``jax.jit``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muon2_optax import dtypes
from muon2_optax.schedules import plans
from muon2_optax.schedules.coefficients import quintic


class Zones(NamedTuple):
    """Borders between normalized singular values by what becomes of them.

    Dead below ``dead``: all K steps leave them short of 1 - tolerance. Convergent from
    ``convergent`` on: the first step takes them there. In between: transition.
    """

    dead: jax.Array
    convergent: jax.Array


class ZoneFractions(NamedTuple):
    """Shares of the singular values, (...) each; they add up to 1."""

    dead: jax.Array
    transition: jax.Array
    convergent: jax.Array


def scalar_map(ns_coeffs: Any, ns_steps: int | jax.Array, s: Any) -> jax.Array:
    """What K steps make of singular values s (any shape) that enter the first step.

    The normalization before that step is not included. Other arguments and errors are
    those of ``newton_schulz``.
    """
    plan = plans.resolve(ns_coeffs, ns_steps)
    s = jnp.asarray(s, dtypes.compute_dtype(jnp.result_type(s)))
    if plan.static:
        for triple in plan.triples:
            s = quintic(triple, s)
        return s
    table = jnp.asarray(plan.triples, s.dtype)
    last = table.shape[0] - 1
    return jax.lax.fori_loop(
        0, plan.steps, lambda i, s: quintic(table[jnp.minimum(i, last)], s), s
    )


def convergence_zones(
    ns_coeffs: Any, ns_steps: int | jax.Array, tolerance: float = 0.3
) -> Zones:
    """The borders of the dead, transition and convergent zones of any schedule.

    Each is the smallest s from 1e-8 to 1 that reaches 1 - tolerance, after all steps or
    after the first; inf if none does. Larger s may fall below 1 - tolerance again where
    the schedule oscillates, as Keller's does by 0.02; the paper's intervals leave that
    aside too.

    Args:
      ns_coeffs, ns_steps: as in ``newton_schulz``.
      tolerance: the paper's epsilon.

    Returns:
      Two real scalars.

    Raises:
      ValueError: a tolerance outside of (0, 1).

    >>> zones = convergence_zones("keller", 5)
    >>> f"{zones.dead:.4f} {zones.convergent:.3f}"
    '0.0016 0.217'
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must lie between 0 and 1, got {tolerance}")
    triples = plans.resolve(ns_coeffs, ns_steps).triples
    first = triples[0] if len(triples) else (1.0, 0.0, 0.0)

    def border(fn: Callable[[jax.Array], jax.Array]) -> jax.Array:
        grid = jnp.concatenate([jnp.zeros(1), jnp.geomspace(1e-8, 1.0, 4096)])
        found = jnp.any(fn(grid) >= 1 - tolerance)
        high = grid[-1]
        for _ in range(3):
            i = jnp.maximum(jnp.argmax(fn(grid) >= 1 - tolerance), 1)
            low, high = grid[i - 1], grid[i]
            grid = jnp.linspace(low, high, 65)
        return jnp.where(found, high, jnp.inf)

    dead = border(lambda s: scalar_map(ns_coeffs, ns_steps, s))
    return Zones(dead, jnp.maximum(dead, border(lambda s: quintic(first, s))))


def zone_fractions(singular_values: jax.Array, zones: Zones) -> ZoneFractions:
    """Shares of normalized singular values (..., k) in each zone; NaN is in none."""
    dead = singular_values < zones.dead
    transition = ~dead & (singular_values < zones.convergent)
    convergent = ~dead & (singular_values >= zones.convergent)
    return ZoneFractions(
        *(jnp.mean(z, axis=-1) for z in (dead, transition, convergent))
    )
