"""The memory table of arXiv:2604.09967 beside what our step takes."""

from collections.abc import Callable
from typing import Any

from examples.config import ModelConfig

GIB = 2**30

# From its table "Memory comparison": one H100, 16 bits, one sequence of 4096 tokens.
PAPER = {
    "llama_1b": {"adamw": 20.39, "muon": 18.56, "muon2": 20.36, "muon2_f": 18.57},
    "llama_7b": {"adamw": 59.31, "muon": 47.29, "muon2": 60.66, "muon2_f": 47.53},
}

NOTES = """
All numbers are GiB (read as GB, the paper's differences fit no number of weights), with
weights, states and products in 16 bits; "left over" is the paper's number less weights
and states.
* 7B: between optimizers the paper's differences are those of the states. AdamW less
  Muon is 12.02 there and 12.06 in states here, Muon2 less Muon 13.37 (1.31 above what a
  second moment takes), Muon2-F less Muon 0.24 (rows and columns take less than 0.01).
  So it kept no float32 copies: those of the weights alone would add 25.
* 7B: 21.7 are left over for AdamW and for Muon alike, less than the gradients and the
  activations without recomputation together: PyTorch frees activations as gradients
  come, while our scanned program makes room for all gradients at the start. That is
  ours, 6 to 8 above the paper, for every optimizer: what the optimizers themselves take
  for a moment fits into what the activations leave.
* 1B: about 13 are left over, more than our temporaries: our norms and activation
  functions keep their inputs alone, and the head keeps no logits. AdamW less Muon is
  1.83 in the paper and 2.25 in states; no layout that it describes explains this.
* A run of this trainer keeps float32 weights, moments and gradients: plan it without
  --paper-table. Muon2's second moment is float32 even for 16-bit weights.
"""


def show(measure: Callable[[ModelConfig, str], dict[str, Any]]) -> None:
    """One line per model and optimizer: GiB of the paper, ours, and ours by kind."""
    heads = ("paper", "ours", "weights", "states", "gradients", "temp", "left over")
    print(f"{'':<20}", *(f"{head:>9}" for head in heads))
    for name, numbers in PAPER.items():
        # Scanned, since that compiles in a minute.
        model = ModelConfig(model=name, seq_len=4096, scan_layers=True)
        for optimizer, paper in numbers.items():
            row = measure(model, optimizer)
            weights = row["bytes"]["parameters"]
            states = sum(row["bytes"].values()) - weights
            columns = (
                *(paper, row["total_bytes"] / GIB, weights / GIB, states / GIB),
                *(row["gradient_bytes"] / GIB, row["temporary_bytes"] / GIB),
                paper - (weights + states) / GIB,
            )
            print(
                f"{name:<10}{optimizer:<10}",
                *(f"{column:>9.2f}" for column in columns),
                flush=True,
            )
    print(NOTES)
