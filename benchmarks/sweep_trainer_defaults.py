"""Learning-rate sweep behind the defaults of `examples.pretrain`.

    python -m benchmarks.sweep_trainer_defaults OUTPUT.jsonl

Every optimizer gets the same grid: its own centre times the same factors, with the same
seed. AdamW goes first; its best rate is then also the rate of the AdamW branch of the
Muon family. Everything else is the trainer's default. Where the best rate lies at the
end of a grid, add a factor there for all optimizers: records that OUTPUT already has
are not computed again.
"""

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from examples.files import read_metrics
from examples.pretrain import main

CENTRES = {"adamw": 0.004, "muon2_f_h": 0.03}
CENTRES |= {"muon": 0.04, "muon2": 0.04, "muon2_f": 0.04}
FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
SEED = 0
FILE = "metrics.jsonl"

Records = list[dict[str, Any]]


def train_once(name: str, rate: float, adam_rate: float | None) -> dict[str, Any]:
    """One default-size run of the trainer; a run that diverged has no loss."""
    with tempfile.TemporaryDirectory() as folder:
        argv = ["--out", folder, "--optimizer", name, "--learning-rate", str(rate)]
        argv += ["--seed", str(SEED), "--eval-every", "1000000"]
        if adam_rate is not None:
            argv += ["--adam-learning-rate", str(adam_rate)]
        code = main(argv)
        if code not in (0, 1):
            sys.exit(f"the trainer ended with exit code {code}")
        last = {record["kind"]: record for record in read_metrics(Path(folder, FILE))}
    run = last["run"]
    outcome = last["result"] if code == 0 else {"val_loss": None, **last["stopped"]}
    return outcome | {
        "optimizer": name,
        "learning_rate": rate,
        "adam_learning_rate": adam_rate,
        "seed": SEED,
        "steps": run["config"]["run"]["steps"],
        "parameters": run["parameters"],
        "text_hash": run["text"]["digest"],
        **run["environment"],
    }


def best_rate(records: Records, name: str) -> float:
    """Print the losses of one optimizer and return the rate of the lowest."""
    own = [record for record in records if record["optimizer"] == name]
    for record in sorted(own, key=lambda record: record["learning_rate"]):
        print(f"{name:>8} {record['learning_rate']:<8g} {record['val_loss']}")

    def loss(record: dict[str, Any]) -> float:
        return math.inf if record["val_loss"] is None else record["val_loss"]

    return min(own, key=loss)["learning_rate"]


def sweep(target: Path) -> None:
    """Run what is missing of the grid; records are appended as they come."""
    records = read_metrics(target) if target.exists() else []
    adam_rate = None
    for name, centre in CENTRES.items():
        for rate in (centre * factor for factor in FACTORS):
            key = (name, rate, adam_rate)
            if any(
                key == (r["optimizer"], r["learning_rate"], r["adam_learning_rate"])
                for r in records
            ):
                continue
            records.append(train_once(*key))
            if len({record["text_hash"] for record in records}) > 1:
                sys.exit("the text has changed: start again with a new OUTPUT")
            with target.open("a", encoding="utf-8") as file:
                file.write(json.dumps(records[-1]) + "\n")
        best = best_rate(records, name)
        if name == "adamw":
            adam_rate = best


if __name__ == "__main__":
    sweep(Path(sys.argv[1]))
