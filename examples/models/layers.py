"""What the decoders are made of: linear maps, norms, activations, the embedding.

Arrays carry their axes in their names: B batch, L length, D model width,
F feed-forward width, V vocabulary, N layers.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from examples.config import ModelConfig
from examples.mesh import BATCH, constrain

# The usual deviation for embedding and head. Matrices inside the blocks go by their
# width, 1 / sqrt(fan_in), which is near 0.02 at 2,500 but far above it in small models.
OUTER_STD = 0.02


class Linear(nnx.Module):
    """x W (+ b); float32 parameters, a product in the compute dtype.

    On a mesh the weights are gathered after rounding, which halves the traffic. `split`
    says whether the `tensor` axis divides the inputs or the outputs.
    """

    def __init__(
        self,
        fan_in: int,
        fan_out: int,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        *,
        gain: float = 1.0,
        bias: bool = False,
        split: Literal["in", "out"] = "out",
    ):
        self.split = split
        init = nnx.initializers.normal(gain / fan_in**0.5)
        self.kernel = nnx.Param(init(rngs.params(), (fan_in, fan_out), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(fan_out, jnp.float32)) if bias else None
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        axes = (None, "tensor") if self.split == "out" else ("tensor", None)
        y = x @ constrain(self.kernel[...].astype(self.dtype), *axes)
        if self.bias is None:
            return y
        bias = self.bias[...].astype(self.dtype)
        return y + jnp.broadcast_to(bias, y.shape)


# Recomputed in the backward pass, like the activations below: their intermediate
# values, several times as wide as what goes in, would be most of what a step keeps.
@jax.checkpoint
def normalize(
    x_BxLxD: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None
) -> jax.Array:
    """RMSNorm, or LayerNorm where there is a bias; in float32."""
    y_BxLxD = x_BxLxD.astype(jnp.float32)
    if bias_D is not None:
        y_BxLxD -= y_BxLxD.mean(axis=-1, keepdims=True)
    square_BxLx1 = jnp.square(y_BxLxD).mean(axis=-1, keepdims=True)
    y_BxLxD *= jax.lax.rsqrt(square_BxLx1 + 1e-5) * scale_D[None, None]
    if bias_D is not None:
        y_BxLxD += bias_D[None, None]
    return y_BxLxD.astype(x_BxLxD.dtype)


class Norm(nnx.Module):
    """RMSNorm (LLaMA), or LayerNorm, which has a bias (GPT)."""

    def __init__(self, config: ModelConfig):
        self.scale = nnx.Param(jnp.ones(config.dim, jnp.float32))
        bias = nnx.Param(jnp.zeros(config.dim, jnp.float32))
        self.bias = bias if config.architecture == "gpt" else None

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        bias_D = None if self.bias is None else self.bias[...]
        return normalize(x_BxLxD, self.scale[...], bias_D)


@jax.checkpoint
def swiglu(gate_BxLxF: jax.Array, up_BxLxF: jax.Array) -> jax.Array:
    return nnx.silu(gate_BxLxF) * up_BxLxF


@jax.checkpoint
def gelu(x: jax.Array) -> jax.Array:
    return nnx.gelu(x, approximate=True)


class Embedding(nnx.Module):
    """Rows of a table by token, in the compute dtype.

    The rows are taken in float32 and rounded afterwards, so that the derivative adds up
    in float32: more exact, and many times faster on GPUs than adding in 16 bits.
    """

    def __init__(self, vocab_size: int, config: ModelConfig, rngs: nnx.Rngs):
        init = nnx.initializers.normal(OUTER_STD)
        shape = (vocab_size, config.dim)
        self.embedding = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.dtype = jnp.dtype(config.dtype)

    def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
        x_BxLxD = jnp.take(self.embedding[...], tokens_BxL, axis=0)
        return constrain(x_BxLxD, BATCH, None, None).astype(self.dtype)


def out_gain(config: ModelConfig) -> float:
    """Keeps the residual stream's size at the start the same at any depth."""
    return (2 * config.layers) ** -0.5


class FeedForward(nnx.Module):
    """Two matrices with a GELU between them and biases (GPT), or SwiGLU (LLaMA)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        dim, hidden, dtype = config.dim, config.hidden, jnp.dtype(config.dtype)
        bias, gain = config.architecture == "gpt", out_gain(config)
        self.gate = None if bias else Linear(dim, hidden, dtype, rngs)
        self.up = Linear(dim, hidden, dtype, rngs, bias=bias)
        self.down = Linear(hidden, dim, dtype, rngs, gain=gain, bias=bias, split="in")

    def __call__(self, x_BxLxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The result, and a loss of its own: none."""
        up_BxLxF = self.up(x_BxLxD)
        if self.gate is None:
            h_BxLxF = gelu(up_BxLxF)
        else:
            h_BxLxF = swiglu(self.gate(x_BxLxD), up_BxLxF)
        y_BxLxD = self.down(constrain(h_BxLxF, BATCH, None, "tensor"))
        return y_BxLxD, jnp.zeros((), jnp.float32)
