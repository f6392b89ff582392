"""Coefficient schedules of the odd quintic Newton-Schulz iteration.

One step maps every singular value s of its input to ``a s + b s^3 + c s^5``. A
schedule lists the triples (a, b, c) of successive steps and carries what belongs
to them: which triples a shorter or longer run takes, how the input is normalized
before the first step, and where the numbers were published.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, Literal

import jax
import numpy as np
from jax.typing import ArrayLike

from muon2_optax import trees
from muon2_optax.options import is_real_number, require_field
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

    Raises:
      TypeError: a ``normalization`` of another kind, or another field of a type that is
        not its own.
      ValueError: ``triples`` or ``shorter`` that are no tables of finite triples, an
        unknown ``take``, or ``shorter`` without ``take="whole"``.
    """

    triples: tuple[Triple, ...]
    take: Literal["first", "last", "whole"] = "first"
    normalization: Normalization = Frobenius()
    source: str = ""
    shorter: tuple[tuple[Triple, ...], ...] = ()

    def __post_init__(self) -> None:
        require_field(self, "take", str, "'first', 'last' or 'whole'")
        require_field(self, "source", str, "a str")
        require_field(self, "shorter", tuple | list, "a tuple of tables")
        if self.take not in ("first", "last", "whole"):
            raise ValueError(
                f"take must be 'first', 'last' or 'whole', got {trees.show(self.take)}"
            )
        if self.shorter and self.take != "whole":
            raise ValueError(
                f"shorter tables go with take='whole', not {self.take!r}, which says"
                " what a shorter run uses"
            )
        if not isinstance(self.normalization, Normalization):
            raise TypeError(
                "normalization must be Frobenius(), AOL(), Schatten() or Spectral(),"
                f" got {trees.show(self.normalization)}"
            )
        object.__setattr__(self, "triples", _check_triples(self.triples))
        object.__setattr__(self, "shorter", tuple(map(_check_triples, self.shorter)))

    @property
    def tables(self) -> dict[int, tuple[Triple, ...]]:
        """The whole tables by their number of steps."""
        return {len(t): t for t in (*self.shorter, self.triples)}

    def rows(self, steps: int) -> tuple[Triple, ...]:
        """The triples of a run of ``steps`` steps; 0 steps only normalize.

        Raises:
          ValueError: a negative number, or one for which nothing is defined.
        """
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


def _check_triples(triples: Any) -> tuple[Any, ...]:
    """Triples as floats, all finite."""
    if not isinstance(triples, Iterable) or not getattr(triples, "ndim", 1):
        raise TypeError(f"a schedule is a table of triples, got {trees.show(triples)}")
    triples = tuple(triples)
    if not all(isinstance(row, tuple | list) or np.ndim(row) for row in triples):
        raise ValueError(
            "a schedule is a table, a single triple is ((a, b, c),), got"
            f" {trees.show(triples)}"
        )
    values = [v for row in triples for v in row]
    if any(
        isinstance(v, bool) or not isinstance(v, Real) and not is_real_number(v)
        for v in values
    ):
        raise TypeError(f"coefficients must be numbers, got {trees.show(triples)}")
    rows = tuple(tuple(float(v) for v in row) for row in triples)
    if not rows or any(len(row) != 3 for row in rows):
        raise ValueError(
            f"a schedule needs at least one triple (a, b, c), got {trees.show(triples)}"
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


class Schedules(dict[str, Schedule]):
    """The named coefficient schedules, each a ``Schedule``: ``SCHEDULES["keller"]``."""


SCHEDULES: dict[str, Schedule] = Schedules()
SCHEDULES |= {
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
