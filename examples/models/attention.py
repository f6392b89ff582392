"""Causal self-attention: rotary positions, and kernels by device and length.

Arrays carry their axes in their names: B batch, L length, D model width, H heads,
K width of one head; C is one chunk of queries, N their number.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from examples.config import ModelConfig
from examples.mesh import BATCH, constrain
from examples.models.layers import Linear, out_gain
from examples.options import check

Rotation = tuple[jax.Array, jax.Array]
_QUERIES = 512


class Cache(NamedTuple):
    """Keys and values (B, seq_len, H, K) of the tokens so far."""

    keys: jax.Array
    values: jax.Array


def rotation(position: Any, length: int, width: int, theta: float) -> Rotation:
    """Cosines and sines (1, L, 1, K / 2) of each position's angles, in float32."""
    half = width // 2
    frequency_K = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    position_L = position + jnp.arange(length, dtype=jnp.float32)
    angle_LxK = position_L[:, None] * frequency_K[None, :]
    angle_1xLx1xK = angle_LxK[None, :, None, :]
    return jnp.cos(angle_1xLx1xK), jnp.sin(angle_1xLx1xK)


def rotate(x_BxLxHxK: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate the two halves of each head by an angle proportional to the position.

    In float32, since angles grow with the position; between a load and a store of 16
    bits, which is where the compiler leaves it.
    """
    cos_1xLx1xK, sin_1xLx1xK = rotation
    a, b = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate(
        [a * cos_1xLx1xK - b * sin_1xLx1xK, a * sin_1xLx1xK + b * cos_1xLx1xK], axis=-1
    )
    return rotated.astype(x_BxLxHxK.dtype)


def _kernel(config: ModelConfig) -> Literal["xla", "cudnn"]:
    """The attention kernel for `--attention`; cuDNN has limits that XLA has not."""
    width = config.dim // config.heads
    gpu = jax.default_backend() == "gpu" and config.dtype == "bfloat16"
    if config.attention != "auto":
        said = "--attention cudnn needs a GPU and --dtype bfloat16; auto chooses"
        check(gpu or config.attention == "xla", said)
        return config.attention
    return "cudnn" if gpu and width <= 128 and width % 8 == 0 else "xla"


def attention(
    config: ModelConfig,
    q_BxLxHxK: jax.Array,
    k_BxLxHxK: jax.Array,
    v_BxLxHxK: jax.Array,
) -> jax.Array:
    """Causal attention by the kernel of `--attention`.

    XLA's takes more than twice `_QUERIES` queries in chunks, whose scores are computed
    once more in the backward pass instead of being kept.
    """
    (batch, length, *width), kernel = q_BxLxHxK.shape, _kernel(config)
    if kernel == "cudnn" or length <= 2 * _QUERIES or length % _QUERIES:
        return jax.nn.dot_product_attention(
            q_BxLxHxK, k_BxLxHxK, v_BxLxHxK, is_causal=True, implementation=kernel
        )

    @jax.checkpoint
    def chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        cache = Cache(k_BxLxHxK, v_BxLxHxK)
        return _attend(part[0], cache, part[1])

    chunks = q_BxLxHxK.reshape(batch, -1, _QUERIES, *width).swapaxes(0, 1)
    firsts_N = jnp.arange(0, length, _QUERIES)
    o_NxBxCxHxK = jax.lax.map(chunk, (chunks, firsts_N))
    return o_NxBxCxHxK.swapaxes(0, 1).reshape(q_BxLxHxK.shape)


def _attend(q_BxLxHxK: jax.Array, cache: Cache, position: Any) -> jax.Array:
    """Attention of tokens from `position` on to all that is there up to each."""
    row_L = position + jnp.arange(q_BxLxHxK.shape[1])
    mask_LxS = row_L[:, None] >= jnp.arange(cache.keys.shape[1])[None, :]
    return jax.nn.dot_product_attention(
        q_BxLxHxK, *cache, mask=mask_LxS[None, None], implementation="xla"
    )


class Attention(nnx.Module):
    """Causal multi-head self-attention; with biases (GPT) or rotary positions."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config, bias = config, config.architecture == "gpt"
        size = config.dim, config.dim, jnp.dtype(config.dtype), rngs
        self.query = Linear(*size, bias=bias)
        self.key = Linear(*size, bias=bias)
        self.value = Linear(*size, bias=bias)
        self.out = Linear(*size, gain=out_gain(config), bias=bias, split="in")

    def __call__(
        self, x_BxLxD: jax.Array, position: Any, cache: Cache | None
    ) -> tuple[jax.Array, Cache | None]:
        """The tokens stand at `position` and what follows."""
        (batch, length, dim), config = x_BxLxD.shape, self.config
        heads = config.heads

        def split(y_BxLxD: jax.Array) -> jax.Array:
            y_BxLxHxK = y_BxLxD.reshape(batch, length, heads, dim // heads)
            return constrain(y_BxLxHxK, BATCH, None, "tensor", None)

        maps = (self.query, self.key, self.value)
        q_BxLxHxK, k_BxLxHxK, v_BxLxHxK = (split(m(x_BxLxD)) for m in maps)
        if config.architecture != "gpt":
            angles = rotation(position, length, dim // heads, config.rope_theta)
            q_BxLxHxK, k_BxLxHxK = rotate(q_BxLxHxK, angles), rotate(k_BxLxHxK, angles)
        if cache is None:
            o_BxLxHxK = attention(config, q_BxLxHxK, k_BxLxHxK, v_BxLxHxK)
        else:
            new = zip(cache, (k_BxLxHxK, v_BxLxHxK))
            at = (0, position, 0, 0)
            cache = Cache(*(jax.lax.dynamic_update_slice(x, y, at) for x, y in new))
            o_BxLxHxK = _attend(q_BxLxHxK, cache, position)
        return self.out(o_BxLxHxK.reshape(batch, length, dim)), cache
