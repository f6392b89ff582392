"""The tables of the results page, as Markdown."""

import collections
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import fit_schedules, record
from benchmarks.evidence import claims, mechanism
from benchmarks.evidence.cells import Cell, perplexity_order
from benchmarks.evidence.plan import BASE, OURS
from benchmarks.evidence.stages import FIRST_SEED
from benchmarks.evidence.stats import Interval, as_percent, by_seed, paired

SIZE = claims.SIZE
ARMS = (BASE, "muon K=3 fitted", "muon_eq K=3 fitted", "muon2 K=3 fitted", OURS)
# Where variants are tried: the best treatment and rate of the main arms.
TRIED = claims.BEST

Results = Mapping[Cell, Mapping[str, Any]]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def number(x: float, digits: int = 1) -> str:
    """With a typographic minus, and none before a zero."""
    return f"{round(x, digits) + 0.0:.{digits}f}".replace("-", "−")


def shown(found: Interval | None) -> str:
    """A change in per cent, with its interval where there is one."""
    if found is None:
        return "–"
    text = f"{number(found.mean)} %"
    if found.low is None or found.high is None:
        return f"{text}, n=1"
    low, high = (_bound(x) for x in (found.low, found.high))
    return f"{text} [{low}, {high}], n={found.n}"


def _bound(x: float) -> str:
    """With two decimals where one would show 0, which the interval may not hold."""
    return number(x) if abs(x) >= 0.05 else number(x, 2)


