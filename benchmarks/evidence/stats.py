"""Paired differences between arms, and what a run tells about its steps."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.evidence.cells import Cell

Results = Mapping[Cell, Mapping[str, Any]]
# 97.5 % quantiles of Student's t, by degrees of freedom.
T_QUANTILES = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
}


class Interval(NamedTuple):
    """A mean, its 95 % confidence interval, and from how many numbers.

    One number has no interval: ``low`` and ``high`` are None.
    """

    mean: float
    low: float | None
    high: float | None
    n: int


def interval(values: Sequence[float]) -> Interval | None:
    """Of the mean, by Student's t; None without values."""
    n = len(values)
    if n == 0:
        return None
    mean = sum(values) / n
    if n == 1:
        return Interval(mean, None, None, 1)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    half = T_QUANTILES[n - 1] * deviation / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def by_seed(results: Results, like: Cell) -> dict[int, float]:
    """Final losses of all seeds of a cell; diverged runs are infinite."""
    found = {
        cell.seed: row["loss"]
        for cell, row in results.items()
        if cell.with_seed(like.seed) == like
    }
    return {s: math.inf if loss is None else loss for s, loss in found.items()}


def paired(results: Results, first: Cell, second: Cell) -> Interval | None:
    """Loss of the first less that of the second, over the seeds that both have."""
    a, b = by_seed(results, first), by_seed(results, second)
    return interval([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])


def percent(x: float) -> float:
    """A difference of losses as a change of perplexity in per cent."""
    return 100 * math.expm1(x)


def as_percent(found: Interval | None) -> Interval | None:
    """An interval of losses as one of changes of perplexity."""
    if found is None or found.low is None or found.high is None:
        return found and found._replace(mean=percent(found.mean))
    return Interval(*map(percent, found[:3]), found.n)


def fewer_steps(
    results: Results, short: Cell, long: Cell, target: Cell, full: int
) -> Interval | None:
    """Per cent fewer steps in which an arm gets to another arm's final loss.

    From two lengths of its runs, each with a schedule of its own; in between the loss
    is taken to be linear in the logarithm of the steps.

    Args:
      short, long: the arm's runs, of ``short.steps`` and of ``full`` steps.
      target: the other arm's run of ``full`` steps.
    """
    losses = [by_seed(results, cell) for cell in (short, long, target)]
    saved = []
    for seed in sorted(set.intersection(*(set(found) for found in losses))):
        a, b, goal = (found[seed] for found in losses)
        slope = (b - a) / math.log(full / short.steps)
        saved.append(100 * (1 - math.exp((goal - b) / slope)))
    return interval(saved)
