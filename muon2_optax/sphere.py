"""The hyperball: each matrix moves on the sphere of its own Frobenius norm."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from muon2_optax import averages, sharding, states, trees
from muon2_optax.arguments import check_arguments
from muon2_optax.axes import ResolvedAxes
from muon2_optax.execution import hyperball_step, inner_products
from muon2_optax.matrices import flatten_matrices, require_matrix, rules_or_default
from muon2_optax.rules import MatrixRules
from muon2_optax.sharding import Shardings

Radius = ArrayLike | Literal["init"] | Callable[[int, int], float] | None


class HyperballState(NamedTuple):
    """count: int32 scalar; radius: the Frobenius norm at which each matrix is held.

    The radii are real: float64 for float64 and complex128 parameters, float32 for all
    others, 16-bit ones included. There is one per matrix, so they have the parameter's
    batch axes only (and one more, last, axis of blocks where the rule splits the
    outputs): a plain matrix has a scalar.
    """

    count: jax.Array
    radius: optax.Updates


@check_arguments
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

    R is set in ``init`` and kept in the state. Published codes measure the norm of W
    again in each step, so that the rounding errors of 16-bit parameters add up in it.
    Here such parameters are rounded with a dither, a threshold that depends only on the
    step and the entry's position: the correction back to the sphere is smaller than
    half a unit in their last place, and rounding to the nearest would always drop it.
    Each norm belongs to a single matrix, never to a stack of layers or experts, nor to
    a whole fused projection. A zero update leaves the matrix as it is. Squares of
    entries outside of 1e-19 to 1e19 leave the range of float32: smaller updates count
    as zero, larger ones give NaN.

    Args:
      learning_rate: length of the step relative to R, or a schedule of it; of the order
        of 0.02 to 0.045. Start with 0.03.
      radius: R, a Frobenius norm in units of the parameters. None: the norm that each
        matrix has in ``init``. A number, or a function of (fan_in, fan_out): the norm
        of all matrices, which the first step with a nonzero update gives them.
        ``"init"``: as None, but sqrt(fan_out) for matrices that are zero. A matrix of
        normal entries with variance 1 / fan_in has this norm, and turns inputs of RMS 1
        into outputs of RMS 1. (``optax.inject_hyperparams`` calls functions as
        schedules: name the argument in its ``static_args``.)
      rules: which axes form the matrices; None: ``MatrixRules()``.
      shardings: where the parameters live, as in ``newton_schulz_orthogonalize``. With
        it, or on Explicit axes, all norms of a tree take one all-reduce of three
        numbers per matrix.

    Returns:
      The transform, with state ``HyperballState``. Updates keep their dtype.

    Raises:
      ValueError: a negative ``learning_rate``; a ``radius`` that is not positive. In
        ``init``, a matrix that is zero and has no ``radius``. Under ``jax.jit`` values
        are not known: there such a matrix gets the radius 0, and its first update other
        than zero is NaN, as with a ``radius`` that turns out not to be positive. On
        update, no ``params``, or ``params`` with other paths or shapes than the
        updates; a leaf that is not a matrix under ``rules``.

    References:
      Wen et al. 2025, "Fantastic Pretraining Optimizers 2.1: Hyperball Optimization".

    >>> import jax.numpy as jnp
    >>> tx = hyperball(learning_rate=0.1)
    >>> w = {"w": jnp.array([[3.0, 0.0], [0.0, 4.0]])}
    >>> updates, _ = tx.update({"w": jnp.ones((2, 2))}, tx.init(w), w)
    >>> bool(jnp.isclose(jnp.linalg.norm(w["w"] + updates["w"]), 5.0))
    True
    """
    rules, shardings = rules_or_default(rules), sharding.check_shardings(shardings)
    _check_radius(radius)

    def init_fn(params: optax.Params) -> HyperballState:
        zeros: list[str] = []

        def leaf(name: str, p: Any) -> jax.Array:
            axes = require_matrix(rules, name, p)
            norms = _norms(p, axes)
            if radius is None and _any_zero(p, norms):
                zeros.append(name or trees.quote(name))
            return _radii(radius, norms, axes)

        state = HyperballState(
            count=jnp.zeros([], jnp.int32), radius=trees.map_named(leaf, params)
        )
        if zeros:
            raise ValueError(
                f"these leaves hold matrices whose norm is zero: {', '.join(zeros)}."
                " There is nothing to hold them at: pass radius='init', which gives"
                " them sqrt(fan_out), or a number or function of (fan_in, fan_out); or"
                " initialize them otherwise"
            )
        return state

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        if params is None:
            raise ValueError(
                "hyperball moves the parameters from where they are: call"
                " update(updates, state, params)"
            )
        states.require_kind(state, HyperballState)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        names, axes, us, (radii,), rebuild = flatten_matrices(
            rules, updates, state.radius
        )
        ws = hyperball_step.parameters_of(names, us, params)
        for name, a, r in zip(names, axes, radii):
            states.require_statistic(
                name, r, a.shape_per_matrix, "radius", "other rules"
            )
        leaves = list(map(hyperball_step.Leaf, names, axes, ws, us, radii))
        moved = [
            hyperball_step.move(x.w, x.u, a, b, state.count, axes=x.axes)
            for x, (a, b) in zip(
                leaves, hyperball_step.factors(leaves, rate, shardings)
            )
        ]
        count = jnp.asarray(optax.safe_increment(state.count))
        return rebuild(moved)[0], HyperballState(count, state.radius)

    return optax.GradientTransformation(init_fn, update_fn)


