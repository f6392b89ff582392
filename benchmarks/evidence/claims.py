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
# Claims that the page's summary quotes.
GPT_SIGN = "The same sign at GPT-124M"
ON_NORMUON = "Muon²-F with K=3 is better than NorMuon with K=5"
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


def nothing(results: Results) -> Interval | None:
    """Of what no run of the plan has measured yet."""
    return None


PLAIN = ("none", 0.02)
GPT = {"size": "gpt_124m", "steps": 350}

PAPER: list[Claim] = [
    Claim(
        "Muon² with K=3 beats Muon with K=5",
        "−1.6 % (LLaMA-60M, 24.59 against 24.98)",
        -1.6,
        change(cell("muon2 K=3", *PLAIN), cell(BASE, *PLAIN)),
        "Keller, no decay, rate 0.02",
    ),
    Claim(
        "Muon²-F with K=3 beats Muon with K=5",
        "−1.2 % (LLaMA-60M, 24.68 against 24.98)",
        -1.2,
        change(cell("muon2_f K=3", *PLAIN), cell(BASE, *PLAIN)),
        "Keller, no decay, rate 0.02",
    ),
    Claim(
        "Muon² with K=3 beats Muon with K=5, smaller model",
        "no number",
        None,
        change(
            cell("muon2 K=3", *PLAIN, size="llama_20m"),
            cell(BASE, *PLAIN, size="llama_20m"),
        ),
        "LLaMA-21M, Keller, no decay, rate 0.02",
    ),
    Claim(
        "25 % fewer steps to Muon's loss",
        "−25 % (LLaMA-1B, training loss 2.36)",
        -25.0,
        steps_to(BASE, "hyperball"),
        "steps of Muon²-F K=3 fitted to the loss of Muon K=5, both on the hyperball",
    ),
    Claim(
        "K=3 costs Muon² nothing against its K=5",
        "0.0 % (LLaMA-60M, 24.59 against 24.60)",
        0.0,
        change(cell("muon2 K=3", *PLAIN), cell("muon2 K=5", *PLAIN)),
        "Keller, no decay, rate 0.02",
    ),
    Claim(
        "GPT: Muon² with K=3 beats Muon with K=5",
        "−4.7 % (GPT-Small, 28.12 against 29.51)",
        -4.7,
        change(
            cell("muon2 K=3", "decay", 0.02, 0.3, size="gpt_124m"),
            cell(BASE, "decay", 0.02, 0.3, size="gpt_124m"),
        ),
        "",
    ),
    Claim(
        "PolarExpress, Turbo-Muon, NorMuon and AdaMuon with K=5 stay behind Muon² K=3",
        "+1.0 to +5.5 % (GPT-Small)",
        None,
        nothing,
        "",
    ),
    Claim("MoE: Muon² with K=3 beats Muon with K=5", "−7.2 %", -7.2, nothing, ""),
]

OWN: list[Claim] = [
    Claim(
        ON_BALL,
        "goal: −3 %",
        -3.0,
        change_of_best((OURS, "hyperball"), (BASE, "hyperball")),
        "each at the best of 3 rates",
    ),
    Claim(
        "The same, both with weight decay",
        "goal: −3 %",
        -3.0,
        change_of_best((OURS, "decay"), (BASE, "decay")),
        "each at the best of 6 cells",
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
        change(
            cell(OURS, "hyperball", 0.03, **GPT), cell(BASE, "hyperball", 0.03, **GPT)
        ),
        "hyperball, rate 0.03, 350 steps",
    ),
    Claim(
        ON_NORMUON,
        "no number",
        None,
        change(cell(OURS, "hyperball", 0.03), cell("normuon K=5", "hyperball", 0.03)),
        "hyperball, rate 0.03: one trial of NorMuon, the best of 3 of ours",
    ),
    Claim(
        "SOAP in place of the second moment is better, at K=3",
        "no number",
        None,
        change_of_best((SOAP, "hyperball"), (OURS, "hyperball")),
        "K=3 fitted, hyperball, each at the best of 3 rates",
    ),
    Claim(
        "K=5 gains nothing over K=3 for Muon²-F with the fitted schedule",
        "no number",
        None,
        change(
            cell(OURS, "hyperball", 0.03),
            cell("muon2_f K=5 fitted", "hyperball", 0.03),
        ),
        "K=3 against K=5, hyperball, rate 0.03",
    ),
    Claim(
        "The hyperball is better than tuned decay for Muon K=5",
        "first look: −5 %",
        None,
        change_of_best((BASE, "hyperball"), (BASE, "decay")),
        "best of 3 against best of 6 cells",
    ),
    Claim(
        "The hyperball is better than tuned decay for Muon²-F K=3 fitted",
        "first look: −5 %",
        None,
        change_of_best((OURS, "hyperball"), (OURS, "decay")),
        "best of 3 against best of 6 cells",
    ),
    Claim(
        "The fitted schedule is better than Keller's at K=3 for Muon²-F",
        "first look: −1.6 %",
        -1.6,
        change(cell(OURS, *PLAIN), cell("muon2_f K=3", *PLAIN)),
        "no decay, rate 0.02",
    ),
    Claim(
        "The fitted schedule lets Muon run with K=3",
        "first look: −1.3 % without decay",
        None,
        change_of_best(("muon K=3 fitted", "hyperball"), (BASE, "hyperball")),
        "K=3 fitted against K=5 Keller, hyperball, each at the best of 3 rates",
    ),
    Claim(
        "Muon²-F is better than its stateless rival, equilibrated Muon",
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
