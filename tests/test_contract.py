"""What every optimizer of the registry owes to JAX and Optax.

Each test runs for every entry of ``m2.REGISTRY``; a new entry is covered by being
registered. What values an optimizer computes is tested elsewhere: the oracle here is
the same optimizer on another path, Optax, or a symmetry that all of them have.
"""

import ast
import functools
import inspect
import itertools
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    JOINS_A_STACK,
    MATRICES,
    OPTIMIZERS,
    RANDOM_START,
    RULES,
    SMALL,
    STATIC,
    WHOLE_MATRICES_ONLY,
    abstract,
    accepts,
    assert_close,
    assert_equal,
    assert_finite,
    bare,
    compiled,
    every,
    gradients,
    leaves,
    make,
    only,
    quick_jit,
    run,
    run_compiled,
    sample,
    types,
    wide,
)
from jax.sharding import PartitionSpec as P

import muon2_optax as m2

DTYPES = ("float32", "bfloat16", "float16")
PAIRS = [*itertools.product(DTYPES, DTYPES), ("mixed", "mixed")]


def cast(tree, dtype):
    if dtype != "mixed":
        return jax.tree.map(lambda x: x.astype(dtype), tree)
    flat, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(x.astype(d) for x, d in zip(flat, itertools.cycle(DTYPES)))


def scaled(tree, factor):
    return jax.tree.map(lambda x: factor * x, tree)


def zeros_like(tree):
    return jax.tree.map(jnp.zeros_like, tree)


# ------------------------------------------------------------------ state and types


@every
def test_init_of_abstract_parameters(name):
    tx, params = make(name, rules=RULES), sample(0)
    want = types(tx.init(params))
    assert types(jax.eval_shape(tx.init, abstract(params))) == want
    assert types(tx.init(abstract(params))) == want


@every
def test_init_under_jit_is_init(name):
    tx, params = make(name, rules=RULES), sample(0)
    assert_equal(jax.jit(tx.init)(params), tx.init(params))


@every
def test_state_holds_statistics_only(name):
    """No hyperparameter, no coefficient, no Python number: zeros, and int32 counts."""
    params = sample(0)
    state = make(name, rules=RULES).init(params)
    steps = only(name, ns_steps=4, ns_coeffs=(2.0, -1.5, 0.5), b2=0.7, eps=1e-3)
    other = make(name, 3e-3, b1=0.5, weight_decay=0.0, rules=RULES, **steps)
    assert_equal(state, other.init(params))
    for path, x in leaves(state):
        assert isinstance(x, jax.Array), path
        assert name in RANDOM_START or not np.any(wide(x)), f"{path} starts at {x}"
        if path.endswith(".count"):
            assert x.dtype == jnp.int32 and x.shape == (), path
        else:
            assert "['" in path.rsplit(".", 1)[-1], f"{path} belongs to no parameter"


@every
def test_counts_count(name):
    _, state, _ = run(compiled(name), sample(0, SMALL), gradients(3, SMALL))
    counts = [int(x) for path, x in leaves(state) if path.endswith(".count")]
    assert counts and set(counts) == {3}


@every
@pytest.mark.parametrize("param_dtype, grad_dtype", PAIRS)
def test_types_are_kept(name, param_dtype, grad_dtype):
    """Updates like the gradients, state as init made it, in cond and in scan too."""
    tx = make(name, rules=RULES)
    params = abstract(cast(sample(0), param_dtype))
    grads = abstract(cast(sample(1), grad_dtype))
    start = types(jax.eval_shape(tx.init, params))
    assert not any(weak for *_, weak in start)
    # Tracing suffices: cond (in apply_if_finite) and scan refuse unequal types.
    guarded = optax.apply_if_finite(tx, 3)
    outer = jax.eval_shape(guarded.init, params)
    updates, outer = jax.eval_shape(guarded.update, grads, outer, params)
    assert types(updates) == types(grads)
    assert types(outer.inner_state) == start

    def loop(params, grads):
        def body(carry, _):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, tx.init(params)), length=2)

    jax.eval_shape(loop, params, grads)


