"""What Optax checks of its own optimizers, where our other tests do not check it.

Written after the checks of github.com/google-deepmind/optax at 2edbcbe2, each named
below; ``docs/conformance.md`` lists all of them, and where we differ on purpose.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    ON_SPHERE,
    SMALL,
    STATIC,
    assert_close,
    assert_equal,
    every,
    gradients,
    run_compiled,
    sample,
    types,
)

import muon2_optax as m2


@every
def test_reaches_the_minimum_at_a_constant_rate(name):
    """contrib/_common_test.py, test_optimizers: parabolas of vectors and matrices."""
    rng = np.random.default_rng(0)
    goal = {
        "vector": jnp.array([1.0, -1.0, 1.0]),
        "matrix": jnp.asarray(rng.standard_normal((8, 8)), jnp.float32),
    }
    start = {"vector": jnp.array([-1.0, 10.0, 1.0]), "matrix": jnp.zeros((8, 8))}
    if name in ON_SPHERE:  # which the start must be on as well
        other = jnp.asarray(rng.standard_normal((8, 8)), jnp.float32)
        norms = jnp.linalg.norm(goal["matrix"]), jnp.linalg.norm(other)
        start["matrix"] = norms[0] / norms[1] * other
    tx = m2.REGISTRY[name](3e-3, adam_learning_rate=1e-2)

    @jax.jit
    def train(params):
        def body(carry, _):
            params, state = carry
            grads = jax.tree.map(lambda p, g: 2 * (p - g), params, goal)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, tx.init(params)), length=6000)[0][0]

    end = train(start)
    for key in goal:
        # Their tolerance: steps of a constant rate end in a circle about the minimum.
        np.testing.assert_allclose(end[key], goal[key], atol=3e-2, err_msg=key)


@every
def test_injected_state_under_jit(name):
    """alias_test.py, test_optimizers_can_be_wrapped_in_inject_hyperparams."""
    params, grads = sample(0, SMALL), gradients(2, SMALL)
    factory = m2.REGISTRY[name]
    static = STATIC.get(name, ())
    injected = optax.inject_hyperparams(factory, static_args=static)(0.1)
    start = jax.jit(injected.init)(params)
    assert types(start.inner_state) == types(factory(0.1).init(params))
    _, want, _ = run_compiled(factory(0.1), params, grads)
    _, got, _ = run_compiled(injected, params, grads)
    # 1 - b1 is taken in float32 there and in Python here, and a difference of two
    # nearly equal squares (adam_b2 = 0.999) keeps 1e-4 of its rounding.
    assert_close(got.inner_state, want, 2e-4)


@every
def test_learning_rate_is_a_number_or_a_schedule(name):
    """contrib/_common_test.py, test_optimizers_accept_learning_rate_schedule_...."""
    parameter = inspect.signature(m2.REGISTRY[name]).parameters["learning_rate"]
    assert parameter.annotation == optax.ScalarOrSchedule
    assert parameter.default is inspect.Parameter.empty


@every
def test_state_can_be_read_and_set(name):
    """tree_utils/_state_utils_test.py: get_all_with_path, get with filtering, set."""
    params = sample(0, SMALL)
    tx = optax.inject_hyperparams(m2.REGISTRY[name], STATIC.get(name, ()))(0.1)
    state = tx.init(params)
    assert float(optax.tree.get(state, "learning_rate")) == pytest.approx(0.1)
    slower = optax.tree.set(state, learning_rate=jnp.asarray(0.05))
    assert float(slower.hyperparams["learning_rate"]) == pytest.approx(0.05)
    assert jax.tree.structure(slower) == jax.tree.structure(state)

    def of_adam(path, _):
        return any(getattr(key, "key", None) == "adam" for key in path)

    mu = optax.tree.get(state, "mu", filtering=of_adam)
    assert mu["b"].shape == (12,)


WRAPPERS = {
    "mechanize": lambda tx: optax.contrib.mechanize(tx, weight_decay=0.0),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 0.1),
    "reduce_on_plateau": lambda tx: optax.chain(tx, optax.contrib.reduce_on_plateau()),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, lambda step: step % 2 == 0
    ),
    "skip_large_updates": lambda tx: optax.MultiSteps(
        tx, 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "named_chain": lambda tx: optax.named_chain(
        ("clip", optax.clip_by_global_norm(1.0)), ("optimizer", tx)
    ),
    "split_real_and_imaginary": optax.contrib.split_real_and_imaginary,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@every
def test_state_is_stable_inside_wrappers(name, wrapper):
    """The suites of the wrappers: two steps, traced, with one type of state."""
    tx = WRAPPERS[wrapper](m2.REGISTRY[name](0.1))
    params = sample(0, SMALL)
    extra = {"value": jnp.asarray(1.0)} if wrapper == "reduce_on_plateau" else {}

    def loop(params, grads):
        def body(carry, _):
            params, state = carry
            updates, state = tx.update(grads, state, params, **extra)
            assert types(updates) == types(grads)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, tx.init(params)), length=2)[0]

    new, _ = jax.eval_shape(loop, params, sample(1, SMALL))
    assert types(new) == types(params)


@every
def test_lookahead(name):
    """lookahead_test.py: slow parameters are synchronized every second step."""
    params = optax.LookaheadParams.init_synced(sample(0, SMALL))
    tx = optax.lookahead(m2.REGISTRY[name](0.1), sync_period=2, slow_step_size=0.5)
    state, update = tx.init(params), jax.jit(tx.update)
    for step, grads in enumerate(gradients(2, SMALL), 1):
        before = params
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if step == 1:
            assert_equal(params.slow, before.slow)
    assert_close(params.fast, params.slow, 1e-6)


@every
def test_sharded_state_of_zeros(name):
    """_src/sharding_test.py, contrib/_sharding_test.py: the state keeps its types."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    rules = m2.MatrixRules(((r"^$", m2.MatrixAxes(-2, -1)),))
    with jax.set_mesh(mesh):
        spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
        params = jnp.zeros((2, 8, 4), jnp.float16, out_sharding=spec)
        radius = {"radius": "init"} if name in ON_SPHERE else {}
        tx = m2.REGISTRY[name](1.0, rules=rules, **radius)
        state = tx.init(params)
        kinds = jax.tree.map(jax.typeof, state)
        assert jax.tree.map(jax.typeof, jax.jit(tx.init)(params)) == kinds
        _, new = jax.eval_shape(tx.update, params, state, params)
        assert jax.tree.map(jax.typeof, new) == kinds


def test_where_we_differ():
    """Each line of the table in ``docs/conformance.md`` that a test can show."""
    params, grads = sample(0, SMALL), sample(1, SMALL)
    # Two branches have a momentum, so a bare name is ambiguous.
    with pytest.raises(KeyError):
        optax.tree.get(m2.muon2(0.1).init(params), "mu")
    # What is not a matrix takes AdamW, not NAdam, by default.
    ours, theirs = m2.muon(0.1), optax.adamw(0.1, weight_decay=0.0)
    got, _ = ours.update(grads, ours.init(params), params)
    want, _ = theirs.update({"b": grads["b"]}, theirs.init({"b": params["b"]}), params)
    # 1 - b2 of AdamW is 1e-3, which float32 knows to 6e-5.
    np.testing.assert_allclose(got["b"], want["b"], rtol=1e-4)
