"""QK-clip: scales down query and key kernels whose attention logits grow too large."""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from muon2_optax import dtypes, sharding, trees
from muon2_optax.arguments import check_names
from muon2_optax.axes import ResolvedAxes
from muon2_optax.matrices import rules_or_default
from muon2_optax.rules import MatrixRules

# Query and key kernels under the names that model codes give them.
QUERY = r"(^|/)(q|wq|query|q_proj|c_q|to_q)(/|$)"
KEY = r"(^|/)(k|wk|key|k_proj|c_k|to_k)(/|$)"
FUSED = r"(^|/)(qkv|wqkv|qkv_proj|c_attn|in_proj|query_key_value)(/|$)"


@check_names
def qk_clip(
    params: optax.Params,
    max_logits: Mapping[str, Any],
    tau: ArrayLike = 100.0,
    rules: MatrixRules | None = None,
    *,
    query: str = QUERY,
    key: str = KEY,
    fused: str = FUSED,
) -> optax.Params:
    """Scales the query and key kernels of heads with attention logits above tau.

    Call it after an optimizer step, with the largest logit S that each head had in the
    forward pass, as it enters the softmax. The kernels of the head's queries and keys
    are both multiplied by ``sqrt(min(1, tau / S))``, after which the same inputs give
    logits of at most tau. So are the biases beside the kernels.

    A kernel's heads are found in its output axis or axes, as ``rules`` describe them:

    ==========================  =======================  ==============================
    kernel                      shape                    axes
    ==========================  =======================  ==============================
    DenseGeneral                (d, heads, k)            ``MatrixAxes(-3, (-2, -1))``
    one matrix per head         (d, heads, k)            ``MatrixAxes(-3, -1)``
    heads side by side          (d, heads * k)           ``MatrixAxes(-2, -1)``
    torch / Equinox             (heads * k, d)           ``MatrixAxes(-1, -2)``
    fused q, k, v, flat         (d, dq + dk + dv)        ``MatrixAxes(-2, -1, (dq, dk,
                                                         dv))``
    fused q, k, v, axis of 3    (d, 3, heads * k)        ``MatrixAxes(-3, -1)``
    ==========================  =======================  ==============================

    With grouped queries a key head serves several successive query heads. As in
    Megatron-LM, the largest logit of these heads decides for all of them and for their
    key head: with a factor for each query head, the shared keys could follow only one.

    Args:
      params: the parameters; only kernels under the paths of ``max_logits`` change.
      max_logits: for each attention layer, the path of what holds its projections, as
        in ``"layers/0/attn"``, and the largest logit of each head, (*batch, heads):
        with batch axes in front where layers are stacked. An S that is not above tau,
        or not finite, asks for no scaling; a head without logits has -inf.
      tau: the threshold.
      rules: which axes form the kernels; None: ``MatrixRules()``.
      query, key, fused: regular expressions, searched in the rest of the path, of the
        query, the key, and the fused query, key and value kernels.

    Returns:
      The parameters, in their dtypes. Leaves that no factor touches are returned as
      they are.

    Raises:
      ValueError: a path without one query and one key kernel or one fused kernel, or
        kernels whose outputs are not divided by the heads; tau is not positive.

    References:
      Kimi Team 2025, "Kimi K2", arXiv:2507.20534, Algorithm 1.

    >>> from muon2_optax.axes import MatrixAxes
    >>> params = {"attn": {"q": jnp.ones((4, 2, 3)), "k": jnp.ones((4, 2, 3))}}
    >>> rules = MatrixRules((("attn", MatrixAxes(0, (1, 2))),))
    >>> new = qk_clip(params, {"attn": jnp.array([50.0, 400.0])}, 100.0, rules)
    >>> new["attn"]["k"][0, :, 0].tolist()
    [1.0, 0.5]
    """
    if not isinstance(tau, jax.core.Tracer) and not np.asarray(tau) > 0:
        raise ValueError(f"tau must be positive, got {tau}")
    rules = rules_or_default(rules)
    named = [(n, x) for n, x in trees.named_leaves(params) if not trees.is_empty(x)]
    factors: dict[str, jax.Array] = {}
    for layer, logits in max_logits.items():
        shrink = _head_factors(layer, logits, tau)
        kernels = {
            part: _kernels(layer, pattern, named, rules)
            for part, pattern in (("q", query), ("k", key), ("qkv", fused))
        }
        counts = tuple(len(found) for found in kernels.values())
        if counts == (0, 0, 1):
            name, axes = kernels["qkv"][0]
            factors[name] = _of_fused(name, axes, shrink)
        elif counts == (1, 1, 0):
            (q, q_axes), (k, k_axes) = kernels["q"][0], kernels["k"][0]
            factors[q], factors[k] = _of_pair(q, q_axes, k, k_axes, shrink)
        else:
            found = ", ".join(n for part in kernels.values() for n, _ in part)
            raise ValueError(
                f"{layer!r} must hold one query and one key kernel, or a fused kernel;"
                f" found {found or 'none'}. Give the path of a single attention layer,"
                " or query=..., key=... or fused=... for its names"
            )

    ins = {n: a.ins for n, a in _resolve_matrices(named, rules) if n in factors}

    def leaf(name: str, x: jax.Array) -> tuple[jax.Array]:
        if name in factors:
            return (_multiply(factors[name], x),)
        kernel = next((n for n in factors if _is_bias_of(name, n)), None)
        if kernel is None:
            return (x,)
        return (_multiply(jnp.squeeze(factors[kernel], ins[kernel]), x),)

    return trees.map_leaves(leaf, params)[0]


