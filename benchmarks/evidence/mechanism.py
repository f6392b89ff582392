"""The paper's mechanism on our own spectra: ranks, dead zones, cosine similarity."""

import pathlib
from typing import Any, NamedTuple

import numpy as np

from benchmarks.evidence import spectra
from benchmarks.fit_schedules import cosine
from muon2_optax import SCHEDULES
from muon2_optax.diagnostics import convergence_zones

ARMS = {"Muon": "muon K=5", "Muon²": "muon2 K=3", "Muon²-F": "muon2_f K=3"}
PHASES = {"early": 0, "middle": 1, "late": 2}
ITERATIONS = (1, 2, 3, 4, 5)


class Phase(NamedTuple):
    """Means over the matrices of one size, optimizer and time.

    Attributes:
      quantiles: of normalized singular values, geometric mean over matrices.
      median: singular value in the middle of them.
      rank: effective rank, as a share of the full one.
      dead: share of singular values that Keller's five steps leave below 0.7.
      cosine: to the polar factor, by schedule and number of steps.
    """

    quantiles: np.ndarray
    median: float
    rank: float
    dead: float
    cosine: dict[tuple[str, int], float]


def effective_rank(quantiles: np.ndarray) -> float:
    """exp of the entropy of the values' shares of their sum, over their number."""
    share = quantiles / quantiles.sum(axis=1, keepdims=True)
    entropy = -np.sum(share * np.log(np.maximum(share, 1e-30)), axis=1)
    return float(np.mean(np.exp(entropy)) / quantiles.shape[1])


def phases(
    size: str = "llama_60m", path: pathlib.Path = spectra.SPECTRA
) -> dict[tuple[str, str], Phase]:
    """By name of the optimizer and of the time in training."""
    entries, quantiles = spectra.load(path)
    steps = sorted({e["step"] for e in entries if e["size"] == size})
    border = float(convergence_zones("keller", 5).dead)
    found = {}
    for name, arm in ARMS.items():
        for phase, index in PHASES.items():
            rows = quantiles[
                [_is(e, size=size, arm=arm, step=steps[index]) for e in entries]
            ]
            rows = np.maximum(rows[rows[:, -1] > 0], 1e-8)
            found[name, phase] = Phase(
                quantiles=np.exp(np.mean(np.log(rows), axis=0)),
                median=float(np.exp(np.mean(np.log(np.median(rows, axis=1))))),
                rank=effective_rank(rows),
                dead=float(np.mean(rows < border)),
                cosine=_cosines(rows),
            )
    return found


def _cosines(rows: np.ndarray) -> dict[tuple[str, int], float]:
    found = {
        ("keller", k): cosine(SCHEDULES["keller"].rows(k), rows) for k in ITERATIONS
    }
    for k in SCHEDULES["muon2"].tables:
        found["muon2", k] = cosine(SCHEDULES["muon2"].rows(k), rows)
    return found


def _is(entry: dict[str, Any], **wanted: Any) -> bool:
    return all(entry[key] == value for key, value in wanted.items())
