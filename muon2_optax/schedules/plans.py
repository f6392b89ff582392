"""From the public arguments ``ns_steps`` and ``ns_coeffs`` to the steps that run."""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muon2_optax import trees
from muon2_optax.schedules.coefficients import (
    SCHEDULES,
    Frobenius,
    Normalization,
    NSCoeffs,
    Schedule,
)

_OF_OPTAX = "; Optax's 'standard' is 'keller' here, and its 'dion' is 'you5'"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one orthogonalization runs: a normalization, then these steps.

    ``triples`` is a tuple of triples known at trace time, or an array of shape (L, 3)
    whose row ``min(i, L - 1)`` serves step i of ``steps``, which may both be traced.
    """

    normalization: Normalization
    triples: Any
    steps: Any = None

    @property
    def static(self) -> bool:
        """Whether the number of steps is known while tracing."""
        return self.steps is None


def resolve(
    ns_coeffs: NSCoeffs,
    ns_steps: int | jax.Array,
) -> Plan:
    """Turns the public arguments into the steps to run.

    Args:
      ns_coeffs: the name of a schedule in ``SCHEDULES``, a ``Schedule``, one triple
        (repeated ``ns_steps`` times), or a (K, 3) table, whose K must then equal
        ``ns_steps``.
      ns_steps: number of iterations K; 0 only normalizes. A traced number runs as a
        loop, without the Hopper kernels, and gives NaN where a number known while
        tracing is refused.

    Raises:
      ValueError: an unknown name, a table of another shape, a table whose length is
        not ``ns_steps``, or more steps than the schedule defines.
    """
    steps = _static_int(ns_steps)
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in SCHEDULES:
            raise ValueError(
                f"unknown ns_coeffs {ns_coeffs!r}; known names: {sorted(SCHEDULES)}"
                f"{_OF_OPTAX if ns_coeffs in ('standard', 'dion') else ''}"
            )
        ns_coeffs = SCHEDULES[ns_coeffs]
    if isinstance(ns_coeffs, Schedule):
        if steps is not None:
            return Plan(ns_coeffs.normalization, ns_coeffs.rows(steps))
        return _schedule_plan(ns_coeffs, jnp.asarray(ns_steps))
    return _table_plan(ns_coeffs, ns_steps, steps)


def steps_or_default(
    ns_steps: int | jax.Array | None, ns_coeffs: Any, default: int
) -> int | jax.Array:
    """The number of steps: as given, else the rows of a plain table, else the default.

    One row is a triple like any other, which every number of steps repeats.
    """
    if ns_steps is not None:
        return ns_steps
    if isinstance(ns_coeffs, (str, Schedule)):
        return default
    try:
        rows = np.shape(ns_coeffs)[:-1]
    except (TypeError, ValueError):  # ``resolve`` says what is wrong with it
        return default
    return rows[0] if len(rows) == 1 and rows[0] > 1 else default


def _table_plan(table: Any, ns_steps: Any, steps: int | None) -> Plan:
    traced = isinstance(table, jax.core.Tracer)
    wanted = (
        "ns_coeffs must be a name, a Schedule, a triple (a, b, c) or a (K, 3) table"
    )
    if isinstance(table, Normalization):
        raise TypeError(
            f"{wanted}; got {table!r}, which a schedule takes:"
            ' dataclasses.replace(SCHEDULES["keller"], normalization=...)'
        )
    try:
        array = table if traced else np.asarray(table, np.float64)
    except (TypeError, ValueError) as err:
        raise ValueError(f"{wanted}; got {trees.show(table)}") from err
    if array.ndim not in (1, 2) or array.shape[-1] != 3:
        raise ValueError(f"{wanted}; got an array of shape {array.shape}")
    single = array.ndim == 1 or array.shape[0] == 1
    rows = array.reshape(-1, 3)
    if steps is None:
        fits = ns_steps >= 0 if single else ns_steps == rows.shape[0]
        return _traced_plan(Frobenius(), jnp.asarray(rows), ns_steps, fits)
    if not single and rows.shape[0] != steps:
        raise ValueError(
            f"ns_coeffs has {rows.shape[0]} rows but ns_steps is {steps}; pass "
            f"ns_steps={rows.shape[0]} (a table is never cut or extended)"
        )
    if traced:
        return Plan(
            Frobenius(), tuple(tuple(rows[i % len(rows)]) for i in range(steps))
        )
    triples: tuple[Any, ...] = tuple(tuple(float(v) for v in row) for row in rows)
    return Plan(Frobenius(), Schedule(triples).rows(steps))


def _schedule_plan(schedule: Schedule, ns_steps: jax.Array) -> Plan:
    table, fits = jnp.asarray(schedule.triples), ns_steps >= 0
    if schedule.take == "whole":
        # Each K has a table of its own, made longer so that they can be stacked.
        sizes = jnp.asarray(sorted(schedule.tables))
        tables = [schedule.tables[k] for k in sorted(schedule.tables)]
        longest = max(map(len, tables))
        stacked = jnp.asarray([t + t[-1:] * (longest - len(t)) for t in tables])
        table = stacked[jnp.argmax(sizes == ns_steps)]
        fits = jnp.any(sizes == ns_steps)
    if schedule.take == "last":
        # Rotated so that step 0 of a run of K finds triple len - K.
        have = len(schedule.triples)
        index = jnp.clip(jnp.arange(have) + have - ns_steps, 0, have - 1)
        table, fits = table[index], fits & (ns_steps <= have)
    return _traced_plan(schedule.normalization, table, ns_steps, fits)


def _traced_plan(how: Normalization, table: Any, ns_steps: Any, fits: Any) -> Plan:
    """A plan with a traced number of steps; one step of NaN where it does not fit."""
    return Plan(how, jnp.where(fits, table, jnp.nan), jnp.where(fits, ns_steps, 1))


def _static_int(steps: Any) -> int | None:
    """The Python int of ``steps``, or None where it is traced."""
    if isinstance(steps, jax.core.Tracer):
        return None
    try:
        if isinstance(steps, bool):
            raise TypeError("a bool counts nothing")
        return operator.index(steps)
    except TypeError as err:
        raise ValueError(
            f"ns_steps must be an integer, got {trees.show(steps)}"
        ) from err
