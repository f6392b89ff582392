"""Every optimizer of the registry is the chain that its documentation says.

The oracle is the same optimizer on another path, Optax, or a symmetry that all of
them have; a new entry of ``m2.REGISTRY`` is covered by being registered.
"""

import inspect

import jax
import optax
import pytest
from helpers import (
    OPTIMIZERS,
    RULES,
    assert_equal,
    gradients,
    make,
    run_compiled,
    sample,
)

import muon2_optax as m2
from muon2_optax.optimizers import NS_STEPS

HAND = {
    "muon": (
        lambda: m2.scale_by_momentum(0.9, nesterov=True),
        {"b1": 0.9, "ns_steps": 5, "shape_scale": "keller"},
    ),
    "muon2": (
        lambda: m2.scale_by_second_moment(0.9, 0.8, 1e-6, bias_correction=True),
        {"b1": 0.9, "b2": 0.8, "eps": 1e-6, "bias_correction": True},
    ),
    "muon2_f": (
        lambda: m2.factorized_second_moment(0.9, 0.8, 1e-6, nesterov=True, rules=RULES),
        {"b1": 0.9, "b2": 0.8, "eps": 1e-6, "nesterov": True},
    ),
}


@pytest.mark.parametrize("name", HAND)
def test_chain_written_by_hand(name):
    """An optimizer is its transforms: the same bits from the public parts."""
    first, kw = HAND[name]
    kw = {"ns_steps": 3, "shape_scale": "spectral"} | kw
    by_hand = optax.partition(
        {
            "matrix": optax.chain(
                first(),
                m2.newton_schulz_orthogonalize(kw["ns_steps"], "keller", rules=RULES),
                m2.scale_by_shape(kw["shape_scale"], rules=RULES),
                optax.add_decayed_weights(0.1),
                optax.scale_by_learning_rate(0.02),
            ),
            "adam": optax.chain(
                m2.scale_by_second_moment(0.7, 0.99, 1e-4, bias_correction=True),
                optax.add_decayed_weights(0.05),
                optax.scale_by_learning_rate(0.003),
            ),
        },
        RULES.labels,
    )
    adam = {"adam_b1": 0.7, "adam_b2": 0.99, "adam_eps": 1e-4}
    ready = make(name, 0.02, rules=RULES, adam_learning_rate=0.003, **adam, **kw)
    params, grads = sample(0), gradients(3)
    got, want = (run_compiled(tx, params, grads) for tx in (ready, by_hand))
    assert_equal((got[0], got[2]), (want[0], want[2]))
    assert_equal(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]))


@pytest.mark.parametrize("name", ["muon_h", "muon2_h", "muon2_f_h"])
def test_hyperball_chain_written_by_hand(name):
    """The direction of ``HAND``, and the hyperball in place of all that follows it."""
    first, kw = HAND[name.removesuffix("_h")]
    kw = {k: v for k, v in kw.items() if k != "shape_scale"} | {"ns_steps": 4}
    by_hand = optax.partition(
        {
            "matrix": optax.chain(
                first(),
                m2.newton_schulz_orthogonalize(4, "keller", rules=RULES),
                m2.hyperball(0.02, rules=RULES),
            ),
            "adam": optax.chain(
                m2.scale_by_second_moment(0.7, 0.99, 1e-4, bias_correction=True),
                optax.add_decayed_weights(0.05),
                optax.scale_by_learning_rate(0.003),
            ),
        },
        RULES.labels,
    )
    adam = {"adam_b1": 0.7, "adam_b2": 0.99, "adam_eps": 1e-4}
    kw = adam | kw | {"radius": None, "adam_learning_rate": 0.003}
    params, grads = sample(0), gradients(3)
    got, want = (
        run_compiled(tx, params, grads)
        for tx in (make(name, 0.02, rules=RULES, **kw), by_hand)
    )
    assert_equal((got[0], got[2]), (want[0], want[2]))
    assert_equal(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]))


def test_registry():
    """Every optimizer is registered under its own name, with the rate first."""
    for name in OPTIMIZERS:
        factory = m2.REGISTRY[name]
        assert factory.__name__ == name
        assert next(iter(inspect.signature(factory).parameters)) == "learning_rate"
    for name in ("muon", "muon2", "muon2_f", "muon2_f_h"):
        assert m2.REGISTRY[name] is getattr(m2, name)


def test_number_of_steps():
    """Three behind a second moment (the K of the paper), as many as Muon elsewhere."""
    for name, steps in NS_STEPS.items():
        assert steps == (3 if name.startswith(("muon2", "soap")) else 5), name