@every
def test_weakly_typed_parameters(name):
    """``jnp.asarray(1.0)`` is weakly typed; the state must not be, at any time."""
    params = {"w": jnp.ones((8, 12)), "scale": jnp.asarray(1.0)}
    assert params["scale"].weak_type
    tx = make(name)
    state = tx.init(params)
    _, new = jax.eval_shape(tx.update, params, state, params)
    assert types(state) == types(new)
    assert not any(weak for *_, weak in types(state))


@every
def test_second_step_does_not_recompile(name):
    tx = make(name, optax.linear_schedule(0.1, 0.0, 10))
    traces = 0

    @quick_jit
    def step(params, state, grads):
        nonlocal traces
        traces += 1
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = sample(0, SMALL)
    state = tx.init(params)
    for grads in gradients(3, SMALL):
        params, state = step(params, state, grads)
    assert traces == 1


@every
def test_extra_arguments_are_ignored(name):
    tx, params, grads = make(name), sample(0, SMALL), sample(1, SMALL)
    extra = {"value": jnp.ones(()), "grad": grads, "loss_fn": len, "anything": None}
    state = tx.init(params)
    got = quick_jit(lambda *args: tx.update(*args, **extra))(grads, state, params)
    assert_equal(got, compiled(name).update(grads, state, params))


@every
@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_dtypes(name, dtype):
    """mu follows the parameters or mu_dtype, nu is float32 unless nu_dtype says so."""
    params = abstract(sample(0, dtype=dtype))

    def stored(**kw):
        tx = make(name, rules=RULES, **kw)
        state = jax.eval_shape(tx.init, params)
        _, new = jax.eval_shape(tx.update, params, state, params)
        assert types(new) == types(state)
        found = {}
        for path, x in leaves(state):
            field = path.rsplit(".", 1)[-1].split("[")[0]
            group = "matrix" if "'matrix'" in path else "adam"
            found.setdefault((group, field), set()).add(jnp.dtype(x.dtype).name)
        return found

    for (group, field), found in stored().items():
        want = {"count": "int32", "mu": dtype}.get(field, "float32")
        assert found == {want}, (group, field)
    for given in (jnp.bfloat16, "bfloat16", np.dtype("float32")):
        found = stored(mu_dtype=given)
        for group in ("matrix", "adam"):
            assert found[group, "mu"] == {jnp.dtype(given).name}, (group, given)
    if accepts(name, "nu_dtype"):
        assert stored(nu_dtype=jnp.bfloat16)["matrix", "nu"] == {"bfloat16"}


@every
@pytest.mark.parametrize("dtype, rtol", [("bfloat16", 0.05), ("float16", 0.01)])
@pytest.mark.parametrize("scale", [2.0**-12, 1.0, 2.0**12])
def test_sixteen_bit_gradients_cost_their_rounding_only(name, dtype, scale, rtol):
    """Against the same gradients in float32: no norm or square is taken in 16 bits.

    The tolerances are about ten units in the last place: one rounding between each two
    transforms, times the gain of Newton-Schulz.
    """
    tx = compiled(name, mu_dtype="float32", **only(name, eps=0.0, adam_eps=0.0))
    zeros = zeros_like(sample(0, SMALL))
    state, narrow = tx.init(zeros), tx.init(cast(zeros, dtype))
    for g in gradients(3, SMALL):
        g = cast(scaled(g, scale), dtype)
        want, state = tx.update(cast(g, "float32"), state, zeros)
        got, narrow = tx.update(g, narrow, cast(zeros, dtype))
        assert_close(got, want, rtol)


@every
def test_sum_of_squares_beyond_float16(name):
    """260 x 260 signs have a squared norm of 67600, and float16 ends at 65504."""
    tx, g = compiled(name), cast(sample(1, {"w": (260, 260)}), "float16")
    g = jax.tree.map(jnp.sign, g)
    updates, state = tx.update(g, tx.init(g), zeros_like(g))
    assert_finite((updates, state))
    assert np.any(wide(updates["w"]))


