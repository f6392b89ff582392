"""Cautious weight decay: only entries that the update shrinks as well.

The oracle is ``reference.cautious_decay``, and Optax where every entry decays.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import OPTIMIZERS, accepts, assert_close, assert_equal, sample
from reference import cautious_decay

import muon2_optax as m2

SHAPES = {"w": (5, 6), "v": {"b": (7,)}}


def test_entries_that_the_update_shrinks():
    params, u = sample(0, SHAPES), sample(1, SHAPES)
    params["w"] = params["w"].at[0].set(0)
    u["w"] = u["w"].at[1].set(0).at[2].multiply(1e-30)  # too small for a product
    params["w"] = params["w"].at[2].multiply(1e-30)
    tx = m2.add_cautious_weight_decay(0.3)
    got, state = tx.update(u, tx.init(params), params)
    assert state == optax.EmptyState()
    want = jax.tree.map(lambda u, p: cautious_decay(u, p, 0.3), u, params)
    assert_close(got, want, 1e-6)
    assert_equal(got["w"][:2], u["w"][:2])


def test_complex_entries_decay_by_their_common_direction():
    rng = np.random.default_rng(0)
    p, u = rng.standard_normal((2, 6, 5, 2)) @ np.array([1, 1j])
    tx = m2.add_cautious_weight_decay(0.3)
    got, _ = tx.update(jnp.asarray(u), optax.EmptyState(), jnp.asarray(p))
    np.testing.assert_allclose(got, cautious_decay(u, p, 0.3), rtol=1e-5)


def test_schedule_and_mask():
    params, u = sample(0, SHAPES), sample(1, SHAPES)
    tx = m2.add_cautious_weight_decay(
        lambda t: 0.1 * (t + 1), lambda p: {"w": True, "v": False}
    )
    state = tx.init(params)
    for t in (1, 2, 3):
        got, state = jax.jit(tx.update)(u, state, params)
        want = cautious_decay(u["w"], params["w"], 0.1 * t)
        np.testing.assert_allclose(got["w"], want, rtol=1e-5)
        assert_equal(got["v"], u["v"])


def test_needs_the_parameters():
    tx = m2.add_cautious_weight_decay(0.1)
    with pytest.raises(ValueError, match=r"update\(updates, state, params\)"):
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_option_of_every_optimizer(name):
    """Of both groups: the difference to no decay is decay where the step shrinks."""
    shapes = {"w": (8, 12), "b": (12,)}
    params, grads = sample(0, shapes), sample(1, shapes)
    options = {"adam_weight_decay": 0.25}
    if accepts(name, "weight_decay"):
        options["weight_decay"] = 0.5
    zeros = dict.fromkeys(options, 0.0)

    def first(**kw):
        tx = m2.REGISTRY[name](0.1, **kw)
        return jax.jit(tx.update)(grads, tx.init(params), params)[0]

    plain, got = first(**zeros), first(cautious_weight_decay=True, **options)
    rates = {"w": options.get("weight_decay", 0.0), "b": 0.25}
    for key, rate in rates.items():
        want = cautious_decay(-plain[key], params[key], 0.1 * rate)
        np.testing.assert_allclose(-got[key], want, atol=1e-6)
        if rate:
            assert 0 < np.mean(np.asarray(got[key] != plain[key])) < 1


def test_mask_that_was_called_with_the_step():
    """As a bool it would decay everything or nothing."""
    params = {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}

    def mask(tree):
        return jax.tree.map(lambda x: x.ndim > 1, tree)

    for factory, name in (
        (m2.muon2, "weight_decay_mask"),
        (m2.muon_h, "weight_decay_mask"),
        (m2.add_cautious_weight_decay, "mask"),
    ):
        first = {"weight_decay" if name == "mask" else "learning_rate": 0.5, name: mask}
        with pytest.raises(TypeError, match=rf"is False, .*static_args=\('{name}',\)"):
            optax.inject_hyperparams(factory)(**first).init(params)
    static = optax.inject_hyperparams(
        m2.add_cautious_weight_decay, static_args=("mask",)
    )
    tx = static(weight_decay=0.5, mask=mask)
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["kernel"].tolist() == [[1.5] * 6] * 4
    assert updates["bias"].tolist() == [1.0] * 6
