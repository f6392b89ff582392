"""A LLaMA whose feed-forwards are mixtures of experts, in Flax NNX.

Besides the axes of the other decoders: E experts, A active experts of one token,
C places of one expert, S all places of all experts, N tokens.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from examples.config import ModelConfig
from examples.mesh import BATCH, constrain
from examples.models import layers

_ROWS = ("data", "fsdp")  # what divides rows while `expert` divides experts


class Routes(NamedTuple):
    """Where the choices of each row of tokens go; -1 stands for nowhere."""

    place_BxLxA: jax.Array  # the place that a token's choice takes
    choice_BxS: jax.Array  # the choice, token * A + a, that fills a place


@jax.custom_vjp
def gather_rows(x_BxMxD: jax.Array, index_BxN: jax.Array, back_BxMxR: jax.Array):
    """Rows by index, zeros for -1; `back` lists where each row of x was sent.

    The derivative gathers as well, by `back`: scattering would add up in an order that
    is not the same in every run.
    """
    del back_BxMxR
    return _take(x_BxMxD, index_BxN)


def _take(x_BxMxD: jax.Array, index_BxN: jax.Array) -> jax.Array:
    rows = jax.vmap(lambda x, i: x.at[i].get(mode="clip"))(x_BxMxD, index_BxN)
    return jnp.where(index_BxN[..., None] >= 0, rows, 0)


def _gather_backward(back_BxMxR: jax.Array, g_BxNxD: jax.Array):
    choices = jnp.moveaxis(back_BxMxR, -1, 0)
    return sum(_take(g_BxNxD, back) for back in choices), None, None


gather_rows.defvjp(lambda x, index, back: (_take(x, index), back), _gather_backward)


def capacity_routes(expert_BxLxA: jax.Array, experts: int, places: int) -> Routes:
    """`places` places per expert and row, for those who come first.

    A token's choices come before those of later tokens, its best choice first, so that
    nothing depends on what comes later.
    """
    batch, _, active = expert_BxLxA.shape
    expert_BxS = expert_BxLxA.reshape(batch, -1)
    member_BxSxE = jax.nn.one_hot(expert_BxS, experts, dtype=jnp.int32)
    before_BxS = ((jnp.cumsum(member_BxSxE, axis=1) - 1) * member_BxSxE).sum(axis=-1)
    kept_BxS = before_BxS < places
    place_BxS = jnp.where(kept_BxS, expert_BxS * places + before_BxS, -1)
    # Beyond the end, which is dropped; -1 would count from the end.
    target_BxS = jnp.where(kept_BxS, place_BxS, experts * places)
    empty = jnp.full((batch, experts * places), -1)
    choice_S = jnp.arange(expert_BxS.shape[1])
    fill = jax.vmap(lambda e, target: e.at[target].set(choice_S, mode="drop"))
    return Routes(place_BxS.reshape(batch, -1, active), fill(empty, target_BxS))


class Router(nnx.Module):
    """Scores experts in float32: a rounded score would choose another expert."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(config.dim**-0.5)
        shape = (config.dim, config.experts)
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.float32))

    def __call__(self, x_BxLxD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Weights and numbers (B, L, A) of each token's experts, weighted loss.

        The load-balancing loss, E sum_e f_e P_e over the share f of choices and the
        mean probability P, is that of the Switch Transformer (arXiv:2101.03961, eq. 4)
        with GShard's top-2 counted by choices; the z-loss is from arXiv:2202.08906.
        """
        config = self.config
        scores_BxLxE = jnp.matmul(
            x_BxLxD.astype(jnp.float32),
            self.kernel[...],
            precision=jax.lax.Precision.HIGHEST,
        )
        probs_BxLxE = jax.nn.softmax(scores_BxLxE)
        weight_BxLxA, expert_BxLxA = jax.lax.top_k(probs_BxLxE, config.active_experts)
        weight_BxLxA /= weight_BxLxA.sum(axis=-1, keepdims=True)
        chosen_BxLxAxE = jax.nn.one_hot(expert_BxLxA, config.experts)
        share_E = chosen_BxLxAxE.mean(axis=(0, 1, 2))
        balance = config.experts * (share_E * probs_BxLxE.mean(axis=(0, 1))).sum()
        z = jnp.square(jax.nn.logsumexp(scores_BxLxE, axis=-1)).mean()
        loss = config.balance_loss * balance + config.router_z_loss * z
        return weight_BxLxA, expert_BxLxA, loss


class Experts(nnx.Module):
    """Feed-forwards of two matrices with a GELU between, stacked over experts."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        experts, dim, hidden = config.experts, config.dim, config.hidden
        init_up = nnx.initializers.normal(dim**-0.5)
        init_down = nnx.initializers.normal(layers.out_gain(config) * hidden**-0.5)
        up, down = (experts, dim, hidden), (experts, hidden, dim)
        self.up = nnx.Param(init_up(rngs.params(), up, jnp.float32))
        self.down = nnx.Param(init_down(rngs.params(), down, jnp.float32))

    def __call__(self, x_BxExCxD: jax.Array) -> jax.Array:
        """Tokens at the places of each expert, through it.

        The weights are gathered in the compute dtype, after rounding.
        """
        up_ExDxF = self.up[...].astype(x_BxExCxD.dtype)
        up_ExDxF = constrain(up_ExDxF, "expert", None, "tensor")
        down_ExFxD = self.down[...].astype(x_BxExCxD.dtype)
        down_ExFxD = constrain(down_ExFxD, "expert", "tensor", None)
        x_BxExCxD = constrain(x_BxExCxD, _ROWS, "expert", None, None)
        h_BxExCxF = jnp.einsum("becd,edf->becf", x_BxExCxD, up_ExDxF)
        h_BxExCxF = layers.gelu(constrain(h_BxExCxF, _ROWS, "expert", None, "tensor"))
        y_BxExCxD = jnp.einsum("becf,efd->becd", h_BxExCxF, down_ExFxD)
        return constrain(y_BxExCxD, _ROWS, "expert", None, None)


class Mixture(nnx.Module):
    """Each token through its experts, weighted by the router."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.router = Router(config, rngs)
        self.experts = Experts(config, rngs)

    def __call__(self, x_BxLxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        config, (batch, length, dim) = self.config, x_BxLxD.shape
        weight_BxLxA, expert_BxLxA, loss = self.router(x_BxLxD)
        share = length * config.active_experts / config.experts
        places = min(length, math.ceil(config.capacity_factor * share))
        routes = capacity_routes(expert_BxLxA, config.experts, places)
        choice_BxS = routes.choice_BxS
        token_BxS = jnp.where(choice_BxS < 0, -1, choice_BxS // config.active_experts)
        x_BxSxD = gather_rows(x_BxLxD, token_BxS, routes.place_BxLxA)
        x_BxExCxD = x_BxSxD.reshape(batch, config.experts, places, dim)
        y_BxSxD = self.experts(x_BxExCxD).reshape(x_BxSxD.shape)
        y_BxSxD = constrain(y_BxSxD, BATCH, None, None)
        place_BxS = routes.place_BxLxA.reshape(batch, -1)
        y_BxSxD = gather_rows(y_BxSxD, place_BxS, choice_BxS[..., None])
        y_BxLxAxD = y_BxSxD.reshape(batch, length, config.active_experts, dim)
        weight_BxLxA = weight_BxLxA.astype(y_BxLxAxD.dtype)
        return jnp.einsum("blad,bla->bld", y_BxLxAxD, weight_BxLxA), loss
