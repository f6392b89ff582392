"""Which arguments are hyperparameters to ``optax.inject_hyperparams``."""

import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import OPTIMIZERS, assert_close, sample
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muon2_optax as m2
from muon2_optax import arguments

ROOT = pathlib.Path(__file__).parents[1]
TREE = {"kernel": (8, 16), "gain": (16,)}
# Numbers that select a program, by optimizer, with values other than the defaults.
STATIC = {name: {"ns_steps": 2} for name in OPTIMIZERS} | {
    "dion": {"rank_fraction": 0.5, "seed": 3},
    "soap_muon": {"precondition_frequency": 4, "max_precond_dim": 12, "ns_steps": 2},
    "teon": {"group_size": 3, "ns_steps": 2},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_default_numbers_that_select_a_program_are_no_hyperparameters(name):
    tx = optax.inject_hyperparams(m2.REGISTRY[name])(0.1)
    found = set(jax.eval_shape(tx.init, sample(0, TREE)).hyperparams)
    numbers = {"ns_steps", "rank_fraction", "seed", "group_size", "period"}
    assert not found & numbers
    # What remains are the numbers that a step may be given.
    parameters = inspect.signature(m2.REGISTRY[name]).parameters
    assert {"learning_rate", "b1", "adam_weight_decay", "adam_eps"} <= found
    assert found <= set(parameters)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_traced_ones_are_refused_in_one_sentence(name):
    """It gives all the names that ``static_args`` needs, and with them it works."""
    factory, given = m2.REGISTRY[name], STATIC[name]
    params = sample(0, TREE)
    tx = optax.inject_hyperparams(factory)(0.1, **given)
    want = ", ".join(map(repr, given)) + ("," if len(given) == 1 else "")
    with pytest.raises(TypeError) as error:
        jax.eval_shape(tx.init, params)
    assert f"static_args=({want})" in str(error.value)
    assert str(error.value).count(". ") == 0
    tx = optax.inject_hyperparams(factory, static_args=tuple(given))(0.1, **given)
    jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)


def test_dtypes_and_masks_are_named_too():
    """Both are callable, so Optax takes them for schedules."""
    tx = optax.inject_hyperparams(m2.adamuon)(
        0.1, ns_steps=4, mu_dtype=jnp.bfloat16, weight_decay_mask=jnp.ones_like
    )
    names = r"\('ns_steps', 'mu_dtype', 'weight_decay_mask'\)"
    with pytest.raises(TypeError, match=names):
        jax.eval_shape(tx.init, sample(0, TREE))


def test_the_faq_names_them_all():
    """In one sentence: the arguments that a check refuses, and those of functions."""
    page = (ROOT / "docs/faq.md").read_text()
    _, answer = page.split("go into `static_args`", 1)
    sentence = answer.split("\n\n")[1].split(". ")[0]
    named = set(re.findall(r"`(\w+)`", sentence))
    refused = set(arguments.STATIC)
    # Coefficients may be arrays where their number is known.
    assert named == refused - {"ns_coeffs"} | {"shape_scale", "radius"}


@pytest.mark.parametrize(
    "kw",
    [
        {"ns_coeffs": "you5", "ns_steps": 6},
        {"ns_coeffs": [(3.0, -3.5, 1.2), (2.0, -1.5, 0.5)], "ns_steps": 4},
        {"ns_steps": -2},
    ],
    ids=["too many", "too few rows", "negative"],
)
def test_what_is_refused_when_known_is_refused_when_traced(kw):
    params = sample(0, TREE)
    for build in (m2.muon, m2.newton_schulz_orthogonalize):
        rate = (0.1,) if build is m2.muon else ()
        with pytest.raises(ValueError, match="ns_steps|rows"):
            build(*rate, **kw)
        tx = optax.inject_hyperparams(build)(*rate, **kw)
        with pytest.raises(TypeError, match=r"static_args=\('ns_steps',\)"):
            jax.jit(tx.init)(params)
    # A function has no one to ask for static_args: there, the result is no number.
    x = params["kernel"]
    coeffs = kw.get("ns_coeffs", "keller")
    out = jax.jit(lambda k: m2.newton_schulz(x, k, coeffs))(kw["ns_steps"])
    assert np.all(np.isnan(out))


def test_period_may_be_traced_if_it_is_whole():
    params = sample(0, TREE)
    tx = optax.inject_hyperparams(m2.muon_bp)(0.1, period=1.5)
    with pytest.raises(ValueError, match="whole number of steps"):
        jax.eval_shape(tx.init, params)
    # Below 1 it is 1: each step is Muon's.
    got = optax.inject_hyperparams(m2.muon_bp)(0.1, period=-3, block_grid=(2, 2))
    want = m2.muon_bp(0.1, period=1, block_grid=(2, 2))
    states = jax.jit(got.init)(params), jax.jit(want.init)(params)
    for _ in range(2):
        a, s = jax.jit(got.update)(params, states[0], params)
        b, t = jax.jit(want.update)(params, states[1], params)
        assert_close(a, b)
        states = s, t


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_explicit_mesh(name):
    """Traced numbers reach the parts that run on a mesh with Explicit axes."""
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    assert set(mesh.axis_types) == {AxisType.Explicit}
    params = sample(0, {"q": {"kernel": (8, 16)}, "o": {"kernel": (16, 8)}, "g": (8,)})
    specs = {
        "q": {"kernel": P("data", "model")},
        "o": {"kernel": P(None, "model")},
        "g": P("data"),
    }
    with jax.set_mesh(mesh):
        params = jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs
        )
        numbers = {"adam_weight_decay": 0.1, "b1": 0.8, "adam_b2": 0.9}
        tx = optax.inject_hyperparams(m2.REGISTRY[name])(0.3, **numbers)
        state = jax.eval_shape(tx.init, params)
        got = jax.eval_shape(tx.update, params, state, params)[0]
        assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, params)
        if name != "dion":  # the others run the same programs as muon
            return
        plain = m2.REGISTRY[name](0.3, **numbers)
        got, _ = jax.jit(tx.update)(params, tx.init(params), params)
        want, _ = jax.jit(plain.update)(params, plain.init(params), params)
    assert_close(got, want)


def test_traced_coefficients_on_an_explicit_mesh():
    mesh = jax.make_mesh((8,), ("x",))
    x = sample(3, {"w": (16, 24)})["w"]
    row = np.float32((2.5, -2.0, 0.6))
    want = m2.newton_schulz(x, 2, row, ns_dtype="float32")
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("x")))
        got = jax.jit(lambda x, row: m2.newton_schulz(x, 2, row, ns_dtype="float32"))(
            placed, jnp.asarray(row)
        )
    assert_close(got, want)


@pytest.mark.parametrize("name", ["muon_bp", "muon2"])
def test_steps_outside_of_jit_compile_once(name):
    compiled = []

    def listen(event, _, **__):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    params = sample(0, {"w": (5, 7), "b": (7,)})  # shapes of no other test
    kw = {"period": 3} if name == "muon_bp" else {}
    tx = m2.REGISTRY[name](0.1, **kw)
    state = tx.init(params)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(2):
            _, state = tx.update(params, state, params)
        assert compiled  # the listener hears
        compiled.clear()
        for _ in range(6):
            _, state = tx.update(params, state, params)
        assert not compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
