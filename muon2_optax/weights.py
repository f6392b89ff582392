"""What happens to the weights' size: spheres of constant norm in place of decay."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muon2_optax import dtypes, moments, sharding, trees
from muon2_optax.arrays import tracing
from muon2_optax.axes import ResolvedAxes
from muon2_optax.execution import inner_products
from muon2_optax.execution.inner_products import InnerProducts, per_matrix
from muon2_optax.orthogonalize import (
    require_matrix,
    required_matrices,
    rules_or_default,
)
from muon2_optax.rules import MatrixRules
from muon2_optax.sharding import Shardings

# Leaves whose inner products are added up by one program.
ALIKE = 8

Radius = float | str | Callable[[int, int], float] | None


class HyperballState(NamedTuple):
    """count: int32 scalar; radius: the norm at which each matrix is held.

    The radii are real, float32 or better, and have the parameter's batch axes only (and
    one more, last, axis of blocks where the rule splits the outputs): a plain matrix
    has a scalar.
    """

    count: jax.Array
    radius: optax.Updates


def hyperball(
    learning_rate: optax.ScalarOrSchedule,
    radius: Radius = None,
    *,
    rules: MatrixRules | None = None,
    shardings: Shardings | None = None,
) -> optax.GradientTransformation:
    """Moves each matrix on the sphere of its own Frobenius norm.

    The last transform of a chain, in place of weight decay and learning rate. With the
    update u of a matrix W of norm R::

        W = R n(W - learning_rate R n(u))          n(x) = x / ||x||

    so that the learning rate is the step's length relative to the weights, whatever the
    size of u. What it returns is the difference from the old W, for
    ``optax.apply_updates``.

    R is taken from the parameters in ``init`` and kept in the state, unlike in the
    published codes, which take the norm of W anew in each step: the rounding of 16-bit
    parameters would add up there. A norm is one of a single matrix, never of a stack of
    layers or experts, nor of a whole fused projection. A zero update, or an R of 0,
    leaves the matrix as it is. Squares of entries outside of 1e-19 to 1e19 leave the
    range of float32.

    Args:
      learning_rate: length of the step relative to R, or a schedule of it; of the order
        of 0.003 to 0.03.
      radius: R. None: the norm that each matrix has in ``init``. A number, or a
        function of (fan_in, fan_out): the norm of all matrices, which the first step
        gives them. ``"init"``: as None, but sqrt(fan_out) for matrices that are zero,
        the norm of normal entries of variance 1 / fan_in, with which inputs of RMS 1
        give outputs of RMS 1. (``optax.inject_hyperparams`` calls functions as
        schedules: name the argument in its ``static_args``.)
      rules: which axes form the matrices; None: ``MatrixRules()``.
      shardings: where the parameters live, as in ``newton_schulz_orthogonalize``. With
        it, or on Explicit axes, all norms of a tree take one all-reduce of three
        numbers per matrix.

    Returns:
      The transform, with state ``HyperballState``. Updates keep their dtype.

    Raises:
      ValueError: in ``init``, a matrix that is zero and has no ``radius``; under
        ``jax.jit`` and ``jax.eval_shape`` values are not known, and such a matrix gets
        the radius 0 and stays zero. On update, no ``params``; a leaf that is not a
        matrix under ``rules``.

    References:
      Wen et al. 2025, "Fantastic Pretraining Optimizers 2.1: Hyperball Optimization".

    >>> import jax.numpy as jnp
    >>> tx = hyperball(learning_rate=0.1)
    >>> w = {"w": jnp.array([[3.0, 0.0], [0.0, 4.0]])}
    >>> updates, _ = tx.update({"w": jnp.ones((2, 2))}, tx.init(w), w)
    >>> bool(jnp.isclose(jnp.linalg.norm(w["w"] + updates["w"]), 5.0))
    True
    """
    rules, shardings = rules_or_default(rules), sharding.checked(shardings)
    _check_radius(radius)

    def init_fn(params: optax.Params) -> HyperballState:
        zeros: list[str] = []

        def leaf(name: str, p: Any) -> jax.Array:
            axes = require_matrix(rules, name, p)
            norms = _norms(p, axes)
            if radius is None and _any_zero(p, norms):
                zeros.append(name)
            return _radii(radius, norms, axes)

        state = HyperballState(
            count=jnp.zeros([], jnp.int32), radius=trees.map_named(leaf, params)
        )
        if zeros:
            raise ValueError(
                f"these leaves hold matrices that are zero: {', '.join(zeros)}. They"
                " have no norm to be held at: pass radius='init', which gives them"
                " sqrt(fan_out), or a number or function of (fan_in, fan_out); or"
                " initialize them otherwise"
            )
        return state

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        if params is None:
            raise ValueError(
                "hyperball moves the parameters from where they are: call"
                " update(updates, state, params)"
            )
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        names, axes, us, radii = required_matrices(rules, updates, state.radius)
        ws = [w for _, w in trees.named_leaves(params) if not trees.is_empty(w)]
        if len(ws) != len(us):
            raise ValueError(
                f"the updates have {len(us)} leaves, but the parameters {len(ws)}"
            )
        leaves = [_Leaf(*row) for row in zip(names, axes, ws, us, radii)]
        factors = iter(zip(leaves, _factors(leaves, rate, shardings)))

        def leaf(name: str, u: jax.Array, r: jax.Array) -> tuple[jax.Array, jax.Array]:
            x, (a, b) = next(factors)
            return _move(x.w, u, a, b, state.count, axes=x.axes), r

        updates, radius = trees.map_leaves(leaf, updates, state.radius)
        count = jnp.asarray(optax.safe_increment(state.count))
        return updates, HyperballState(count, radius)

    return optax.GradientTransformation(init_fn, update_fn)


class _Leaf(NamedTuple):
    name: str
    axes: ResolvedAxes
    w: jax.Array
    u: jax.Array
    radius: jax.Array


def _factors(
    leaves: Sequence[_Leaf], rate: Any, shardings: Shardings | None
) -> list[tuple[jax.Array, jax.Array]]:
    """``step_factors`` of every leaf."""
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
        for low in range(0, len(group), ALIKE):
            some = group[low : low + ALIKE]
            for i, found in zip(some, _stacked([leaves[i] for i in some], rate)):
                done[i] = found
    columns = zip(*(leaves[i] for i in alone))
    names, axes, ws, us, radii = columns if alone else ([],) * 5
    found = inner_products.of_pairs(names, ws, us, axes, shardings)
    for i, radius, known in zip(alone, radii, found):
        done[i] = step_factors(radius, known, rate)
    return done


def _stacked(leaves: Sequence[_Leaf], rate: Any) -> list[tuple[jax.Array, jax.Array]]:
    """The same for leaves alike on one device."""
    known = inner_products.of_alike(
        [x.w for x in leaves], [x.u for x in leaves], leaves[0].axes
    )
    factors = step_factors(jnp.stack([x.radius for x in leaves]), known, rate)
    # XLA would cut the stacks into leaves again, with programs for each.
    of_w, of_u = jax.lax.optimization_barrier(factors)
    return [(of_w[k], of_u[k]) for k in range(len(leaves))]


@tracing.once
def _move(
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
    move = per_matrix(of_w, axes) * old - per_matrix(of_u, axes) * u.astype(wide)
    if w.dtype.itemsize < wide.itemsize:
        move = dtypes.round_with_dither(old + move, w.dtype, count) - old
    return move.astype(u.dtype)


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
    norm_u = jnp.sqrt(known.yy)
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


def _norms(p: Any, axes: ResolvedAxes) -> jax.Array:
    """Frobenius norms of a leaf's matrices; zeros where the leaf is a shape only."""
    if isinstance(p, jax.ShapeDtypeStruct):
        p = sharding.zeros_like(p, None)
    norms = jnp.sqrt(inner_products.squared_norms(jnp.asarray(p), axes))
    return norms.astype(moments.second_dtype(p))


