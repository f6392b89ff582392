"""``rest=``: any transformation for what is not a matrix, on every optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import OPTIMIZERS, RULES, sample

import muon2_optax as m2

SHAPES = {"w": (8, 12), "embed": (6, 8), "bias": (12,)}


def two_steps(tx, params):
    state, update = tx.init(params), jax.jit(tx.update)
    for seed in (1, 2):
        updates, state = update(sample(seed, SHAPES), state, params)
    return updates, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rest_goes_there_and_matrices_as_ever(name):
    """With the learning rate and the arguments of its own."""
    rest = optax.chain(optax.trace(0.7), optax.scale(-0.5))
    tx = m2.REGISTRY[name](0.1, rest=rest)
    params = sample(0, SHAPES)
    if name != "muon":  # the others run the same code
        shapes = jax.eval_shape(tx.init, params).inner_states["adam"].inner_state
        assert shapes[0].trace["bias"].shape == (12,)
        return
    got, state = two_steps(tx, params)
    plain, _ = two_steps(m2.muon(0.1), params)
    np.testing.assert_array_equal(got["w"], plain["w"])
    g1, g2 = (sample(seed, SHAPES) for seed in (1, 2))
    for leaf in ("embed", "bias"):
        want = -0.5 * (g2[leaf] + 0.7 * g1[leaf])
        np.testing.assert_allclose(got[leaf], want, rtol=1e-6)


def test_extra_arguments_reach_it():
    def scaled(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda u: value * u, updates), state

    rest = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), scaled)
    params = sample(0, SHAPES)
    tx = m2.muon2(0.1, rest=rest)
    got, _ = tx.update(params, tx.init(params), params, value=3.0)
    np.testing.assert_array_equal(got["bias"], 3 * params["bias"])


@pytest.mark.parametrize(
    "given",
    [
        {"adam_learning_rate": 1e-3},
        {"adam_b1": 0.8, "adam_b2": 0.99},
        {"adam_eps": 1e-6, "adam_eps_root": 0.0},
        {"adam_weight_decay": 0.1},
    ],
    ids=lambda given: "-".join(given),
)
def test_arguments_for_adamw_beside_it_are_named(given):
    with pytest.raises(ValueError, match=f"^{' and '.join(given)} would have no"):
        m2.normuon(0.1, rest=optax.sgd(0.1), **given)
    if given.get("adam_weight_decay"):
        with pytest.raises(ValueError, match="^adam_weight_decay and adam_h would"):
            m2.muon_h(0.1, rest=optax.sgd(0.1), adam_h="embed", **given)


def test_hyperparameters():
    """Defaults that Optax injects are no arguments of the user's; None stays None."""
    for given in ({"adam_learning_rate": lambda step: 0.1}, {"adam_eps_root": 1e-9}):
        tx = optax.inject_hyperparams(m2.muon2)(0.1, rest=optax.sgd(0.2), **given)
        with pytest.raises(ValueError, match=f"^{next(iter(given))} would have no"):
            tx.init(sample(0, SHAPES))
    tx = optax.inject_hyperparams(m2.muon2)(0.1, rest=optax.sgd(0.2))
    params = sample(0, SHAPES)
    got, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_allclose(got["bias"], -0.2 * params["bias"], rtol=1e-6)


def test_anything_else_is_refused():
    with pytest.raises(TypeError, match="rest must be an optax.GradientTransformation"):
        m2.muon(0.1, rest=1e-3)
    with pytest.raises(TypeError, match="rest must be"):
        m2.dion(0.1, rest=optax.adamw)


def test_eps_root_of_adamw():
    """Two steps against float64: eps is added under the corrected root and after it."""
    params = {"bias": jnp.zeros(5)}
    grads = [np.linspace(-1e-2, 3e-2, 5), np.linspace(2e-2, -1e-2, 5)]
    tx = m2.muon2_f(0.1, adam_eps_root=1e-4, adam_eps=1e-3, adam_b2=0.9)
    state, mu, nu = tx.init(params), 0.0, 0.0
    for t, g in enumerate(grads, 1):
        updates, state = tx.update({"bias": jnp.float32(g)}, state, params)
        mu, nu = 0.9 * mu + 0.1 * g, 0.9 * nu + 0.1 * g * g
        root = np.sqrt(nu / (1 - 0.9**t) + 1e-4) + 1e-3
        want = -0.1 * mu / (1 - 0.9**t) / root
        # 1 - b^t cancels a digit of float32.
        np.testing.assert_allclose(updates["bias"], want, rtol=1e-5)


