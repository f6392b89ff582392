"""Which runs the study wants, the most telling first: lists of stages."""

from collections.abc import Iterable

from benchmarks.evidence.cells import Cell
from benchmarks.evidence.stages import (
    Results,
    Stage,
    extended,
    grid,
    repeats,
    shorter,
)

HYPERBALL = ("hyperball", 0.0, (0.03, 0.02, 0.045))
DECAY_1 = ("decay", 0.1, (0.02, 0.03))
DECAY_3 = ("decay", 0.3, (0.02, 0.03))
FASTER_1, FASTER_3 = ("decay", 0.1, (0.045,)), ("decay", 0.3, (0.045,))
DECAY_6 = ("decay", 0.6, (0.02, 0.03))
CAUTIOUS = ("cautious", 0.3, (0.02, 0.03))
NONE = ("none", 0.0, (0.02,))
TREATMENTS = (HYPERBALL, DECAY_1, DECAY_3, CAUTIOUS, NONE)
ADAM_TREATMENTS = (
    ("decay", 0.1, (2e-3, 4e-3, 1e-3, 5e-4)),
    ("hyperball", 0.0, (1e-2, 5e-3, 2e-2)),
)

BASE, OURS = "muon K=5", "muon2_f K=3 fitted"
# OURS with as many Newton-Schulz steps as BASE.
FIVE = "muon2_f K=5 fitted"
# With OURS a ladder: the same orthogonalization of different inputs.
FAMILY = ("muon2 K=3 fitted", "muon_eq K=3 fitted", "muon K=3 fitted")


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
# Where the second moment acts, with Muon's direction elsewhere.
PARTS = ("muon2_f attention", "muon2_f mlp in", "muon2_f mlp out")
PAPER = (
    "muon K=5",
    "polar_express K=5",
    "turbo K=4",
    "normuon K=5",
    "adamuon K=5",
    "muon2 K=3",
    "muon2_f K=3",
)
BEST_RATE = ("hyperball", 0.0, (0.03,))
LOWER_RATE = ("hyperball", 0.0, (0.015,))

# What might have made OURS better, and rivals with the same addition.
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
    "muon2_f b2=.9",
    "muon2_f eps=1e-6",
    "polar_express K=5",
    "muon K=5 ahead",
)

PLANS: dict[str, list[Stage]] = {
    # The runs of the plans below whose absence left the most open.
    "gaps": [
        grid((BASE, OURS), [FASTER_3, FASTER_1]),
        grid((FIVE,), [BEST_RATE], seeds=(101, 102, 103)),
        grid(("adamw",), [("decay", 0.1, (1e-3, 5e-4))]),
        grid((BASE, OURS), [BEST_RATE], "moe_16x2"),
        grid(("muon_eq K=3 fitted",), [BEST_RATE], seeds=(101, 102, 103)),
        grid(("muon2_f K=3", "muon2_f plain", "muon2_f K=4 fitted"), [BEST_RATE]),
    ],
    # What questions remain once the recipe has five steps: its rates, the matrices that
    # profit, and whether K=3 is enough for a GPT that is trained for longer.
    "five": [
        grid((FIVE,), [("hyperball", 0.0, (0.02, 0.045))]),
        grid(PARTS, [BEST_RATE]),
        grid((BASE, FIVE), [("hyperball", 0.0, (0.045,))], "gpt_124m", steps=350),
        grid((BASE, FIVE, OURS), [BEST_RATE], "gpt_124m"),
        grid((FIVE,), [BEST_RATE], "moe_16x2", (101, 102, 103)),
        grid((BASE, OURS), [BEST_RATE], "moe_16x2", (102, 103)),
        grid(("muon2_f K=5",), [BEST_RATE]),
    ],
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
    "variants": [
        grid(VARIANTS, [BEST_RATE]),
        grid(("normuon K=5",), [BEST_RATE], seeds=(102, 103)),
        grid(("muon2_f K=5 fitted",), [BEST_RATE], seeds=(102, 103)),
        # One trial is no fair trial for arms that are as good as OURS.
        grid(("normuon K=5", "muon2_f K=5 fitted"), [HYPERBALL]),
    ],
    # Half of the steps, to see whether the sign is the same. At the rate that is best
    # for LLaMA it is not, with three steps; with five it is.
    "gpt_124m_sign": [
        grid((BASE, OURS), [BEST_RATE], "gpt_124m", (101, 102), 350),
        grid((FIVE,), [BEST_RATE], "gpt_124m", steps=350),
        grid((BASE, FIVE, OURS), [LOWER_RATE], "gpt_124m", steps=350),
        repeats((BASE, FIVE), "hyperball", 2, (102, 103), "gpt_124m", 350),
        grid(("muon2 K=3 fitted", "normuon K=5"), [LOWER_RATE], "gpt_124m", steps=350),
        repeats((OURS,), "hyperball", 2, (102, 103), "gpt_124m", 350),
        grid((BASE, FIVE, OURS), [("decay", 0.3, (0.02,))], "gpt_124m", steps=350),
    ],
    # At GPT-124M the recipe had its lowest loss with the highest rate that was tried,
    # so a higher one may be better.
    "gpt_124m_rates": [
        grid((BASE, FIVE), [("hyperball", 0.0, (0.07,))], "gpt_124m", steps=350),
        repeats((BASE, FIVE), "hyperball", 4, (102, 103), "gpt_124m", 350),
        grid((BASE, FIVE), [BEST_RATE], "gpt_124m", (102, 103)),
        grid((FIVE,), [("decay", 0.3, (0.03, 0.02))], "gpt_124m", steps=350),
    ],
    # The paper's comparison, each method at the best of two rates and two controls.
    "gpt_124m": [
        grid(PAPER, [treatment], "gpt_124m", steps=350)
        for treatment in (
            BEST_RATE,
            ("decay", 0.3, (0.03,)),
            ("decay", 0.3, (0.02,)),
            ("hyperball", 0.0, (0.045,)),
        )
    ]
    + [grid(("adamw",), ADAM_TREATMENTS[:1], "gpt_124m", steps=350)],
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
    ],
}


def wanted(plan: str, results: Results) -> Iterable[Cell]:
    """Cells of a plan without a result, in order."""
    cells = dict.fromkeys(cell for stage in PLANS[plan] for cell in stage(results))
    return [cell for cell in cells if cell not in results]