def perplexity(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    return "diverged" if row["loss"] is None else f"{math.exp(row['loss']):.2f}"


def claim_table(results: Results, chosen: Sequence[claims.Claim]) -> str:
    rows = []
    for claim in chosen:
        found = claim.measure(results)
        word = claims.verdict(claim, found)
        rows.append([claim.text, claim.source, shown(found), f"**{word}**", claim.how])
    return table(["claim", "claimed", "here", "verdict", "compared"], rows)


def searched(results: Results) -> list[str]:
    """Arms with several cells of the main size and first seed, the main ones first."""
    cells = [c for c in results if (c.size, c.seed, c.steps) == (SIZE, FIRST_SEED, 0)]
    counts = collections.Counter(c.arm for c in cells)
    several = [arm for arm in sorted(counts) if counts[arm] > 1]
    return [*ARMS, *(arm for arm in several if arm not in ARMS)]


def grid_table(results: Results) -> str:
    """Perplexities of the first seed by treatment and rate, the best of a row bold."""
    arms = searched(results)
    first = {
        c: r
        for c, r in results.items()
        if (c.size, c.seed, c.steps) == (SIZE, FIRST_SEED, 0) and c.arm in arms
    }
    places = sorted({(c.control, c.decay, c.rate) for c in first})
    rows = []
    for control, decay, rate in places:
        cells = [Cell(SIZE, arm, control, rate, decay) for arm in arms]
        losses = [first[c]["loss"] or math.inf for c in cells if c in first]
        texts = [perplexity(first.get(c)) for c in cells]
        texts = [
            f"**{t}**" if c in first and first[c]["loss"] == min(losses) else t
            for c, t in zip(cells, texts)
        ]
        rows.append([cells[0].treatment, f"{rate:g}", *texts])
    return table(["weights", "rate", *arms], rows)


def arm_table(results: Results, size: str, steps: int) -> str:
    """Perplexities of the first seed, an arm a row; the best of a column bold."""
    cells = [
        c for c in results if (c.size, c.steps, c.seed) == (size, steps, FIRST_SEED)
    ]
    columns = collections.defaultdict(list)
    for c in cells:
        columns[c.control, c.decay, c.rate].append(c)
    bests = [
        min(columns[place], key=lambda c: perplexity_order(results, c))
        for place in sorted(columns)
    ]

    def text(cell: Cell, best: Cell) -> str:
        mark = "**" if cell == best else ""
        return f"{mark}{perplexity(results.get(cell))}{mark}"

    rows = [
        [arm, *(text(dataclasses.replace(best, arm=arm), best) for best in bests)]
        for arm in sorted({c.arm for c in cells})
    ]
    return table(["arm", *(f"{c.treatment}, {c.rate:g}" for c in bests)], rows)


def seed_table(results: Results) -> str:
    """Every cell that has several seeds."""
    rows = []
    for cell in sorted(results):
        losses = by_seed(results, cell)
        if cell.seed != FIRST_SEED or len(losses) < 2:
            continue
        values = [f"{seed}: {math.exp(losses[seed]):.2f}" for seed in sorted(losses)]
        length = str(cell.steps or claims.STEPS)
        place = [cell.treatment, f"{cell.rate:g}", length]
        rows.append([cell.size, cell.arm, *place, ", ".join(values)])
    head = ["model", "arm", "weights", "rate", "steps", "perplexity by seed"]
    return table(head, rows)


def pair_table(results: Results) -> str:
    """The arms of the grid against the baseline at the same rate and treatment."""
    rows = []
    for cell in sorted(
        results, key=lambda c: (c.size, c.control, c.decay, c.rate, c.arm)
    ):
        other = Cell(**{**vars(cell), "arm": BASE})
        alone = (cell.size, cell.treatment, cell.rate) == (SIZE, *TRIED)
        if cell.seed != FIRST_SEED or cell.arm == BASE:
            continue
        found = as_percent(paired(results, cell, other))
        if found is None or (alone and cell.arm not in searched(results)):
            continue
        place = [str(cell.steps or claims.STEPS), cell.treatment, f"{cell.rate:g}"]
        rows.append([cell.size, *place, cell.arm, shown(found)])
    head = ["model", "steps", "weights", "rate", "arm", f"against {BASE}"]
    return table(head, rows)


def trial_table(results: Results) -> str:
    """Arms that were tried in the best cell alone, against both main arms there."""
    control, rate = TRIED
    base, ours = (Cell(SIZE, arm, control, rate) for arm in (BASE, OURS))
    tried = [
        c
        for c in results
        if (c.size, c.treatment, c.rate, c.seed, c.steps)
        == (SIZE, control, rate, FIRST_SEED, 0)
        and c.arm not in searched(results)
    ]
    rows = [
        [
            c.arm,
            perplexity(results[c]),
            *(shown(as_percent(paired(results, c, main))) for main in (ours, base)),
        ]
        for c in sorted(tried, key=lambda c: perplexity_order(results, c))
    ]
    head = ["arm", "perplexity, seed 101", f"against {OURS}", f"against {BASE}"]
    return table(head, rows)


def mechanism_table(phases: Mapping[tuple[str, str], mechanism.Phase]) -> str:
    columns = [("keller", 3), ("muon2", 3), ("keller", 5), ("muon2", 5)]
    rows = [
        [
            name,
            when,
            f"{phase.median:.4f}",
            f"{100 * phase.rank:.0f} %",
            f"{100 * phase.dead:.0f} %",
            *(f"{phase.cosine[column]:.3f}" for column in columns),
        ]
        for (name, when), phase in phases.items()
    ]
    heads = ("Keller K=3", "fitted K=3", "Keller K=5", "fitted K=5")
    cosines = [f"cosine, {head}" for head in heads]
    head = ["input of", "when", "median", "effective rank", "dead zone", *cosines]
    return table(head, rows)


def first_steps_table(path: pathlib.Path = record.RESULTS / "first_steps.jsonl") -> str:
    """The short runs of GPT-124M: the loss, and what Newton-Schulz made of them."""
    rows = []
    for row in map(json.loads, path.read_text().splitlines()):
        looked = row.get("matrices", {}).values()
        found = [[m[key] for m in looked] for key in ("median", "cosine", "error")]
        texts = [f"{sum(x) / len(x):.4f}" if x else "" for x in found]
        step, loss = row["curve"][-1][:2]
        where = "kernels" if row["kernels"] else "stock XLA"
        rows.append([row["arm"], f"{row['rate']:g}", where, f"{loss:.3f}", *texts])
    head = ["arm", "rate", "products", f"loss after {step} steps"]
    return table(head + ["median", "cosine", "error"], sorted(rows, key=lambda r: r[3]))


def schedule_table(path: pathlib.Path = fit_schedules.FITS) -> str:
    rows = []
    for fit in json.loads(path.read_text()):
        published = fit["published"]
        rows.append(
            [
                fit["schedule"],
                str(fit["ns_steps"]),
                f"{fit['cosine']:.4f}",
                *(f"{published[name]:.4f}" for name in fit_schedules.PUBLISHED),
            ]
        )
    return table(["spectra", "K", "fitted", *fit_schedules.PUBLISHED], rows)


def transfer(path: pathlib.Path = fit_schedules.FITS) -> str:
    """The most that a fit to a part loses on the whole of another part."""
    lost = [
        part["cosine_of_own"] - part["cosine_of_all"]
        for fit in json.loads(path.read_text())
        if fit["schedule"] == "muon2"
        for part in fit["parts"].values()
    ]
    return f"{max(lost):.3f}"
