"""Coefficient schedules of the odd quintic Newton-Schulz iteration.

One step maps every singular value s of its input to ``a s + b s^3 + c s^5``. A
schedule lists the triples (a, b, c) of successive steps and carries what belongs
to them: which triples a shorter or longer run takes, how the input is normalized
before the first step, and where the numbers were published.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Triple = tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class Frobenius:
    """Divide each matrix by ``factor * ||X||_F + eps``.

    The Frobenius norm bounds the largest singular value, so the result lies in the
    interval [0, 1] on which the iteration converges. ``eps=0`` (the default) makes
    the result independent of the size of X; a zero matrix stays zero either way.
    """

    factor: float = 1.0
    eps: float = 0.0


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Newton-Schulz coefficients with the conventions they were published with.

    Attributes:
      triples: the (a, b, c) of successive steps.
      take: which triples a run of K steps uses. ``"first"``: the first K, the last
        one repeating beyond the end. ``"last"``: the last K; more than there are is
        an error, because such a list has no defined continuation.
      normalization: what is done to the input before the first step.
      source: paper or repository.
    """

    triples: tuple[Triple, ...]
    take: Literal["first", "last"] = "first"
    normalization: Frobenius = Frobenius()
    source: str = ""

    def __post_init__(self) -> None:
        rows = tuple(tuple(float(v) for v in row) for row in self.triples)
        if not rows or any(len(row) != 3 for row in rows):
            raise ValueError(
                f"a schedule needs at least one triple (a, b, c), got {self.triples!r}"
            )
        if self.take not in ("first", "last"):
            raise ValueError(f"take must be 'first' or 'last', got {self.take!r}")
        object.__setattr__(self, "triples", rows)

    def rows(self, steps: int) -> tuple[Triple, ...]:
        """The triples of a run of ``steps`` steps; 0 steps only normalize."""
        if steps < 0:
            raise ValueError(f"ns_steps must be 0 or more, got {steps}")
        have = len(self.triples)
        if self.take == "last":
            if steps > have:
                raise ValueError(
                    f"ns_steps={steps}, but this schedule ends after {have} steps"
                    f" and defines no more; use at most {have}"
                )
            return self.triples[have - steps :]
        return tuple(self.triples[min(i, have - 1)] for i in range(steps))


SCHEDULES: dict[str, Schedule] = {
    # One triple, tuned for steep ascent at 0: singular values end within about
    # [0.7, 1.2] rather than at 1.
    "keller": Schedule(
        ((3.4445, -4.7750, 2.0315),),
        source="Jordan et al. 2024, github.com/KellerJordan/Muon",
    ),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one orthogonalization runs: a normalization, then these steps.

    ``rows`` is a tuple of triples known at trace time, or an array of shape (L, 3)
    whose row ``min(i, L - 1)`` serves step i of ``steps`` (both may be traced then,
    as ``optax.inject_hyperparams`` does with every numeric argument).
    """

    normalization: Frobenius
    rows: Any
    steps: Any = None

    @property
    def static(self) -> bool:
        return self.steps is None


def resolve(
    ns_coeffs: str | Schedule | Sequence[float] | Sequence[Triple] | jax.Array,
    ns_steps: int | jax.Array,
) -> Plan:
    """Turns the public arguments into the steps to run.

    Args:
      ns_coeffs: the name of a schedule in ``SCHEDULES``, a ``Schedule``, one triple
        (repeated ``ns_steps`` times), or a (K, 3) table, whose K must then equal
        ``ns_steps``.
      ns_steps: number of iterations K; 0 only normalizes.

    Raises:
      ValueError: an unknown name, a table of another shape, a table whose length is
        not ``ns_steps``, or more steps than the schedule defines.
    """
    steps = _static_int(ns_steps)
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in SCHEDULES:
            raise ValueError(
                f"unknown ns_coeffs {ns_coeffs!r}; known names: {sorted(SCHEDULES)}"
            )
        ns_coeffs = SCHEDULES[ns_coeffs]
    if isinstance(ns_coeffs, Schedule):
        if steps is not None:
            return Plan(ns_coeffs.normalization, ns_coeffs.rows(steps))
        return _traced_plan(ns_coeffs, jnp.asarray(ns_steps))
    return _table_plan(ns_coeffs, ns_steps, steps)


def _table_plan(table: Any, ns_steps: Any, steps: int | None) -> Plan:
    traced = isinstance(table, jax.core.Tracer)
    array = table if traced else np.asarray(table, np.float64)
    if array.ndim not in (1, 2) or array.shape[-1] != 3:
        raise ValueError(
            "ns_coeffs must be a name, a Schedule, a triple (a, b, c) or a (K, 3) table"
            f"; got an array of shape {array.shape}"
        )
    single = array.ndim == 1 or array.shape[0] == 1
    rows = array.reshape(-1, 3)
    if steps is None:
        return Plan(Frobenius(), jnp.asarray(rows), ns_steps)
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


def _traced_plan(schedule: Schedule, ns_steps: jax.Array) -> Plan:
    table = jnp.asarray(schedule.triples)
    if schedule.take == "last":
        # Rotated so that step 0 of a run of K finds triple len - K.
        have = len(schedule.triples)
        index = jnp.clip(jnp.arange(have) + have - ns_steps, 0, have - 1)
        table = table[index]
    return Plan(schedule.normalization, table, ns_steps)


def _static_int(steps: Any) -> int | None:
    """The Python int of ``steps``, or None where it is traced."""
    if isinstance(steps, jax.core.Tracer):
        return None
    try:
        return operator.index(steps)
    except TypeError as err:
        raise ValueError(f"ns_steps must be an integer, got {steps!r}") from err
