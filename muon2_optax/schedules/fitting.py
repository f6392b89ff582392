"""Coefficient schedules fitted to the singular values that a model has.

``polar_express_coefficients`` knows their bounds and minimizes the worst error between;
``fit_coefficients`` knows their distribution and maximizes the cosine similarity to the
polar factor. Both run on the host, in float64; every optimizer takes what they return
as ``ns_coeffs``.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from muon2_optax.schedules.coefficients import SCHEDULES, Triple, quintic
from muon2_optax.schedules.minimax import (
    polar_express_coefficients as polar_express_coefficients,
)

# Fitted steps are safe up to here: rounding takes singular values above 1.
_TOP = 1.02
# The upper end of the paper's target interval, 1 + 0.3.
_LARGEST = 1.3
# Singular values of float32 matrices without full rank end up below this.
_NOISE = 1e-7
_BINS = np.geomspace(_NOISE, 1, 320)
_CHECKS = np.r_[np.geomspace(_NOISE, 0.05, 160), np.linspace(0.05, _TOP, 400)]
_FINE_CHECKS = np.r_[np.geomspace(1e-9, 0.05, 2000), np.linspace(0.05, _TOP, 8000)]


def fit_coefficients(
    spectrum: Any,
    steps: int,
    *,
    weights: Any = None,
    floor: float = 0.1,
    blend: float = 0.02,
) -> tuple[Triple, ...]:
    """The schedule with the best cosine similarity to the polar factor.

    For normalized singular values s and the composition f of all steps it is the mean
    over matrices of ``sum f(s) / sqrt(n sum f(s)^2)``, the paper's eq. 9, which does
    not see the size of f. Candidates must be safe on all of [0, 1.02]:

    - each step maps [0, 1.02] into [0, 1], the last into [0, 1.3];
    - f(s) > 0, so that the update never turns against its input, and once f has risen
      to ``floor`` times its maximum it stays above that;
    - no step raises any value by a larger factor than those near 0.

    The registered schedules that comply and minimax ones are improved by BFGS; the
    result is no worse than they are (to 1e-6). Deterministic; takes seconds.

    Args:
      spectrum: singular values, divided by the matrix's Frobenius norm: (n,) for one
        matrix, (..., n) for several, or a list of such arrays of different n, as
        ``diagnostics.orthogonalization_report`` gives. Each matrix counts the same.
        Values under 1e-7 of its largest are noise and do not count.
      steps: number of triples K.
      weights: how often each value occurs, in the shape of ``spectrum``.
      floor: as above. A higher one treats the large singular values more evenly and
        costs reach when K is small; Keller's triple complies up to 0.56.
      blend: share of each spectrum's weight that is spread over [0, 1], half of it
        evenly in s, half in log s from a tenth of the lowest percentile on, so that the
        schedule also serves spectra a little different from these.

    Returns:
      K triples, a table that only fits ``ns_steps=K``. The last is scaled so that the
      output comes nearest to the polar factor in the Frobenius norm, up to 1.3.

    Raises:
      ValueError: singular values that are negative, not finite, above 1 or all zero,
        weights that do not fit, another argument out of range, or nothing complies.

    >>> table = fit_coefficients(np.geomspace(0.003, 0.1, 64), 2)
    >>> len(table), table[0][0] > 3.4445
    (2, True)
    """
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
    if not 0 < floor < 1 or not 0 <= blend < 1:
        raise ValueError(f"floor {floor} or blend {blend} is out of range")
    values, counts = _collect(spectrum, weights)
    histogram = _histogram(values, counts, blend)

    def loss(x: np.ndarray) -> np.ndarray:
        rows = _rows(x)
        y = _compose(rows, _BINS)
        cosine = np.mean((y @ histogram) / np.sqrt(y**2 @ histogram), axis=-1)
        missing = _shortfall(rows, _CHECKS, 1.01 * floor)
        return 1e4 * np.mean(missing**2, axis=-1) - cosine

    starts = np.array([_parameters(triples) for triples in _starts(steps)])
    starts = starts[np.argsort(loss(starts), kind="stable")]
    ends = np.array([_minimize(loss, x) for x in starts[:8]])
    candidates = np.concatenate([ends, starts])
    best, best_cosine, scale = None, -math.inf, 1.0
    for rows in _rows(candidates[np.argsort(loss(candidates), kind="stable")]):
        if np.any(_shortfall(rows, _FINE_CHECKS, floor) > 0):
            continue
        y = _compose(rows, values)
        mean, square = np.sum(counts * y, axis=-1), np.sum(counts * y**2, axis=-1)
        cosine = float(np.mean(mean / np.sqrt(square)))
        if cosine > best_cosine + 1e-6:
            best, best_cosine = rows, cosine
            limit = _LARGEST / np.max(_compose(rows, _FINE_CHECKS))
            scale = min(limit, float(np.sum(mean) / np.sum(square)))
    if best is None:
        raise ValueError(f"no schedule with floor={floor}")
    best[-1] *= scale
    return tuple((float(a), float(b), float(c)) for a, b, c in best)


def _collect(spectrum: Any, weights: Any) -> tuple[np.ndarray, np.ndarray]:
    """The spectra as rows of one array, with weights that add up to 1 in each row."""
    several = isinstance(spectrum, (list, tuple)) and np.ndim([*spectrum, 0][0]) > 0

    def arrays(x: Any) -> list[np.ndarray]:
        return [np.atleast_1d(np.asarray(a, float)) for a in (x if several else [x])]

    parts = arrays(spectrum)
    given = [np.ones_like(s) for s in parts] if weights is None else arrays(weights)
    if [w.shape for w in given] != [s.shape for s in parts]:
        raise ValueError("weights must have the shape of the spectrum")
    width = max(s.shape[-1] for s in parts)

    def stack(parts: list[np.ndarray]) -> np.ndarray:
        rows = [a.reshape(-1, a.shape[-1]) for a in parts if a.size]
        wide = [np.pad(r, ((0, 0), (0, width - r.shape[-1]))) for r in rows]
        return np.concatenate([*wide, np.zeros((0, width))])

    values, counts = stack(parts), stack(given)
    if not np.all((values >= 0) & (values <= 1.001)):
        raise ValueError(
            "singular values not in [0, 1]: divide by their Frobenius norm"
        )
    counts = counts * (values.T > _NOISE * np.max(values, axis=-1, initial=0)).T
    total = np.sum(counts, axis=-1, keepdims=True)
    if not np.all((counts >= 0) & np.isfinite(counts)) or not np.any(total):
        raise ValueError("no singular values above 0, or weights below 0")
    used = total[:, 0] > 0
    return np.minimum(values[used], 1), counts[used] / total[used]


def _histogram(values: np.ndarray, counts: np.ndarray, blend: float) -> np.ndarray:
    """Each row's weights on the bins, blended with even ones: (bins, rows)."""
    columns, size = [], len(_BINS)
    for s, w in zip(values, counts):
        place = np.interp(np.log(np.maximum(s, _NOISE)), np.log(_BINS), range(size))
        left = np.minimum(place.astype(int), size - 2)
        column = np.bincount(left, w * (left + 1 - place), size)
        column += np.bincount(left + 1, w * (place - left), size)
        low = _BINS[np.searchsorted(np.cumsum(column), 0.01)] / 10
        in_log = (_BINS >= low) / np.sum(_BINS >= low)
        even = (in_log + _BINS / np.sum(_BINS)) / 2
        columns.append((1 - blend) * column + blend * even)
    return np.stack(columns, axis=1)


