"""What this project hoped for or asked, and how our lines judge it."""

from benchmarks.evidence.claims import (
    BEST,
    GPT,
    GPT_NOISE,
    HIGHER,
    MOE,
    PLAIN,
    Claim,
    cell,
    change,
    change_of_best,
    steps_to,
)
from benchmarks.evidence.plan import BASE, FIVE, OURS

# The summary of the results page finds these claims by their text.
GPT_SIGN = "The same sign at GPT-124M"
GPT_FIVE = "The same sign at GPT-124M, both with K=5"
GPT_LONG = "GPT-124M with all 700 steps: Muon²-F with K=5 beats Muon with K=5"
GPT_LONG_THREE = "GPT-124M with all 700 steps: the same with K=3"
MOE_SIGN = "The same sign at a mixture of 16 experts"
MOE_FIVE = "The same at 16 experts, both with K=5"
ON_BALL_FIVE = "The same with K=5 in both"
ON_NORMUON = "Muon²-F with K=3 is better than NorMuon with K=5"
FIVE_ON_NORMUON = "Muon²-F with K=5 is better than NorMuon with K=5"
FIVE_ON_THREE = "Muon²-F is better with K=5 than with K=3"
ON_ADAMW = "Muon with K=5 is better than AdamW"
STATELESS = "Muon²-F is better than its stateless rival, equilibrated Muon"
SOAP = "soap_muon K=3 fitted"
ON_BALL = "The best of ours with K=3 beats the best Muon K=5, both on the hyperball"
FEWER = "25 % fewer steps than Muon K=5 with tuned decay"

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
        "fitted schedule against Keller's, each at the best of 3 rates",
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
        GPT_NOISE,
    ),
    Claim(
        GPT_FIVE,
        "no number",
        None,
        change(cell(FIVE, *BEST, **GPT), cell(BASE, *BEST, **GPT)),
        "hyperball, rate 0.03, the best of 3 of Muon, 350 steps",
        GPT_NOISE,
    ),
    Claim(
        "The same, each at the best of 3 rates",
        "no number",
        None,
        change(cell(FIVE, *HIGHER, **GPT), cell(BASE, *BEST, **GPT)),
        "hyperball, 0.045 of ours against 0.03, 350 steps",
        GPT_NOISE,
    ),
    Claim(
        GPT_LONG,
        "no number",
        None,
        change(cell(FIVE, *BEST, size="gpt_124m"), cell(BASE, *BEST, size="gpt_124m")),
        "hyperball, rate 0.03",
        GPT_NOISE,
    ),
    Claim(
        GPT_LONG_THREE,
        "no number",
        None,
        change(cell(OURS, *BEST, size="gpt_124m"), cell(BASE, *BEST, size="gpt_124m")),
        "K=3 fitted against K=5, hyperball, rate 0.03",
        GPT_NOISE,
    ),
    Claim(
        MOE_SIGN,
        "no number",
        None,
        change(cell(OURS, *BEST, size=MOE), cell(BASE, *BEST, size=MOE)),
        "K=3 fitted against K=5, hyperball, each at the better of 2 rates",
    ),
    Claim(
        MOE_FIVE,
        "no number",
        None,
        change(cell(FIVE, *BEST, size=MOE), cell(BASE, *BEST, size=MOE)),
        "hyperball, rate 0.03: one trial of ours, the better of 2 of Muon",
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
        "The same on the hyperball with K=5",
        "no number",
        None,
        change(cell(FIVE, *BEST), cell("muon2_f K=5", *BEST)),
        "rate 0.03",
    ),
    Claim(
        "The second moment is needed beyond the inputs of the MLPs",
        "no number",
        None,
        change(cell(FIVE, *BEST), cell("muon2_f mlp in", *BEST)),
        "K=5, hyperball, rate 0.03: everywhere, against there alone",
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
