"""A LLaMA decoder in Flax NNX: RMSNorm, rotary positions, SwiGLU, untied head.

Arrays carry their axes in their names: B batch, L length, D model width, H heads,
K width of one head, F feed-forward width, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from examples.models.config import ModelConfig

# The usual deviation for embedding and head. Matrices inside the blocks go by their
# width, 1 / sqrt(fan_in), which is near 0.02 at 2,500 but far above it in small models.
OUTER_STD = 0.02


def _linear(
    fan_in: int,
    fan_out: int,
    dtype: DTypeLike,
    rngs: nnx.Rngs,
    *,
    gain: float = 1.0,
) -> nnx.Linear:
    std = gain / fan_in**0.5
    return nnx.Linear(
        fan_in,
        fan_out,
        use_bias=False,
        dtype=dtype,
        param_dtype=jnp.float32,
        kernel_init=nnx.initializers.normal(std),
        rngs=rngs,
    )


def _norm(width: int, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        width, epsilon=1e-5, dtype=dtype, param_dtype=jnp.float32, rngs=rngs
    )


def _out_gain(config: ModelConfig) -> float:
    """Keeps the residual stream's size at the start the same at any depth."""
    return (2 * config.layers) ** -0.5


def rotary(x_BxLxHxK: jax.Array, theta: float) -> jax.Array:
    """Rotate the two halves of each head by an angle proportional to the position."""
    length, half = x_BxLxHxK.shape[1], x_BxLxHxK.shape[-1] // 2
    frequency_K = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_LxK = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency_K[None, :]
    cos_1xLx1xK = jnp.cos(angle_LxK)[None, :, None, :]
    sin_1xLx1xK = jnp.sin(angle_LxK)[None, :, None, :]
    # Angles grow with the position, so the rotation stays in float32.
    a, b = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate(
        [a * cos_1xLx1xK - b * sin_1xLx1xK, a * sin_1xLx1xK + b * cos_1xLx1xK], axis=-1
    )
    return rotated.astype(x_BxLxHxK.dtype)


class Attention(nnx.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        dim, dtype = config.dim, jnp.dtype(config.dtype)
        self.heads = config.heads
        self.theta = config.rope_theta
        self.query = _linear(dim, dim, dtype, rngs)
        self.key = _linear(dim, dim, dtype, rngs)
        self.value = _linear(dim, dim, dtype, rngs)
        self.out = _linear(dim, dim, dtype, rngs, gain=_out_gain(config))

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        batch, length, dim = x_BxLxD.shape
        split = (batch, length, self.heads, dim // self.heads)
        q_BxLxHxK = rotary(self.query(x_BxLxD).reshape(split), self.theta)
        k_BxLxHxK = rotary(self.key(x_BxLxD).reshape(split), self.theta)
        v_BxLxHxK = self.value(x_BxLxD).reshape(split)
        o_BxLxHxK = jax.nn.dot_product_attention(
            q_BxLxHxK, k_BxLxHxK, v_BxLxHxK, is_causal=True
        )
        return self.out(o_BxLxHxK.reshape(batch, length, dim))


class FeedForward(nnx.Module):
    """SwiGLU: a gated feed-forward with three matrices."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.gate = _linear(config.dim, config.hidden, dtype, rngs)
        self.up = _linear(config.dim, config.hidden, dtype, rngs)
        self.down = _linear(
            config.hidden, config.dim, dtype, rngs, gain=_out_gain(config)
        )

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        h_BxLxF = nnx.silu(self.gate(x_BxLxD)) * self.up(x_BxLxD)
        return self.down(h_BxLxF)


class Block(nnx.Module):
    """Pre-norm residual block: attention, then feed-forward."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.attention_norm = _norm(config.dim, dtype, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = _norm(config.dim, dtype, rngs)
        self.mlp = FeedForward(config, rngs)

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        x_BxLxD = x_BxLxD + self.attention(self.attention_norm(x_BxLxD))
        return x_BxLxD + self.mlp(self.mlp_norm(x_BxLxD))


class Llama(nnx.Module):
    """Token ids (B, L) to float32 logits (B, L, V)."""

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.embed = nnx.Embed(
            vocab_size,
            config.dim,
            dtype=dtype,
            param_dtype=jnp.float32,
            embedding_init=nnx.initializers.normal(OUTER_STD),
            rngs=rngs,
        )
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.final_norm = _norm(config.dim, dtype, rngs)
        head_gain = OUTER_STD * config.dim**0.5
        self.lm_head = _linear(config.dim, vocab_size, dtype, rngs, gain=head_gain)

    def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
        x_BxLxD = self.embed(tokens_BxL)
        for block in self.blocks:
            x_BxLxD = block(x_BxLxD)
        logits_BxLxV = self.lm_head(self.final_norm(x_BxLxD))
        return logits_BxLxV.astype(jnp.float32)


def parameter_count(config: ModelConfig, vocab_size: int) -> int:
    """Parameters of `Llama` by formula, without building it."""
    attention = 4 * config.dim**2
    feed_forward = 3 * config.dim * config.hidden
    norms = 2 * config.dim
    outer = 2 * vocab_size * config.dim + config.dim
    return config.layers * (attention + feed_forward + norms) + outer
