"""A LLaMA decoder in Flax NNX: RMSNorm, rotary positions, SwiGLU, untied head."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.config import ModelConfig
from examples.mesh import BATCH, constrain
from examples.models import layers
from examples.models.attention import Place, rotation
from examples.models.decoder import Block, Decoder, make_blocks
from examples.models.layers import Linear


class FeedForward(nnx.Module):
    """SwiGLU: a gated feed-forward with three matrices."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        dim, hidden, dtype = config.dim, config.hidden, jnp.dtype(config.dtype)
        self.gate = Linear(dim, hidden, dtype, rngs)
        self.up = Linear(dim, hidden, dtype, rngs)
        gain = layers.out_gain(config)
        self.down = Linear(hidden, dim, dtype, rngs, gain=gain, split="in")

    def __call__(self, x_BxLxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        h_BxLxF = layers.swiglu(self.gate(x_BxLxD), self.up(x_BxLxD))
        y_BxLxD = self.down(constrain(h_BxLxF, BATCH, None, "tensor"))
        return y_BxLxD, jnp.zeros((), jnp.float32)


class Llama(Decoder):
    """Token ids (B, L) to float32 logits (B, L, V)."""

    feed_forward: Any = FeedForward  # a decoder of other blocks names its own here

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = layers.Embedding(vocab_size, config, rngs)
        mlp = type(self).feed_forward
        self.blocks = make_blocks(
            config, lambda rngs: Block(config, mlp, rngs, bias=False), rngs
        )
        self.final_norm = layers.Norm(config, bias=False)
        gain = layers.OUTER_STD * config.dim**0.5
        dtype = jnp.dtype(config.dtype)
        self.lm_head = Linear(config.dim, vocab_size, dtype, rngs, gain=gain)

    def embedded(self, tokens_BxL: jax.Array, position: Any) -> jax.Array:
        del position  # the blocks rotate by it
        return self.embed(tokens_BxL)

    def place(self, length: int, position: Any) -> Place:
        config = self.config
        width = config.dim // config.heads
        return Place(position, rotation(position, length, width, config.rope_theta))

    def head(self) -> jax.Array:
        return self.lm_head.kernel[...]
