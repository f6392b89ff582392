"""Running a transform on blocks of each matrix, or only every so many steps."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muon2_optax import layout, trees
from muon2_optax.axes import MatrixAxes, ResolvedAxes
from muon2_optax.orthogonalize import required_matrices, rules_or_default
from muon2_optax.rules import MatrixRules

# Every leaf that a block transform sees is a stack of blocks.
_BLOCK_RULES = MatrixRules((("", MatrixAxes(-2, -1)),))


class PeriodicState(NamedTuple):
    """count: int32 scalar; often, seldom: states of the two transforms."""

    count: jax.Array
    often: Any
    seldom: Any


def periodically(
    seldom: optax.GradientTransformation,
    often: optax.GradientTransformation,
    period: int,
) -> optax.GradientTransformationExtraArgs:
    """Runs ``seldom`` on steps 0, period, 2 period, ..., ``often`` on the others."""
    seldom, often = map(optax.with_extra_args_support, (seldom, often))
    if not isinstance(period, jax.Array) and (period % 1 or period < 1):
        raise ValueError(f"period must be a whole number of steps, 1 or more: {period}")

    def init_fn(params: optax.Params) -> PeriodicState:
        zero = jnp.zeros([], jnp.int32)
        return PeriodicState(zero, often.init(params), seldom.init(params))

    def update_fn(updates: optax.Updates, state: Any, params: Any = None, **extra: Any):
        # The branches must agree; a traced scalar in one of them would promote.
        def run_seldom(updates: Any, state: Any) -> Any:
            new, inner = seldom.update(updates, state.seldom, params, **extra)
            return optax.tree.cast_like(new, updates), state._replace(seldom=inner)

        def run_often(updates: Any, state: Any) -> Any:
            new, inner = often.update(updates, state.often, params, **extra)
            return optax.tree.cast_like(new, updates), state._replace(often=inner)

        turn = state.count % period == 0
        updates, state = jax.lax.cond(turn, run_seldom, run_often, updates, state)
        return updates, state._replace(
            count=jnp.asarray(optax.safe_increment(state.count))
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def in_blocks(
    make: Callable[[MatrixRules], optax.GradientTransformation],
    grid: tuple[int, int],
    *,
    rules: MatrixRules | None = None,
) -> optax.GradientTransformation:
    """Runs a stateless transform on a grid of blocks of every matrix.

    Args:
      make: from the rules under which blocks are matrices to the transform.
      grid: number of blocks along (inputs, outputs). A side that does not divide is
        padded with zeros, which the last blocks contain.
      rules: which axes form the matrices; None: ``MatrixRules()``.
    """
    rules = rules_or_default(rules)
    if len(grid) != 2 or min(grid) < 1:
        raise ValueError(f"block_grid must be two positive numbers, got {grid}")
    inner = make(_BLOCK_RULES)

    def update_fn(updates: optax.Updates, params: Any = None) -> optax.Updates:
        del params

        _, axes, leaves = required_matrices(rules, updates)

        def on_grid(*xs: jax.Array) -> list[jax.Array]:
            return _on_grid(xs, axes, grid, inner)

        done = iter(layout.automatic(on_grid, leaves))
        return trees.map_leaves(lambda name, u: (next(done),), updates)[0]

    return optax.stateless(update_fn)


def _on_grid(
    xs: Sequence[jax.Array],
    axes: Sequence[ResolvedAxes],
    grid: tuple[int, int],
    inner: optax.GradientTransformation,
) -> list[jax.Array]:
    """All blocks of all leaves in one update, so that equal ones run together."""
    matrices = [a.to_blocks(x) for a, x in zip(axes, xs)]
    cuts = [_cut(m, grid) for leaf in matrices for m in leaf]
    done = iter(jax.tree.leaves(inner.update(cuts, inner.init(cuts))[0]))
    joined = [[_join(next(done), m.shape) for m in leaf] for leaf in matrices]
    return [a.from_blocks(blocks) for a, blocks in zip(axes, joined)]


def _cut(x: jax.Array, grid: tuple[int, int]) -> jax.Array:
    """(..., m, n) to (..., grid 0, grid 1, block rows, block columns)."""
    pads = [(-side) % parts for side, parts in zip(x.shape[-2:], grid)]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, pad) for pad in pads])
    rows, cols = (side // parts for side, parts in zip(x.shape[-2:], grid))
    x = x.reshape(*x.shape[:-2], grid[0], rows, grid[1], cols)
    return jnp.swapaxes(x, -3, -2)


def _join(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverse of ``_cut``; drops the padding."""
    x = jnp.swapaxes(x, -3, -2)
    rows, cols = x.shape[-4] * x.shape[-3], x.shape[-2] * x.shape[-1]
    x = x.reshape(*x.shape[:-4], rows, cols)
    return x[..., : shape[-2], : shape[-1]]
