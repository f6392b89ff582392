"""Functions of a leaf that are traced once for all leaves of a shape."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import count_compilations

import muon2_optax as m2
from muon2_optax import averages
from muon2_optax.arrays import limits, tracing


def test_once_per_shape_and_setting():
    seen = []

    @tracing.once
    def times(x, *, factor):
        seen.append((x.shape, factor))
        return factor * x

    def step(xs):
        return [times(x, factor=f) for x in xs for f in (2.0, 3.0)]

    xs = [np.full(n, 2, np.float32) for n in (3, 3, 4)]
    jax.jit(step)(xs)
    assert sorted(seen) == [((3,), 2.0), ((3,), 3.0), ((4,), 2.0), ((4,), 3.0)]
    # Settings that are arrays cannot be static: nothing is shared then.
    np.testing.assert_array_equal(times(xs[0], factor=jnp.float32(5)), np.full(3, 10))
    slope = jax.grad(lambda f: jnp.sum(times(xs[1], factor=f)))(5.0)
    np.testing.assert_array_equal(slope, 6)


@tracing.each
def shifted(x, y, *, by):
    return x + y + by, y


def test_each_leaf_alone_and_a_few_in_a_call():
    sizes = [3] * (2 * limits.LEAVES_PER_CALL + 1) + [4] + [3] * limits.LEAVES_PER_CALL
    xs = [np.full(n, i, np.float32) for i, n in enumerate(sizes)]
    ys = [x / 2 for x in xs]

    def step(xs, ys):
        return shifted(xs, ys, by=2.0)

    for got in (jax.jit(step)(xs, ys), step(xs, ys)):
        want = [(1.5 * x + 2, y) for x, y in zip(xs, ys)]
        jax.tree.map(np.testing.assert_array_equal, got, want)
    calls = [e.params["jaxpr"] for e in jax.make_jaxpr(step)(xs, ys).eqns]
    counts = [len(c.jaxpr.invars) // 2 for c in calls]
    assert counts == [
        limits.LEAVES_PER_CALL,
        limits.LEAVES_PER_CALL,
        1,
        1,
        limits.LEAVES_PER_CALL,
    ]
    assert calls[0] is calls[1] is calls[-1]
    # Lists of two lengths are a mistake, not leaves left out.
    with pytest.raises(ValueError, match="shorter"):
        shifted(xs, ys[:-1], by=2.0)


def test_leaves_beside_a_traced_one_are_not_compiled():
    seen = []

    @tracing.each
    def twice(x):
        seen.append(isinstance(x, jax.core.Tracer))
        return 2 * x

    xs = [jnp.full(5, float(i)) for i in range(4)]
    jax.jvp(lambda x: twice([xs[0], x, *xs[2:]])[1], (xs[1],), (xs[1],))
    assert seen == [False, True, False, False]


def test_nothing_is_compiled_for_a_new_setting_outside_of_jit():
    params = {"w": jnp.ones((3, 5))}
    tx = m2.scale_by_second_moment
    state = tx().init(params)
    tx().update(params, state)
    with count_compilations() as compilations:
        for b1 in (0.81, 0.82, 0.83):
            tx(b1=b1).update(params, state)
    assert not compilations


@pytest.mark.parametrize("optimizer", [m2.muon2, m2.muon])
def test_a_leaf_more_costs_few_operations(optimizer):
    """Of the lowered step, where most operations of a leaf are its shape's."""

    def lines(count):
        params = {f"w{i}": jnp.ones((8, 16)) for i in range(count)}
        tx = optimizer(0.02)

        def step(grads, state, params):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        lowered = jax.jit(step).lower(params, tx.init(params), params)
        return len(lowered.as_text().splitlines())

    assert lines(8) - lines(7) < 25


@pytest.mark.parametrize("eps", [1e-13, 1e-12, 3e-12, 4e-12, 1e-11, 1e-10, 1e-8, 1.0])
def test_a_larger_eps_hides_the_floor_under_the_root(eps):
    """To the bit: a root that is held up makes the same sum."""
    root = np.geomspace(1e-38, 1e19, 4000).astype(np.float32)
    root = jnp.asarray(np.append(root, [0, np.inf, np.nan]), jnp.float32)
    got = averages.divisor(root, eps)
    np.testing.assert_array_equal(got, averages.divisor(root, jnp.float32(eps)))
