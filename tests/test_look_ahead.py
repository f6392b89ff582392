"""EMA-Nesterov around other transforms, against ``reference.ema_nesterov``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_equal, gradients, run_compiled, sample
from reference import ema_nesterov, relative_error

import muon2_optax as m2

BETAS = [0.0, 0.6, 0.6, 0.3, 0.0, 0.5, 0.2]


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_gradients_are_taken_ahead(dtype):
    """Descent with decay on a quadratic: the base step depends on where it starts."""
    rng = np.random.default_rng(0)
    curvature = np.diag(rng.uniform(0.5, 2.0, 6))
    x0, rate, decay = rng.standard_normal((6, 4)).astype(dtype), 0.2, 0.8
    if dtype == np.complex128:
        x0 = x0 + 1j * rng.standard_normal((6, 4))

    def step_from(t, y):
        return -rate * (curvature @ y + 0.1 * y)

    iterates, points = ema_nesterov(x0, step_from, BETAS, decay)
    with jax.enable_x64(True):
        base = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(rate))
        tx = m2.ema_nesterov(base, lambda t: jnp.asarray(BETAS)[t], decay)
        params = {"x": jnp.asarray(x0)}
        state = tx.init(params)
        for t in range(len(BETAS) - 1):
            # The state keeps beta in float32.
            assert relative_error(params["x"], points[t]) < 1e-7
            grads = {"x": jnp.asarray(curvature) @ params["x"]}
            updates, state = jax.jit(tx.update)(grads, state, params)
            params = optax.apply_updates(params, updates)
            got = m2.ema_nesterov_eval_params(state, params)
            assert relative_error(got["x"], iterates[t + 1]) < 1e-7
    assert int(state.count) == len(BETAS) - 1


def test_without_look_ahead_it_is_the_wrapped_optimizer():
    shapes = {"w": (8, 12), "b": (12,)}
    params, grads = sample(0, shapes), gradients(3, shapes)
    base = m2.muon2_f(0.1, ns_steps=1)
    want = run_compiled(base, params, grads)
    got = run_compiled(m2.ema_nesterov(base, 0.0), params, grads)
    assert_equal(got[0], want[0])
    assert_equal(m2.ema_nesterov_eval_params(got[1], got[0]), want[0])


def test_among_wrappers_and_in_sixteen_bits():
    shapes = {"w": (8, 12), "b": (12,)}
    grads = gradients(4, shapes, jnp.bfloat16)
    params = sample(0, shapes, jnp.bfloat16)
    inner = m2.ema_nesterov(optax.adam(0.1), 0.5, 0.9)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.MultiSteps(inner, 2))
    got, state, updates = run_compiled(tx, params, grads)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype("bfloat16")}
    behind = m2.ema_nesterov_eval_params(state, got)
    assert {x.dtype for x in jax.tree.leaves(behind)} == {jnp.dtype("bfloat16")}
    assert np.any(np.asarray(behind["w"] != got["w"]))
    found = optax.tree.get(state, "step")
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    injected = optax.inject_hyperparams(
        lambda beta: m2.ema_nesterov(optax.sgd(0.1), beta)
    )(beta=0.5)
    plain = m2.ema_nesterov(optax.sgd(0.1), 0.5)
    start, steps = sample(0, shapes), gradients(3, shapes)
    got, want = (run_compiled(t, start, steps)[0] for t in (injected, plain))
    assert_close(got, want, 1e-6)


def test_state_of_another_optimizer():
    params = {"w": jnp.ones((2, 2))}
    with pytest.raises(ValueError, match="the state holds 0 EmaNesterovStates"):
        m2.ema_nesterov_eval_params(optax.sgd(0.1).init(params), params)


@pytest.mark.parametrize("wrap", ["masked", "partition"])
def test_what_a_mask_kept_away_is_evaluated_as_it_is(wrap):
    params = {"head": jnp.ones(3), "body": {"w": jnp.ones((4, 2)), "b": jnp.ones(2)}}
    inner = m2.ema_nesterov(optax.sgd(0.25), 0.5, 0.5)
    if wrap == "masked":
        tx = optax.masked(inner, {"head": False, "body": True})
    else:
        labels = {"head": "other", "body": "ahead"}
        tx = optax.partition({"ahead": inner, "other": optax.sgd(0.25)}, labels)
    state = tx.init(params)
    updates, state = tx.update(params, state, params)
    params = optax.apply_updates(params, updates)
    got = m2.ema_nesterov_eval_params(state, params)
    assert_equal(got["head"], params["head"])
    for x in jax.tree.leaves(got["body"]):
        np.testing.assert_array_equal(x, 0.75)
    for p in jax.tree.leaves(params["body"]):
        np.testing.assert_array_equal(p, 0.6875)  # 0.5 of a mean step of 0.125 ahead


def test_schedule_of_a_constant_rate():
    beta = m2.ema_nesterov_schedule(0.03, 20, peak=0.4)
    values = [float(beta(t)) for t in (2, 3, 14, 15)]
    np.testing.assert_allclose(values, [0, 0.4, 0.4, 0], rtol=1e-6)


def test_published_schedule():
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.04, 20, 100)
    beta = m2.ema_nesterov_schedule(rate, 100, peak=0.6)
    values = np.asarray([beta(t) for t in range(100)])
    assert not values[:15].any() and not values[75:].any()
    inside = [0.6 * float(rate(t)) / 0.04 for t in range(15, 75)]
    np.testing.assert_allclose(values[15:75], inside, rtol=1e-5)
    assert values.max() == pytest.approx(0.6)
    with pytest.raises(ValueError, match="fractions in order"):
        m2.ema_nesterov_schedule(rate, 100, start=0.8)
    with pytest.raises(ValueError, match="never positive"):
        m2.ema_nesterov_schedule(optax.constant_schedule(0.0), 10)