def _head_factors(layer: str, logits: Any, tau: Any) -> jax.Array:
    """The factor of each head's queries and keys; 1 where its logit is not finite."""
    logits = jnp.asarray(logits)
    if 0 in logits.shape or not logits.ndim:
        raise ValueError(
            f"the logits of {layer!r} have shape {logits.shape}, not (*batch, heads)"
        )
    logits = dtypes.widen(logits)
    # Grouping heads takes all of them, also where the mesh divides them.
    logits = sharding.replicate(logits)
    above = (logits > tau) & jnp.isfinite(logits)
    return jnp.where(above, jnp.sqrt(tau / jnp.where(above, logits, 1)), 1)


def _resolve_matrices(
    named: list[tuple[str, Any]], rules: MatrixRules
) -> list[tuple[str, ResolvedAxes]]:
    """The leaves that are matrices."""
    pairs = [(n, rules.resolve(n, jnp.shape(x))) for n, x in named]
    return [(n, axes) for n, axes in pairs if axes is not None]


def _kernels(
    layer: str, pattern: str, named: list[tuple[str, Any]], rules: MatrixRules
) -> list[tuple[str, ResolvedAxes]]:
    """The kernels of a layer whose path within it matches."""
    start = f"{layer}/" if layer else ""
    inside = [(n, x) for n, x in named if n.startswith(start)]
    matching = [(n, x) for n, x in inside if re.search(pattern, n[len(start) :])]
    return _resolve_matrices(matching, rules)


