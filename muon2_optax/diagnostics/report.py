"""What enters and leaves the orthogonalization of a running optimizer.

``orthogonalization_report`` reads it from the optimizer's state. Call it under
``jax.jit``: outside, every call compiles again. The functions that it applies are
public too: spectra, ranks and cosine similarity of any matrices, scalar maps and
convergence zones of any schedule.
"""

import itertools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muon2_optax import averages, dtypes, moments, trees
from muon2_optax.arrays import stacks
from muon2_optax.arrays.grouping import run_in_groups
from muon2_optax.diagnostics import spectra
from muon2_optax.diagnostics.spectra import (
    cosine_to_polar,
    singular_values,
)
from muon2_optax.diagnostics.zones import (
    ZoneFractions,
    convergence_zones,
    zone_fractions,
)
from muon2_optax.execution import dispatch
from muon2_optax.execution.factored_moment import root_of_outer
from muon2_optax.optimizers.muon2_f import FactorizedSecondMomentState
from muon2_optax.rules import MatrixRules
from muon2_optax.schedules import plans
from muon2_optax.schedules.plans import Plan
from muon2_optax.sharding import locate

_MOMENTS = (
    moments.MomentumState,
    moments.SecondMomentState,
    FactorizedSecondMomentState,
)


class MatrixReport(NamedTuple):
    """What ``orthogonalization_report`` says of one stack of matrices.

    Attributes:
      singular_values: as they enter the first step, (..., min(m, n)), descending.
      effective_rank: of what enters, (...).
      zones: shares of ``singular_values`` in the schedule's zones, (...) each.
      output_singular_values: after the last step, (..., min(m, n)), descending.
      cosine: of the output to the exact polar factor, (...).
    """

    singular_values: jax.Array
    effective_rank: jax.Array
    zones: ZoneFractions
    output_singular_values: jax.Array
    cosine: jax.Array


def orthogonalization_report(
    opt_state: Any,
    rules: MatrixRules | None = None,
    *,
    ns_steps: int | jax.Array,
    ns_coeffs: Any = "keller",
    ns_dtype: Any = None,
    eps: float = 1e-10,
    tolerance: float = 0.3,
    before: Callable[[jax.Array], jax.Array] | None = None,
) -> dict[str, MatrixReport]:
    """What the orthogonalization gets and gives, from the state of an optimizer.

    Takes the momentum M from every ``MomentumState``, ``SecondMomentState`` (divided by
    the root of its second moment) and ``FactorizedSecondMomentState`` (likewise) within
    ``opt_state``, under whatever wrappers, and orthogonalizes it as the optimizer does.
    Without Nesterov's term and bias correction (Muon^2's default) this is the last
    step's input, up to the rounding of the stored state. With Nesterov's term it lacks
    the share of the current gradient, which no state keeps.

    Args:
      opt_state: state of an optimizer of this library, or a part of it.
      rules: those of the optimizer; None: ``MatrixRules()``. Leaves that are not
        matrices under them are left out.
      ns_steps, ns_coeffs, ns_dtype, eps: those of the optimizer.
      tolerance: of the zones; see ``convergence_zones``.
      before: what the optimizer does to M first: ``jnp.sign`` for AdaMuon.

    Returns:
      For each leaf's path a ``MatrixReport`` whose leading axes are the batch axes of
      the leaf; ``"path[i]"`` for block i of a leaf with ``out_splits``.

    Raises:
      ValueError: ``opt_state`` holds no momentum of a matrix (Dion's low-rank state is
        none), or two momenta of the same path.

    >>> import optax
    >>> from muon2_optax import muon2
    >>> params = {"kernel": jnp.eye(4, 8)}
    >>> tx = muon2(0.02, ns_steps=3)
    >>> _, state = tx.update(params, tx.init(params), params)
    >>> report = orthogonalization_report(state, ns_steps=3)
    >>> f"{report['kernel'].effective_rank:.2f}"
    '4.00'
    """
    rules = MatrixRules() if rules is None else rules
    plan = plans.resolve(ns_coeffs, ns_steps)
    zones = convergence_zones(ns_coeffs, ns_steps, tolerance)
    inputs: dict[str, jax.Array] = {}
    for state in jax.tree.leaves(opt_state, is_leaf=lambda s: isinstance(s, _MOMENTS)):
        if not isinstance(state, _MOMENTS):
            continue
        for name, x in _inputs(state, rules, eps):
            if name in inputs:
                raise ValueError(f"{name!r} has two momenta here; pass one's state")
            inputs[name] = x if before is None else before(x)
    if not inputs:
        raise ValueError("no momentum of any matrix in this state under these rules")

    def orthogonalize(x: jax.Array, plan: Plan, dtype: Any) -> jax.Array:
        undivided = locate("", x).undivided
        return dispatch.orthogonalize_by_shape([x], plan, dtype, undivided)[0]

    def report(x: jax.Array) -> MatrixReport:
        # Without steps: the normalization alone.
        entering = orthogonalize(x, Plan(plan.normalization, ()), x.dtype)
        output = orthogonalize(x, plan, ns_dtype)
        s = singular_values(entering)
        return MatrixReport(
            singular_values=s,
            effective_rank=spectra.entropy_rank(s),
            zones=zone_fractions(s, zones),
            output_singular_values=singular_values(output),
            cosine=cosine_to_polar(output, x),
        )

    return _map_by_shape(report, inputs)


def _map_by_shape(
    fn: Callable[[jax.Array], Any], inputs: dict[str, jax.Array]
) -> dict[str, Any]:
    """fn of each matrix of each stack, compiled once per shape, one after another."""

    def key(x: jax.Array) -> Hashable:
        return x.shape[-2:], x.dtype.name

    def run(xs: list[jax.Array]) -> list[Any]:
        flat = stacks.to_stacks(xs)
        done = jax.lax.map(fn, jnp.concatenate(flat))
        ends = itertools.accumulate(map(len, flat))
        return [
            _cut(done, end - len(part), end, x.shape[:-2])
            for x, part, end in zip(xs, flat, ends)
        ]

    return dict(zip(inputs, run_in_groups(list(inputs.values()), key, run)))


def _cut(tree: Any, start: int, end: int, batch: tuple[int, ...]) -> Any:
    return jax.tree.map(lambda y: y[start:end].reshape(*batch, *y.shape[1:]), tree)


def _inputs(state: Any, rules: MatrixRules, eps: Any) -> list[tuple[str, jax.Array]]:
    """Paths and matrices (*batch, fan_in, fan_out) of one state's preconditioned M."""
    names = [n for n in ("nu", "nu_row", "nu_col") if hasattr(state, n)]
    statistics = [dict(trees.named_leaves(getattr(state, n))) for n in names]
    found = []
    for name, mu in trees.named_leaves(state.mu):
        axes = None if trees.is_empty(mu) else rules.resolve(name, mu.shape)
        if axes is None:
            continue
        leaves = [mu, *(t[name] for t in statistics)]
        m, *second = [dtypes.widen(spectra.replicate(x)) for x in leaves]
        if len(second) == 1:
            m = m / averages.divisor(jnp.sqrt(second[0]), eps)
        elif second:
            root = root_of_outer(second[0], second[1], axes)
            m = m / averages.divisor(root, eps)
        several = len(axes.splits) > 1
        for i, block in enumerate(axes.to_blocks(m)):
            found.append((f"{name}[{i}]" if several else name, block))
    return found
