"""Derivatives through a step, as hypergradients and learned optimizers take them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, every, only, sample

import muon2_optax as m2

TREE = {"wide": (4, 7), "bias": (6,)}


def total(tx, params, state, grads):
    """One number that depends on all that a step returns."""
    updates, state = tx.update(grads, state, params)
    moved = jax.tree.map(lambda w, u: jnp.sum(w * u), sample(9, TREE), updates)
    kept = [jnp.sum(x) for x in jax.tree.leaves(state) if x.dtype == jnp.float32]
    return sum(jax.tree.leaves(moved)) + sum(kept)


@every
def test_zero_gradients_have_finite_derivatives(name):
    """All of them, a row or an entry; in the first step and after another."""
    params = sample(0, TREE)
    tx = m2.REGISTRY[name](0.1, **only(name, eps=0.0), adam_eps=0.0)
    first = tx.init(params)
    later = jax.jit(tx.update)(params, first, params)[1]
    slope = jax.jit(jax.grad(lambda g, s: total(tx, params, s, g)))
    zeros = jax.tree.map(jnp.zeros_like, params)
    row = jax.tree.map(lambda x: x.at[1].set(0), params)
    entry = params | {"wide": params["wide"].at[0, 3].set(0)}
    for grads, state in (
        (zeros, first),
        (zeros, later),
        (row, first),
        (entry, first),
    ):
        if name == "dion" and grads is row:
            continue  # QR of a matrix of lower rank has no derivative
        for leaf in jax.tree.leaves(slope(grads, state)):
            assert np.all(np.isfinite(leaf))


@pytest.mark.parametrize("schedule", ["turbo", "polar_express"])
def test_zero_matrix_of_a_stack(schedule):
    """Its derivative is 0, and its neighbour's is the one it has alone."""
    x = sample(1, {"w": (2, 3, 6)})["w"].at[0].set(0)

    @jax.jit
    @jax.grad
    def slope(x):
        return jnp.sum(jnp.sin(m2.newton_schulz(x, 4, schedule, ns_dtype="float32")))

    got = slope(x)
    assert not np.any(got[0])
    assert_close(got[1], slope(x[1]))


@pytest.mark.parametrize("name", ["muon2", "muon2_f", "muon_eq", "normuon", "dion"])
def test_derivatives_elsewhere_are_those_of_the_values(name):
    """Against central differences in float64."""
    with jax.enable_x64(True):
        params, along = (sample(seed, TREE, jnp.float64) for seed in (0, 2))
        tx = m2.REGISTRY[name](0.1)
        _, state = jax.jit(tx.update)(along, tx.init(params), params)

        @jax.jit
        def value_and_slope(t):
            def fn(t):
                moved = jax.tree.map(lambda p, d: p + t * d, params, along)
                updates, _ = tx.update(moved, state, params)
                return sum(jnp.sum(jnp.sin(9 * u)) for u in jax.tree.leaves(updates))

            return jax.jvp(fn, (t,), (1.0,))

        h = 1e-5  # error h^2 of the difference, 1e-16 / h of its rounding
        low, (_, slope), high = map(value_and_slope, (-h, 0.0, h))
        want = (high[0] - low[0]) / (2 * h)
    np.testing.assert_allclose(slope, want, rtol=1e-6)