def _of_pair(
    q: str, q_axes: ResolvedAxes, k: str, k_axes: ResolvedAxes, shrink: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Factors of a query and a key kernel, shaped to multiply them."""
    heads, size = shrink.shape[-1], math.prod(q_axes.shape[a] for a in q_axes.outs)
    if _heads_are_batch(q, q_axes, shrink):
        groups = k_axes.shape[k_axes.batch[-1]]
    elif len(k_axes.outs) > 1:
        groups = k_axes.shape[k_axes.outs[0]]
    else:
        per_head = _divide_evenly(q, size, heads)
        groups = _divide_evenly(k, k_axes.shape[k_axes.outs[0]], per_head, "head size")
    shared = _take_least_of_groups(k, shrink, groups)
    queries = jnp.repeat(shared, heads // groups, axis=-1)
    return _to_kernel(q, q_axes, queries), _to_kernel(k, k_axes, shared)


def _of_fused(name: str, axes: ResolvedAxes, shrink: jax.Array) -> jax.Array:
    """Factors of a fused kernel, shaped to multiply it; those of the values are 1."""
    heads, (out,) = shrink.shape[-1], axes.outs[:1]
    batch = axes.batch
    if len(axes.splits) == 3:
        sizes = axes.splits
    elif len(batch) == shrink.ndim and axes.shape[batch[-1]] == 3:
        sizes = (axes.shape[out],) * 3
    else:
        raise ValueError(
            f"{name!r} of shape {axes.shape} is not q, k and v under its rule: give it"
            " out_splits of three, or an axis of 3 that is a batch axis"
        )
    per_head = _divide_evenly(name, sizes[0], heads)
    groups = _divide_evenly(name, sizes[1], per_head, "head size")
    shared = _take_least_of_groups(name, shrink, groups)
    parts = [
        jnp.repeat(shared, heads // groups * per_head, axis=-1),
        jnp.repeat(shared, per_head, axis=-1),
        jnp.ones((*shrink.shape[:-1], sizes[2]), shrink.dtype),
    ]
    if len(axes.splits) == 3:
        return _shape_like_leaf(
            name, jnp.concatenate(parts, axis=-1), (*batch, out), axes
        )
    return _shape_like_leaf(name, jnp.stack(parts, axis=-2), (*batch, out), axes)


def _take_least_of_groups(name: str, shrink: jax.Array, groups: int) -> jax.Array:
    """The smallest factor of each group of successive heads."""
    size = _divide_evenly(name, shrink.shape[-1], groups, "key heads")
    return jnp.min(shrink.reshape(*shrink.shape[:-1], groups, size), axis=-1)


def _heads_are_batch(name: str, axes: ResolvedAxes, shrink: jax.Array) -> bool:
    """Whether heads are matrices of their own rather than among the outputs."""
    extra = len(axes.batch) - (shrink.ndim - 1)
    # If the outputs are (heads, size), the heads are among them. Then another batch
    # axis cannot be the heads.
    if extra not in (0, 1) or (extra and len(axes.outs) > 1):
        raise ValueError(
            f"{name!r} of shape {axes.shape} has {len(axes.batch)} batch axes, but the"
            f" logits have shape {shrink.shape}, (*batch, heads)"
        )
    return extra == 1


def _to_kernel(name: str, axes: ResolvedAxes, factors: jax.Array) -> jax.Array:
    """One factor per head, shaped to multiply the kernel."""
    if _heads_are_batch(name, axes, factors):
        return _shape_like_leaf(name, factors, axes.batch, axes)
    heads, out = factors.shape[-1], axes.outs[0]
    if len(axes.outs) == 1:
        size = _divide_evenly(name, axes.shape[out], heads)
        factors = jnp.repeat(factors, size, axis=-1)
    return _shape_like_leaf(name, factors, (*axes.batch, out), axes)


def _shape_like_leaf(
    name: str, values: jax.Array, dims: tuple[int, ...], axes: ResolvedAxes
) -> jax.Array:
    """Values for the axes ``dims`` of the leaf, in the leaf's order and rank.

    Raises:
      ValueError: their sizes are not those of the leaf.
    """
    sizes = tuple(axes.shape[a] for a in dims)
    if values.shape != sizes:
        raise ValueError(
            f"the logits give {values.shape} factors, but {name!r} of shape"
            f" {axes.shape} has {sizes}"
        )
    order = sorted(range(len(dims)), key=dims.__getitem__)
    rest = tuple(a for a in range(len(axes.shape)) if a not in dims)
    return jnp.expand_dims(jnp.transpose(values, order), rest)


def _divide_evenly(name: str, size: int, by: int, what: str = "heads") -> int:
    if by < 1 or size % by:
        raise ValueError(f"{name!r}: {size} is no multiple of {by} ({what})")
    return size // by


def _is_bias_of(name: str, kernel: str) -> bool:
    """Whether a leaf is the bias beside this kernel."""
    parent, _, last = name.rpartition("/")
    return last in ("bias", "b") and parent == kernel.rpartition("/")[0] != ""


def _multiply(factor: jax.Array, x: jax.Array) -> jax.Array:
    wide = dtypes.widen(x)
    return (factor.astype(wide.real.dtype) * wide).astype(x.dtype)
