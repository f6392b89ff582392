"""What enters Newton-Schulz while models train, kept as quantiles.

``python -m benchmarks.evidence.spectra --tokens FOLDER`` trains two sizes with Muon,
Muon^2 and Muon^2-F and looks at every matrix early, in the middle and late.
``benchmarks.fit_schedules`` makes schedules of what it writes.
"""

import argparse
import concurrent.futures
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import record
from benchmarks.evidence import arms, data, sizes
from benchmarks.evidence.cells import Cell

SPECTRA = record.RESULTS / "spectra.npz"
QUANTILES = 128
MOMENTS = {"momentum": "muon", "second": "muon2", "factored": "muon2_f"}


def quantiles(matrix: np.ndarray) -> np.ndarray:
    """Of the singular values over the matrix's Frobenius norm, ascending, float16.

    Zeros for a zero matrix. Their mean square is only about one over their number: it
    is one of quantiles, not of the values.
    """
    s = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    norm = np.linalg.norm(s)
    s = np.sort(s / norm if norm else s)
    middle = (np.arange(QUANTILES) + 0.5) / QUANTILES
    places = (np.arange(s.size) + 0.5) / s.size
    return np.interp(middle, places, s).astype(np.float16)


class Collector:
    """Takes what a training shows, and computes spectra on the host meanwhile."""

    def __init__(self, threads: int = 8):
        self._pool = concurrent.futures.ThreadPoolExecutor(threads)
        self._found: list[tuple[dict[str, Any], Any]] = []

    def of(self, cell: Cell) -> Any:
        """A ``look`` for ``training.Trainer.run``."""

        def look(step: int, state: Any) -> None:
            updates = arms.watched_updates(state)
            leaves = jax.tree_util.tree_leaves_with_path(updates)
            # Before the next step donates them.
            for path, leaf in jax.device_get(leaves):
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                for i, matrix in enumerate(leaf.reshape(-1, *leaf.shape[-2:])):
                    entry = {
                        "size": cell.size,
                        "arm": cell.arm,
                        "control": cell.treatment,
                        "rate": cell.rate,
                        "step": step,
                        "matrix": name if leaf.ndim == 2 else f"{name}[{i}]",
                        "shape": matrix.shape,
                    }
                    self._found.append((entry, self._pool.submit(quantiles, matrix)))

        return look

    def save(self, path: pathlib.Path, environment: dict[str, Any]) -> None:
        """Entries as JSON beside an array (entries, QUANTILES)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            path,
            quantiles=np.stack([future.result() for _, future in self._found]),
            entries=json.dumps([entry for entry, _ in self._found]),
            environment=json.dumps(environment),
        )


def load(path: pathlib.Path = SPECTRA) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Entries and their quantiles, float64."""
    with np.load(path) as file:
        return json.loads(str(file["entries"])), file["quantiles"].astype(np.float64)


def looks(steps: int) -> Sequence[int]:
    """Early (the end of the warm-up), in the middle, late."""
    return [max(1, round(steps * share)) for share in (0.05, 0.5, 0.95)]


def main() -> None:
    from benchmarks.evidence import run, training

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=pathlib.Path, required=True)
    parser.add_argument("--sizes", default="llama_60m,llama_20m")
    parser.add_argument("--arms", default="muon2_f K=3,muon2 K=3,muon K=5")
    parser.add_argument("--control", default="none")
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=101)
    parser.add_argument("--out", type=pathlib.Path, default=SPECTRA)
    parser.add_argument("--results", type=pathlib.Path, default=run.RESULTS)
    parser.add_argument("--commit", help="recorded where git is not there")
    args = parser.parse_args()
    environment, collector = record.environment(args.commit), Collector()
    for name in args.sizes.split(","):
        size = sizes.SIZES[name]
        trainer = training.Trainer(size, data.load(args.tokens / size.tokenizer))
        for arm in args.arms.split(","):
            trainer.prepare(arm, args.control, watched=True)
        for arm in args.arms.split(","):
            cell = Cell(name, arm, args.control, args.rate, seed=args.seed)
            found = trainer.run(cell, collector.of(cell), looks(size.steps))
            run.append(args.results, run.line(cell, found, environment))
            print(cell, found["loss"], found["wall_s"], flush=True)
    collector.save(args.out, environment)


if __name__ == "__main__":
    main()
