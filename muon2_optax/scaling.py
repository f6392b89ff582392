"""What follows the orthogonalization: shape factors, statistics, norms.

NorMuon and AdaMuon divide the orthogonalized update O by the root of a moving average
of its own squares, then bring the result back to a chosen size.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from muon2_optax import averages, dtypes, roots, sharding, trees
from muon2_optax.arguments import check_arguments
from muon2_optax.axes import (
    ResolvedAxes,
    ShapeScale,
    check_shape_scale,
    shape_factors,
)
from muon2_optax.matrices import require_matrix, rules_or_default
from muon2_optax.rules import MatrixRules


def scale_by_shape(
    kind: ShapeScale = "spectral", *, rules: MatrixRules | None = None
) -> optax.GradientTransformation:
    """Multiplies each matrix by a factor of its fan-in and fan-out.

    Args:
      kind: one of

        - ``"spectral"``: sqrt(fan_out / fan_in), line 8 of the paper's Algorithm 1
          (sqrt(m/n) of an n x m kernel; Bernstein and Newhouse 2025),
        - ``"keller"``: sqrt(max(1, fan_out / fan_in)), Keller Jordan's Muon,
        - ``"match_rms"``: 0.2 sqrt(max(fan_in, fan_out)), the RMS of an AdamW update
          (Liu et al. 2025, "Muon is scalable for LLM training"),
        - ``MatchRMS(rms)``: the same with another number in place of 0.2,
        - ``"none"``: 1,
        - a function of (fan_in, fan_out). (``optax.inject_hyperparams`` calls functions
          as schedules: name the argument in its ``static_args``.)

        Elsewhere (Emerging-Optimizers, Megatron) ``"spectral"`` is sqrt(max(fan_in,
        fan_out)), which is ``MatchRMS(1.0)`` here. No spectral norm is taken: to divide
        by it before Newton-Schulz is ``Schedule(..., normalization=Spectral())``.
      rules: which axes form the matrices; None: ``MatrixRules()``.

    Returns:
      A stateless transform.

    Raises:
      ValueError: an unknown kind; on update, a leaf that is not a matrix.
    """
    rules = rules_or_default(rules)
    check_shape_scale(kind)

    def update_fn(updates: optax.Updates, params: Any = None) -> optax.Updates:
        del params

        def leaf(name: str, u: jax.Array) -> tuple[jax.Array]:
            axes = require_matrix(rules, name, u)
            factor = axes.per_output(shape_factors(axes, kind))
            if not isinstance(factor, float):
                factor = jnp.asarray(factor, u.real.dtype)
            elif factor == 1:
                return (u,)
            return (factor * u,)

        return trees.map_leaves(leaf, updates)[0]

    return optax.stateless(update_fn)


class OutputSecondMomentState(NamedTuple):
    """nu: average of the squared updates, per entry or per output."""

    nu: optax.Updates


@check_arguments
def scale_by_output_second_moment(
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    *,
    eps_root: ArrayLike = 0.0,
    nu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Divides by the root of the average square of each entry (AdaMuon).

    ``V = b2 V + (1 - b2) O * O; update = O / (sqrt(V + eps_root) + eps)``, uncorrected.

    Args:
      b2: decay rate.
      eps: added to the root.
      eps_root: added under the root.
      nu_dtype: dtype in which V is stored; None: float32 or better.

    Returns:
      The transform, with state ``OutputSecondMomentState`` in the parameters' shapes.
    """
    nu_dtype = dtypes.canonical("nu_dtype", nu_dtype)

    def init_fn(params: optax.Params) -> OutputSecondMomentState:
        return OutputSecondMomentState(
            jax.tree.map(
                lambda p: sharding.zeros_like(p, averages.second_dtype(p, nu_dtype)),
                params,
            )
        )

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        del params

        def leaf(name: str, o: jax.Array, nu: jax.Array) -> tuple[jax.Array, jax.Array]:
            v = averages.average(nu, averages.square(o), b2)
            update = _wide(o) / averages.divisor(roots.sqrt(v + eps_root), eps)
            return update.astype(o.dtype), dtypes.stored(v, nu)

        updates, nu = trees.map_leaves(leaf, updates, state.nu)
        return updates, OutputSecondMomentState(nu)

    return optax.GradientTransformation(init_fn, update_fn)


