"""Shape scales: factors of an update that depend on fan_in and fan_out alone."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax

from muon2_optax import trees
from muon2_optax.axes import ResolvedAxes
from muon2_optax.options import is_real_number


def match_rms(fan_in: int, fan_out: int, rms: float) -> float:
    """The factor that gives an orthogonal matrix this root mean square."""
    return rms * math.sqrt(max(fan_in, fan_out))


@dataclasses.dataclass(frozen=True)
class MatchRMS:
    """The shape scale ``rms * sqrt(max(fan_in, fan_out))``.

    It gives the update of every matrix the root mean square ``rms``, whatever its shape
    (Liu et al. 2025, "Muon is scalable for LLM training", eq. 4). ``MatchRMS(0.2)`` is
    ``"match_rms"``: the size of AdamW's updates. Optax calls it ``consistent_rms``.

    Attributes:
      rms: the root mean square, per unit of the learning rate; NumPy's and JAX's
        numbers become floats.

    Raises:
      TypeError: rms is traced.
      ValueError: rms is no positive number.
    """

    rms: float = 0.2

    def __post_init__(self) -> None:
        if isinstance(self.rms, jax.core.Tracer):
            raise TypeError(
                "rms of MatchRMS must be known while tracing; multiply the learning"
                " rate by what varies"
            )
        rms = float(self.rms) if is_real_number(self.rms) else math.nan
        if not 0 < rms < math.inf:
            raise ValueError(
                f"rms must be a positive number, got {trees.show(self.rms)}"
            )
        object.__setattr__(self, "rms", rms)


ShapeScaleName = Literal["spectral", "keller", "match_rms", "none"]
# Functions are of (fan_in, fan_out).
ShapeScale = ShapeScaleName | MatchRMS | Callable[[int, int], float]

SHAPE_SCALES: dict[str, Callable[[int, int], float]] = {
    # The RMS -> RMS operator norm of the update is 1 (Bernstein & Newhouse 2025); the
    # paper's sqrt(m/n) for a kernel stored (n, m) = (fan_in, fan_out).
    "spectral": lambda fan_in, fan_out: math.sqrt(fan_out / fan_in),
    # github.com/KellerJordan/Muon
    "keller": lambda fan_in, fan_out: math.sqrt(max(1.0, fan_out / fan_in)),
    # The RMS of an AdamW update (Liu et al. 2025, "Muon is scalable", eq. 4).
    "match_rms": lambda fan_in, fan_out: match_rms(fan_in, fan_out, 0.2),
    "none": lambda fan_in, fan_out: 1.0,
}


def check_shape_scale(scale: Any) -> None:
    """Refuses what is no shape scale.

    Raises:
      TypeError: an array, as ``optax.inject_hyperparams`` makes of a function.
      ValueError: anything else.
    """
    if isinstance(scale, jax.Array):
        raise TypeError(
            "the shape scale arrived as an array; under optax.inject_hyperparams, which"
            " calls every function with the step, name its argument in static_args"
        )
    if isinstance(scale, MatchRMS) or (callable(scale) and scale is not MatchRMS):
        return
    if not isinstance(scale, str) or scale not in SHAPE_SCALES:
        raise ValueError(
            f"unknown shape scale {trees.show(scale)}; known: {sorted(SHAPE_SCALES)},"
            " MatchRMS(0.2) for any root mean square, and functions of fan_in and"
            " fan_out"
        )


def shape_factors(axes: ResolvedAxes, scale: ShapeScale) -> list[float]:
    """The shape factor of each block of one leaf."""
    if isinstance(scale, MatchRMS):
        return [match_rms(axes.fan_in, n, scale.rms) for n in axes.splits]
    of_shape = SHAPE_SCALES[scale] if isinstance(scale, str) else scale
    # A function may compute with jax.numpy, which would trace it.
    with jax.ensure_compile_time_eval():
        return [float(of_shape(axes.fan_in, n)) for n in axes.splits]