def _norms(p: Any, axes: ResolvedAxes) -> jax.Array:
    """Frobenius norms of a leaf's matrices; zeros where the leaf is a shape only."""
    if isinstance(p, jax.ShapeDtypeStruct):
        p = sharding.zeros_like(p, None)
    norms = jnp.sqrt(inner_products.squared_norms(jnp.asarray(p), axes))
    return norms.astype(averages.second_dtype(p))


def _any_zero(p: Any, norms: jax.Array) -> bool:
    """Whether a matrix is known to be zero, among the shards of this process."""
    if isinstance(p, jax.ShapeDtypeStruct) or isinstance(norms, jax.core.Tracer):
        return False
    return any(bool(np.any(np.asarray(s.data) == 0)) for s in norms.addressable_shards)


def _check_radius(radius: Radius) -> None:
    if isinstance(radius, str) and radius != "init":
        raise ValueError(f"radius is a number, a function or 'init', got {radius!r}")
    if not (radius is None or isinstance(radius, str) or callable(radius)):
        _check_positive("radius", radius)


def _check_positive(source: str, radius: Any) -> None:
    """Refuses what is known not to be one positive number; traced values pass."""
    if np.ndim(radius) != 0:
        raise ValueError(f"{source} must be one number, got shape {np.shape(radius)}")
    if not isinstance(radius, jax.core.Tracer) and not 0 < float(radius) < math.inf:
        raise ValueError(f"{source} must be positive, got {radius}")


def _radii(radius: Radius, norms: jax.Array, axes: ResolvedAxes) -> jax.Array:
    """R of every matrix of a leaf."""
    if radius is None:
        return norms
    if isinstance(radius, str):
        roots = [math.sqrt(n) for n in axes.splits]
        return jnp.where(norms == 0, _per_block(roots, norms), norms)
    of_shape = radius if callable(radius) else lambda fan_in, fan_out: radius
    given = [of_shape(axes.fan_in, n) for n in axes.splits]
    for n, value in zip(axes.splits, given):
        _check_positive(f"radius({axes.fan_in}, {n})", value)
    return sharding.zeros_like(norms, None) + _per_block(given, norms)


def _per_block(values: Sequence[Any], norms: jax.Array) -> jax.Array:
    """One number per block, in the rank and dtype of the norms."""
    if len(values) == 1:
        return jnp.asarray(values[0], norms.dtype)
    return jnp.asarray(values, norms.dtype).reshape((1,) * (norms.ndim - 1) + (-1,))
