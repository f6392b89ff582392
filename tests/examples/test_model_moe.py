"""Mixtures of experts: every dispatch equals sending tokens one by one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.config import ModelConfig
from examples.models.moe import Mixture, capacity_routes, gather_rows

CONFIG = ModelConfig(
    model="moe_tiny", dim=16, heads=2, hidden=24, experts=4, active_experts=2
)


def activations(batch: int = 3, length: int = 10) -> jax.Array:
    return jax.random.normal(jax.random.key(7), (batch, length, 16))


def one_by_one(mixture: Mixture, x_BxLxD: Any) -> np.ndarray:
    """Each token through its two experts, in float64."""
    x = np.asarray(x_BxLxD, np.float64)
    router = np.asarray(mixture.router.kernel[...], np.float64)
    up = np.asarray(mixture.experts.up[...], np.float64)
    down = np.asarray(mixture.experts.down[...], np.float64)
    out = np.zeros_like(x)
    for place in np.ndindex(x.shape[:2]):
        scores = x[place] @ router
        chosen = np.argsort(-scores)[:2]
        weights = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
        for weight, expert in zip(weights, chosen):
            hidden = np.asarray(jax.nn.gelu(jnp.asarray(x[place] @ up[expert])))
            out[place] += weight * (hidden @ down[expert])
    return out


def mixture(**options: Any) -> Mixture:
    return Mixture(dataclasses.replace(CONFIG, **options), nnx.Rngs(0))


def test_with_places_for_all_it_equals_the_reference() -> None:
    x = activations()
    layer = Mixture(CONFIG.without_drops(), nnx.Rngs(0))
    y, _ = jax.jit(layer.__call__)(x)
    np.testing.assert_allclose(y, one_by_one(layer, x), atol=1e-5)


def test_gradients_are_those_of_all_tokens_through_all_experts() -> None:
    layer = Mixture(CONFIG.without_drops(), nnx.Rngs(0))
    graphdef, state = nnx.split(layer, nnx.Param)
    params, x = nnx.to_pure_dict(state), activations()
    weights = jax.random.normal(jax.random.key(1), x.shape)

    def ours(params: Any, x: jax.Array) -> jax.Array:
        return (nnx.merge(graphdef, params)(x)[0] * weights).sum()

    def plain(params: Any, x: jax.Array) -> jax.Array:
        probs = jax.nn.softmax(x @ params["router"]["kernel"])
        chosen = probs >= jnp.sort(probs, axis=-1)[..., -2:-1]
        gates = jnp.where(chosen, probs, 0)
        gates /= gates.sum(axis=-1, keepdims=True)
        experts = params["experts"]
        hidden = jax.nn.gelu(jnp.einsum("bld,edf->blef", x, experts["up"]))
        y = jnp.einsum("blef,efd,ble->bld", hidden, experts["down"], gates)
        return (y * weights).sum()

    found, expected = (jax.jit(jax.grad(f, (0, 1)))(params, x) for f in (ours, plain))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, expected
    )


def test_a_full_expert_drops_late_tokens() -> None:
    expert = jnp.asarray([[[0, 1], [0, 2], [1, 0], [0, 3]]])  # one row, four tokens
    routes = capacity_routes(expert, experts=4, places=2)
    # Tokens 0 and 1 fill expert 0, so that the second choice of token 2 and the first
    # of token 3 go nowhere.
    place = [[0, 2], [1, 4], [3, -1], [-1, 6]]
    np.testing.assert_array_equal(routes.place_BxLxA[0], place)
    choice = [0, 2, 1, 4, 3, -1, 7, -1]
    np.testing.assert_array_equal(routes.choice_BxS[0], choice)


def test_gathering_has_the_derivative_of_gathering() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 4, 3))
    index = jnp.asarray([[1, -1, 0, 1], [3, 2, -1, -1]])
    back = jnp.asarray(
        [[[2, -1], [0, 3], [-1, -1], [-1, -1]], [[-1, -1], [-1, -1], [1, -1], [0, -1]]]
    )
    g = jax.random.normal(jax.random.key(1), (2, 4, 3))

    def plain(x: jax.Array) -> jax.Array:
        rows = jnp.take_along_axis(x, jnp.maximum(index, 0)[..., None], axis=1)
        return jnp.where(index[..., None] >= 0, rows, 0)

    y, pullback = jax.vjp(lambda x: gather_rows(x, index, back), x)
    expected, exact = jax.vjp(plain, x)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_allclose(pullback(g)[0], exact(g)[0], atol=1e-6)


def test_the_balance_loss_is_least_where_experts_share() -> None:
    x = activations(8, 64)
    even = mixture(balance_loss=1.0).router
    even.kernel[...] = 1e-4 * even.kernel[...]
    crowded = mixture(balance_loss=1.0).router
    crowded.kernel[...] = jnp.zeros_like(crowded.kernel[...])
    crowded.kernel[0, 0] = 10.0
    x = x.at[..., 0].set(1.0)
    np.testing.assert_allclose(even(x)[2], 1.0, atol=0.01)
    # All tokens go to expert 0 and to one other: E (1/2 * 1) = 2.
    np.testing.assert_allclose(crowded(x)[2], 2.0, atol=0.01)


def test_the_z_loss_is_the_squared_log_sum_exp() -> None:
    router = mixture(balance_loss=0.0, router_z_loss=0.5).router
    x = activations()
    scores = x @ router.kernel[...]
    expected = 0.5 * (jax.nn.logsumexp(scores, axis=-1) ** 2).mean()
    np.testing.assert_allclose(router(x)[2], expected, rtol=1e-5)


def test_routing_ignores_the_compute_dtype() -> None:
    x = activations().astype(jnp.bfloat16)
    layer = mixture(dtype="bfloat16")
    weight, _, _ = layer.router(x)
    assert weight.dtype == jnp.float32
    assert layer(x)[0].dtype == jnp.bfloat16
