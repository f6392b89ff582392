"""Low-rank orthonormal updates with error feedback (Dion)."""

import math
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muon2_optax import dtypes, layout, moments, trees
from muon2_optax.axes import ResolvedAxes
from muon2_optax.orthogonalize import require_matrix, rules_or_default
from muon2_optax.polar import adjoint
from muon2_optax.rules import MatrixRules


class LowRankState(NamedTuple):
    """mu: momentum with error feedback; q: right factors (*batch, side, r)."""

    mu: optax.Updates
    q: optax.Updates


def scale_by_low_rank_orthonormal(
    b1: float = 0.95,
    eps: float = 1e-8,
    *,
    rank_fraction: float = 1.0,
    seed: int = 0,
    mu_dtype: Any = None,
    rules: MatrixRules | None = None,
) -> optax.GradientTransformation:
    """Replaces each matrix by an orthonormal one of rank r, from one power iteration.

    With B the momentum, stored so that its right side is the smaller one::

        B = M + G;  P = qr(B Q);  R = B^H P
        M = B - (1 - b1) P R^H              what was not applied stays
        Q = R / (column norms + eps);  update = P Q^H

    A matrix whose momentum is exactly zero gives a zero update and keeps its Q.

    Args:
      b1: the paper's mu.
      eps: added to the column norms of R.
      rank_fraction: r = ceil(rank_fraction * smaller side).
      seed: of the initial Q, standard normal, different for each path.
      mu_dtype: dtype in which M is stored; None: the parameters'.
      rules: which axes form the matrices; None: ``MatrixRules()``.

    Returns:
      The transform, with state ``LowRankState``; Q is float32 or better.

    Raises:
      ValueError: a leaf that is not a matrix, or whose rule splits the outputs.

    References:
      Ahn et al. 2025, "Dion", arXiv:2504.05295, algorithm 1.
    """
    mu_dtype = dtypes.canonical("mu_dtype", mu_dtype)
    rank_fraction = float(dtypes.static_number("rank_fraction", rank_fraction))
    seed = int(dtypes.static_number("seed", seed))
    if not 0 < rank_fraction <= 1:
        raise ValueError(f"rank_fraction must lie in (0, 1], got {rank_fraction}")
    rules = rules_or_default(rules)

    def matrix_axes(name: str, leaf: Any) -> ResolvedAxes:
        axes = require_matrix(rules, name, leaf)
        if len(axes.splits) > 1:
            raise ValueError(
                f"{name!r}: low-rank updates take whole matrices; remove out_splits"
                " from its rule, or store the parts as leaves of their own"
            )
        return axes

    def init_fn(params: optax.Params) -> LowRankState:
        def leaf(name: str, p: Any) -> jax.Array:
            axes = matrix_axes(name, p)
            side = min(axes.fan_in, axes.splits[0])
            rank = min(side, math.ceil(rank_fraction * side))
            batch = [axes.shape[a] for a in axes.batch]
            key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
            dtype = dtypes.compute_dtype(p.dtype)
            return jax.random.normal(key, (*batch, side, rank), dtype)

        return LowRankState(
            moments.zeros_like(params, mu_dtype), trees.map_named(leaf, params)
        )

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        del params

        def leaf(name: str, g: jax.Array, mu: jax.Array, q: jax.Array) -> Any:
            axes = matrix_axes(name, g)

            def run(g: jax.Array, mu: jax.Array, q: jax.Array) -> list[jax.Array]:
                wide = dtypes.compute_dtype(g.dtype)
                b = axes.to_blocks(mu.astype(wide) + g.astype(wide))[0]
                update, rest, new_q = _power_iteration(b, q.astype(wide), b1, eps)
                return [axes.from_blocks([update]), axes.from_blocks([rest]), new_q]

            new, rest, new_q = layout.automatic(run, [g, mu, q])
            return (
                dtypes.narrow(new, g.dtype),
                dtypes.narrow(rest, mu.dtype),
                new_q.astype(q.dtype),
            )

        updates, mu, q = trees.map_leaves(leaf, updates, state.mu, state.q)
        return updates, LowRankState(mu, q)

    return optax.GradientTransformation(init_fn, update_fn)


def _power_iteration(
    b: jax.Array, q: jax.Array, b1: Any, eps: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step on B (*batch, fan_in, fan_out), with Q on either side of it."""
    on_outputs = b.shape[-1] == q.shape[-2] and b.shape[-2] != q.shape[-2]
    a = b if on_outputs else adjoint(b)
    # Taken out and put back, so that no norm overflows.
    largest = jnp.max(jnp.abs(a), axis=(-2, -1), keepdims=True, initial=0.0)
    largest = jnp.where(largest == 0, 1, largest)
    a = a / largest
    p = jnp.linalg.qr(_product(a, q))[0]
    r = _product(adjoint(a), p)
    empty = jnp.all(a == 0, axis=(-2, -1), keepdims=True)
    p, r = jnp.where(empty, 0, p), jnp.where(empty, q, r)
    rest = largest * (a - (1 - b1) * _product(p, adjoint(r)))
    columns = jnp.linalg.norm(r, axis=-2, keepdims=True) + eps / largest
    new_q = jnp.where(empty, q, r / jnp.where(columns == 0, 1, columns))
    update = _product(p, adjoint(new_q))
    if not on_outputs:
        update, rest = adjoint(update), adjoint(rest)
    return update, rest, new_q


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
