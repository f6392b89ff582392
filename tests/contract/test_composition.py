"""Every optimizer of the registry among Optax's wrappers and in any container.

The oracle is the same optimizer on another path, Optax, or a symmetry that all of
them have; a new entry of ``m2.REGISTRY`` is covered by being registered.
"""

import functools

import jax
import numpy as np
import optax
import pytest
from helpers import (
    ON_SPHERE,
    RANDOM_START,
    RULES,
    SMALL,
    STATIC,
    assert_close,
    assert_equal,
    compiled,
    every,
    gradients,
    leaves,
    make,
    only,
    run,
    run_compiled,
    sample,
    scaled,
    types,
    wide,
    zeros_like,
)
from jax.sharding import PartitionSpec as P

import muon2_optax as m2


@every
def test_multi_steps_is_the_mean_gradient(name):
    params, grads = sample(0, SMALL), gradients(6, SMALL)
    multi = optax.MultiSteps(make(name), 3)
    got, state, _ = run_compiled(multi, params, grads)
    thirds = [grads[:3], grads[3:]]
    means = [jax.tree.map(lambda *g: sum(g) / 3, *third) for third in thirds]
    want, inner, _ = run(compiled(name), params, means)
    assert_close(got, want)
    assert_close(state.inner_opt_state, inner)


def on_sphere(w, towards, rate):
    """The hyperball's step from w, where ``towards`` is its step from zero, -R n(u)."""
    w, towards = wide(w), wide(towards)
    moved = w + rate * towards
    return np.linalg.norm(w) * moved / np.linalg.norm(moved) - w


def injected(name, learning_rate, **kw):
    static = STATIC.get(name, ())
    wrap = functools.partial(optax.inject_hyperparams, static_args=static)
    return make(name, learning_rate, wrap=wrap, **kw)


@every
@pytest.mark.parametrize("given", [False, True], ids=["defaults", "given"])
def test_inject_hyperparams(name, given):
    """The same updates, from the same leaves in the same groups.

    Whatever is callable would be called as a schedule: not the rules, then.
    """
    shapes = {"embed": (8, 12), "kernel": (12, 8)}
    params, grads = sample(0, shapes), gradients(3, shapes)
    rate, kw = 0.1, {}
    if given:  # the opposite of the default rules
        rate = optax.linear_schedule(0.1, 0.02, 4)
        opposite = (("embed", m2.MatrixAxes(0, 1)), ("kernel", None))
        kw = only(name, ns_coeffs="keller", mu_dtype="float32")
        kw["rules"] = m2.MatrixRules(opposite)
    tx, plain = injected(name, rate, **kw), make(name, rate, **kw)

    def routing(state):
        # A schedule keeps a count of its own, inside the plain optimizer only.
        return [kind for kind in types(state) if not kind[0].endswith(".count")]

    state = tx.init(params)
    assert routing(state.inner_state) == routing(plain.init(params))
    got, new, _ = run_compiled(tx, params, grads)
    assert types(new) == types(state)
    want, _, _ = run_compiled(plain, params, grads)
    # 1 - b1 is taken in float32 rather than in Python.
    assert_close(got, want)


@every
def test_injected_hyperparameters_act(name):
    params, grads = sample(0, SMALL), sample(1, SMALL)
    tx = injected(name, 0.1, weight_decay=0.0, adam_weight_decay=0.0)
    state, update = tx.init(params), jax.jit(tx.update)
    full, _ = update(grads, state, params)
    state.hyperparams["learning_rate"] /= 2
    half, _ = update(grads, state, params)
    if name in ON_SPHERE:
        towards = update(grads, state, zeros_like(params))[0].pop("w")
        for step, rate in ((full, 0.1), (half, 0.05)):
            assert_close(step.pop("w"), on_sphere(params["w"], towards, rate))
    assert_equal(scaled(half, 2), full)  # a power of two: exact


@every
def test_constant_schedule_is_the_constant(name):
    params, grads = sample(0, SMALL), gradients(3, SMALL)
    got, _, last = run_compiled(make(name, optax.constant_schedule(0.1)), params, grads)
    want, _, want_last = run(compiled(name), params, grads)
    # A traced rate may be multiplied in another order.
    assert_close((got, last), (want, want_last), 1e-6)


@every
def test_schedules_see_the_step(name):
    """Step t moves by schedule(t), counted from 0, each group by its own schedule."""
    params = sample(0, SMALL)
    rates = {"w": lambda t: 0.5 / (t + 1.0), "b": lambda t: 0.1 * (t + 1.0)}
    tx = make(name, rates["w"], adam_learning_rate=rates["b"])
    plain = compiled(name, learning_rate=1.0)
    state, plain_state, update = (
        tx.init(params),
        plain.init(params),
        jax.jit(tx.update),
    )
    for t, g in enumerate(gradients(3, SMALL)):
        got, state = update(g, state, params)
        before = plain_state
        unit, plain_state = plain.update(g, before, params)
        want = {k: rates[k](t) * u for k, u in unit.items()}
        if name in ON_SPHERE:
            towards, _ = plain.update(g, before, zeros_like(params))
            want["w"] = on_sphere(params["w"], towards["w"], rates["w"](t))
        assert_close(got, want, 1e-6)  # one product more


LARGER = SMALL | {"v": (12, 8), "c": (8,)}


def part(tree, empty=None):
    """What SMALL has of a tree in the shapes of LARGER."""
    return {k: v if k in SMALL else empty for k, v in tree.items()}


