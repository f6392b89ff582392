"""A GPT-2 decoder in Flax NNX: LayerNorm, learned positions, GELU, tied head."""

import jax
import jax.numpy as jnp
from flax import nnx

from examples.flags import UserError
from examples.mesh import BATCH, constrain
from examples.models import layers
from examples.models.attention import Attention
from examples.models.config import ModelConfig
from examples.models.layers import Linear


class FeedForward(nnx.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        dim, hidden, dtype = config.dim, config.hidden, jnp.dtype(config.dtype)
        gain = layers.out_gain(config)
        self.up = Linear(dim, hidden, dtype, rngs, bias=True)
        self.down = Linear(hidden, dim, dtype, rngs, gain=gain, bias=True, split="in")

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        h_BxLxF = layers.gelu(self.up(x_BxLxD))
        return self.down(constrain(h_BxLxF, BATCH, None, "tensor"))


class Block(nnx.Module):
    """Pre-norm residual block: attention, then feed-forward."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = layers.LayerNorm(config)
        self.attention = Attention(config, rngs, bias=True)
        self.mlp_norm = layers.LayerNorm(config)
        self.mlp = FeedForward(config, rngs)

    def __call__(self, x_BxLxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_BxLxD = x_BxLxD + self.attention(self.attention_norm(x_BxLxD), None)
        x_BxLxD = x_BxLxD + self.mlp(self.mlp_norm(x_BxLxD))
        return x_BxLxD, jnp.zeros((), jnp.float32)


class Gpt(layers.Decoder):
    """Token ids (B, L) to float32 logits (B, L, V); L is at most `seq_len`."""

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = layers.Embedding(vocab_size, config, rngs)
        shape = (config.seq_len, config.dim)
        init = nnx.initializers.normal(layers.OUTER_STD)
        self.position_table = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.blocks = layers.make_blocks(config, lambda rngs: Block(config, rngs), rngs)
        self.final_norm = layers.LayerNorm(config)

    def features(self, tokens_BxL: jax.Array) -> tuple[jax.Array, jax.Array]:
        length = tokens_BxL.shape[1]
        if length > self.config.seq_len:
            raise UserError(
                f"{length} tokens exceed the {self.config.seq_len} learned positions "
                "of this model (--seq-len)"
            )
        position_LxD = self.position_table[...][:length].astype(self.config.dtype)
        x_BxLxD = self.embed(tokens_BxL) + position_LxD[None]
        x_BxLxD, aux = layers.run_blocks(self.config, self.blocks, x_BxLxD)
        return constrain(self.final_norm(x_BxLxD), BATCH, None, None), aux

    def head(self) -> jax.Array:
        return self.embed.embedding[...].T