@every
def test_x64(name):
    """float64 stays float64 in every digit, and float32 beside it float32."""
    flip = functools.partial(transposed, keys=("w",))
    with jax.enable_x64(True):
        params, grads = sample(0, SMALL, "float64"), gradients(3, SMALL, "float64")
        for tree in (params, *grads):
            tree["b"] = tree["b"].astype("float32")
        tx = make(name)
        state = tx.init(params)
        for path, x in leaves(state):
            want = "float32" if path.endswith("['b']") else "float64"
            assert x.dtype == ("int32" if path.endswith(".count") else want), path
        got, new, updates = run_compiled(tx, params, grads)
        assert types(new) == types(state)
        assert types(updates) == types(grads[0])
        # The same matrix stored transposed: another program, the same numbers.
        tx = make(name, rules=m2.MatrixRules((("w", m2.MatrixAxes(1, 0)),)))
        flipped, _, _ = run_compiled(tx, flip(params), [flip(g) for g in grads])
    # 1e-12: float64's rounding (1e-16) times the gain of Newton-Schulz; one operation
    # in float32 anywhere would leave 1e-8.
    assert_close(flip(flipped)["w"], got["w"], 1e-12)
    if name not in RANDOM_START:  # a start in float64 is another one
        grads = [cast(g, "float32") for g in grads]
        single, _, _ = run(compiled(name), cast(params, "float32"), grads)
        assert_close(single, got)


# ------------------------------------------------------------------------ composition


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
    state, update = tx.init(params), quick_jit(tx.update)
    full, _ = update(grads, state, params)
    state.hyperparams["learning_rate"] /= 2
    half, _ = update(grads, state, params)
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
        quick_jit(tx.update),
    )
    for t, g in enumerate(gradients(3, SMALL)):
        got, state = update(g, state, params)
        unit, plain_state = plain.update(g, plain_state, params)
        want = {k: rates[k](t) * u for k, u in unit.items()}
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
    updates, _ = quick_jit(tx.update)(zeros_like(params), tx.init(params), params)
    # A zero gradient moves nothing, so what is left is the decay alone.
    on, off, factor = ("b", "w", -0.025) if function else ("w", "b", -0.05)
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


# ------------------------------------------------------------------------- gradients


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
    tx = optax.GradientTransformationExtraArgs(tx.init, quick_jit(tx.update))
    got, state, _ = run(tx, params, [g, bad, h])
    want, clean, _ = run(tx, params, [g, h])
    assert_equal(got, want)
    assert_equal(state.inner_state, clean.inner_state)
    assert int(state.total_notfinite) == 1


# --------------------------------------------------------------------- shapes, values


@every
def test_odd_shapes(name):
    """Scalars, empty leaves, vectors as matrices, rank 5 under a rule."""
    shapes = {
        "scalar": (),
        "nothing": (0,),
        "no_rows": (0, 8),
        "no_members": (0, 4, 6),
        "row": (1, 8),
        "dot": (1, 1),
        "experts": (2, 1, 2, 8, 12),
        "convolution": (2, 2, 1, 2, 12),
    }
    rules = (
        (r"experts|no_members", m2.MatrixAxes(-2, -1)),
        (r"convolution", m2.MatrixAxes((0, 1, 2, 3), 4)),
    )
    params, grads = sample(0, shapes), sample(1, shapes)
    tx = make(name, rules=m2.MatrixRules(rules))
    updates, state = quick_jit(tx.update)(grads, tx.init(params), params)
    assert types(updates) == types(grads)
    assert_finite((updates, state))
    if name in RANDOM_START:
        return  # the start depends on the path and the stack
    # Each expert alone, and the convolution as a matrix of its own.
    tx = compiled(name)

    def matrices(tree):
        experts = tree["experts"].reshape(4, 8, 12)
        return [*experts, tree["convolution"].reshape(8, 12)]

    for got, g, p in zip(*map(matrices, (updates, grads, params))):
        want, _ = tx.update({"w": g}, tx.init({"w": p}), {"w": p})
        assert_close(got, want["w"])