@every
@pytest.mark.parametrize("empty", [None, optax.MaskedNode()], ids=["None", "Masked"])
def test_absent_leaves(name, empty):
    """They stay absent, and change nothing about the others."""
    params, *grads = sample(0, LARGER), *gradients(2, LARGER)
    got, _, _ = run_compiled(
        make(name), part(params, empty), [part(g, empty) for g in grads]
    )
    assert got["v"] == got["c"] == empty
    small = [{k: tree[k] for k in SMALL} for tree in (params, *grads)]
    want, _, _ = run(compiled(name), small[0], small[1:])
    assert_close({k: got[k] for k in SMALL}, want)


@every
def test_masked(name):
    params, grads = sample(0, LARGER), gradients(2, LARGER)
    masked = optax.masked(make(name), {k: k in SMALL for k in LARGER})
    got, _, last = run_compiled(masked, params, grads)
    small = [{k: tree[k] for k in SMALL} for tree in (params, *grads)]
    want, _, _ = run(compiled(name), small[0], small[1:])
    assert_close({k: got[k] for k in SMALL}, want)
    for key in ("v", "c"):  # masked out: untouched
        assert_equal(last[key], grads[-1][key])


@every
def test_nested_partition(name):
    """Two copies and a foreign transform, each on its part of the tree."""
    shapes = SMALL | {"v": (8, 12), "c": (6,)}
    params, grads = sample(0, shapes), gradients(2, shapes)
    parts = {"ours": make(name), "other": make(name, 0.3), "sgd": optax.sgd(0.5)}
    labels = {"w": "ours", "b": "ours", "v": "other", "c": "sgd"}
    got, _, last = run_compiled(optax.partition(parts, labels), params, grads)
    for tx, keys in ((compiled(name), "wb"), (compiled(name, learning_rate=0.3), "v")):
        start, *steps = ({k: tree[k] for k in keys} for tree in (params, *grads))
        want, _, _ = run(tx, start, steps)
        assert_close({k: got[k] for k in keys}, want)
    assert_equal(last["c"], -0.5 * grads[-1]["c"])


@every
@pytest.mark.parametrize("function", [False, True], ids=["tree", "function"])
def test_masked_weight_decay(name, function):
    """weight_decay_mask reaches both groups; the decay is multiplied by the rate."""
    mask = {"w": not function, "b": function}
    tx = make(name, 0.5, weight_decay_mask=(lambda _: mask) if function else mask)
    params = sample(0, SMALL)
    updates, _ = jax.jit(tx.update)(zeros_like(params), tx.init(params), params)
    # A zero gradient moves nothing, so what is left is the decay alone.
    on, off, factor = ("b", "w", -0.025) if function else ("w", "b", -0.05)
    if name in ON_SPHERE and on == "w":
        factor = 0  # a matrix of constant norm has no decay
    assert_close(updates[on], factor * params[on], 1e-6)  # one product more
    assert not np.any(wide(updates[off]))


@every
def test_map_params(name):
    """Every statistic of a parameter is recognised as such; counts are not."""
    tx, params = make(name, rules=RULES), sample(0)
    state = tx.init(params)
    raised = optax.tree.map_params(
        tx, lambda x: x + 1, state, transform_non_params=lambda x: x + 10
    )
    assert jax.tree.structure(raised) == jax.tree.structure(state)
    for (path, got), old in zip(leaves(raised), jax.tree.leaves(state)):
        want = old + (10 if path.endswith(".count") else 1)
        np.testing.assert_array_equal(got, want, err_msg=path)
    # Which parameter a statistic belongs to: each gets that one's path and spec.
    specs = {path: P(f"axis{i}") for i, (path, _) in enumerate(leaves(params))}
    paths = jax.tree.structure(params).unflatten(specs)

    def is_masked(x):
        return isinstance(x, optax.MaskedNode)

    found = optax.tree.map_params(
        tx,
        lambda x, spec, path: x if is_masked(x) else f"{path}: {spec}",
        state,
        jax.tree.map(specs.get, paths),
        paths,
        transform_non_params=lambda x: "no parameter",
        is_leaf=is_masked,
    )
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for path, got in leaves(found):
        owner = next((p for p in specs if path.endswith(p)), None)
        assert got == (f"{owner}: {specs[owner]}" if owner else "no parameter"), path


@every
def test_containers(name):
    """Tuples, lists and nodes of the user's own give what the dict gives."""
    if name in RANDOM_START:
        pytest.skip("the start depends on the paths")
    tx, params, grads = compiled(name), sample(0, SMALL), sample(1, SMALL)
    want, _ = tx.update(grads, tx.init(params), params)
    for build in (
        lambda tree: (tree["w"], tree["b"]),
        lambda tree: Pair([tree["w"]], (tree["b"], {})),
    ):
        p, g = build(params), build(grads)
        got, _ = tx.update(g, tx.init(p), p)
        assert jax.tree.structure(got) == jax.tree.structure(g)
        assert_close(got, build(want))
    assert tx.update({}, tx.init({}), {})[0] == {}


@every
def test_bare_array(name):
    tx, g = make(name), sample(1, SMALL)["w"]
    updates, _ = jax.eval_shape(tx.update, g, tx.init(g), g)
    assert types(updates) == types(g)
    assert types(tx.init(g)) == types(jax.eval_shape(tx.init, g))


@jax.tree_util.register_pytree_with_keys_class
class Pair:
    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return ((key("weight"), self.weight), (key("bias"), self.bias)), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)