def _starts(steps: int) -> list[Any]:
    starts: list[Any] = []
    for schedule in SCHEDULES.values():
        if schedule.take == "whole":
            continue  # made by this fit, which must not start from its own results
        for rows in (schedule.triples[:steps], schedule.triples[-steps:]):
            rows += rows[-1:] * (steps - len(rows))
            if rows not in starts:
                starts.append(rows)
    lower = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    return starts + [polar_express_coefficients(x, steps=steps).triples for x in lower]


def _parameters(triples: Sequence[Triple]) -> np.ndarray:
    """Two numbers per step, each step rescaled to map [0, 1] onto [0, 1].

    A factor of one step's output can be taken back at the next one's input, so only the
    ratios b / a < 0 and c / a < -b / a / 1.02^2 remain: then p(x) <= a x on [0, 1.02].
    """
    high, x = 1.0, []
    for a, b, c in triples:
        a, b, c = a * high, b * high**3, c * high**5
        high = float(_maximum(np.array([a, b, c]), 1.0))
        fall = max(-b / a, 1e-3)
        x += [math.log(fall), math.log(max(1 - c / a * _TOP**2 / fall, 1e-3))]
    return np.array(x)


def _rows(x: np.ndarray) -> np.ndarray:
    """Triples (..., K, 3) from 2 K parameters; each step maps [0, 1.02] onto [0, 1]."""
    fall = np.exp(x[..., ::2])
    c = fall * (1 - np.exp(x[..., 1::2])) / _TOP**2
    triples = np.stack([np.ones_like(c), -fall, c], axis=-1)
    return triples / _maximum(triples, _TOP)[..., None]


