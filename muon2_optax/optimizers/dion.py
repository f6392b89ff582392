"""Dion: low-rank orthonormalized updates with error feedback."""

import math
import operator
import zlib
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from muon2_optax import averages, dtypes, sharding, states, trees
from muon2_optax.arguments import check_arguments
from muon2_optax.arrays import stacks
from muon2_optax.arrays.grouping import run_in_groups
from muon2_optax.axes import ResolvedAxes
from muon2_optax.decay import decay_weights
from muon2_optax.execution import dispatch
from muon2_optax.matrices import require_whole_matrix, rules_or_default
from muon2_optax.optimizers._route import route
from muon2_optax.optimizers._shared_arguments import optimizer
from muon2_optax.power_iteration import power_iteration
from muon2_optax.rules import MatrixRules
from muon2_optax.scaling import scale_by_shape
from muon2_optax.shape_scales import ShapeScale


class LowRankState(NamedTuple):
    """mu: momentum with error feedback; q: right factors (*batch, side, r)."""

    mu: optax.Updates
    q: optax.Updates


@check_arguments
def scale_by_low_rank_orthonormal(
    b1: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    *,
    rank_fraction: float | None = None,
    seed: int | None = None,
    mu_dtype: DTypeLike | None = None,
    rules: MatrixRules | None = None,
) -> optax.GradientTransformation:
    """Replaces each matrix by an orthonormal one of rank r, from one power iteration.

    With B the momentum, stored so that its right side is the smaller one::

        B = M + G;  P = qr(B Q);  R = B^H P
        M = B - (1 - b1) P R^H              what was not applied stays
        Q = R / (column norms + eps);  update = P Q^H

    A matrix whose momentum is exactly zero gives a zero update and keeps its Q. Columns
    of R that are rounding noise, because the momentum's rank is below r, become 0 in Q.

    Args:
      b1: the paper's mu.
      eps: added to the column norms of R.
      rank_fraction: r = ceil(rank_fraction * smaller side); None: 1.
      seed: of the initial Q, standard normal, different for each path; None: 0.
      mu_dtype: dtype in which M is stored; None: the parameters'.
      rules: which axes form the matrices; None: ``MatrixRules()``.

    Returns:
      The transform, with state ``LowRankState``; Q is float32 or better.

    Raises:
      ValueError: ``rank_fraction`` outside of (0, 1], ``b1`` outside of [0, 1); in
        ``init``, a leaf that is not a matrix, or whose rule splits the outputs; on
        update, a state of another rank.

    References:
      Ahn et al. 2025, "Dion", arXiv:2504.05295, algorithm 1.
    """
    mu_dtype = dtypes.canonical("mu_dtype", mu_dtype)
    rank_fraction = 1.0 if rank_fraction is None else float(rank_fraction)
    seed = 0 if seed is None else operator.index(seed)
    if not 0 < rank_fraction <= 1:
        raise ValueError(f"rank_fraction must lie in (0, 1], got {rank_fraction}")
    rules = rules_or_default(rules)

    def matrix_axes(name: str, leaf: Any) -> ResolvedAxes:
        return require_whole_matrix(rules, name, leaf, "low-rank updates")

    def factor_shape(axes: ResolvedAxes, q: Any = None) -> tuple[int, ...]:
        sides = axes.fan_in, axes.splits[0]
        rank = min(*sides, math.ceil(rank_fraction * min(sides)))
        # States of other implementations may hold a Q for the longer side.
        given = q is not None and q.ndim > 1 and q.shape[-2] in sides
        return *axes.batch_shape, q.shape[-2] if given else min(sides), rank

    def init_fn(params: optax.Params) -> LowRankState:
        def leaf(name: str, p: Any) -> tuple[jax.Array, list[int | None]]:
            axes = matrix_axes(name, p)
            key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
            dtype = dtypes.compute_dtype(p.dtype)
            q = jax.random.normal(key, factor_shape(axes), dtype)
            # Inside jax.shard_map an array that depends on no parameter has the type of
            # one that is equal on all devices, and updates of it would not.
            none = sharding.zeros_like(p, dtype)
            q = q + jnp.sum(none, axis=axes.ins + axes.outs)[..., None, None]
            return q, [*axes.batch, None, None]

        return LowRankState(
            averages.zeros_like(params, mu_dtype), trees.map_reduced(leaf, params)
        )

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        del params
        states.require_kind(state, LowRankState)
        names, lists, rebuild = trees.flatten_leaves(updates, state.mu, state.q)
        axes = [matrix_axes(name, g) for name, g in zip(names, lists[0])]
        for name, a, g, mu, q in zip(names, axes, *lists):
            states.require_shape(name, g, mu, "momentum")
            states.require_statistic(
                name,
                q,
                factor_shape(a, q),
                "right factor",
                "another rank_fraction, other rules",
            )

        def run(settings: tuple[Any, Any], *xs: jax.Array) -> list[jax.Array]:
            leaves = list(map(_Leaf, axes, xs[0::3], xs[1::3], xs[2::3]))
            done = run_in_groups(
                leaves, _Leaf.kind, lambda some: _update(some, *settings)
            )
            return [x for leaf in done for x in leaf]

        # Leaf by leaf: the update, its momentum and its Q.
        flat = [x for leaf in zip(*lists) for x in leaf]
        done = dispatch.with_automatic_axes(run, flat, (b1, eps))
        updates, mu, q = rebuild(done[0::3], done[1::3], done[2::3])
        return updates, LowRankState(mu, q)

    return optax.GradientTransformation(init_fn, update_fn)