@check_arguments
def scale_by_neuron_second_moment(
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-10,
    *,
    eps_root: ArrayLike = 0.0,
    rules: MatrixRules | None = None,
) -> optax.GradientTransformation:
    """Divides by the root of the average square of each output's weights (NorMuon).

    As ``scale_by_output_second_moment``, with O * O replaced by its mean over the input
    axes: one number per output neuron of each matrix.

    Args:
      b2: decay rate.
      eps: added to the root.
      eps_root: added under the root.
      rules: which axes form the matrices; None: ``MatrixRules()``.

    Returns:
      The transform. Its state has the parameters' shapes without the input axes, in
      float32 or better.

    Raises:
      ValueError: a leaf that is not a matrix under ``rules``.
    """
    rules = rules_or_default(rules)

    def mean_square(x: jax.Array, axes: ResolvedAxes) -> jax.Array:
        return jnp.sum(averages.square(x) / axes.fan_in, axis=axes.ins)

    def init_fn(params: optax.Params) -> OutputSecondMomentState:
        def leaf(name: str, p: Any) -> tuple[jax.Array, list[int | None]]:
            axes = require_matrix(rules, name, p)
            zeros = sharding.zeros_like(p, averages.second_dtype(p))
            dims: list[int | None] = [d for d in range(p.ndim) if d not in axes.ins]
            return mean_square(zeros, axes), dims

        return OutputSecondMomentState(trees.map_reduced(leaf, params))

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        del params

        def leaf(name: str, o: jax.Array, nu: jax.Array) -> tuple[jax.Array, jax.Array]:
            axes = require_matrix(rules, name, o)
            v = averages.average(nu, mean_square(o, axes), b2)
            root = jnp.expand_dims(roots.sqrt(v + eps_root), axes.ins)
            update = _wide(o) / averages.divisor(root, eps)
            return update.astype(o.dtype), dtypes.stored(v, nu)

        updates, nu = trees.map_leaves(leaf, updates, state.nu)
        return updates, OutputSecondMomentState(nu)

    return optax.GradientTransformation(init_fn, update_fn)


@check_arguments
def keep_norm(
    inner: optax.GradientTransformation,
    eps: ArrayLike = 1e-10,
    *,
    rules: MatrixRules | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Runs ``inner``, then gives each matrix the Frobenius norm it had before.

    Args:
      inner: the transform to wrap; its state is the state.
      eps: added to the norm that is divided by.
      rules: which axes form the matrices; None: ``MatrixRules()``.
    """
    rules = rules_or_default(rules)
    inner = optax.with_extra_args_support(inner)

    def update_fn(updates: optax.Updates, state: Any, params: Any = None, **extra: Any):
        changed, state = inner.update(updates, state, params, **extra)

        def leaf(name: str, new: jax.Array, old: jax.Array) -> tuple[jax.Array, ...]:
            axes = require_matrix(rules, name, new)
            factor = _norm(old, axes) / _positive(_norm(new, axes) + eps)
            return (factor * _wide(new)).astype(new.dtype), old

        return trees.map_leaves(leaf, changed, updates)[0], state

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


@check_arguments
def scale_by_dual_norm(
    inner: optax.GradientTransformation, *, rules: MatrixRules | None = None
) -> optax.GradientTransformationExtraArgs:
    """Runs ``inner``, then multiplies each matrix by its product with what it was.

    With M before and O after ``inner``, which orthogonalizes, the update is
    ``Re(sum(conj(M) * O)) O``. The sum is about the nuclear norm of M, the dual of the
    spectral norm: the step of steepest descent, whose size follows the gradients'.
    It has their scale, so rates of plain Muon do not carry over. (``adaptive=True`` of
    ``optax.contrib.muon``, which takes one sum over a stack of matrices.)

    Args:
      inner: the transform to wrap; its state is the state.
      rules: which axes form the matrices; None: ``MatrixRules()``.

    Returns:
      The transform. Updates keep their dtype.

    Raises:
      ValueError: on update, a leaf that is not a matrix under ``rules``.

    References:
      Bernstein and Newhouse 2024, "Old Optimizer, New Norm", arXiv:2409.20325.
    """
    rules = rules_or_default(rules)
    inner = optax.with_extra_args_support(inner)

    def update_fn(updates: optax.Updates, state: Any, params: Any = None, **extra: Any):
        changed, state = inner.update(updates, state, params, **extra)

        def leaf(name: str, new: jax.Array, old: jax.Array) -> tuple[jax.Array, ...]:
            axes = require_matrix(rules, name, new)
            products = (_wide(old).conj() * _wide(new)).real
            sums = axes.by_block(axes.sums(products, axes.ins + axes.outs))
            return dtypes.narrow(sums * _wide(new), new.dtype), old

        return trees.map_leaves(leaf, changed, updates)[0], state

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


@check_arguments
def scale_to_rms(
    rms: ArrayLike = 0.2, eps: ArrayLike = 1e-8, *, rules: MatrixRules | None = None
) -> optax.GradientTransformation:
    """Gives each matrix the root mean square ``rms``: 0.2, like an AdamW update's.

    Args:
      rms: the size wanted; a zero matrix stays zero.
      eps: added to the Frobenius norm that is divided by.
      rules: which axes form the matrices; None: ``MatrixRules()``.

    References:
      Liu et al. 2025, "Muon is scalable for LLM training", for the 0.2.
    """
    rules = rules_or_default(rules)

    def update_fn(updates: optax.Updates, params: Any = None) -> optax.Updates:
        del params

        def leaf(name: str, u: jax.Array) -> tuple[jax.Array]:
            axes = require_matrix(rules, name, u)
            sides = axes.per_output([math.sqrt(axes.fan_in * n) for n in axes.splits])
            norm = _positive(_norm(u, axes) + eps)
            factor = jnp.asarray(rms * jnp.asarray(sides, norm.dtype) / norm)
            return ((factor * _wide(u)).astype(u.dtype),)

        return trees.map_leaves(leaf, updates)[0]

    return optax.stateless(update_fn)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(dtypes.compute_dtype(x.dtype))


def _norm(x: jax.Array, axes: ResolvedAxes) -> jax.Array:
    over = axes.ins + axes.outs
    return roots.sqrt(axes.by_block(axes.sums(averages.square(x), over)))


def _positive(x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, 1, x)
