"""Zero, huge, tiny and bad gradients, for every optimizer of the registry.

The oracle is the same optimizer on another path, Optax, or a symmetry that all of
them have; a new entry of ``m2.REGISTRY`` is covered by being registered.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    JOINS_A_STACK,
    MATRICES,
    RULES,
    SMALL,
    WHOLE_MATRICES_ONLY,
    accepts,
    assert_close,
    assert_equal,
    assert_finite,
    bare,
    compiled,
    every,
    gradients,
    make,
    run,
    sample,
    scaled,
    wide,
    zeros_like,
)

import muon2_optax as m2


@every
def test_zero_gradients_do_not_move(name):
    tx, params = bare(name), sample(0)
    zeros = zeros_like(params)
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(zeros, state, params)
        assert_equal(updates, zeros)
    assert_finite(state)
    # What has seen only zeros must still learn.
    updates, state = tx.update(sample(1), state, params)
    assert_finite((updates, state))
    assert all(np.any(wide(x)) for x in jax.tree.leaves(updates))


@every
def test_zero_member_of_a_stack(name):
    if name in JOINS_A_STACK:
        pytest.skip("the members are one matrix")
    tx, params, grads = bare(name), sample(0), sample(1)
    part = grads | {"stack": grads["stack"].at[0].set(0)}
    got, _ = tx.update(part, tx.init(params), params)
    want, _ = tx.update(grads, tx.init(params), params)
    assert not np.any(wide(got["stack"][0]))
    assert_equal(got["stack"][1], want["stack"][1])


@every
@pytest.mark.parametrize("sign", [1, -1], ids=["huge", "tiny"])
def test_size_of_the_gradients_drops_out(name, sign):
    """1e30 and 1e-30, or 1e15 and 1e-15 where squares are taken."""
    squares = accepts(name, "eps")
    # Powers of two change no digit, except where something is added to them.
    factor = 2.0 ** (sign * (50 if squares else 100))
    tx, params = bare(name), sample(0)
    state, other = tx.init(params), tx.init(params)
    for g in gradients(3):
        # Entries in [0.5, 2.5]: their range is what is spoken of, not the norm's.
        g = jax.tree.map(lambda x: jnp.sign(x) * jnp.clip(jnp.abs(x), 0.5, 2.5), g)
        want, state = tx.update(g, state, params)
        got, other = tx.update(scaled(g, factor), other, params)
        if not squares:  # but AdamW takes them
            got, want = ({k: u[k] for k in MATRICES} for u in (got, want))
        assert_close(got, want)


@every
@pytest.mark.parametrize("size", [3e38, 1e30, 1e-30, 1e-38, 1e-44])
def test_finite_beyond_that_range(name, size):
    params = sample(0)
    huge = jax.tree.map(lambda x: jnp.sign(x) * np.float32(size), sample(1))
    for tx in (compiled(name, rules=RULES), bare(name)):
        for grads in (huge, jax.tree.map(lambda x: x * (x > 0), huge)):
            state = tx.init(params)
            for g in (grads, sample(2), grads):
                updates, state = tx.update(g, state, params)
                assert_finite((updates, state))
                if g is not grads:  # nor has it stopped for good
                    assert all(np.any(wide(x)) for x in jax.tree.leaves(updates))


@every
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_leaf_stays_alone(name, bad):
    """Leaves of one shape run as one batch, and still do not touch one another."""
    tx, params, (g, h) = compiled(name, rules=RULES), sample(0), gradients(2)
    broken = [
        {"block": {"up": g["block"]["up"].at[0, 0].set(bad)}},
        {"stack": g["stack"].at[1, 2, 3].set(bad), "bias": g["bias"].at[3].set(bad)},
    ]
    for part in broken:
        state, clean = tx.init(params), tx.init(params)
        for got, want in ((g | part, g), (h, h)):
            got, state = tx.update(got, state, params)
            want, clean = tx.update(want, clean, params)
            healthy = [k for k in g if k not in part]
            assert_equal({k: got[k] for k in healthy}, {k: want[k] for k in healthy})
            if "bias" in part:
                assert_equal(jnp.delete(got["bias"], 3), jnp.delete(want["bias"], 3))
            if "stack" in part and name not in JOINS_A_STACK:
                assert_equal(got["stack"][0], want["stack"][0])
            if np.isnan(bad):  # nor is it hidden
                for key in part:
                    values = jax.tree.leaves(got[key])[0]
                    assert np.any(np.isnan(wide(values))), key


@every
def test_bad_block_of_a_fused_leaf_stays_alone(name):
    if name in WHOLE_MATRICES_ONLY:
        pytest.skip("takes no out_splits")
    tx = compiled(name, rules=m2.MatrixRules((("qkv", m2.MatrixAxes(0, 1, (4, 8))),)))
    params, grads = sample(0, {"qkv": (8, 12)}), sample(1, {"qkv": (8, 12)})
    broken = {"qkv": grads["qkv"].at[0, 0].set(jnp.nan)}
    got, _ = tx.update(broken, tx.init(params), params)
    want, _ = tx.update(grads, tx.init(params), params)
    assert np.any(np.isnan(wide(got["qkv"][:, :4])))
    assert_equal(got["qkv"][:, 4:], want["qkv"][:, 4:])


@every
def test_skipped_step_leaves_no_trace(name):
    """optax.apply_if_finite: parameters and state as if the bad step were not there."""
    params, (g, bad, h) = sample(0, SMALL), gradients(3, SMALL)
    bad = {"w": bad["w"].at[0, 0].set(jnp.inf), "b": bad["b"].at[0].set(jnp.nan)}
    tx = optax.apply_if_finite(make(name), 5)
    tx = optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))
    got, state, _ = run(tx, params, [g, bad, h])
    want, clean, _ = run(tx, params, [g, h])
    assert_equal(got, want)
    assert_equal(state.inner_state, clean.inner_state)
    assert int(state.total_notfinite) == 1