def _maximum(triple: np.ndarray, high: float) -> np.ndarray:
    """Largest value of a x + b x^3 + c x^5 on [0, high], for a > 0 > b."""
    a, b, c = np.moveaxis(triple, -1, 0)
    root = np.sqrt(np.maximum(9 * b * b - 20 * a * c, 0))
    # The smaller root of p', which is no maximum where the roots are not real.
    peak = np.sqrt(np.clip(2 * a / (root - 3 * b), 0, high**2))
    points = np.stack([peak, np.full_like(peak, high)], axis=-1)
    return np.max(_poly(triple, points), axis=-1)


def _poly(triple: np.ndarray, x: np.ndarray) -> np.ndarray:
    """a x + b x^3 + c x^5, for x of shape (..., n) and triples (..., 3)."""
    return quintic(np.moveaxis(triple[..., None], -2, 0), x)


def _compose(rows: np.ndarray, s: np.ndarray) -> np.ndarray:
    """All steps of schedules (..., K, 3) on s; shape (..., *s.shape)."""
    y = s
    for step in range(rows.shape[-2]):
        # Negative values are rejected; they must not overflow before they are.
        y = np.clip(_poly(rows[..., step, :], y), -1, 1)
    return y


def _shortfall(rows: np.ndarray, s: np.ndarray, floor: float) -> np.ndarray:
    """How far f / max f lies below ``floor`` and below 0.7 of its tangent at 0."""
    slope = np.prod(rows[..., 0], axis=-1)[..., None]
    y = _compose(rows, s)
    top = np.max(y, axis=-1, keepdims=True)
    return np.maximum(np.minimum(floor, 0.7 * slope * s / top) - y / top, 0)


def _minimize(loss: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """BFGS with central differences; ``loss`` takes a batch of points."""
    eye = np.eye(len(x))

    def gradient(x: np.ndarray) -> np.ndarray:
        up, down = np.split(loss(np.concatenate([x + 1e-6 * eye, x - 1e-6 * eye])), 2)
        return (up - down) / 2e-6

    value, slope, inverse = loss(x[None])[0], gradient(x), 0.1 * eye
    for _ in range(300):
        move = -inverse @ slope
        move *= min(1, 0.5 / np.max(np.abs(move) + 1e-30))
        tries = x + 0.5 ** np.arange(20)[:, None] * move
        losses = loss(tries)
        if not np.min(losses) < value - 1e-12:
            if np.array_equal(inverse, 0.1 * eye):
                break
            inverse = 0.1 * eye
            continue
        after = tries[np.argmin(losses)]
        new = gradient(after)
        s, y = after - x, new - slope
        if s @ y > 1e-14:
            left = eye - np.outer(s, y) / (s @ y)
            inverse = left @ inverse @ left.T + np.outer(s, s) / (s @ y)
        x, value, slope = after, np.min(losses), new
    return x
