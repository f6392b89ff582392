"""Stages of a plan: functions from the results so far to the cells that they want.

A fixed grid, or what follows from it where an arm was best: further seeds, rates beyond
the grid's edge, shorter runs.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.evidence.cells import Cell, perplexity_order

Results = Mapping[Cell, Mapping[str, Any]]
Stage = Callable[[Results], list[Cell]]
# A weight control, its decay rate, and the peak learning rates that are tried with it.
Treatment = tuple[str, float, tuple[float, ...]]
# Tuning sees the first seed alone; the others repeat what it has chosen.
FIRST_SEED = 101


def grid(
    arms: Iterable[str],
    treatments: Iterable[Treatment],
    size: str = "llama_60m",
    seeds: Sequence[int] = (FIRST_SEED,),
    steps: int = 0,
) -> Stage:
    """Every rate of every treatment, arms next to each other so that pairs are full."""
    cells = [
        Cell(size, arm, control, rate, decay, seed, steps)
        for control, decay, rates in treatments
        for rate in rates
        for seed in seeds
        for arm in arms
    ]
    return lambda results: cells


def best(
    results: Results,
    arm: str,
    control: str,
    size: str = "llama_60m",
    trials: int = 1,
    steps: int = 0,
) -> Cell | None:
    """The best cell of the first seed; None before there are so many trials."""
    cells = [
        cell
        for cell in results
        if (cell.size, cell.arm, cell.control) == (size, arm, control)
        and (cell.seed, cell.steps, cell.adam_rate) == (FIRST_SEED, steps, 0)
    ]
    if len(cells) < trials:
        return None
    return min(cells, key=lambda cell: perplexity_order(results, cell))


def repeats(
    arms: Sequence[str],
    control: str,
    trials: int,
    seeds: Sequence[int],
    size: str = "llama_60m",
    steps: int = 0,
) -> Stage:
    """Further seeds of each arm's best cell; if the bests differ, of both for both.

    So every difference is also there at equal rates.
    """

    def stage(results: Results) -> list[Cell]:
        found = [best(results, arm, control, size, trials, steps) for arm in arms]
        if None in found:
            return []
        chosen = dict.fromkeys(
            (cell.rate, cell.decay) for cell in found if cell is not None
        )
        return [
            Cell(size, arm, control, rate, decay, seed, steps)
            for rate, decay in chosen
            for seed in seeds
            for arm in arms
        ]

    return stage


def extended(
    arms: Sequence[str],
    edge: Treatment,
    beyond: Treatment,
    trials: int,
    size: str = "llama_60m",
) -> Stage:
    """More of a treatment for all arms, if one of them was best at the grid's edge."""

    def stage(results: Results) -> list[Cell]:
        found = [best(results, arm, edge[0], size, trials) for arm in arms]
        if None in found or all(cell and cell.decay != edge[1] for cell in found):
            return []
        return grid(arms, [beyond], size)(results)

    return stage


def shorter(
    arm: str,
    control: str,
    trials: int,
    steps: Sequence[int],
    seeds: Sequence[int],
    size: str = "llama_60m",
) -> Stage:
    """The best cell trained for fewer steps, with a schedule of that length."""

    def stage(results: Results) -> list[Cell]:
        cell = best(results, arm, control, size, trials)
        if cell is None:
            return []
        return [
            dataclasses.replace(cell, seed=seed, steps=n)
            for n in steps
            for seed in seeds
        ]

    return stage
