"""The step of ``sphere.hyperball``: moves matrices on the spheres of their norms."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muon2_optax import dtypes, roots, trees
from muon2_optax.arrays import limits, tracing
from muon2_optax.arrays.grouping import run_in_groups
from muon2_optax.axes import ResolvedAxes
from muon2_optax.execution import inner_products
from muon2_optax.execution.inner_products import InnerProducts, per_matrix
from muon2_optax.sharding import Shardings, locate


class Leaf(NamedTuple):
    """A parameter w, its update u, and the norms of its matrices."""

    name: str
    axes: ResolvedAxes
    w: jax.Array
    u: jax.Array
    radius: jax.Array


def parameters_of(
    names: Sequence[str], updates: Sequence[jax.Array], params: Any
) -> list[jax.Array]:
    """The parameters to which the updates belong, in the same order.

    Raises:
      ValueError: they have other paths or other shapes.
    """
    named = [(n, w) for n, w in trees.named_leaves(params) if not trees.is_empty(w)]
    if len(named) != len(names):
        raise ValueError(
            f"the updates have {len(names)} leaves, but the parameters {len(named)}"
        )
    for name, u, (other, w) in zip(names, updates, named):
        if name != other or jnp.shape(u) != jnp.shape(w):
            raise ValueError(
                f"the update of {trees.quote(name)} has shape {jnp.shape(u)}, but the"
                f" parameter in its place is {trees.quote(other)} of shape"
                f" {jnp.shape(w)}: give update() the parameters of its updates"
            )
    return [w for _, w in named]


def factors(
    leaves: Sequence[Leaf], rate: Any, shardings: Shardings | None
) -> list[tuple[jax.Array, jax.Array]]:
    """``step_factors`` of every leaf, one number per matrix each."""
    undivided = [locate(x.name, x.w, shardings).undivided for x in leaves]

    def key(i: int) -> Hashable:
        x = leaves[i]
        # Inside a shard_map a type also holds the mesh axes over which its leaf varies.
        types = (*map(jax.typeof, (x.w, x.u, x.radius)), x.axes)
        return types if undivided[i] else None

    def run(members: list[int]) -> list[tuple[jax.Array, jax.Array]]:
        some = [leaves[i] for i in members]
        if not undivided[members[0]]:
            names, axes, ws, us, radii = zip(*some)
            known = inner_products.of_pairs(names, ws, us, axes, shardings)
            return [step_factors(r, k, rate) for r, k in zip(radii, known)]
        most = max(1, limits.LEAVES_ON_SPHERE // len(some[0].axes.splits))
        few = (some[low : low + most] for low in range(0, len(some), most))
        return [
            factors
            for part in few
            for factors in _step_factors_of_equal_leaves(part, rate)
        ]

    return run_in_groups(range(len(leaves)), key, run)


def _step_factors_of_equal_leaves(
    leaves: Sequence[Leaf], rate: Any
) -> list[tuple[jax.Array, jax.Array]]:
    """``step_factors`` of equal leaves on one device, in one program."""
    known = inner_products.of_equal_leaves(
        [x.w for x in leaves], [x.u for x in leaves], leaves[0].axes
    )
    factors = step_factors(jnp.stack([x.radius for x in leaves]), known, rate)
    # Without it XLA would cut the stacks into leaves again and run programs for each.
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
    """The step ``of_w w - of_u u``, in the dtype of u.

    In parameters of 16 bits a step back to the sphere would be lost in rounding, and
    their norm would drift until the step is large enough. So they are rounded with a
    dither.
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
    """Factors a and b with R n(w - rate R n(u)) - w = a w - b u, n(x) = x / |x|.

    They follow from the inner products of x = w and y = u, so that w and u are read
    once for these and once for the step. In units of R, let q be the norm of
    w - rate R n(u), and q^2 = 1 - d. Then a = 1 / q - 1 is computed as d / (q (1 + q)),
    because a difference of two numbers near 1 would lose a small rate.
    """
    dtype = radius.dtype
    # A matrix that was zero in a jitted init, where that is no error, has no sphere to
    # move on. Leaving it as it is would hide that it does not train; NaN tells.
    r = jnp.where(radius > 0, radius, jnp.nan)
    # Where the squares overflow, u over its norm would be zero, and w would shrink
    # without notice. NaN tells.
    norm_u = roots.sqrt(jnp.where(jnp.isinf(known.yy), jnp.nan, known.yy))
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
    a, b = d / (q * (1 + q)), rate * r * per_u / q
    return jnp.where(moves, a, 0), jnp.where(moves, b, 0)
