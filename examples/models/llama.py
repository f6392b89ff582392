"""A LLaMA decoder in Flax NNX: RMSNorm, rotary positions, SwiGLU, untied head."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.mesh import BATCH, constrain
from examples.models import layers
from examples.models.attention import Attention, Rotation, rotation
from examples.models.config import ModelConfig
from examples.models.layers import Linear


class FeedForward(nnx.Module):
    """SwiGLU: a gated feed-forward with three matrices."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        dim, hidden, dtype = config.dim, config.hidden, jnp.dtype(config.dtype)
        self.gate = Linear(dim, hidden, dtype, rngs)
        self.up = Linear(dim, hidden, dtype, rngs)
        gain = layers.out_gain(config)
        self.down = Linear(hidden, dim, dtype, rngs, gain=gain, split="in")

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        h_BxLxF = layers.swiglu(self.gate(x_BxLxD), self.up(x_BxLxD))
        return self.down(constrain(h_BxLxF, BATCH, None, "tensor"))


class Block(nnx.Module):
    """Pre-norm residual block: attention, then feed-forward."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = layers.RmsNorm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = layers.RmsNorm(config)
        self.mlp = FeedForward(config, rngs)

    def __call__(
        self, x_BxLxD: jax.Array, rotation: Rotation
    ) -> tuple[jax.Array, jax.Array]:
        x_BxLxD = x_BxLxD + self.attention(self.attention_norm(x_BxLxD), rotation)
        x_BxLxD = x_BxLxD + self.mlp(self.mlp_norm(x_BxLxD))
        return x_BxLxD, jnp.zeros((), jnp.float32)


class Llama(layers.Decoder):
    """Token ids (B, L) to float32 logits (B, L, V)."""

    make_block: Any = Block  # a decoder of other blocks names them here

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = layers.Embedding(vocab_size, config, rngs)
        self.blocks = layers.make_blocks(
            config, lambda rngs: type(self).make_block(config, rngs), rngs
        )
        self.final_norm = layers.RmsNorm(config)
        gain = layers.OUTER_STD * config.dim**0.5
        dtype = jnp.dtype(config.dtype)
        self.lm_head = Linear(config.dim, vocab_size, dtype, rngs, gain=gain)

    def features(self, tokens_BxL: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        angles = rotation(
            tokens_BxL.shape[1], config.dim // config.heads, config.rope_theta
        )
        x_BxLxD = self.embed(tokens_BxL)
        x_BxLxD, aux = layers.run_blocks(config, self.blocks, x_BxLxD, angles)
        return constrain(self.final_norm(x_BxLxD), BATCH, None, None), aux

    def head(self) -> jax.Array:
        return self.lm_head.kernel[...]
