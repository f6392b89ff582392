"""The first steps of a run, with the GPU kernels or without, and what they iterate.

``python -m benchmarks.evidence.first_steps --size gpt_124m --tokens FOLDER`` trains
arms for a part of a run whose schedule is that of the whole, and looks once at what
enters Newton-Schulz: how steep the spectra are, how near the result comes to the polar
factor, and how near it is to the same steps in float64. So it tells whether an arm is
behind because of its spectra or because of the arithmetic on the device.
"""

import argparse
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import muon2_optax as m2
from benchmarks import record
from benchmarks.evidence import data, run, sizes, training
from benchmarks.evidence.arms import ARMS, Arm, watched_updates
from benchmarks.evidence.cells import Cell
from benchmarks.fit_schedules import scalar_map
from muon2_optax.kernels import hopper
from muon2_optax.schedules import plans

RESULTS = record.RESULTS / "first_steps.jsonl"


def compare(x: np.ndarray, result: np.ndarray, arm: Arm) -> dict[str, float]:
    """What one matrix says.

    Returns:
      ``largest``, ``median``: of the singular values of x over its Frobenius norm;
      ``cosine``: of the result to the polar factor; ``error``: of the result against
      the same steps in float64, relative, in the Frobenius norm.
    """
    u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    s = s / np.linalg.norm(s)
    plan = plans.resolve(arm.ns_coeffs, arm.ns_steps)
    want, size = (u * scalar_map(plan.triples, s)) @ vt, np.linalg.norm(result)
    return {
        "largest": float(s[0]),
        "median": float(np.median(s)),
        "cosine": float(np.sum(result * (u @ vt)) / size / np.sqrt(len(s))),
        "error": float(np.linalg.norm(result - want) / np.linalg.norm(want)),
    }


def look_at(
    arm: Arm, rules: m2.MatrixRules, blocks: tuple[int, ...], found: dict[str, Any]
) -> Any:
    """A ``look`` for ``training.Trainer.run`` that compares the matrices of blocks."""
    transform = m2.newton_schulz_orthogonalize(arm.ns_steps, arm.ns_coeffs, rules=rules)

    def look(step: int, state: Any) -> None:
        del step
        inputs = watched_updates(state)
        outputs = jax.jit(lambda x: transform.update(x, transform.init(x))[0])(inputs)
        pairs = zip(
            jax.tree_util.tree_leaves_with_path(inputs), jax.tree.leaves(outputs)
        )
        for (path, x), y in pairs:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if any(f"blocks/{block}/" in name for block in blocks):
                found[name] = compare(np.asarray(x), np.asarray(y, np.float64), arm)

    return look


def line(
    cell: Cell, found: Mapping[str, Any], environment: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """What is kept of a run: no final loss, because its schedule goes on."""
    kept = {key: found[key] for key in ("curve", "steps_run")}
    row = run.line(cell, more | kept, environment)
    return row | {"benchmark": "first_steps"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=pathlib.Path, required=True)
    parser.add_argument("--size", default="gpt_124m")
    parser.add_argument("--arms", default="muon2_f K=3 fitted,muon K=5")
    parser.add_argument("--rate", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=101)
    parser.add_argument("--steps", type=int, default=350, help="of the schedule")
    parser.add_argument("--stop", type=int, default=132, help="steps that are run")
    parser.add_argument("--look", type=int, default=88, help="step of the comparison")
    parser.add_argument("--blocks", type=int, nargs="*", default=(0, 10, 11))
    parser.add_argument("--kernels", choices=("on", "off"), nargs="+", default=["on"])
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded where git is not there")
    args = parser.parse_args()
    size, environment = sizes.SIZES[args.size], record.environment(args.commit)
    tokens = data.load(args.tokens / size.tokenizer)
    for switch in args.kernels:
        with hopper.kernels(None if switch == "on" else False):
            trainer = training.Trainer(size, tokens)
            for name in args.arms.split(","):
                cell = Cell(
                    args.size,
                    name,
                    "hyperball",
                    args.rate,
                    seed=args.seed,
                    steps=args.steps,
                )
                matrices: dict[str, Any] = {}
                look = look_at(ARMS[name], trainer.rules, args.blocks, matrices)
                found = trainer.run(cell, look, [args.look], stop=args.stop)
                more = {"kernels": switch == "on", "matrices": matrices}
                row = line(cell, found, environment, **more)
                record.write(args.out, [row])
                print(json.dumps(row), flush=True)
            trainer.close()


if __name__ == "__main__":
    main()
