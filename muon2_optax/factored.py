"""The second moment in factored form: one number per row and one per column."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from muon2_optax import dtypes, hopper, moments, placement, trees
from muon2_optax.axes import ResolvedAxes
from muon2_optax.orthogonalize import require_matrix, rules_or_default
from muon2_optax.placement import Axes, Placement, Shardings
from muon2_optax.rules import MatrixRules

# Rows that are averaged first, and the averages then: a reduction across memory, whose
# two stages give a GPU enough to do at once. In one stage XLA would store all squares.
GROUP = 16


class FactorizedSecondMomentState(NamedTuple):
    """As ``SecondMomentState``, with |g|^2 averaged over outputs and over inputs.

    nu_row has the parameter's shape without the output axes (and one more, last, axis
    of blocks where the rule splits the outputs); nu_col has it without the input axes.
    """

    count: jax.Array
    mu: optax.Updates
    nu_row: optax.Updates
    nu_col: optax.Updates


def factorized_second_moment(
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-10,
    *,
    nesterov: bool = False,
    bias_correction: bool = False,
    mu_dtype: Any = None,
    rules: MatrixRules | None = None,
    shardings: Shardings | None = None,
) -> optax.GradientTransformation:
    """As ``scale_by_second_moment``, with V factored into rows and columns.

    Lines 4 to 9 of the paper's Algorithm 2 (line 9 prints V where V-hat is meant)::

        r = b2 r + (1 - b2) mean over outputs of G * G        c: mean over inputs
        V-hat = r c^T / mean(r)
        update = M / (sqrt(V-hat) + eps)

    Means stand for the paper's sums; V-hat is the same and the range is larger. It
    stores fan_in + fan_out numbers per matrix (in float32, or float64 for float64) in
    place of their product, each matrix of a stack and each block of a fused projection
    for itself. V-hat is 0 while no gradient has been seen.

    Args:
      b1, b2, eps, nesterov, bias_correction, mu_dtype: as in
        ``scale_by_second_moment``.
      rules: which axes form the matrices; None: ``MatrixRules()``.
      shardings: where the parameters live, as in ``newton_schulz_orthogonalize``. Only
        the speed depends on it.

    Returns:
      The transform, with state ``FactorizedSecondMomentState``.

    Raises:
      ValueError: a leaf that is not a matrix under ``rules``.

    References:
      Shazeer and Stern 2018, "Adafactor", for the factored form.
    """
    mu_dtype = dtypes.canonical("mu_dtype", mu_dtype)
    rules, shardings = rules_or_default(rules), placement.checked(shardings)

    def init_fn(params: optax.Params) -> FactorizedSecondMomentState:
        def statistic(which: int) -> Any:
            def leaf(name: str, p: Any) -> jax.Array:
                # Statistics of zeros rather than zeros: on a mesh they come out with
                # the reduced sharding that every later update gives them.
                empty = placement.zeros_like(p, moments.second_dtype(p))
                axes, unknown = require_matrix(rules, name, p), (None,) * p.ndim
                return _means(empty, axes, unknown)[which]

            return trees.map_named(leaf, params)

        return FactorizedSecondMomentState(
            count=jnp.zeros([], jnp.int32),
            mu=moments.zeros_like(params, mu_dtype),
            nu_row=statistic(0),
            nu_col=statistic(1),
        )

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        mu_scale, nu_scale = moments.corrections(
            b1, b2, count, nesterov, bias_correction
        )

        def leaf(
            name: str, g: jax.Array, mu: jax.Array, row: jax.Array, col: jax.Array
        ) -> tuple[jax.Array, ...]:
            axes = require_matrix(rules, name, g)
            m, numerator = moments.momentum_step(g, mu, b1, nesterov)
            local = placement.local_shape(name, g, shardings)
            place = placement.placement(name, g, shardings)
            whole = place is None and placement.undivided(g, shardings)
            kernel = (whole or place is not None) and hopper.takes_sums(g, axes, place)
            new_row, new_col = _statistics(g, axes, local, kernel, place)
            r = moments.average(row, new_row, b2)
            c = moments.average(col, new_col, b2)
            root = jnp.sqrt(nu_scale) * root_of_outer(r, c, axes)
            update = mu_scale * numerator / moments.divisor(root, eps)
            states = (
                dtypes.narrow(m, mu.dtype),
                r.astype(row.dtype),
                c.astype(col.dtype),
            )
            return dtypes.narrow(update, g.dtype), *states

        updates, mu, row, col = trees.map_leaves(
            leaf, updates, state.mu, state.nu_row, state.nu_col
        )
        return updates, FactorizedSecondMomentState(count, mu, row, col)

    return optax.GradientTransformation(init_fn, update_fn)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _statistics(
    g: jax.Array,
    axes: ResolvedAxes,
    local: tuple[int | None, ...],
    kernel: bool,
    place: Placement | None,
) -> tuple[jax.Array, jax.Array]:
    """Means of |g|^2 over the output axes (per block) and over the input axes.

    Args:
      local: the shape on each device, as far as it is known.
      kernel: whether a GPU may take the kernel for both at once.
      place: where the leaf is divided, if it is.
    """
    plain = functools.partial(_means, axes=axes, local=local)
    if not kernel:
        return plain(g)
    fused = functools.partial(_fused_means, axes=axes, place=place)
    return jax.lax.platform_dependent(g, cuda=fused, default=plain)


def _fused_means(
    g: jax.Array, axes: ResolvedAxes, place: Placement | None
) -> tuple[jax.Array, jax.Array]:
    """The same, of matrices in the last two axes; on a mesh, each device its part."""
    m, n = g.shape[-2:]
    over_rows, over_columns = place.dims[-2:] if place else ((), ())

    def part(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        from muon2_optax import sums

        rows, columns = sums.of_squares(x.reshape(-1, *x.shape[-2:]))
        largest = max(x.shape[-2:])
        return (
            mean(rows, largest / n, over_columns).reshape(x.shape[:-1]),
            mean(columns, largest / m, over_rows).reshape(*x.shape[:-2], -1),
        )

    def mean(parts: jax.Array, scale: float, over: Axes) -> jax.Array:
        total = jnp.sum(parts, axis=1) * scale
        total = jax.lax.psum(total, over) if over else total
        # Held below overflow, as single squares are on the other path.
        return jnp.minimum(total, float(jnp.finfo(jnp.float32).max) / 4)

    if place is not None:
        spec = tuple(place.spec) + (None,) * (g.ndim - len(place.spec))
        part = jax.shard_map(
            part,
            mesh=place.mesh,
            in_specs=PartitionSpec(*spec),
            out_specs=(
                PartitionSpec(*spec[:-1]),
                PartitionSpec(*spec[:-2], spec[-1]),
            ),
            check_vma=False,
        )
    pair = part(g)
    return pair if axes.ins == (g.ndim - 2,) else pair[::-1]


def _means(
    g: jax.Array, axes: ResolvedAxes, local: tuple[int | None, ...]
) -> tuple[jax.Array, jax.Array]:
    square = moments.square(g)
    col = _mean(square, axes.ins, local)
    if len(axes.splits) == 1:
        return _mean(square, axes.outs, local), col
    sizes = jnp.asarray(axes.per_output(axes.splits), square.dtype)
    rows = axes.sums(square / sizes, axes.outs)
    return jnp.stack([jnp.squeeze(r, axes.outs) for r in rows], axis=-1), col


def _mean(
    x: jax.Array, dims: tuple[int, ...], local: tuple[int | None, ...]
) -> jax.Array:
    """Mean over these dimensions; of groups of rows first where that is possible."""
    # Divided before it is summed: a sum of large squares would overflow.
    first, count = dims[0], math.prod(x.shape[d] for d in dims)
    group = math.gcd(local[first] or 1, GROUP)
    if len(dims) > 1 or first == x.ndim - 1 or group < GROUP // 2:
        return jnp.sum(x / count, axis=dims)
    groups = count // group
    split = x.reshape(*x.shape[:first], groups, group, *x.shape[first + 1 :])
    return jnp.sum(jnp.sum(split / group, axis=first + 1) / groups, axis=first)


def root_of_outer(row: jax.Array, col: jax.Array, axes: ResolvedAxes) -> jax.Array:
    """sqrt(r c^T / mean(r)), broadcastable to the parameter, without 0/0 or r c^T.

    The product of r and c would leave the range long before its root does.
    """

    def root_of_share(r: jax.Array) -> jax.Array:
        r = jnp.expand_dims(r, axes.outs)
        # Divided before it is summed, as everywhere here.
        mean = jnp.sum(r / axes.fan_in, axis=axes.ins, keepdims=True)
        return jnp.sqrt(r / jnp.maximum(mean, jnp.finfo(row.dtype).tiny))

    blocks = len(axes.splits)
    rows = [row] if blocks == 1 else [row[..., k] for k in range(blocks)]
    shares = axes.by_block([root_of_share(r) for r in rows])
    return shares * jnp.sqrt(jnp.expand_dims(col, axes.ins))
