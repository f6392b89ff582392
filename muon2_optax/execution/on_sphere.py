"""Steps of matrices on the spheres of their norms."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muon2_optax import dtypes, roots, sharding
from muon2_optax.arrays import tracing
from muon2_optax.axes import ResolvedAxes
from muon2_optax.execution import inner_products
from muon2_optax.execution.inner_products import InnerProducts, per_matrix
from muon2_optax.sharding import Shardings

# Leaves whose inner products are added up by one program, of three operands for each
# leaf and block: XLA fuses no more than about 96.
ALIKE = 24


class Leaf(NamedTuple):
    """A parameter w, its update u, and the norms of its matrices."""

    name: str
    axes: ResolvedAxes
    w: jax.Array
    u: jax.Array
    radius: jax.Array


def factors(
    leaves: Sequence[Leaf], rate: Any, shardings: Shardings | None
) -> list[tuple[jax.Array, jax.Array]]:
    """``step_factors`` of every leaf, one number per matrix each."""
    done: list[Any] = [None] * len(leaves)
    alone: list[int] = []
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        if sharding.undivided(x.w, shardings):
            # Types tell over which axes of a shard_map leaves vary.
            key = (*map(jax.typeof, (x.w, x.u, x.radius)), x.axes)
            groups.setdefault(key, []).append(i)
        else:
            alone.append(i)
    for group in groups.values():
        most = max(1, ALIKE // len(leaves[group[0]].axes.splits))
        for low in range(0, len(group), most):
            some = group[low : low + most]
            for i, found in zip(some, _stacked([leaves[i] for i in some], rate)):
                done[i] = found
    columns = zip(*(leaves[i] for i in alone))
    names, axes, ws, us, radii = columns if alone else ([],) * 5
    found = inner_products.of_pairs(names, ws, us, axes, shardings)
    for i, radius, known in zip(alone, radii, found):
        done[i] = step_factors(radius, known, rate)
    return done


def _stacked(leaves: Sequence[Leaf], rate: Any) -> list[tuple[jax.Array, jax.Array]]:
    """The same for leaves alike on one device."""
    known = inner_products.of_alike(
        [x.w for x in leaves], [x.u for x in leaves], leaves[0].axes
    )
    factors = step_factors(jnp.stack([x.radius for x in leaves]), known, rate)
    # XLA would cut the stacks into leaves again, with programs for each.
    of_w, of_u = jax.lax.optimization_barrier(factors)
    return [(of_w[k], of_u[k]) for k in range(len(leaves))]


@tracing.once
def move(
    w: jax.Array,
    u: jax.Array,
    of_w: jax.Array,
    of_u: jax.Array,
    count: jax.Array,
    *,
    axes: ResolvedAxes,
) -> jax.Array:
    """a w - b u, in the dtype of u.

    To parameters of 16 bits a step back to the sphere is too small to be seen, and
    their norm would drift until it is not: they are rounded with a dither.
    """
    wide = dtypes.compute_dtype(jnp.promote_types(w.dtype, u.dtype))
    old = w.astype(wide)
    step = per_matrix(of_w, axes) * old - per_matrix(of_u, axes) * u.astype(wide)
    if w.dtype.itemsize < wide.itemsize:
        step = dtypes.round_with_dither(old + step, w.dtype, count) - old
    return step.astype(u.dtype)


def step_factors(
    radius: jax.Array, known: InnerProducts, rate: Any
) -> tuple[jax.Array, jax.Array]:
    """Factors a and b with R n(w - rate R n(u)) - w = a w - b u.

    From the inner products (of x = w and y = u), so that w and u are read once for
    these and once for the step. In units of R, the squared norm q^2 of what is scaled
    back to the sphere is 1 - d, and a = 1 / q - 1 is d / (q (1 + q)): without the
    difference of two numbers near 1, which would lose a small rate.
    """
    dtype, held = radius.dtype, radius > 0
    r = jnp.where(held, radius, 1)
    norm_u = roots.sqrt(known.yy)
    moves = norm_u != 0  # NaN moves
    rate = jnp.asarray(rate, dtype)
    per_u = 1 / jnp.where(moves, norm_u, 1)
    size = jnp.sqrt(known.xx) / r
    along = known.xy * per_u / r
    turn = rate * (2 * along - rate)
    d, q2 = (1 - size) * (1 + size) + turn, size * size - turn
    # Where all of w is taken away, only rounding is left of q^2.
    numbers = jnp.finfo(dtype)
    q = jnp.sqrt(jnp.maximum(q2, numbers.eps * size * size + numbers.tiny))
    go = moves & held
    return jnp.where(go, d / (q * (1 + q)), 0), jnp.where(go, rate * r * per_u / q, 0)
