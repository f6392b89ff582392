"""QK-clip: logits of the clipped kernels, computed from the same inputs.

The oracle is attention itself, in float64 numpy: after the clip, no head's largest
logit is above tau, and heads that were below keep theirs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muon2_optax as m2

D, HEADS, GROUPS, SIZE, TAU = 12, 6, 2, 4, 25.0
X = np.random.default_rng(9).standard_normal((20, D))
A = m2.MatrixAxes
# name: (axes of q and k, from (d, heads, size) to the stored layout, and back)
LAYOUTS = {
    "dense general": (A(-3, (-2, -1)), lambda w: w, lambda w: w),
    "per head": (A(-3, -1), lambda w: w, lambda w: w),
    "side by side": (
        A(-2, -1),
        lambda w: w.reshape(D, -1),
        lambda w: w.reshape(D, -1, SIZE),
    ),
    "torch": (
        A(-1, -2),
        lambda w: w.reshape(D, -1).T,
        lambda w: w.T.reshape(D, -1, SIZE),
    ),
    "heads first": (
        A(1, (0, 2)),
        lambda w: w.transpose(1, 0, 2),
        lambda w: w.transpose(1, 0, 2),
    ),
}


def draw(groups=GROUPS, seed=0):
    """q and k, with heads of very different sizes."""
    rng = np.random.default_rng(seed)
    sizes = np.linspace(0.2, 2.0, HEADS)[rng.permutation(HEADS)]
    q = rng.standard_normal((D, HEADS, SIZE)) * sizes[:, None]
    return q, rng.standard_normal((D, groups, SIZE))


def logits(q, k, q_bias=0.0):
    """(heads, positions, positions)."""
    q, k = (np.asarray(w, np.float64) for w in (q, k))
    queries = np.einsum("td,dhk->htk", X, q) + np.asarray(q_bias, np.float64)
    keys = np.einsum("td,dhk->htk", X, k)
    keys = np.repeat(keys, q.shape[1] // k.shape[1], axis=0)
    return queries @ keys.swapaxes(1, 2) / np.sqrt(SIZE)


def expected(before, groups):
    """Each head's largest logit after the clip: its group's largest comes to tau."""
    largest = before.max(axis=(1, 2))
    worst = largest.reshape(groups, -1).max(axis=1).repeat(HEADS // groups)
    return largest * np.minimum(1, TAU / worst)


@pytest.mark.parametrize("groups", [HEADS, GROUPS, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_largest_logits(layout, groups):
    axes, store, load = LAYOUTS[layout]
    q, k = draw(groups)
    before = logits(q, k)
    largest = before.max(axis=(1, 2))
    assert (largest > TAU).any() and (largest <= TAU).any()
    attn = {n: {"kernel": jnp.asarray(store(w))} for n, w in (("q", q), ("k", k))}
    params = {"attn": attn | {"v": {"kernel": jnp.ones((D, 8))}}, "mlp": jnp.ones(3)}
    rules = m2.MatrixRules((("/[qk]/", axes),))
    clip = jax.jit(lambda p, s: m2.qk_clip(p, {"attn": s}, TAU, rules))
    got = clip(params, jnp.asarray(largest))
    new = {n: load(np.asarray(got["attn"][n]["kernel"])) for n in "qk"}
    after = logits(new["q"], new["k"])
    np.testing.assert_allclose(after.max(axis=(1, 2)), expected(before, groups), 1e-5)
    # Queries and keys take equal parts of it.
    factor = np.linalg.norm(new["q"], axis=(0, 2)) / np.linalg.norm(q, axis=(0, 2))
    shared = np.linalg.norm(new["k"], axis=(0, 2)) / np.linalg.norm(k, axis=(0, 2))
    np.testing.assert_allclose(factor, shared.repeat(HEADS // groups), rtol=1e-5)
    for path in (("attn", "v", "kernel"), ("mlp",)):
        old, kept = params, got
        for key in path:
            old, kept = old[key], kept[key]
        np.testing.assert_array_equal(kept, old)
    # Where no head is above, nothing changes, not by a bit.
    same = clip(params, jnp.full(HEADS, TAU))
    jax.tree.map(np.testing.assert_array_equal, same, params)


@pytest.mark.parametrize("kind", ["flat", "torch", "axis of 3"])
def test_fused_kernels(kind):
    groups = HEADS if kind == "axis of 3" else GROUPS
    (q, k), v = draw(groups), np.ones((D, groups * SIZE))
    parts = [q.reshape(D, -1), k.reshape(D, -1), v]
    sizes = tuple(p.shape[1] for p in parts)
    if kind == "axis of 3":
        axes, kernel = A(-3, -1), np.stack(parts, axis=1)
    else:
        axes, kernel = A(-2, -1, sizes), np.concatenate(parts, axis=1)
    if kind == "torch":
        axes, kernel = A(-1, -2, sizes), kernel.T
    params = {"block": {"attn": {"qkv": {"kernel": jnp.asarray(kernel)}}}}
    rules = m2.MatrixRules((("qkv", axes),))
    before = logits(q, k)
    got = m2.qk_clip(params, {"block/attn": before.max(axis=(1, 2))}, TAU, rules)
    new = np.asarray(got["block"]["attn"]["qkv"]["kernel"])
    if kind == "axis of 3":
        new_q, new_k, new_v = new.swapaxes(0, 1)
    else:
        whole = new.T if kind == "torch" else new
        new_q, new_k, new_v = np.split(whole, np.cumsum(sizes)[:2], axis=1)
    after = logits(new_q.reshape(q.shape), new_k.reshape(k.shape))
    np.testing.assert_allclose(after.max(axis=(1, 2)), expected(before, groups), 1e-5)
    np.testing.assert_array_equal(new_v, v)


@pytest.mark.parametrize("layout", ["dense general", "per head", "side by side"])
def test_stacked_layers_and_biases(layout):
    axes, store, load = LAYOUTS[layout]
    pairs = [draw(seed=1), draw(seed=2)]
    biases = np.random.default_rng(3).standard_normal((2, HEADS, 1, SIZE))
    q, k = (np.stack([store(w) for w in ws]) for ws in zip(*pairs))
    q_bias = biases.reshape(2, *q.shape[2:])
    before = [logits(*p, b) for p, b in zip(pairs, biases)]
    params = {
        "q_proj": {"kernel": jnp.asarray(q), "bias": jnp.asarray(q_bias)},
        "k_proj": {"kernel": jnp.asarray(k)},
    }
    rules = m2.MatrixRules((("kernel", axes),))
    largest = jnp.asarray([b.max(axis=(1, 2)) for b in before])
    got = m2.qk_clip(params, {"": largest}, TAU, rules)
    for i in range(2):
        after = logits(
            load(np.asarray(got["q_proj"]["kernel"][i])),
            load(np.asarray(got["k_proj"]["kernel"][i])),
            np.asarray(got["q_proj"]["bias"][i]).reshape(HEADS, 1, SIZE),
        )
        want = expected(before[i], GROUPS)
        np.testing.assert_allclose(after.max(axis=(1, 2)), want, 1e-5)


def test_logits_that_are_no_numbers_change_nothing():
    q, k = draw(HEADS)
    params = {"q": jnp.asarray(q, jnp.bfloat16), "k": jnp.asarray(k, jnp.bfloat16)}
    rules = m2.MatrixRules((("^[qk]$", A(0, (1, 2))),))
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        got = m2.qk_clip(params, {"": jnp.full(HEADS, bad)}, TAU, rules)
        jax.tree.map(np.testing.assert_array_equal, got, params)
        assert got["q"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "layer, heads, message",
    [
        ("attention", HEADS, "'attention' must hold .* found none"),
        ("attn", 5, "'attn/k'|'attn/q'|5"),
        ("attn", (2, HEADS), "batch axes"),
        ("attn", (), r"'attn' have shape \(\)"),
        ("attn", (0,), r"'attn' have shape \(0,\)"),
    ],
)
def test_errors(layer, heads, message):
    q, k = draw()
    params = {"attn": {"q": jnp.asarray(q), "k": jnp.asarray(k)}}
    rules = m2.MatrixRules((("attn", A(0, (1, 2))),))
    with pytest.raises(ValueError, match=message):
        m2.qk_clip(params, {layer: jnp.ones(heads)}, TAU, rules)


@pytest.mark.parametrize("tau", [0.0, -25.0, np.float32(np.nan)])
def test_tau_that_is_not_positive(tau):
    params = {"q": jnp.ones((D, HEADS, SIZE)), "k": jnp.ones((D, HEADS, SIZE))}
    rules = m2.MatrixRules((("^[qk]$", A(0, (1, 2))),))
    with pytest.raises(ValueError, match="tau must be positive"):
        m2.qk_clip(params, {"": jnp.ones(HEADS)}, tau, rules)


def test_layers_are_not_taken_for_heads():
    """As many layers as heads, and logits without the layers."""
    shape = (HEADS, D, HEADS, SIZE)
    params = {"q": jnp.ones(shape), "k": jnp.ones(shape)}
    rules = m2.MatrixRules((("^[qk]$", A(-3, (-2, -1))),))
    with pytest.raises(ValueError, match="'q' of shape .* 1 batch axes"):
        m2.qk_clip(params, {"": jnp.full(HEADS, 2 * TAU)}, TAU, rules)
    with pytest.raises(ValueError, match=r"\(4, 6\) factors, but 'q' of shape"):
        m2.qk_clip(params, {"": jnp.full((4, HEADS), 2 * TAU)}, TAU, rules)


def test_sixteen_bit_logits_give_factors_in_float32():
    params = {"q": jnp.ones((D, 2, SIZE)), "k": jnp.ones((D, 2, SIZE))}
    rules = m2.MatrixRules((("^[qk]$", A(0, (1, 2))),))
    got = m2.qk_clip(params, {"": jnp.array([75, 1], jnp.bfloat16)}, TAU, rules)
    np.testing.assert_allclose(got["q"][0, :, 0], [3**-0.5, 1], rtol=1e-6)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_logits_divided_over_explicit_axes():
    params = {"q": jnp.ones((D, 8 * SIZE)), "k": jnp.ones((D, 4 * SIZE))}
    largest = jnp.linspace(5.0, 100.0, 8)
    rules = m2.MatrixRules((("^[qk]$", A(0, 1)),))
    want = m2.qk_clip(params, {"": largest}, TAU, rules)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, NamedSharding(mesh, P(None, "model")))
        largest = jax.device_put(largest, NamedSharding(mesh, P("model")))
        got = jax.jit(lambda p, s: m2.qk_clip(p, {"": s}, TAU, rules))(params, largest)
    assert got["k"].sharding.spec == P(None, "model")
    jax.tree.map(np.testing.assert_array_equal, got, want)