@every
def test_uncovered_rank_five_goes_to_adamw_with_a_warning(name):
    shapes = {"odd": (2, 1, 2, 3, 4)}
    params, grads = sample(0, shapes), sample(1, shapes)
    tx = make(name)
    with pytest.warns(UserWarning, match=r"odd \(2, 1, 2, 3, 4\)"):
        updates, _ = tx.update(grads, tx.init(params), params)
    adam = optax.adamw(0.1, b2=0.9, weight_decay=0.05)
    want, _ = adam.update(grads, adam.init(params), params)
    assert_close(updates, want, 1e-6)  # the same formula in another order


@every
def test_the_rest_is_optax_adamw(name):
    params, grads = sample(0, SMALL), gradients(4, SMALL)
    kw = {"adam_b1": 0.8, "adam_b2": 0.95, "adam_eps": 1e-3}
    got, _, _ = run_compiled(make(name, adam_learning_rate=0.05, **kw), params, grads)
    adam = optax.adamw(0.05, 0.8, 0.95, 1e-3, weight_decay=0.05)
    want, _, _ = run(adam, params["b"], [g["b"] for g in grads])
    assert_close(got["b"], want, 1e-5)  # the same formula, reordered; 1 - b2^t cancels


def transposed(tree, keys=MATRICES):
    """The tree with the matrices under ``keys`` stored as (fan_out, fan_in)."""
    flip = functools.partial(jax.tree.map, lambda x: jnp.swapaxes(x, -1, -2))
    return {k: flip(v) if k in keys else v for k, v in tree.items()}


@every
def test_storage_order_does_not_matter(name):
    """What counts is which axis is the input; the shape factor follows it."""
    params, grads = sample(0), gradients(2)
    rules = (
        (r"^stack$", m2.MatrixAxes(-1, -2)),
        (r"^block/", m2.MatrixAxes(1, 0)),
    )
    want, _, _ = run(compiled(name, rules=RULES), params, grads)
    tx = make(name, rules=m2.MatrixRules(rules))
    got, _, _ = run_compiled(tx, transposed(params), [transposed(g) for g in grads])
    assert_close(transposed(got), want)


@every
def test_complex_leaves(name):
    """A phase passes through, real numbers stay real, and imaginary parts count."""
    tx = compiled(name, weight_decay=0.0, adam_weight_decay=0.0)
    real, other = sample(1, SMALL), sample(2, SMALL)
    zeros = zeros_like(cast(real, "complex64"))

    def first(g):
        return tx.update(g, tx.init(zeros), zeros)[0]

    if name not in RANDOM_START:  # a complex start is another one
        want, _ = tx.update(real, tx.init(zeros_like(real)), zeros_like(real))
        assert_close(first(cast(real, "complex64")), cast(want, "complex64"))
    phase = np.complex64(np.exp(0.7j))
    both = jax.tree.map(lambda a, b: a + 1j * b, real, other)
    want = scaled(first(both), phase)
    assert_close(first(scaled(both, phase)), want)
    assert types(want) == types(zeros)


def parabola(params):
    return jnp.sum((params["w"] - sample(7, SMALL)["w"]) ** 2)


def line(params):
    """For AdamW's group."""
    return jnp.sum((params["b"] - sample(7, SMALL)["b"]) ** 2)


def rosenbrock(params):
    x, y = params["xy"]
    return jnp.sum(100 * (y - x**2) ** 2 + (1 - x) ** 2)


def least_squares(params):
    """Condition number 1e4."""
    scale = jnp.geomspace(1.0, 100.0, 8)[:, None]
    return jnp.sum((scale * (params["v"] - sample(7, SMALL)["w"])) ** 2)


def two_layers(params):
    product = params["first"] @ params["second"] + params["bias"][None, :]
    return jnp.sum((product - sample(7, SMALL)["w"]) ** 2)


@every
def test_convergence(name):
    """Five targets on leaves of their own, in one run to save compilations."""
    targets = (parabola, line, rosenbrock, least_squares, two_layers)
    layers = {"first": (8, 10), "second": (10, 12), "bias": (12,)}
    params = sample(3, SMALL | layers | {"v": (8, 12), "xy": (2, 6)})
    steps = 2000
    rate = optax.linear_schedule(0.1, 0.0, steps)
    tx = make(name, rate, weight_decay=0.0, adam_weight_decay=0.0)

    @quick_jit
    def train(params):
        def body(carry, _):
            params, state = carry
            grads = jax.grad(lambda p: sum(f(p) for f in targets))(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, tx.init(params)), length=steps)[0][0]

    end = train(params)
    for loss in targets:
        assert loss(end) < 1e-3 * loss(params), loss.__name__


