"""What the decoders have in common: linear maps, norms, the head, stacks of blocks.

Arrays carry their axes in their names: B batch, L length, D model width,
F feed-forward width, V vocabulary, N layers.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from examples.mesh import BATCH, constrain
from examples.models import loss
from examples.models.config import ModelConfig

# The usual deviation for embedding and head. Matrices inside the blocks go by their
# width, 1 / sqrt(fan_in), which is near 0.02 at 2,500 but far above it in small models.
OUTER_STD = 0.02

# A block takes activations and a context, and gives activations and a loss of its own.
Block = Callable[..., tuple[jax.Array, jax.Array]]


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


class RmsNorm(nnx.Module):
    """Divides by the root of the mean square, and scales."""

    def __init__(self, config: ModelConfig):
        self.scale = nnx.Param(jnp.ones(config.dim, jnp.float32))

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        return normalize(x_BxLxD, self.scale[...], None)


class LayerNorm(nnx.Module):
    """Subtracts the mean, divides by the deviation, scales and shifts."""

    def __init__(self, config: ModelConfig):
        self.scale = nnx.Param(jnp.ones(config.dim, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(config.dim, jnp.float32))

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        return normalize(x_BxLxD, self.scale[...], self.bias[...])


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


class Decoder(nnx.Module):
    """What every decoder offers on top of `features` and `head`."""

    config: ModelConfig

    def features(self, tokens_BxL: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the head sees (B, L, D), and the weighted loss of the blocks."""
        raise NotImplementedError

    def head(self) -> jax.Array:
        """The matrix (D, V) that makes logits of features, in float32."""
        raise NotImplementedError

    def logits(self, x_BxLxD: jax.Array) -> jax.Array:
        """Float32 logits (B, L, V) of features."""
        w_DxV = self.head()
        w_DxW = loss.padded(w_DxV.astype(x_BxLxD.dtype))
        return loss.product(x_BxLxD, w_DxW)[..., : w_DxV.shape[1]]

    def loss(
        self,
        x_BxLxD: jax.Array,
        targets_BxL: jax.Array,
        *,
        z_weight: float = 0.0,
        chunks: int = 1,
    ) -> tuple[jax.Array, jax.Array]:
        """Mean cross entropy of features with the z-loss, and without it.

        Computed `chunks` parts of the positions one after the other; see `head_loss`.
        """
        return loss.head_loss(x_BxLxD, self.head(), targets_BxL, z_weight, chunks)

    def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
        return self.logits(self.features(tokens_BxL)[0])


def make_blocks(
    config: ModelConfig, make: Callable[[nnx.Rngs], Any], rngs: nnx.Rngs
) -> Any:
    """One block per layer: a list, or one block whose parameters are (N, ...).

    Both hold the same numbers for the same key.
    """
    keys = jax.random.split(rngs.params(), config.layers)
    abstract = nnx.eval_shape(lambda key: make(nnx.Rngs(key)), keys[0])
    graphdef, _ = nnx.split(abstract, nnx.Param)
    # One program makes all layers in a loop: random numbers for each layer take long to
    # compile, and also a stack of them where XLA moves the slices below into it.
    stacked = jax.lax.map(lambda key: nnx.state(make(nnx.Rngs(key)), nnx.Param), keys)
    if config.scan_layers:
        return nnx.merge(graphdef, stacked)
    layers = (jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(config.layers))
    return nnx.List([nnx.merge(graphdef, layer) for layer in layers])


def _checkpointed(config: ModelConfig, function: Block) -> Block:
    if config.remat == "none":
        return function
    policies = jax.checkpoint_policies
    policy = {
        "dots": policies.dots_with_no_batch_dims_saveable,
        "full": policies.nothing_saveable,
    }[config.remat]
    # Under a scan nothing can be merged across the boundary, so no barrier is needed.
    return jax.checkpoint(function, policy=policy, prevent_cse=not config.scan_layers)


def run_blocks(
    config: ModelConfig, blocks: Any, x_BxLxD: jax.Array, *context: Any
) -> tuple[jax.Array, jax.Array]:
    """The activations after all blocks, and the sum of the blocks' own losses."""

    def apply(block: Any, x_BxLxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        graphdef, params = block
        x_BxLxD = constrain(x_BxLxD, BATCH, None, None)
        return nnx.merge(graphdef, params)(x_BxLxD, *context)

    if config.scan_layers:
        graphdef, stacked = nnx.split(blocks, nnx.Param)
        step = _checkpointed(config, lambda p, x: apply((graphdef, p), x))
        x_BxLxD, aux_N = jax.lax.scan(lambda x, p: step(p, x), x_BxLxD, stacked)
        return x_BxLxD, aux_N.sum()
    total = jnp.zeros((), jnp.float32)
    for block in blocks:
        graphdef, params = nnx.split(block, nnx.Param)
        step = _checkpointed(config, lambda p, x, g=graphdef: apply((g, p), x))
        x_BxLxD, aux = step(params, x_BxLxD)
        total = total + aux
    return x_BxLxD, total
