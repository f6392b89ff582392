"""What the Muon^2 paper (arXiv:2604.09967) claims, and how our lines judge it."""

from benchmarks.evidence.claims import (
    BEST,
    GPT,
    GPT_NOISE,
    MOE,
    PLAIN,
    Claim,
    cell,
    change,
    steps_to,
)
from benchmarks.evidence.plan import BASE, OURS

LOWER = ("hyperball", 0.015)


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
        change(cell("muon2_f K=3", *BEST), cell("muon2_f K=5", *BEST)),
        "Muon²-F, Keller, hyperball, rate 0.03",
    ),
    Claim(
        "GPT: Muon² with K=3 beats Muon with K=5",
        "−4.7 % (GPT-Small, 28.12 against 29.51)",
        -4.7,
        change(cell("muon2 K=3 fitted", *LOWER, **GPT), cell(BASE, *LOWER, **GPT)),
        "K=3 fitted, hyperball, rate 0.015, 350 steps",
        GPT_NOISE,
    ),
    Claim(
        "PolarExpress, Turbo-Muon, NorMuon and AdaMuon with K=5 stay behind Muon² K=3",
        "+1.0 to +5.5 % (GPT-Small)",
        None,
        change(
            cell("muon2 K=3", *BEST, **GPT), cell("polar_express K=5", *BEST, **GPT)
        ),
        "against PolarExpress, the best of the four here; Keller, hyperball, rate 0.03",
        GPT_NOISE,
    ),
    Claim(
        "MoE: Muon² with K=3 beats Muon with K=5",
        "−7.2 %",
        -7.2,
        change(cell(OURS, *BEST, size=MOE), cell(BASE, *BEST, size=MOE)),
        "Muon²-F, K=3 fitted, hyperball, rate 0.03",
    ),
]
