"""Passes traced hyperparameters to functions that may not close over them.

On a mesh with Explicit axes neither ``jax.shard_map`` nor ``jax.sharding.auto_axes``
takes a function that refers to traced values outside of it, so these must be among its
operands. Numbers that are known while tracing stay what they are, because they are
computed with in Python, in higher precision.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from muon2_optax.schedules.plans import Plan


def split(
    settings: Any,
) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], Any]]:
    """Returns the arrays in a tree, and a function that puts others in their place."""
    leaves, structure = jax.tree.flatten(settings)
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]

    def rebuild(arrays: Sequence[jax.Array]) -> Any:
        new = dict(zip(places, arrays, strict=True))
        return structure.unflatten(new.get(i, x) for i, x in enumerate(leaves))

    return [leaves[i] for i in places], rebuild


def split_plan(
    plan: Plan,
) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], Plan]]:
    """Splits the coefficients and the step count off a plan, as ``split`` does."""
    arrays, rebuild = split((plan.triples, plan.steps))

    def plan_with(arrays: Sequence[jax.Array]) -> Plan:
        triples, steps = rebuild(arrays)
        return dataclasses.replace(plan, triples=triples, steps=steps)

    return arrays, plan_with
