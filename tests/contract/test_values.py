"""Odd shapes, the rest of the tree, layouts and convergence, for every optimizer.

The oracle is the same optimizer on another path, Optax, or a symmetry that all of
them have; a new entry of ``m2.REGISTRY`` is covered by being registered.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    ON_SPHERE,
    RANDOM_START,
    RULES,
    SMALL,
    assert_close,
    assert_finite,
    cast,
    compiled,
    every,
    gradients,
    make,
    run,
    run_compiled,
    sample,
    scaled,
    transposed,
    types,
    zeros_like,
)

import muon2_optax as m2


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
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
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
    if name in ON_SPHERE:  # which the targets must be on
        ends = {"w": sample(7, SMALL)["w"], "v": sample(7, SMALL)["w"], "xy": 1.0}
        for key, end in ends.items():
            norm = jnp.linalg.norm(jnp.broadcast_to(end, params[key].shape))
            params[key] *= norm / jnp.linalg.norm(params[key])
    steps = 2000
    rate = optax.linear_schedule(0.1, 0.0, steps)
    tx = make(name, rate, weight_decay=0.0, adam_weight_decay=0.0)

    @jax.jit
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
