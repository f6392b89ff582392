"""What the decoders have in common: linear maps, norms, attention, stacks of blocks.

Arrays carry their axes in their names: B batch, L length, D model width, H heads,
K width of one head, F feed-forward width, V vocabulary; N stands for layers.
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


def rms_norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.dim,
        epsilon=1e-5,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.float32,
        rngs=rngs,
    )


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


Rotation = tuple[jax.Array, jax.Array]


def rotation(length: int, width: int, theta: float) -> Rotation:
    """Cosines and sines (1, L, 1, K / 2) of each position's angles, in float32."""
    half = width // 2
    frequency_K = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_LxK = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency_K[None, :]
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
    if config.attention != "auto":
        return config.attention
    width = config.dim // config.heads
    gpu = jax.default_backend() == "gpu" and config.dtype == "bfloat16"
    return "cudnn" if gpu and width <= 128 and width % 8 == 0 else "xla"


# Queries that XLA's attention takes at a time. More than twice as many come in chunks,
# whose scores are computed once more in the backward pass instead of being kept.
_QUERIES = 512


def attention(
    config: ModelConfig,
    q_BxLxHxK: jax.Array,
    k_BxLxHxK: jax.Array,
    v_BxLxHxK: jax.Array,
) -> jax.Array:
    """Causal attention by the kernel of `--attention`."""
    length, kernel = q_BxLxHxK.shape[1], _kernel(config)
    if kernel == "cudnn" or length <= 2 * _QUERIES or length % _QUERIES:
        return jax.nn.dot_product_attention(
            q_BxLxHxK, k_BxLxHxK, v_BxLxHxK, is_causal=True, implementation=kernel
        )

    @jax.checkpoint
    def chunk(q_BxCxHxK: jax.Array, first: jax.Array) -> jax.Array:
        row_C = first + jnp.arange(_QUERIES)
        mask_1x1xCxL = (row_C[:, None] >= jnp.arange(length)[None, :])[None, None]
        return jax.nn.dot_product_attention(
            q_BxCxHxK, k_BxLxHxK, v_BxLxHxK, mask=mask_1x1xCxL, implementation="xla"
        )

    batch, _, heads, width = q_BxLxHxK.shape
    shape = (batch, -1, _QUERIES, heads, width)
    chunks_NxBxCxHxK = q_BxLxHxK.reshape(shape).swapaxes(0, 1)
    firsts_N = jnp.arange(0, length, _QUERIES)
    o_NxBxCxHxK = jax.lax.map(lambda part: chunk(*part), (chunks_NxBxCxHxK, firsts_N))
    return o_NxBxCxHxK.swapaxes(0, 1).reshape(q_BxLxHxK.shape)


class Attention(nnx.Module):
    """Causal multi-head self-attention, with rotary positions where given."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, bias: bool = False):
        dim, dtype = config.dim, jnp.dtype(config.dtype)
        self.config = config
        self.query = Linear(dim, dim, dtype, rngs, bias=bias)
        self.key = Linear(dim, dim, dtype, rngs, bias=bias)
        self.value = Linear(dim, dim, dtype, rngs, bias=bias)
        self.out = Linear(
            dim, dim, dtype, rngs, gain=out_gain(config), bias=bias, split="in"
        )

    def __call__(self, x_BxLxD: jax.Array, rotation: Rotation | None) -> jax.Array:
        batch, length, dim = x_BxLxD.shape
        heads = self.config.heads

        def split(y_BxLxD: jax.Array) -> jax.Array:
            y_BxLxHxK = y_BxLxD.reshape(batch, length, heads, dim // heads)
            return constrain(y_BxLxHxK, BATCH, None, "tensor", None)

        maps = (self.query, self.key, self.value)
        q_BxLxHxK, k_BxLxHxK, v_BxLxHxK = (split(m(x_BxLxD)) for m in maps)
        if rotation is not None:
            q_BxLxHxK = rotate(q_BxLxHxK, rotation)
            k_BxLxHxK = rotate(k_BxLxHxK, rotation)
        o_BxLxHxK = attention(self.config, q_BxLxHxK, k_BxLxHxK, v_BxLxHxK)
        return self.out(o_BxLxHxK.reshape(batch, length, dim))


def make_blocks(
    config: ModelConfig, make: Callable[[nnx.Rngs], Any], rngs: nnx.Rngs
) -> Any:
    """One block per layer: a list, or one block whose parameters are (N, ...).

    Both hold the same numbers for the same key.
    """
    keys = jax.random.split(rngs.params(), config.layers)
    abstract = nnx.eval_shape(lambda key: make(nnx.Rngs(key)), keys[0])
    graphdef, _ = nnx.split(abstract, nnx.Param)
    # Made together in any case: random numbers for each layer take long to compile.
    stacked = jax.vmap(lambda key: nnx.state(make(nnx.Rngs(key)), nnx.Param))(keys)
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