# ------------------------------------------------------------------- transformations


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
    scan = quick_jit(functools.partial(jax.lax.scan, body))
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
    got, one = quick_jit(jax.vmap(train))(rates), quick_jit(train)
    for i, rate in enumerate(rates):
        assert_close(jax.tree.map(lambda x, i=i: x[i], got), one(rate))


@every
def test_donation(name):
    """No buffer is shared, all of them are given back, and the numbers stay."""
    tx, params, grads = make(name), sample(0, SMALL), gradients(3, SMALL)
    want = run(compiled(name), params, grads)[:2]

    @functools.partial(quick_jit, donate_argnums=(0, 1))
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


# ---------------------------------------------------------------------- construction


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


def test_registry():
    """Every optimizer is registered under its own name, with the rate first."""
    for name in OPTIMIZERS:
        factory = m2.REGISTRY[name]
        assert factory.__name__ == name
        assert next(iter(inspect.signature(factory).parameters)) == "learning_rate"
    for name in ("muon", "muon2", "muon2_f"):
        assert m2.REGISTRY[name] is getattr(m2, name)


# ------------------------------------------------------------------------ the package


PACKAGE = pathlib.Path(m2.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): ast.parse(path.read_text()) for path in SOURCES}


def imports(module):
    """Absolute names of all that a module imports, wherever in it."""
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inner_imports(module):
    """Which modules of the package a module imports."""
    found = set()
    for name in imports(module):
        if name.split(".")[0] == "muon2_optax":
            found.add(name if name in MODULES else name.rpartition(".")[0])
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_of_a_module(module):
    allowed = {"jax", "optax", "numpy", "muon2_optax"} | set(sys.stdlib_module_names)
    for name in imports(module):
        assert name.split(".")[0] in allowed, name
        assert not any(part.startswith("_") for part in name.split(".")[:2]), name
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Attribute):
            assert node.attr != "_src", f"private API in line {node.lineno}"
    upper = ("muon2_optax", "muon2_optax.optimizers")
    if module != "muon2_optax" and not module.startswith("muon2_optax.optimizers"):
        for name in inner_imports(module):
            assert name not in upper and not name.startswith(upper[1] + "."), name


def test_imports_have_no_cycle():
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            path.append(module)
            for name in inner_imports(module):
                visit(name)
            done.add(path.pop())

    for module in MODULES:
        visit(module)


def test_import_needs_jax_and_optax_only():
    """In a process of its own, where the frameworks cannot even be imported."""
    code = """
import sys
import jax, jax.numpy, jaxlib, numpy, optax
before = {name.split(".")[0] for name in sys.modules}
for name in ("flax", "chex", "orbax", "jaxtyping", "equinox"):
    assert name not in before, f"optax imports {name}"
    sys.modules[name] = None
import muon2_optax as m2
params = {"w": jax.numpy.ones((4, 6)), "b": jax.numpy.ones(6)}
for factory in (m2.muon, m2.muon2, m2.muon2_f):
    factory(0.1).init(params)
new = {name.split(".")[0] for name in sys.modules} - before
print(*sorted(n for n in new - set(sys.stdlib_module_names) if sys.modules[n]))
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["muon2_optax"]


def test_public_names_are_documented():
    public = {k: v for k, v in vars(m2).items() if not k.startswith("_")}
    documented = {k: v for k, v in public.items() if callable(v)}
    assert {"muon2", "MatrixRules", "newton_schulz", "scale_by_shape"} <= set(
        documented
    )
    for name, obj in documented.items():
        doc = inspect.getdoc(obj) or ""
        # A dataclass without a docstring gets its signature as one.
        assert len(doc) > 30 and not doc.startswith(f"{name}("), name
