"""Coefficient schedules of the odd quintic Newton-Schulz iteration.

One step maps every singular value s of its input to ``a s + b s^3 + c s^5``. A
schedule lists the triples (a, b, c) of successive steps and carries what belongs
to them: which triples a shorter or longer run takes, how the input is normalized
before the first step, and where the numbers were published.
"""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from muon2_optax.schedules.normalizations import AOL as AOL
from muon2_optax.schedules.normalizations import Frobenius as Frobenius
from muon2_optax.schedules.normalizations import Normalization as Normalization
from muon2_optax.schedules.normalizations import Schatten as Schatten
from muon2_optax.schedules.normalizations import Spectral as Spectral

Triple = tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Newton-Schulz coefficients with the conventions they were published with.

    Attributes:
      triples: the (a, b, c) of successive steps.
      take: which triples a run of K steps uses. ``"first"``: the first K, the last
        one repeating beyond the end. ``"last"``: the last K; more than there are is
        an error, because such a list has no defined continuation. ``"whole"``: all of
        ``triples``, or all of the one table in ``shorter`` that has K rows; any other
        K is an error, because each table was made for its own number of steps.
      shorter: the tables for fewer steps, with ``take="whole"``.
      normalization: what is done to the input before the first step.
      source: paper or repository.
    """

    triples: tuple[Triple, ...]
    take: Literal["first", "last", "whole"] = "first"
    normalization: Normalization = Frobenius()
    source: str = ""
    shorter: tuple[tuple[Triple, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.take not in ("first", "last", "whole"):
            raise ValueError(
                f"take must be 'first', 'last' or 'whole', got {self.take!r}"
            )
        if self.shorter and self.take != "whole":
            raise ValueError(
                f"shorter tables go with take='whole', not {self.take!r}, which says"
                " what a shorter run uses"
            )
        if not isinstance(self.normalization, Normalization):
            raise TypeError(
                "normalization must be Frobenius(), AOL(), Schatten() or Spectral(),"
                f" got {self.normalization!r}"
            )
        object.__setattr__(self, "triples", _checked(self.triples))
        object.__setattr__(self, "shorter", tuple(map(_checked, self.shorter)))

    @property
    def tables(self) -> dict[int, tuple[Triple, ...]]:
        """The whole tables by their number of steps."""
        return {len(t): t for t in (*self.shorter, self.triples)}

    def rows(self, steps: int) -> tuple[Triple, ...]:
        """The triples of a run of ``steps`` steps; 0 steps only normalize."""
        if steps < 0:
            raise ValueError(f"ns_steps must be 0 or more, got {steps}")
        have = len(self.triples)
        if self.take == "whole" and steps:
            if steps not in self.tables:
                raise ValueError(
                    f"ns_steps={steps}, but this schedule has tables for"
                    f" {sorted(self.tables)} steps only, each fitted as a whole"
                )
            return self.tables[steps]
        if self.take == "last":
            if steps > have:
                raise ValueError(
                    f"ns_steps={steps}, but this schedule ends after {have} steps"
                    f" and defines no more; use at most {have}"
                )
            return self.triples[have - steps :]
        return tuple(self.triples[min(i, have - 1)] for i in range(steps))


def _checked(triples: Any) -> tuple[Any, ...]:
    """Triples as floats, all finite."""
    if any(np.ndim(row) == 0 for row in triples):
        raise ValueError(
            f"a schedule is a table, a single triple is ((a, b, c),), got {triples!r}"
        )
    rows = tuple(tuple(float(v) for v in row) for row in triples)
    if not rows or any(len(row) != 3 for row in rows):
        raise ValueError(
            f"a schedule needs at least one triple (a, b, c), got {triples!r}"
        )
    if not all(math.isfinite(v) for row in rows for v in row):
        raise ValueError(f"coefficients must be finite, got {rows}")
    return rows


_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)

_YOU = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def _safe(triples: Sequence[Triple], factor: float) -> tuple[Triple, ...]:
    """p(x / factor): a margin for rounding above 1."""
    return tuple((a / factor, b / factor**3, c / factor**5) for a, b, c in triples)


SCHEDULES: dict[str, Schedule] = {
    # One triple, tuned for steep ascent at 0: singular values end within about
    # [0.7, 1.2] rather than at 1.
    "keller": Schedule(
        ((3.4445, -4.7750, 2.0315),),
        source="Jordan et al. 2024, github.com/KellerJordan/Muon",
    ),
    # The last triple has no margin and repeats for ever.
    "polar_express": Schedule(
        (*_safe(_POLAR_EXPRESS, 1.01), (1.875, -1.25, 0.375)),
        normalization=Frobenius(factor=1.01),
        source="Amsel et al. 2025, arXiv:2505.16932, github.com/NoahAmsel/PolarExpress",
    ),
    "polar_express_nanogpt": Schedule(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        normalization=Frobenius(factor=1.02),
        source="github.com/KellerJordan/modded-nanogpt; also nanochat and dion",
    ),
    "you5": Schedule(
        _YOU,
        take="last",
        source="You Jiacheng and Cesista 2025; HeavyBall's default, optax's 'dion'",
    ),
    "turbo": Schedule(
        _YOU,
        take="last",
        normalization=AOL(),
        source="Boissin et al. 2025, arXiv:2512.04632,"
        " github.com/thib-s/flash-newton-schulz",
    ),
    "cans": Schedule(
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        source="Grishina et al. 2025, arXiv:2506.10935",
    ),
    # Keller's eight times, then two steps that converge to 1.
    "deepseek_v4": Schedule(
        ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2,
        source="DeepSeek-V4, as in github.com/AI-Hypercomputer/maxtext pull 4065",
    ),
    # Made by benchmarks/fit_schedules.py with ``fit_coefficients``: the best mean
    # cosine similarity to the polar factor over what entered Newton-Schulz in trainings
    # with Muon^2 and Muon^2-F (all 98 matrices of a LLaMA of 21M and one of 60M
    # parameters, at 5, 50 and 95 % of 46M tokens; benchmarks/results/spectra.npz). It
    # serves Muon's momentum as well: a fit of its own gains less than 0.0004.
    "muon2": Schedule(
        (
            (4.1641, -11.8312, 8.41),
            (4.1563, -11.7714, 8.3795),
            (4.0808, -11.24, 7.9393),
            (3.1974, -8.1646, 5.7994),
            (4.1782, -10.3172, 9.072),
        ),
        take="whole",
        source="this project, benchmarks/fit_schedules.py",
        shorter=(
            (
                (4.1511, -11.73, 8.3453),
                (5.3655, -15.2873, 11.2218),
            ),
            (
                (4.1675, -11.8621, 8.4571),
                (3.4857, -9.899, 7.2001),
                (5.6325, -17.9101, 17.2146),
            ),
            (
                (4.1703, -11.8846, 8.4753),
                (4.1258, -11.5585, 8.2038),
                (3.24, -8.6566, 6.233),
                (4.9515, -14.2718, 13.59),
            ),
        ),
    ),
    # Converges to the exact polar factor, slowly from small singular values. What
    # Emerging-Optimizers and Megatron call "quintic" is "you5".
    "quintic": Schedule(
        ((2.0, -1.5, 0.5),), source="modded-nanogpt pull 266 (twelve steps)"
    ),
}


def quintic(triple: Any, x: Any) -> Any:
    """``a x + b x^3 + c x^5``, what one step makes of a singular value."""
    a, b, c = triple
    square = x * x
    return x * (a + square * (b + square * c))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one orthogonalization runs: a normalization, then these steps.

    ``rows`` is a tuple of triples known at trace time, or an array of shape (L, 3)
    whose row ``min(i, L - 1)`` serves step i of ``steps``, which may both be traced.
    """

    normalization: Normalization
    rows: Any
    steps: Any = None

    @property
    def static(self) -> bool:
        return self.steps is None


