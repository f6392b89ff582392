"""Model architectures, one module each, and what the trainer asks of all of them.

A model takes tokens (B, L) to float32 logits (B, L, V). `model.features(tokens)` gives
the last activations and the weighted load-balancing loss (zero without experts), and
`model.logits(features)` the rest, so that a loss may go through positions in chunks.
"""

import importlib
from typing import TYPE_CHECKING, Any

from examples.models.config import ModelConfig
from examples.models.sizes import (
    active_parameter_count,
    flops_per_token,
    parameter_count,
)

if TYPE_CHECKING:
    from flax import nnx

    import muon2_optax as m2

__all__ = [
    "ModelConfig",
    "active_parameter_count",
    "build",
    "flops_per_token",
    "matrix_rules",
    "parameter_count",
]

_CLASSES = {"gpt": "Gpt", "llama": "Llama", "moe": "Moe"}


def build(config: ModelConfig, vocab_size: int, *, rngs: "nnx.Rngs") -> Any:
    """The model of a configuration, with fresh parameters."""
    # Imported late: the command line takes its options from here and needs no JAX.
    module = importlib.import_module(f"examples.models.{config.architecture}")
    return getattr(module, _CLASSES[config.architecture])(config, vocab_size, rngs=rngs)


def matrix_rules(config: ModelConfig) -> "m2.MatrixRules":
    """Which parameters the Muon family trains: every (..., in, out) of a block.

    Axes in front, of layers that are scanned or of experts, stack matrices. Embeddings,
    head, norms, biases and routers stay with AdamW.
    """
    import muon2_optax as m2

    axes = m2.MatrixAxes(-2, -1)
    rules = ((r"norm|bias|router", None), (r"blocks/.*kernel$", axes))
    if config.architecture == "moe":
        rules += ((r"experts/(up|down)$", axes),)
    return m2.MatrixRules(rules, strict=True)
