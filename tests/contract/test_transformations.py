"""jit, scan, vmap and donation, for every optimizer of the registry.

The oracle is the same optimizer on another path, Optax, or a symmetry that all of
them have; a new entry of ``m2.REGISTRY`` is covered by being registered.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from helpers import (
    SMALL,
    assert_close,
    compiled,
    every,
    gradients,
    make,
    run,
    sample,
)


@every
def test_jit_is_eager(name):
    params, grads = sample(0, SMALL), gradients(3, SMALL)
    want = run(make(name), params, grads)
    assert_close(run(compiled(name), params, grads), want)


@every
def test_scan_is_loop(name):
    tx, params, grads = make(name), sample(0, SMALL), gradients(4, SMALL)

    def body(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        return (optax.apply_updates(params, updates), state), updates

    stacked = jax.tree.map(lambda *g: jnp.stack(g), *grads)
    scan = jax.jit(functools.partial(jax.lax.scan, body))
    carry, updates = scan((params, tx.init(params)), stacked)
    last = jax.tree.map(lambda x: x[-1], updates)
    assert_close((*carry, last), run(compiled(name), params, grads))


@every
def test_vmap_over_learning_rates(name):
    params, grads = sample(0, SMALL), gradients(2, SMALL)

    def train(rate):
        tx = make(name, rate, weight_decay=rate, adam_learning_rate=2 * rate)
        return run(tx, params, grads)[0]

    rates = jnp.array([0.01, 0.1, 0.3])
    got, one = jax.jit(jax.vmap(train))(rates), jax.jit(train)
    for i, rate in enumerate(rates):
        assert_close(jax.tree.map(lambda x, i=i: x[i], got), one(rate))


@every
def test_donation(name):
    """No buffer is shared, all of them are given back, and the numbers stay."""
    tx, params, grads = make(name), sample(0, SMALL), gradients(3, SMALL)
    want = run(compiled(name), params, grads)[:2]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, g):
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    params, state = sample(0, SMALL), tx.init(params)
    for g in grads:
        buffers = jax.tree.leaves((params, state))
        pointers = [x.unsafe_buffer_pointer() for x in buffers]
        assert len(set(pointers)) == len(pointers)
        params, state = step(params, state, g)
        assert all(x.is_deleted() for x in buffers)
    assert_close((params, state), want)
