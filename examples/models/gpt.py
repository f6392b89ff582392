"""A GPT-2 decoder in Flax NNX: LayerNorm, learned positions, GELU, tied head."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.config import ModelConfig
from examples.mesh import BATCH, constrain
from examples.models import layers
from examples.models.decoder import Block, Decoder, make_blocks
from examples.models.layers import Linear
from examples.options import check


class FeedForward(nnx.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        dim, hidden, dtype = config.dim, config.hidden, jnp.dtype(config.dtype)
        gain = layers.out_gain(config)
        self.up = Linear(dim, hidden, dtype, rngs, bias=True)
        self.down = Linear(hidden, dim, dtype, rngs, gain=gain, bias=True, split="in")

    def __call__(self, x_BxLxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        h_BxLxF = layers.gelu(self.up(x_BxLxD))
        y_BxLxD = self.down(constrain(h_BxLxF, BATCH, None, "tensor"))
        return y_BxLxD, jnp.zeros((), jnp.float32)


class Gpt(Decoder):
    """Token ids (B, L) to float32 logits (B, L, V); L is at most `seq_len`."""

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = layers.Embedding(vocab_size, config, rngs)
        shape = (config.seq_len, config.dim)
        init = nnx.initializers.normal(layers.OUTER_STD)
        self.position_table = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.blocks = make_blocks(
            config, lambda rngs: Block(config, FeedForward, rngs, bias=True), rngs
        )
        self.final_norm = layers.Norm(config, bias=True)

    def embedded(self, tokens_BxL: jax.Array, position: Any) -> jax.Array:
        length, longest = tokens_BxL.shape[1], self.config.seq_len
        said = f"{length} tokens exceed the {longest} learned positions of this model"
        check(length <= longest, f"{said} (--seq-len)")
        position_LxD = jax.lax.dynamic_slice_in_dim(
            self.position_table[...], position, length
        )
        return self.embed(tokens_BxL) + position_LxD.astype(self.config.dtype)[None]

    def head(self) -> jax.Array:
        return self.embed.embedding[...].T
