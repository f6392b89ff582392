"""Which runs the study wants, the most telling first.

A plan is a list of stages. A stage is a function from the results so far to cells: a
fixed grid, or further seeds where an arm was best, which come once the grid is there.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.evidence.cells import Cell, perplexity_order

Results = Mapping[Cell, Mapping[str, Any]]
Stage = Callable[[Results], list[Cell]]
# Tuning sees the first seed alone; the others repeat what it has chosen.
FIRST_SEED, MORE_SEEDS = 101, (102, 103, 104)

# Each treatment is a weight control, its decay rate, and the peak learning rates that
# are tried with it.
HYPERBALL = ("hyperball", 0.0, (0.03, 0.02, 0.045))
DECAY_1 = ("decay", 0.1, (0.02, 0.03))
DECAY_3 = ("decay", 0.3, (0.02, 0.03))
FASTER_1, FASTER_3 = ("decay", 0.1, (0.045,)), ("decay", 0.3, (0.045,))
DECAY_6 = ("decay", 0.6, (0.02, 0.03))
CAUTIOUS = ("cautious", 0.3, (0.02, 0.03))
NONE = ("none", 0.0, (0.02,))
TREATMENTS = (HYPERBALL, DECAY_1, DECAY_3, CAUTIOUS, NONE)
ADAM_TREATMENTS = (
    ("decay", 0.1, (2e-3, 4e-3, 1e-3)),
    ("hyperball", 0.0, (1e-2, 5e-3, 2e-2)),
)
Treatment = tuple[str, float, tuple[float, ...]]

BASE, OURS = "muon K=5", "muon2_f K=3 fitted"
# With OURS a ladder: the same orthogonalization of different inputs.
FAMILY = ("muon2 K=3 fitted", "muon_eq K=3 fitted", "muon K=3 fitted")


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
    results: Results, arm: str, control: str, size: str = "llama_60m", trials: int = 1
) -> Cell | None:
    """The best cell of the first seed; None before there are so many trials."""
    cells = [
        cell
        for cell in results
        if (cell.size, cell.arm, cell.control) == (size, arm, control)
        and (cell.seed, cell.steps, cell.adam_rate) == (FIRST_SEED, 0, 0)
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
) -> Stage:
    """Further seeds of each arm's best cell; if the bests differ, of both for both.

    So every difference is also there at equal rates.
    """

    def stage(results: Results) -> list[Cell]:
        found = [best(results, arm, control, size, trials) for arm in arms]
        if None in found:
            return []
        chosen = dict.fromkeys(
            (cell.rate, cell.decay) for cell in found if cell is not None
        )
        return [
            Cell(size, arm, control, rate, decay, seed)
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


# At the best cell of OURS, each one change away from it or from BASE.
ABLATIONS = (
    "muon2_f K=3",
    "muon2_f plain",
    "muon K=5 fitted",
    "muon2_f K=5 fitted",
    "muon2_f b2=.99",
    "muon2_f eps=1e-6",
    "muon2_f K=2 fitted",
    "muon2_f corrected",
    "muon2_f b2=.9",
    "muon2_f eps=1e-15",
    "muon2_f K=4 fitted",
    "muon_eq K=5",
    "muon K=3",
    "muon2_f K=1",
    "muon2_f K=5",
    "muon2 K=5 fitted",
)
PAPER = (
    "adamw",
    "muon K=5",
    "polar_express K=5",
    "turbo K=4",
    "normuon K=5",
    "adamuon K=5",
    "muon2 K=3",
    "muon2_f K=3",
)
BEST_RATE = ("hyperball", 0.0, (0.03,))

# What might make OURS better, and rivals with the same addition.
VARIANTS = (
    "muon2_f K=3 schatten",
    "muon2_f K=3 neurons",
    "muon2_f K=5 fitted",
    "muon2_f K=3 schatten neurons",
    "muon K=5 fitted",
    "normuon K=5",
    "muon2_f b2=.99",
    "muon2_f K=3 ahead",
    "muon2_f K=3 scaled gradients",
    "muon_eq K=3 schatten",
    "muon2 K=3 neurons",
    "muon2_f eps=1e-6",
    "polar_express K=5",
)

PLANS: dict[str, list[Stage]] = {
    # What the main question needs.
    "llama_60m": [
        grid((BASE, OURS), [HYPERBALL, DECAY_3, DECAY_1, NONE]),
        repeats((BASE, OURS), "hyperball", 3, (102, 103)),
        shorter(OURS, "hyperball", 3, (525,), (101, 102, 103)),
        extended((BASE, OURS), DECAY_3, DECAY_6, 4),
        grid(FAMILY, [HYPERBALL]),
        # Decay was best at the highest rate of the grid.
        grid((BASE, OURS), [FASTER_1, FASTER_3]),
        repeats((BASE, OURS), "decay", 8, (102, 103)),
        repeats((BASE, OURS, *FAMILY), "hyperball", 3, (102, 103)),
        shorter(OURS, "hyperball", 3, (630,), (101, 102, 103)),
        grid(ABLATIONS[:4], [BEST_RATE]),
    ],
    # Its neighbours.
    "llama_60m_more": [
        grid(("adamw",), ADAM_TREATMENTS[:1]),
        grid(ABLATIONS[4:], [BEST_RATE]),
        grid((BASE, OURS), [CAUTIOUS]),
        grid(("adamw",), ADAM_TREATMENTS[1:]),
        grid(FAMILY, [DECAY_1, DECAY_3, FASTER_1, FASTER_3, NONE, CAUTIOUS]),
        repeats((BASE, OURS), "hyperball", 3, (104,)),
        repeats((BASE, OURS), "decay", 8, (104,)),
        # The paper's table: as published but for equal momentum.
        grid(("muon K=3", "muon2 K=5", "muon2_f K=5"), [NONE]),
        grid((BASE, "muon2 K=3", "muon2_f K=3"), [NONE], seeds=(102, 103)),
    ],
    "variants": [grid(VARIANTS, [BEST_RATE])],
    "second": [
        grid(("muon2_f b2=.9",), [BEST_RATE]),
        grid(("normuon K=5",), [BEST_RATE], seeds=(102, 103)),
        grid(("soap_muon K=3 fitted",), [HYPERBALL]),
        repeats(("soap_muon K=3 fitted",), "hyperball", 3, (102, 103)),
        grid(("adamw",), ADAM_TREATMENTS[:1]),
        grid(("muon2_f K=5 fitted",), [BEST_RATE], seeds=(102, 103)),
        grid((BASE, OURS), [FASTER_1, FASTER_3]),
    ],
    "third": [
        grid((BASE, OURS), [BEST_RATE], "gpt_124m", steps=350),
        grid((BASE, OURS), [BEST_RATE], "gpt_124m", (102,), 350),
        grid(("soap_muon K=3 fitted",), [BEST_RATE], "gpt_124m", steps=350),
        grid((BASE, OURS), [("decay", 0.3, (0.02,))], "gpt_124m", steps=350),
    ],
    "tiny_second": [
        grid(("soap_muon K=3 fitted", "muon2_f b2=.9", "adamw"), [HYPERBALL], "tiny"),
        repeats(("soap_muon K=3 fitted",), "hyperball", 3, (102, 103), "tiny"),
    ],
    # Half of the steps, to see whether the sign is the same.
    "gpt_124m_sign": [
        grid((BASE, OURS), [BEST_RATE], "gpt_124m", steps=350),
        grid((BASE, OURS), [("decay", 0.3, (0.02,))], "gpt_124m", steps=350),
        grid((BASE, OURS), [BEST_RATE], "gpt_124m", (102,), 350),
    ],
    "gpt_124m": [
        grid(
            (BASE, OURS),
            [("hyperball", 0.0, (0.03,)), ("decay", 0.3, (0.02,))],
            size="gpt_124m",
        ),
        grid(
            PAPER[1:],
            [("hyperball", 0.0, (0.02, 0.03)), ("decay", 0.3, (0.02, 0.03))],
            size="gpt_124m",
        ),
        grid(("adamw",), ADAM_TREATMENTS, size="gpt_124m"),
    ],
    "moe_16x2": [
        grid(
            (BASE, OURS),
            [("hyperball", 0.0, (0.02, 0.03)), ("decay", 0.3, (0.02, 0.03))],
            size="moe_16x2",
        )
    ],
    # These runs show whether the best learning rate depends on the width. Width 512 is
    # LLaMA-60M itself, which the other plans run.
    "widths": [
        grid(
            (OURS,),
            [
                ("hyperball", 0.0, (0.015, 0.03, 0.06)),
                ("decay", 0.1, (0.015, 0.03, 0.06)),
            ],
            size=size,
        )
        for size in ("llama_w128", "llama_w256", "llama_60m", "llama_w1024")
    ],
    "tiny": [
        grid(
            (BASE, OURS, "adamw", "muon_eq K=5"),
            [("decay", 0.1, (0.02, 0.03)), ("cautious", 0.3, (0.02,))],
            size="tiny",
        ),
        grid((BASE, OURS, "adamw"), [HYPERBALL], size="tiny"),
        repeats((BASE, OURS), "decay", 2, (102,), size="tiny"),
        shorter(OURS, "decay", 2, (9,), (101,), size="tiny"),
        grid(VARIANTS, [BEST_RATE], size="tiny"),
    ],
}


def wanted(plan: str, results: Results) -> Iterable[Cell]:
    """Cells of a plan without a result, in order."""
    cells = dict.fromkeys(cell for stage in PLANS[plan] for cell in stage(results))
    return [cell for cell in cells if cell not in results]
