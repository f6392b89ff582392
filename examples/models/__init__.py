"""The decoders, and what the trainer asks of them."""

from typing import Any

import jax
from flax import nnx

import muon2_optax as m2
from examples.config import ModelConfig
from examples.models.decoder import Decoder


def make_model(config: ModelConfig, vocab_size: int) -> tuple[Any, jax.stages.Wrapped]:
    """The model's structure, and a jitted function from a key to its parameters.

    The parameters are plain nested dictionaries: what Optax, jit and checkpoints take
    without further ado.
    """

    def make(key: jax.Array) -> nnx.Module:
        return Decoder(config, vocab_size, rngs=nnx.Rngs(key))

    abstract = nnx.eval_shape(make, jax.random.key(0))
    graphdef, _ = nnx.split(abstract, nnx.Param)

    @jax.jit
    def init(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(make(key), nnx.Param))

    return graphdef, init


def matrix_rules(config: ModelConfig) -> m2.MatrixRules:
    """Which parameters the Muon family trains: every (..., in, out) of a block.

    Axes in front, of layers that are scanned or of experts, stack matrices. Embeddings,
    head, norms, biases and routers stay with AdamW.
    """
    axes = m2.MatrixAxes(-2, -1)
    rules = ((r"norm|bias|router", None), (r"blocks/.*kernel$", axes))
    if config.architecture == "moe":
        rules += ((r"experts/(up|down)$", axes),)
    return m2.MatrixRules(rules, strict=True)


def count_parameters(config: ModelConfig, params: Any) -> tuple[int, int]:
    """All of them, and those that one token passes through: fewer in an MoE.

    `params` may be their shapes.
    """
    total = active = 0.0
    for path, leaf in jax.tree.leaves_with_path(params):
        expert = "/experts/" in jax.tree_util.keystr(path, simple=True, separator="/")
        total += leaf.size
        active += leaf.size * (config.active_experts / config.experts if expert else 1)
    return int(total), int(active)
