"""The head and its cross entropy as one operation that keeps no logits."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from examples.mesh import BATCH, constrain

# Vocabularies such as GPT-2's 50,257 are filled up to a multiple of this: products of
# odd widths take GPUs several times as long.
_MULTIPLE = 128


def padded(w_DxV: jax.Array) -> jax.Array:
    """The head with columns of zeros up to a width that hardware likes."""
    missing = -w_DxV.shape[1] % _MULTIPLE
    if missing and w_DxV.shape[1] > _MULTIPLE:  # small ones are for tests and CPUs
        w_DxV = jnp.pad(w_DxV, ((0, 0), (0, missing)))
    return constrain(w_DxV, None, "tensor")


def wide_product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product of 16-bit arrays with a float32 result.

    XLA has none for some layouts on CPUs, the one of a tied head's gradient among them;
    there, 16-bit numbers are widened first, to the same result.
    """

    def short(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)

    def widened(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(equation, a.astype(jnp.float32), b.astype(jnp.float32))

    return jax.lax.platform_dependent(a, b, cpu=widened, default=short)


def logits(x_BxLxD: jax.Array, w_DxW: jax.Array) -> jax.Array:
    """Float32 logits; W is V, filled up."""
    return constrain(wide_product("bld,dw->blw", x_BxLxD, w_DxW), BATCH, None, "tensor")


def _cut(x_BxLx: jax.Array, chunks: int) -> jax.Array:
    batch, length, *rest = x_BxLx.shape
    return x_BxLx.reshape(batch, chunks, length // chunks, *rest).swapaxes(0, 1)


def _join(x_NxBxCx: jax.Array) -> jax.Array:
    count, batch, length, *rest = x_NxBxCx.shape
    return x_NxBxCx.swapaxes(0, 1).reshape(batch, count * length, *rest)


def _sums(
    x_BxCxD: jax.Array, w_DxW: jax.Array, targets_BxC: jax.Array, width: int
) -> tuple[jax.Array, ...]:
    """Logits, where the targets are, log-sum-exp and negative log-likelihood."""
    logits_BxCxW = logits(x_BxCxD, w_DxW)
    column_1x1xW = jax.lax.broadcasted_iota(jnp.int32, (1, 1, w_DxW.shape[1]), 2)
    if w_DxW.shape[1] > width:
        logits_BxCxW = jnp.where(column_1x1xW < width, logits_BxCxW, -jnp.inf)
    # Not a lookup: its derivative would write the whole array once more.
    target_BxCxW = column_1x1xW == targets_BxC[..., None]
    lse_BxC = jax.nn.logsumexp(logits_BxCxW, axis=-1)
    at_target_BxC = jnp.where(target_BxCxW, logits_BxCxW, 0).sum(axis=-1)
    return logits_BxCxW, target_BxCxW, lse_BxC, lse_BxC - at_target_BxC


def token_losses(
    x_BxLxD: jax.Array, w_DxV: jax.Array, targets_BxL: jax.Array, chunks: int
) -> jax.Array:
    """Negative log-likelihood (B, L) of each next token.

    Float32 logits of one of `chunks` parts of the positions are all that ever exists.
    """
    w_DxW = padded(w_DxV.astype(x_BxLxD.dtype))

    def part(xt: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _sums(xt[0], w_DxW, xt[1], w_DxV.shape[1])[3]

    parts = _cut(x_BxLxD, chunks), _cut(targets_BxL, chunks)
    return _join(jax.lax.map(part, parts))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def head_loss(
    x_BxLxD: jax.Array, w_DxV: jax.Array, targets_BxL: jax.Array, chunks: int
) -> jax.Array:
    """The mean cross entropy.

    Its derivative is computed along with it, chunk of positions by chunk, so that
    nothing is computed twice. It rounds the logits' derivative to the compute dtype,
    for which there are fast products.
    """
    return _forward(x_BxLxD, w_DxV, targets_BxL, chunks)[0]


def _forward(
    x_BxLxD: jax.Array, w_DxV: jax.Array, targets_BxL: jax.Array, chunks: int
) -> tuple[Any, Any]:
    w_DxW = padded(w_DxV.astype(x_BxLxD.dtype))
    count = targets_BxL.size

    def part(dw_DxW: jax.Array, xt: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        x_BxCxD, targets_BxC = xt
        logits_BxCxW, target_BxCxW, lse_BxC, nll_BxC = _sums(
            x_BxCxD, w_DxW, targets_BxC, w_DxV.shape[1]
        )
        p_BxCxW = jnp.exp(logits_BxCxW - lse_BxC[..., None]) * (1 / count)
        g_BxCxW = (p_BxCxW - target_BxCxW / count).astype(x_BxCxD.dtype)
        dx_BxCxD = jnp.einsum("blw,dw->bld", g_BxCxW, w_DxW)
        dw_DxW += wide_product("bld,blw->dw", x_BxCxD, g_BxCxW)
        return dw_DxW, (dx_BxCxD, nll_BxC.sum())

    start = constrain(jnp.zeros(w_DxW.shape, jnp.float32), None, "tensor")
    parts = _cut(x_BxLxD, chunks), _cut(targets_BxL, chunks)
    dw_DxW, (dx, nll) = jax.lax.scan(part, start, parts)
    dw_DxV = dw_DxW[:, : w_DxV.shape[1]].astype(w_DxV.dtype)
    return nll.sum() / count, (_join(dx), dw_DxV)


def _backward(chunks: int, saved: Any, scale: jax.Array) -> Any:
    del chunks
    dx_BxLxD, dw_DxV = saved
    dx_BxLxD = (dx_BxLxD * scale).astype(dx_BxLxD.dtype)
    return dx_BxLxD, (dw_DxV * scale).astype(dw_DxV.dtype), None


head_loss.defvjp(_forward, _backward)