ScheduleName = Literal[
    "keller",
    "polar_express",
    "polar_express_nanogpt",
    "you5",
    "turbo",
    "cans",
    "deepseek_v4",
    "muon2",
    "quintic",
]
# A name, a schedule, one triple or a table of triples.
NSCoeffs = (
    ScheduleName
    | Schedule
    | Sequence[ArrayLike]
    | Sequence[Sequence[ArrayLike]]
    | np.ndarray
    | jax.Array
)


_OF_OPTAX = "; Optax's 'standard' is 'keller' here, and its 'dion' is 'you5'"


def resolve(
    ns_coeffs: NSCoeffs,
    ns_steps: int | jax.Array,
) -> Plan:
    """Turns the public arguments into the steps to run.

    Args:
      ns_coeffs: the name of a schedule in ``SCHEDULES``, a ``Schedule``, one triple
        (repeated ``ns_steps`` times), or a (K, 3) table, whose K must then equal
        ``ns_steps``.
      ns_steps: number of iterations K; 0 only normalizes. A traced number makes a loop
        on the products of XLA, and NaN where a number known while tracing is refused.

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
        raise ValueError(f"{wanted}; got {table!r}") from err
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
    """A plan of a traced number of steps: one step of NaN where it does not fit."""
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
        raise ValueError(f"ns_steps must be an integer, got {steps!r}") from err
