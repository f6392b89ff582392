"""What every optimizer of the registry owes to JAX: its state and its types.

The oracle is the same optimizer on another path, Optax, or a symmetry that all of
them have; a new entry of ``m2.REGISTRY`` is covered by being registered.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    DTYPES,
    RANDOM_START,
    RULES,
    SMALL,
    abstract,
    accepts,
    assert_close,
    assert_equal,
    assert_finite,
    cast,
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
    transposed,
    types,
    wide,
    zeros_like,
)

import muon2_optax as m2

PAIRS = [*itertools.product(DTYPES, DTYPES), ("mixed", "mixed")]


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
        of_parameters = name in RANDOM_START or ".radius" in path
        assert of_parameters or not np.any(wide(x)), f"{path} starts at {x}"
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

    @jax.jit
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
    got = jax.jit(lambda *args: tx.update(*args, **extra))(grads, state, params)
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
