"""The decoders, and what the trainer asks of them."""

from typing import Any, NamedTuple

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


class Sizes(NamedTuple):
    """Of a model; FLOPs are those of a training step, for MFU.

    They are the products of the forward pass and twice that for the backward pass; of
    attention the half that a causal mask leaves. Recomputation, lookups and elementwise
    work are left out.
    """

    parameters: int
    active: int  # that one token passes through; all, but for an MoE
    flops_per_token: float


def sizes(config: ModelConfig, params: Any) -> Sizes:
    """Counted from the parameters, or from their shapes."""
    total = active = multiplied = 0.0
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        expert = "/experts/" in name
        used = leaf.size * (config.active_experts / config.experts if expert else 1)
        total, active = total + leaf.size, active + used
        tied_head = name == "embed/embedding" and "lm_head" not in params
        if expert or tied_head or name.endswith("/kernel"):
            multiplied += used if "router" not in name else leaf.size
    attention = config.layers * 2 * config.seq_len * config.dim
    return Sizes(int(total), int(active), 3.0 * (2 * multiplied + attention))
