"""What is claimed, by the paper and by this project, and how our lines judge it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from benchmarks.evidence.cells import Cell
from benchmarks.evidence.plan import BASE, FIVE, OURS
from benchmarks.evidence.stages import best
from benchmarks.evidence.stats import Interval, as_percent, fewer_steps, paired

Results = Mapping[Cell, Mapping[str, Any]]
SIZE, STEPS, SHORT = "llama_60m", 700, 525
MISSING = "not yet measured"
# Claims that the page's summary quotes.
GPT_SIGN = "The same sign at GPT-124M"
GPT_FIVE = "The same sign at GPT-124M, both with K=5"
MOE_SIGN = "The same sign at a mixture of 16 experts"
ON_BALL_FIVE = "The same with K=5 in both"
ON_NORMUON = "Muon²-F with K=3 is better than NorMuon with K=5"
FIVE_ON_NORMUON = "Muon²-F with K=5 is better than NorMuon with K=5"
FIVE_ON_THREE = "Muon²-F is better with K=5 than with K=3"
ON_ADAMW = "Muon with K=5 is better than AdamW"
STATELESS = "Muon²-F is better than its stateless rival, equilibrated Muon"
SOAP = "soap_muon K=3 fitted"
ON_BALL = "The best of ours with K=3 beats the best Muon K=5, both on the hyperball"
FEWER = "25 % fewer steps than Muon K=5 with tuned decay"


class Claim(NamedTuple):
    """One row of the table of claims.

    Attributes:
      text: what is claimed.
      source: its number, and where it is from.
      target: the claimed change in per cent; negative is better, and what is measured
        "holds" from there on. None: only the sign counts.
      measure: from results to the change in per cent.
      how: what was compared.
    """

    text: str
    source: str
    target: float | None
    measure: Callable[[Results], Interval | None]
    how: str


# Per cent of perplexity: twice the largest standard deviation of paired differences
# between arms at LLaMA-60M so far. A single pair that is closer says nothing.
NOISE = 1.3


def verdict(found: Interval | None, target: float | None) -> str:
    """In a few words: weaker is at least half of what is claimed."""
    if found is None:
        return MISSING
    goal = 0.0 if target is None else target
    one = " (one seed)" if found.n == 1 else ""
    low = found.mean - NOISE if found.low is None else found.low
    high = found.mean + NOISE if found.high is None else found.high
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


PLAIN, BEST = ("none", 0.02), ("hyperball", 0.03)
GPT, MOE = {"size": "gpt_124m", "steps": 350}, "moe_16x2"

OWN: list[Claim] = [
    Claim(
        ON_BALL,
        "goal: −3 %",
        -3.0,
        change_of_best((OURS, "hyperball"), (BASE, "hyperball")),
        "each at the best of 3 rates",
    ),
    Claim(
        ON_BALL_FIVE,
        "goal: −3 %, for K=3",
        -3.0,
        change(cell(FIVE, *BEST), cell(BASE, *BEST)),
        "fitted schedule against Keller's; one rate of ours, the best of 3 of Muon",
    ),
    Claim(
        "The same, both with weight decay",
        "goal: −3 %",
        -3.0,
        change_of_best((OURS, "decay"), (BASE, "decay")),
        "each at the best of 8 cells",
    ),
    Claim(
        FEWER,
        "goal: −25 %",
        -25.0,
        steps_to(BASE, "decay"),
        "steps of Muon²-F K=3 fitted on the hyperball",
    ),
    Claim(
        "25 % fewer steps than Muon K=5 without decay",
        "no number",
        -25.0,
        steps_to(BASE, "none"),
        "the same; most of it is the hyperball's",
    ),
    Claim(
        GPT_SIGN,
        "goal: below 0",
        None,
        change(cell(OURS, *BEST, **GPT), cell(BASE, *BEST, **GPT)),
        "K=3 fitted against K=5, hyperball, each at the better of 2 rates, 350 steps",
    ),
    Claim(
        GPT_FIVE,
        "no number",
        None,
        change(cell(FIVE, *BEST, **GPT), cell(BASE, *BEST, **GPT)),
        "hyperball, each at the better of 2 rates, 350 steps",
    ),
    Claim(
        MOE_SIGN,
        "no number",
        None,
        change(cell(OURS, *BEST, size=MOE), cell(BASE, *BEST, size=MOE)),
        "K=3 fitted against K=5, hyperball, each at the better of 2 rates",
    ),
    Claim(
        ON_ADAMW,
        "no number",
        None,
        change_of_best((BASE, "decay"), ("adamw", "decay")),
        "weight decay, the best of 8 cells against the best of 4 rates",
    ),
    Claim(
        ON_NORMUON,
        "no number",
        None,
        change(cell(OURS, *BEST), cell("normuon K=5", *BEST)),
        "hyperball, rate 0.03: one trial of NorMuon, the best of 3 of ours",
    ),
    Claim(
        FIVE_ON_NORMUON,
        "no number",
        None,
        change(cell(FIVE, *BEST), cell("normuon K=5", *BEST)),
        "hyperball, rate 0.03: one trial of each",
    ),
    Claim(
        "SOAP in place of the second moment is better, at K=3",
        "no number",
        None,
        change_of_best((SOAP, "hyperball"), (OURS, "hyperball")),
        "K=3 fitted, hyperball, each at the best of 3 rates",
    ),
    Claim(
        FIVE_ON_THREE,
        "no number",
        None,
        change(cell(FIVE, *BEST), cell(OURS, *BEST)),
        "fitted schedule, hyperball, rate 0.03",
    ),
    Claim(
        "Nesterov's term lowers the loss of Muon²-F",
        "first look: −1.2 % (Muon², no decay)",
        None,
        change(cell(OURS, *BEST), cell("muon2_f plain", *BEST)),
        "K=3 fitted, hyperball, rate 0.03",
    ),
    Claim(
        "The hyperball is better than tuned decay for Muon K=5",
        "first look: −5 %",
        None,
        change_of_best((BASE, "hyperball"), (BASE, "decay")),
        "best of 3 against best of 8 cells",
    ),
    Claim(
        "The hyperball is better than tuned decay for Muon²-F K=3 fitted",
        "first look: −5 %",
        None,
        change_of_best((OURS, "hyperball"), (OURS, "decay")),
        "best of 3 against best of 8 cells",
    ),
    Claim(
        "The fitted schedule is better than Keller's at K=3 for Muon²-F",
        "first look: −1.6 %",
        -1.6,
        change(cell(OURS, *PLAIN), cell("muon2_f K=3", *PLAIN)),
        "no decay, rate 0.02",
    ),
    Claim(
        "The same on the hyperball",
        "first look: −1.6 % without decay",
        -1.6,
        change(cell(OURS, *BEST), cell("muon2_f K=3", *BEST)),
        "rate 0.03",
    ),
    Claim(
        "The fitted schedule lets Muon run with K=3",
        "first look: −1.3 % without decay",
        None,
        change_of_best(("muon K=3 fitted", "hyperball"), (BASE, "hyperball")),
        "K=3 fitted against K=5 Keller, hyperball, each at the best of 3 rates",
    ),
    Claim(
        STATELESS,
        "no number",
        None,
        change_of_best((OURS, "hyperball"), ("muon_eq K=3 fitted", "hyperball")),
        "K=3 fitted, hyperball, each at the best of 3 rates",
    ),
    Claim(
        "The full second moment is better than the factored one",
        "paper: −0.4 % (LLaMA-60M, Keller)",
        None,
        change_of_best(("muon2 K=3 fitted", "hyperball"), (OURS, "hyperball")),
        "K=3 fitted, hyperball, each at the best of 3 rates",
    ),
]
