"""What is claimed, by the paper and by this project, and how our lines judge it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from benchmarks.evidence.cells import Cell
from benchmarks.evidence.plan import BASE, OURS
from benchmarks.evidence.stages import best
from benchmarks.evidence.stats import Interval, as_percent, fewer_steps, paired

Results = Mapping[Cell, Mapping[str, Any]]
SIZE, STEPS, SHORT = "llama_60m", 700, 525
MISSING = "not yet measured"
# Per cent of perplexity: twice the largest standard deviation of paired differences
# between arms so far, at LLaMA-60M and at GPT-124M with half of the steps.
NOISE, GPT_NOISE = 1.3, 2.0


class Claim(NamedTuple):
    """One row of the table of claims.

    Attributes:
      text: what is claimed.
      source: its number, and where it is from.
      target: the claimed change in per cent; negative is better, and what is measured
        "holds" from there on. None: only the sign counts.
      measure: from results to the change in per cent.
      how: what was compared.
      noise: a single pair that is closer than this many per cent decides nothing.
    """

    text: str
    source: str
    target: float | None
    measure: Callable[[Results], Interval | None]
    how: str
    noise: float = NOISE


def verdict(claim: Claim, found: Interval | None) -> str:
    """In a few words: weaker is at least half of what is claimed."""
    if found is None:
        return MISSING
    goal = claim.target or 0.0
    one = " (one seed)" if found.n == 1 else ""
    low = found.mean - claim.noise if found.low is None else found.low
    high = found.mean + claim.noise if found.high is None else found.high
    if low <= 0 <= high:
        return f"not decided{one}"
    if found.mean <= goal:
        return f"holds{one}"
    if found.mean <= goal / 2 < 0:
        return f"holds, weaker{one}"
    return f"does not hold here{one}"


def cell(arm: str, control: str, rate: float, decay: float = 0.0, **more: Any) -> Cell:
    return Cell(more.pop("size", SIZE), arm, control, rate, decay, **more)


def change(first: Cell, second: Cell) -> Callable[[Results], Interval | None]:
    """Perplexity of the first against the second."""
    return lambda results: as_percent(paired(results, first, second))


def change_of_best(
    first: tuple[str, str], second: tuple[str, str]
) -> Callable[[Results], Interval | None]:
    """The same for the best cells of two arms and controls."""

    def measure(results: Results) -> Interval | None:
        cells = [best(results, arm, control, SIZE) for arm, control in (first, second)]
        a, b = cells
        return None if a is None or b is None else change(a, b)(results)

    return measure


def steps_to(arm: str, control: str) -> Callable[[Results], Interval | None]:
    """Change of the steps that OURS on the hyperball needs to an arm's final loss."""

    def measure(results: Results) -> Interval | None:
        ours = best(results, OURS, "hyperball", SIZE)
        target = best(results, arm, control, SIZE)
        if ours is None or target is None:
            return None
        short = cell(OURS, "hyperball", ours.rate, steps=SHORT)
        found = fewer_steps(results, short, ours, target, STEPS)
        if found is None or found.low is None or found.high is None:
            return found and found._replace(mean=-found.mean)
        return Interval(-found.mean, -found.high, -found.low, found.n)

    return measure


def at_fewer_steps(results: Results) -> Interval | None:
    """Change from Muon with tuned decay to OURS with a quarter fewer steps."""
    target, ours = (
        best(results, a, c, SIZE) for a, c in ((BASE, "decay"), (OURS, "hyperball"))
    )
    if target is None or ours is None:
        return None
    return change(cell(OURS, "hyperball", ours.rate, steps=SHORT), target)(results)


PLAIN, BEST, HIGHER = ("none", 0.02), ("hyperball", 0.03), ("hyperball", 0.045)
GPT, MOE = {"size": "gpt_124m", "steps": 350}, "moe_16x2"
