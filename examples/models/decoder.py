"""A decoder: an embedding, a stack of blocks, a norm and a head.

GPT-2 has LayerNorm, biases, learned positions, GELU and a head tied to the embedding.
LLaMA has RMSNorm, rotary positions, SwiGLU and a head of its own. The mixture of
experts is a LLaMA with experts as feed-forwards.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from examples.config import ModelConfig
from examples.mesh import BATCH, constrain
from examples.models import head, layers
from examples.models.attention import Attention, Cache
from examples.models.moe import Mixture
from examples.options import check

# The results of the forward pass that are kept for the backward pass, by --remat. All
# others are computed a second time.
_KEPT = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Features(NamedTuple):
    """What comes out of the blocks."""

    x_BxLxD: jax.Array  # what the head sees
    balance_loss: jax.Array  # weighted, of the experts; zero without them
    caches: Any  # of each layer, with the new keys and values


class Block(nnx.Module):
    """Pre-norm residual block: attention, then feed-forward."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        feed_forward = Mixture if config.architecture == "moe" else layers.FeedForward
        self.attention_norm = layers.Norm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = layers.Norm(config)
        self.mlp: Any = feed_forward(config, rngs)

    def __call__(
        self, x_BxLxD: jax.Array, position: Any, cache: Cache | None
    ) -> tuple[jax.Array, tuple[jax.Array, Cache | None]]:
        y_BxLxD, cache = self.attention(self.attention_norm(x_BxLxD), position, cache)
        x_BxLxD = x_BxLxD + y_BxLxD
        y_BxLxD, loss = self.mlp(self.mlp_norm(x_BxLxD))
        return x_BxLxD + y_BxLxD, (loss, cache)


class Decoder(nnx.Module):
    """Token ids (B, L) to float32 logits (B, L, V), in two halves.

    `features` gives the last activations and `logits` or `head_loss` the rest, so that
    positions may go through the head in chunks.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.config, gpt = config, config.architecture == "gpt"
        self.embed = layers.Embedding(vocab_size, config, rngs)
        if gpt:
            init = nnx.initializers.normal(layers.OUTER_STD)
            shape = config.seq_len, config.dim
            self.position_table = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.blocks = make_blocks(config, rngs)
        self.final_norm = layers.Norm(config)
        if not gpt:
            size, gain = (config.dim, vocab_size), layers.OUTER_STD * config.dim**0.5
            self.lm_head = layers.Linear(
                *size, jnp.dtype(config.dtype), rngs, gain=gain
            )

    def head(self) -> jax.Array:
        """The matrix (D, V) that makes logits of features, in float32."""
        tied = self.config.architecture == "gpt"
        return self.embed.embedding[...].T if tied else self.lm_head.kernel[...]

    def features(
        self, tokens_BxL: jax.Array, caches: Any = None, position: Any = 0
    ) -> Features:
        """The activations after all blocks.

        With `caches` the tokens stand at `position` and what follows, and see what was
        cached before it.
        """
        x_BxLxD, config = self.embed(tokens_BxL), self.config
        if config.architecture == "gpt":  # the blocks of others rotate by the position
            length, most = tokens_BxL.shape[1], config.seq_len
            said = f"{length} tokens exceed the {most} learned positions of this model"
            check(length <= most, f"{said} (--seq-len)")
            table_MxD = self.position_table[...]
            position_LxD = jax.lax.dynamic_slice_in_dim(table_MxD, position, length)
            x_BxLxD = x_BxLxD + position_LxD.astype(config.dtype)[None]
        x_BxLxD, loss, caches = _run(config, self.blocks, x_BxLxD, position, caches)
        x_BxLxD = constrain(self.final_norm(x_BxLxD), BATCH, None, None)
        return Features(x_BxLxD, loss, caches)

    def empty_caches(self, batch: int) -> Any:
        """Room for the keys and values of `seq_len` tokens in every layer."""
        config = self.config
        shape = (batch, config.seq_len, config.heads, config.dim // config.heads)
        cache = Cache(*jnp.zeros((2, *shape), config.dtype))
        if not config.scan_layers:
            return [cache] * config.layers
        return jax.tree.map(lambda x: jnp.stack([x] * config.layers), cache)

    def logits(self, x_BxLxD: jax.Array) -> jax.Array:
        """Float32 logits (B, L, V) of features."""
        w_DxV = self.head()
        w_DxW = head.padded(w_DxV.astype(x_BxLxD.dtype))
        return head.logits(x_BxLxD, w_DxW)[..., : w_DxV.shape[1]]

    def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
        return self.logits(self.features(tokens_BxL).x_BxLxD)


def make_blocks(config: ModelConfig, rngs: nnx.Rngs) -> Any:
    """One block per layer: a list, or one block whose parameters are (N, ...).

    Both hold the same numbers for the same key.
    """

    def make(key: jax.Array) -> Block:
        return Block(config, nnx.Rngs(key))

    keys = jax.random.split(rngs.params(), config.layers)
    abstract = nnx.eval_shape(make, keys[0])
    graphdef, _ = nnx.split(abstract, nnx.Param)
    # One program makes all layers in a loop: random numbers for each layer take long to
    # compile, and also a stack of them where XLA moves the slices below into it.
    stacked = jax.lax.map(lambda key: nnx.state(make(key), nnx.Param), keys)
    if config.scan_layers:
        return nnx.merge(graphdef, stacked)
    single = (jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(config.layers))
    return nnx.List([nnx.merge(graphdef, layer) for layer in single])


def _run(
    config: ModelConfig, blocks: Any, x_BxLxD: jax.Array, position: Any, caches: Any
) -> tuple[jax.Array, jax.Array, Any]:
    """The activations after all blocks, the sum of their own losses, the caches."""

    def step(graphdef: Any) -> Callable[..., Any]:
        def apply(params: Any, x_BxLxD: jax.Array, cache: Any) -> Any:
            x_BxLxD = constrain(x_BxLxD, BATCH, None, None)
            return nnx.merge(graphdef, params)(x_BxLxD, position, cache)

        if config.remat == "none":
            return apply
        # Nothing can be merged across the boundary of a scan: it needs no barrier.
        again = {"policy": _KEPT[config.remat], "prevent_cse": not config.scan_layers}
        return jax.checkpoint(apply, **again)

    if config.scan_layers:
        graphdef, stacked = nnx.split(blocks, nnx.Param)
        apply = step(graphdef)
        x_BxLxD, (loss_N, caches) = jax.lax.scan(
            lambda x, layer: apply(layer[0], x, layer[1]), x_BxLxD, (stacked, caches)
        )
        return x_BxLxD, loss_N.sum(), caches
    total, new = jnp.zeros((), jnp.float32), []
    for block, cache in zip(blocks, caches or [None] * config.layers, strict=True):
        graphdef, params = nnx.split(block, nnx.Param)
        x_BxLxD, (loss, cache) = step(graphdef)(params, x_BxLxD, cache)
        total, new = total + loss, [*new, cache]
    return x_BxLxD, total, new
