"""What the transforms ask of the rules: which leaves are matrices, on which axes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muon2_optax import trees
from muon2_optax.axes import ResolvedAxes
from muon2_optax.rules import MatrixRules


def rules_or_default(rules: MatrixRules | None) -> MatrixRules:
    """``MatrixRules()`` for None; anything else must be rules."""
    if rules is None:
        return MatrixRules()
    if not isinstance(rules, MatrixRules):
        raise TypeError(
            f"rules must be MatrixRules(...) or None, got {trees.show(rules)}"
        )
    return rules


def require_matrix(rules: MatrixRules, name: str, leaf: Any) -> ResolvedAxes:
    """The axes of a leaf that must be a matrix.

    Raises:
      ValueError: it is not, under these rules.
    """
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise TypeError(
            f"{trees.quote(name)} is {leaf.dtype}: matrices must be floating point;"
            " keep it out of the optimizer with optax.masked, or give it the rule None"
        )
    axes = rules.resolve(name, leaf.shape)
    if axes is None:
        raise ValueError(
            f"{trees.quote(name)} of shape {tuple(leaf.shape)} is not a matrix under "
            "these rules; send it elsewhere with optax.partition({'matrix': ..., "
            "'adam': ...}, rules.labels), or add a rule for it to MatrixRules and pass "
            "rules=... to every transform of the chain"
        )
    return axes


def require_whole_matrix(
    rules: MatrixRules, name: str, leaf: Any, what: str
) -> ResolvedAxes:
    """As ``require_matrix``, for ``what`` has no form for outputs in blocks.

    Raises:
      ValueError: the rule splits the outputs.
    """
    axes = require_matrix(rules, name, leaf)
    if len(axes.splits) > 1:
        raise ValueError(
            f"{trees.quote(name)}: {what} take whole matrices; remove out_splits from"
            " its rule, or store the parts as leaves of their own"
        )
    return axes


class Matrices(NamedTuple):
    """The leaves of the updates, all of them matrices, as lists in one order.

    Attributes:
      names: their paths.
      axes: which of their axes form the matrices.
      leaves: the updates.
      states: for each state beside the updates the list of its leaves.
      rebuild: makes trees of lists of leaves: of new updates, and then of new states.
    """

    names: list[str]
    axes: list[ResolvedAxes]
    leaves: list[jax.Array]
    states: list[list[jax.Array]]
    rebuild: Callable[..., tuple[Any, ...]]


def flatten_matrices(
    rules: MatrixRules, updates: optax.Updates, *states: Any
) -> Matrices:
    """Lists of all leaves, each of which must be a matrix, and of states beside them.

    Raises:
      ValueError: a leaf is not a matrix, or a state has other leaves.
    """
    names, (leaves, *rest), rebuild = trees.flatten_leaves(updates, *states)
    axes = [require_matrix(rules, name, x) for name, x in zip(names, leaves)]
    return Matrices(names, axes, leaves, rest, rebuild)
