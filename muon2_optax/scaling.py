"""Gives each matrix of the updates its size, by its shape or by a norm."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from muon2_optax import averages, dtypes, roots, trees
from muon2_optax.arguments import check_arguments, check_names
from muon2_optax.axes import ResolvedAxes
from muon2_optax.matrices import require_matrix, rules_or_default
from muon2_optax.rules import MatrixRules
from muon2_optax.shape_scales import ShapeScale, check_shape_scale, shape_factors


@check_names
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

    Returns:
      The transform. Updates keep their dtype.

    Raises:
      TypeError: ``inner`` is no transformation.
      ValueError: a negative ``eps``; on update, a leaf that is not a matrix under
        ``rules``.
    """

    def factor(new: jax.Array, old: jax.Array, axes: ResolvedAxes) -> jax.Array:
        return _norm(old, axes) / roots.replace_zero(_norm(new, axes) + eps)

    return _rescale(inner, factor, rules)


@check_arguments
def scale_by_dual_norm(
    inner: optax.GradientTransformation, *, rules: MatrixRules | None = None
) -> optax.GradientTransformationExtraArgs:
    """Runs ``inner``, then multiplies each matrix by its inner product with its input.

    If ``inner`` turns M into an orthogonal O, the update is ``Re(sum(conj(M) * O)) O``.
    The sum is about the nuclear norm of M, which is the dual of the spectral norm: this
    is the step of steepest descent, and its size follows that of the gradients. So
    learning rates of plain Muon do not carry over. ``optax.contrib.muon`` calls it
    ``adaptive=True`` and takes one sum over a whole stack of matrices.

    Args:
      inner: the transform to wrap; its state is the state.
      rules: which axes form the matrices; None: ``MatrixRules()``.

    Returns:
      The transform. Updates keep their dtype.

    Raises:
      TypeError: ``inner`` is no transformation.
      ValueError: on update, a leaf that is not a matrix under ``rules``.

    References:
      Bernstein and Newhouse 2024, "Old Optimizer, New Norm", arXiv:2409.20325.
    """

    def factor(new: jax.Array, old: jax.Array, axes: ResolvedAxes) -> jax.Array:
        products = (dtypes.widen(old).conj() * dtypes.widen(new)).real
        return axes.by_block(axes.sums(products, axes.ins + axes.outs))

    return _rescale(inner, factor, rules)


def _rescale(
    inner: optax.GradientTransformation,
    factor: Callable[[jax.Array, jax.Array, ResolvedAxes], jax.Array],
    rules: MatrixRules | None,
) -> optax.GradientTransformationExtraArgs:
    """Runs ``inner``, then multiplies each matrix by ``factor(new, old, axes)``."""
    known = rules_or_default(rules)
    inner = optax.with_extra_args_support(inner)

    def update_fn(updates: optax.Updates, state: Any, params: Any = None, **extra: Any):
        changed, state = inner.update(updates, state, params, **extra)

        def leaf(name: str, new: jax.Array, old: jax.Array) -> tuple[jax.Array, ...]:
            axes = require_matrix(known, name, new)
            scaled = factor(new, old, axes) * dtypes.widen(new)
            return dtypes.narrow(scaled, new.dtype), old

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

    Returns:
      A stateless transform. Updates keep their dtype.

    Raises:
      ValueError: a negative ``rms`` or ``eps``; on update, a leaf that is not a matrix
        under ``rules``.

    References:
      Liu et al. 2025, "Muon is scalable for LLM training", for the 0.2.
    """
    rules = rules_or_default(rules)

    def update_fn(updates: optax.Updates, params: Any = None) -> optax.Updates:
        del params

        def leaf(name: str, u: jax.Array) -> tuple[jax.Array]:
            axes = require_matrix(rules, name, u)
            sides = axes.per_output([math.sqrt(axes.fan_in * n) for n in axes.splits])
            norm = roots.replace_zero(_norm(u, axes) + eps)
            factor = jnp.asarray(rms * jnp.asarray(sides, norm.dtype) / norm)
            return ((factor * dtypes.widen(u)).astype(u.dtype),)

        return trees.map_leaves(leaf, updates)[0]

    return optax.stateless(update_fn)


def _norm(x: jax.Array, axes: ResolvedAxes) -> jax.Array:
    over = axes.ins + axes.outs
    return roots.sqrt(axes.by_block(axes.sums(averages.square(x), over)))
