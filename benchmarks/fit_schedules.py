"""Fits schedules, among them the named one "muon2", to spectra of training runs.

``python -m benchmarks.fit_schedules`` reads what ``benchmarks.evidence.spectra`` wrote,
prints the tables (the registry holds those of "muon2"), and compares them with the
published schedules and with fits to parts of the spectra. Takes a minute on a CPU.
"""

import argparse
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

# Before NumPy is there: its products here are small, and threads make them wait.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

import muon2_optax as m2
from benchmarks import record
from benchmarks.evidence import spectra
from muon2_optax.schedules.coefficients import Triple

FITS = record.RESULTS / "fitted_schedules.json"
STEPS = (2, 3, 4, 5)
# The number of steps at which parts of the spectra are fitted alone.
PARTED = 3
# Whose spectra each schedule is made for.
ARMS = {"muon2": ("muon2", "muon2_f"), "muon": ("muon",)}
PUBLISHED = ("keller", "polar_express", "you5")
# As many digits as spectra of two seeds agree to.
DIGITS = 4

Entry = dict[str, Any]
Table = tuple[Triple, ...]


def scalar_map(table: Sequence[Triple], s: np.ndarray) -> np.ndarray:
    for a, b, c in table:
        s = s * (a + s * s * (b + s * s * c))
    return s


def cosine(table: Sequence[Triple], quantiles: np.ndarray) -> float:
    """To the polar factor, mean over matrices: the paper's equation 9."""
    y = scalar_map(table, quantiles)
    return float(np.mean(y.mean(axis=1) / np.sqrt((y**2).mean(axis=1))))


def fit(quantiles: np.ndarray, steps: int) -> Table:
    table = m2.fit_coefficients(quantiles, steps)
    return tuple(
        (round(a, DIGITS), round(b, DIGITS), round(c, DIGITS)) for a, b, c in table
    )


def schatten_norms(entries: list[Entry], quantiles: np.ndarray) -> np.ndarray:
    """Estimates of the Schatten 4-norms of matrices whose Frobenius norms are 1.

    Quantiles stand for all singular values but the largest, which has the rest of the
    squares. Divided by these norms, spectra are fitted for ``Schatten()``.
    """
    squares = quantiles.astype(float) ** 2
    counts = np.array([min(e["shape"]) for e in entries])
    rest = np.maximum(1 - counts * squares.mean(axis=1), 0)
    return (counts * (squares**2).mean(axis=1) + rest**2) ** 0.25


def published(name: str, steps: int) -> Table:
    return m2.SCHEDULES[name].rows(steps)


def compare(
    name: str, steps: int, entries: list[Entry], quantiles: np.ndarray
) -> dict[str, Any]:
    """The fit to all spectra of a kind, beside published ones and fits to parts."""

    def rows(keep: Callable[[Entry], bool]) -> np.ndarray:
        return quantiles[[keep(e) for e in entries]]

    table = fit(quantiles, steps)
    found = {
        "schedule": name,
        "ns_steps": steps,
        "table": table,
        "cosine": cosine(table, quantiles),
        "lowest_cosine": min(cosine(table, row[None]) for row in quantiles),
        "published": {p: cosine(published(p, steps), quantiles) for p in PUBLISHED},
    }
    # A schedule fitted to some of the spectra is also scored on the rest. That shows
    # how far a fit depends on the size, the optimizer or the stage of training.
    parts = {}
    for key in ("size", "arm", "step") if steps == PARTED else ():
        for value in dict.fromkeys(e[key] for e in entries):
            part = rows(lambda e, key=key, value=value: e[key] == value)
            rest = rows(lambda e, key=key, value=value: e[key] != value)
            if len(rest):
                own = fit(part, steps)
                parts[f"{key} {value}"] = {
                    "table": own,
                    "cosine_of_all": cosine(table, part),
                    "cosine_of_own": cosine(own, part),
                    "cosine_elsewhere": cosine(own, rest),
                }
    return {**found, "parts": parts}


def of_kind(
    name: str, entries: list[Entry], quantiles: np.ndarray
) -> tuple[list[Entry], np.ndarray]:
    """The spectra of the arms that a schedule is made for; zero matrices left out."""
    keep = [
        e["arm"].split()[0] in ARMS[name] and q[-1] > 0
        for e, q in zip(entries, quantiles)
    ]
    return [e for e, k in zip(entries, keep) if k], quantiles[keep]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spectra", type=pathlib.Path, default=spectra.SPECTRA)
    parser.add_argument("--out", type=pathlib.Path, default=FITS)
    args = parser.parse_args()
    loaded = spectra.load(args.spectra)
    fits = []
    for name in ARMS:
        entries, quantiles = of_kind(name, *loaded)
        for steps in STEPS:
            fits.append(compare(name, steps, entries, quantiles))
            shown = {k: fits[-1][k] for k in ("cosine", "lowest_cosine", "published")}
            print(name, steps, fits[-1]["table"], shown, flush=True)
    args.out.write_text(json.dumps(fits, indent=1) + "\n")


if __name__ == "__main__":
    main()
