"""The minimax schedules of the Polar Express paper, for any bounds.

Given the smallest and the largest singular value that enter, each step is the odd
quintic with the least maximal error on the interval which the steps before it leave.
Runs on the host, in float64.
"""

import math
from typing import Literal

import numpy as np

from muon2_optax.schedules.coefficients import Frobenius, Schedule, quintic

# From this lower / upper on, the minimax polynomial equals its limit up to rounding
# (github.com/NoahAmsel/PolarExpress).
_DEGENERATE = 1 - 5e-6


def polar_express_coefficients(
    lower: float,
    upper: float = 1.0,
    steps: int = 5,
    *,
    cushion: float = 0.02,
    safety: float = 0.01,
    safety_applied: Literal["during", "after"] = "during",
) -> Schedule:
    """The minimax schedule for singular values in [lower, upper].

    Each step is the odd quintic with the least maximal distance from 1 on the interval
    into which the steps before it map [lower, upper]. Without cushion and safety no
    other composition of odd quintics comes closer to 1 (Amsel et al.). Published are:

    - the paper's: ``(1e-3, steps=8, cushion=0.02407327424182761, safety=0)``; its code
      then divides, ``safety=0.01, safety_applied="after"``;
    - modded-nanogpt's (also nanochat's and dion's): ``(1e-3, steps=5, safety=0.02)``;
    - the default of the authors' generator: ``(1e-3, steps=10)``.

    The first six rows agree to 1e-13. Later intervals are so short that float64 leaves
    1e-10 of the seventh row and 1e-8 of the eighth.

    Args:
      lower: smallest singular value, after normalization, that has to reach 1. Smaller
        ones grow as fast, but end short of it.
      upper: the largest one, 1 after division by the Frobenius norm. If it is set lower
        and exceeded, the iteration can diverge.
      steps: how many triples. A run of more steps repeats the last, a run of fewer
        takes the first ones.
      cushion: an interval counts as no wider than [cushion * upper, upper] while its
        polynomial is sought, which keeps it well above 0 in between; the polynomial is
        then scaled so that its values over the real interval are centered at 1.
      safety: every step but the last is p(x / (1 + safety)) for the minimax p, a margin
        for rounding above ``upper``.
      safety_applied: ``"during"``: the intervals of later steps take it into account;
        ``"after"``: they do not.

    Returns:
      A ``Schedule`` with ``take="first"``, normalized by the Frobenius norm.

    Raises:
      ValueError: not 0 < lower <= upper < inf, or another argument out of range.

    References:
      Amsel et al. 2025, "The Polar Express", arXiv:2505.16932, algorithm 1 and
      github.com/NoahAmsel/PolarExpress.

    >>> schedule = polar_express_coefficients(1e-2, steps=3)
    >>> [round(a, 2) for a, b, c in schedule.triples]
    [7.94, 3.61, 2.69]
    """
    if not 0 < lower <= upper < math.inf:
        raise ValueError(f"need 0 < lower <= upper < inf, got {lower} and {upper}")
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
    if not 0 <= cushion < 1 or not 0 <= safety < math.inf:
        raise ValueError(f"cushion {cushion} or safety {safety} is out of range")
    if safety_applied not in ("during", "after"):
        raise ValueError(f"safety_applied: 'during' or 'after', not {safety_applied!r}")
    low, high, triples = float(lower), float(upper), []
    for step in range(steps):
        triple = _minimax(max(low, cushion * high), high)
        if low < cushion * high:
            triple *= 2 / (quintic(triple, low) + quintic(triple, high))
        margin = 1 + safety if step < steps - 1 else 1.0
        divided = triple / margin ** np.array([1, 3, 5])
        triples.append(divided)
        low = quintic(divided if safety_applied == "during" else triple, low)
        high = 2 - low
    return Schedule(
        tuple((float(a), float(b), float(c)) for a, b, c in triples),
        take="first",
        normalization=Frobenius(),
        source=f"minimax on [{lower:g}, {upper:g}] (Amsel et al. 2025,"
        f" arXiv:2505.16932), cushion {cushion:g}, safety {safety:g}",
    )


def _minimax(low: float, high: float) -> np.ndarray:
    """The odd quintic nearest to 1 on [low, high], by Remez' exchange.

    The error is -E, E, -E, E at low, two inner extrema and high. These start at the
    quarters and move to the roots of p' until E stands still.
    """
    if low / high >= _DEGENERATE:
        return np.array([15 / 8, -10 / 8, 3 / 8]) / high ** np.array([1, 3, 5])
    inner = np.array([3 * low + high, low + 3 * high]) / 4
    signs = np.array([1.0, -1.0, 1.0, -1.0])
    error, before = math.inf, 0.0
    for _ in range(100):
        x = np.array([low, *inner, high])
        system = np.stack([x, x**3, x**5, signs], axis=1)
        a, b, c, error = np.linalg.solve(system, np.ones(4))
        if abs(error - before) <= 1e-15:
            break
        before = error
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = np.sqrt((-3 * b + np.array([-root, root])) / (10 * c))
    return np.array([a, b, c])