class _Leaf(NamedTuple):
    """The axes of a leaf's matrices, its gradient, momentum and Q."""

    axes: ResolvedAxes
    g: jax.Array
    mu: jax.Array
    q: jax.Array

    def kind(self) -> Hashable:
        """What leaves must have in common to run as one batch."""
        sides = self.axes.fan_in, self.axes.splits, self.q.shape[-1]
        return sides, dtypes.compute_dtype(self.g.dtype)


def _update(
    leaves: Sequence[_Leaf], b1: Any, eps: Any
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """The update, the momentum and the Q of leaves of one kind."""
    dtype = dtypes.compute_dtype(leaves[0].g.dtype)
    momenta = [
        x.axes.to_blocks(x.mu.astype(dtype) + x.g.astype(dtype))[0] for x in leaves
    ]
    b = jnp.concatenate(stacks.to_stacks(momenta))
    q = jnp.concatenate(stacks.to_stacks([x.q.astype(dtype) for x in leaves]))
    ends = np.cumsum([math.prod(x.shape[:-2]) for x in momenta])[:-1]
    parts = [jnp.split(y, ends) for y in power_iteration(b, q, b1, eps)]

    def restore(x: _Leaf, momentum: jax.Array, *done: jax.Array) -> Any:
        update, rest = (
            x.axes.from_blocks([y.reshape(momentum.shape)]) for y in done[:2]
        )
        return (
            dtypes.narrow(update, x.g.dtype),
            dtypes.narrow_average(rest, x.mu),
            done[2].reshape(x.q.shape).astype(x.q.dtype),
        )

    return list(map(restore, leaves, momenta, *parts))


@optimizer()
def dion(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    *,
    rank_fraction: float | None = None,
    shape_scale: ShapeScale = "spectral",
    seed: int | None = None,
    rules: MatrixRules | None = None,
    weight_decay_mask: Any = None,
    cautious_weight_decay: bool = False,
    mu_dtype: DTypeLike | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps: ArrayLike = 1e-8,
    adam_eps_root: ArrayLike | None = None,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    rest: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Dion for the matrices, AdamW for the rest.

    One power iteration of rank r tracks the dominant subspace of the momentum; what the
    rank-r update leaves out stays in the momentum. No Newton-Schulz: it takes one QR
    decomposition of an m x r matrix, in float32 or better. See
    ``scale_by_low_rank_orthonormal``. The authors' defaults are learning rate 0.01 and
    weight decay 0.01.

    Args:
      b1: the paper's mu; 1 - b1 of the part just applied leaves the momentum.
      eps: added to the column norms of the right factor.
      rank_fraction: r as a fraction of the smaller side; None: 1.
      seed: of the first right factor, a normal random matrix; None: 0.

    Returns:
      The optimizer. Updates have the gradients' dtypes.

    Raises:
      ValueError: ``rank_fraction`` outside of (0, 1]; in ``init``, a rule that splits
        the outputs.

    References:
      Ahn et al. 2025, "Dion", arXiv:2504.05295; github.com/microsoft/dion.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    >>> tx = dion(learning_rate=0.02, adam_learning_rate=3e-3)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """

    def matrix(rules: MatrixRules) -> optax.GradientTransformation:
        return optax.chain(
            scale_by_low_rank_orthonormal(
                b1,
                eps,
                rank_fraction=rank_fraction,
                seed=seed,
                mu_dtype=mu_dtype,
                rules=rules,
            ),
            scale_by_shape(shape_scale, rules=rules),
            decay_weights(weight_decay, weight_decay_mask, cautious_weight_decay),
            optax.scale_by_learning_rate(learning_rate),
        )

    return route(
        matrix,
        rules,
        learning_rate=learning_rate,
        adam_learning_rate=adam_learning_rate,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps=adam_eps,
        adam_eps_root=adam_eps_root,
        adam_weight_decay=adam_weight_decay,
        rest=rest,
        weight_decay_mask=weight_decay_mask,
        cautious_weight_decay=cautious_weight_decay,
        mu_dtype=mu_dtype,
    )