def test_momentum_as_nadam_mixes_it():
    """Against float64, with other rates than Optax's; the state stays uncorrected."""
    rng = np.random.default_rng(3)
    grads = rng.standard_normal((4, 3, 5))
    for nesterov in (True, False):
        tx = m2.scale_by_momentum(0.8, nesterov=nesterov, bias_correction=True)
        state, mu = tx.init({"w": jnp.zeros((3, 5))}), 0.0
        for t, g in enumerate(grads, 1):
            got, state = tx.update({"w": jnp.float32(g)}, state)
            mu = 0.8 * mu + 0.2 * g
            want = mu / (1 - 0.8**t)
            if nesterov:
                want = 0.8 * mu / (1 - 0.8 ** (t + 1)) + 0.2 * g / (1 - 0.8**t)
            np.testing.assert_allclose(got["w"], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.mu["w"], mu, rtol=1e-5, atol=1e-6)
        assert int(state.count) == len(grads)
    with pytest.raises(ValueError, match="dampening=None"):
        m2.scale_by_momentum(bias_correction=True, dampening=0.0)


def test_dual_norm_is_that_of_each_matrix():
    """After exact orthogonalization: the nuclear norm times the polar factor."""
    tx = m2.scale_by_dual_norm(
        m2.newton_schulz_orthogonalize(40, "quintic", rules=RULES), rules=RULES
    )
    g = sample(5, {"stack": (3, 4, 6), "w": (6, 4)})
    got, _ = tx.update(g, tx.init(g))
    for name, x in g.items():
        u, s, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
        want = s.sum(-1)[..., None, None] * (u @ vt)
        np.testing.assert_allclose(got[name], want, atol=2e-5 * s.sum())


def test_adaptive_muon_takes_it_between():
    params = sample(6, SHAPES)
    tx = m2.muon(0.1, adaptive=True, shape_scale="none", ns_steps=3)
    got, _ = tx.update(params, tx.init(params), params)
    plain = m2.muon(0.1, shape_scale="none", ns_steps=3)
    o = plain.update(params, plain.init(params), params)[0]["w"] / -0.1
    numerator = (0.95 * 0.05 + 0.05) * params["w"]
    want = -0.1 * jnp.sum(numerator * o) * o
    np.testing.assert_allclose(got["w"], want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "scale, factor",
    [
        (m2.MatchRMS(0.31), 0.31 * 12**0.5),
        (m2.MatchRMS(), 0.2 * 12**0.5),
        (lambda fan_in, fan_out: 2 * fan_in + fan_out, 28),
    ],
    ids=["0.31", "default", "function"],
)
def test_shape_scales_that_are_no_names(scale, factor):
    x = {"w": jnp.ones((8, 12))}
    got, _ = m2.scale_by_shape(scale).update(x, optax.EmptyState())
    np.testing.assert_allclose(got["w"], factor, rtol=1e-6)
    table = m2.MatrixRules().describe(x, shape_scale=scale)
    assert f"{factor:.4g}" in table


def test_numbers_of_numpy_and_jax_in_shape_scales():
    for rms in (np.float32(0.5), np.asarray(0.5), jnp.float32(0.5)):
        assert hash(m2.MatchRMS(rms)) == hash(m2.MatchRMS(0.5))
    tx = m2.scale_by_shape(lambda fan_in, fan_out: jnp.sqrt(fan_in * fan_out))
    got = jax.jit(lambda x: tx.update(x, optax.EmptyState())[0])(
        {"w": jnp.ones((8, 2))}
    )
    np.testing.assert_allclose(got["w"], 4.0, rtol=1e-6)


def test_shape_scales_that_are_none():
    for rms in (0.0, -1.0, float("nan"), "0.2", None, True, np.ones(2)):
        with pytest.raises(ValueError, match="rms must be a positive number"):
            m2.MatchRMS(rms)
    with pytest.raises(TypeError, match="known while tracing"):
        jax.eval_shape(m2.MatchRMS, 0.4)
    for scale in (0.2, None, "match-rms", m2.MatchRMS):
        with pytest.raises(ValueError, match="MatchRMS"):
            m2.muon(0.1, shape_scale=scale)
    tx = optax.inject_hyperparams(m2.scale_by_shape)(lambda fan_in, fan_out=1: 1.0)
    with pytest.raises(TypeError, match="static_args"):
        tx.init({"w": jnp.ones((2, 3))})
    tx = optax.inject_hyperparams(m2.scale_by_shape)(m2.MatchRMS(0.3))
    tx.init({"w": jnp.ones((2, 3))})


@pytest.mark.parametrize("name", ["weight_decay", "adam_weight_decay"])
def test_decay_without_parameters_is_refused(name):
    grads = {"w": jnp.ones((4, 6)), "b": jnp.ones(6)}
    tx = m2.muon2(0.1, **{name: 0.25})
    with pytest.raises(ValueError, match="decay of 0.25 needs the parameters"):
        tx.update(grads, tx.init(grads))
    none = m2.muon2(0.1, weight_decay=0.0, adam_weight_decay=0.0)
    jax.eval_shape(none.update, grads, none.init(grads))