def _any_zero(p: Any, norms: jax.Array) -> bool:
    """Whether a matrix is known to be zero: of the parts that this process holds."""
    if isinstance(p, jax.ShapeDtypeStruct) or isinstance(norms, jax.core.Tracer):
        return False
    return any(bool(np.any(np.asarray(s.data) == 0)) for s in norms.addressable_shards)


def _check_radius(radius: Radius) -> None:
    if isinstance(radius, str) and radius != "init":
        raise ValueError(f"radius is a number, a function or 'init', got {radius!r}")
    if isinstance(radius, (int, float)) and not 0 < radius < math.inf:
        raise ValueError(f"radius must be positive, got {radius}")


def _radii(radius: Radius, norms: jax.Array, axes: ResolvedAxes) -> jax.Array:
    """R of every matrix of a leaf."""
    if radius is None:
        return norms
    if radius == "init":
        roots = [math.sqrt(n) for n in axes.splits]
        return jnp.where(norms == 0, _per_block(roots, norms), norms)
    of_shape = radius if callable(radius) else lambda fan_in, fan_out: radius
    given = [of_shape(axes.fan_in, n) for n in axes.splits]
    return sharding.zeros_like(norms, None) + _per_block(given, norms)


def _per_block(values: Sequence[Any], norms: jax.Array) -> jax.Array:
    """One number per block, in the rank and dtype of the norms."""
    if len(values) == 1:
        return jnp.asarray(values[0], norms.dtype)
    return jnp.asarray(values, norms.dtype).reshape((1,) * (norms.ndim - 1) + (-1,))
