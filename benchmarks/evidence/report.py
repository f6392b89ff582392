"""Writes docs/results.md and its figures from the lines of the study.

``python -m benchmarks.evidence.report`` needs no device.
"""

import argparse
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from benchmarks.evidence import claims, figures, mechanism, run, tables
from benchmarks.evidence.cells import Cell
from benchmarks.evidence.plan import BASE, OURS
from benchmarks.evidence.stages import best
from benchmarks.evidence.stats import by_seed, paired
from benchmarks.evidence.tables import shown

DOCS = pathlib.Path(__file__).parents[2] / "docs"
TEMPLATE = pathlib.Path(__file__).with_name("results_template.md")
SIZE = claims.SIZE

Results = Mapping[Cell, Mapping[str, Any]]


def mean_perplexity(results: Results, arm: str, control: str) -> str:
    """Of the best cell, over its seeds."""
    cell = best(results, arm, control, SIZE)
    if cell is None:
        return "–"
    losses = by_seed(results, cell).values()
    return f"{math.exp(sum(losses) / len(losses)):.2f}"


def summary(results: Results) -> str:
    """The main numbers in sentences, from the same functions as the tables."""
    measured = {claim.text: claim.measure(results) for claim in claims.OWN}
    ppl = {
        (arm, control): mean_perplexity(results, arm, control)
        for arm in (BASE, OURS, "muon K=3 fitted", "muon_eq K=3 fitted")
        for control in ("none", "decay", "hyperball")
    }

    def three(arm: str) -> str:
        none, decay, ball = (ppl[arm, c] for c in ("none", "decay", "hyperball"))
        return (
            f"{none} without decay, {decay} with tuned decay, {ball} on the hyperball"
        )

    ball, steps = measured[claims.ON_BALL], measured[claims.FEWER]
    gpt, normuon = measured[claims.GPT_SIGN], measured[claims.ON_NORMUON]
    rest = claims.at_fewer_steps(results)
    base, ours = (ppl[arm, "hyperball"] for arm in (BASE, OURS))
    lines = [
        "**LLaMA-60M: Muon²-F with K=3 and the fitted schedule beats Muon with K=5,"
        f" both on the hyperball:** perplexity {ours} against {base}. Change"
        f" {shown(ball)}: real, and less than the 3 % that was the goal.",
        f"**GPT-124M: it loses, by far:** {shown(gpt)}, with half the steps and one"
        " rate tried. The cause is not known yet (below). Until it is, Muon with K=5 on"
        " the hyperball is the choice for a GPT.",
        "**NorMuon with K=5 cannot be told from it at LLaMA-60M:** Muon²-F K=3 against"
        f" it {shown(normuon)}.",
        "**Weights that nothing holds cost most;** between tuned decay and the"
        " hyperball the choice matters less than the direction. Muon K=5:"
        f" {three(BASE)}. Muon²-F K=3 fitted: {three(OURS)}.",
        f"**Steps to the final loss of Muon K=5 with tuned decay:** {shown(steps)}, not"
        f" the −25 % that was the goal. Trained for {claims.SHORT} steps instead of"
        f" {claims.STEPS}, its perplexity is still higher than that Muon's:"
        f" {shown(rest)}.",
        "**Muon alone cannot use K=3 on the hyperball:** with the fitted schedule it"
        f" has {ppl['muon K=3 fitted', 'hyperball']}, against {base} with K=5 and"
        " Keller's triple (one seed).",
        "**The stateless rival is close:** equilibrated Muon with the fitted schedule"
        f" and K=3 has {ppl['muon_eq K=3 fitted', 'hyperball']} (one seed).",
        "**No variant with K=3 reached 3 %,** SOAP before Newton–Schulz among them."
        " With K=5 the same recipe comes closest (below).",
    ]
    return "\n".join(f"- {line}" for line in lines)


def gpt_loss(results: Results) -> float:
    """Nats by which OURS is behind BASE at GPT-124M."""
    ours, base = (
        Cell("gpt_124m", arm, *tables.TRIED, steps=350) for arm in (OURS, BASE)
    )
    found = paired(results, ours, base)
    return found.mean if found else math.nan


def environment(results: Results) -> str:
    """Devices, versions and commits of the lines, and what they took."""
    rows = list(results.values())

    def names(key: str) -> str:
        return ", ".join(sorted({str(row[key]) for row in rows}))

    hours = sum(row["wall_s"] for row in rows) / 3600
    return (
        f"{len(rows)} runs, {hours:.2f} GPU hours, {names('device')}, "
        f"jax {names('jax')}, commits {names('commit')}, {names('date')}"
    )


def write(
    results: Results, out: pathlib.Path, spectra: pathlib.Path | None = None
) -> None:
    """The page and its figures, below ``out``."""
    phases = mechanism.phases(SIZE, *([spectra] if spectra else []))
    panels = ("decay 0.1", "decay 0.3", "hyperball")
    figures.rates(results, SIZE, panels, tables.ARMS, out / "figures" / "rates.svg")
    figures.mechanisms(phases, out / "figures" / "spectra.svg")
    parts = {
        "environment": environment(results),
        "summary": summary(results),
        "transfer": tables.transfer(),
        "gpt_loss": f"{gpt_loss(results):.2f}",
        "own": tables.claim_table(results, claims.OWN),
        "paper": tables.claim_table(results, claims.PAPER),
        "grid": tables.grid_table(results),
        "seeds": tables.seed_table(results),
        "pairs": tables.pair_table(results),
        "trials": tables.trial_table(results),
        "mechanism": tables.mechanism_table(phases),
        "schedules": tables.schedule_table(),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, content in parts.items():
        text = text.replace(f"{{{{{name}}}}}", content)
    (out / "results.md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, default=run.RESULTS)
    parser.add_argument("--docs", type=pathlib.Path, default=DOCS)
    args = parser.parse_args()
    write(run.read(args.results), args.docs)


if __name__ == "__main__":
    main()
