"""Gradients of several steps, and what the moments make of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import muon2_optax as m2

TRANSFORMS = {
    "full": (m2.scale_by_second_moment, reference.second_moment),
    "factored": (m2.factorized_second_moment, reference.factored_second_moment),
}
both = pytest.mark.parametrize("kind", TRANSFORMS)


def gradients(shape, steps=10, seed=0, dtype=np.float64):
    """Noise whose rows and columns differ in size, as in layers of a network."""
    rng = np.random.default_rng(seed)
    size = rng.lognormal(size=(shape[-2], 1)) * rng.lognormal(size=shape[-1])
    noise = rng.standard_normal((steps, *shape))
    if np.issubdtype(dtype, np.complexfloating):
        noise = noise + 1j * rng.standard_normal((steps, *shape))
    return (noise * size).astype(dtype)


@functools.cache
def _scan(tx):
    """One compilation per transform, shape and dtype."""

    def body(state, g):
        updates, state = tx.update({"w": g}, state, {"w": g})
        return state, updates["w"]

    return jax.jit(functools.partial(jax.lax.scan, body))


def run(tx, grads, params=None):
    """All updates, stacked, and the last state; grads[t] is the leaf of step t."""
    grads = jnp.asarray(grads)
    state = tx.init({"w": grads[0] if params is None else params})
    state, updates = _scan(tx)(state, grads)
    return updates, state
