"""Optax's wrappers around the optimizers; ``docs/recipes.md`` shows these functions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from recipes.first_step import ADAM_RATE, RATE, assert_moved, data

import muon2_optax as m2


def small_tree(seed):
    rng = np.random.default_rng(seed)
    shapes = {"up": (16, 32), "down": (32, 16), "bias": (16,)}
    return {k: jnp.asarray(rng.standard_normal(v), "f4") for k, v in shapes.items()}


def moved(tx, state, params, grads):
    updates, state = jax.jit(tx.update)(grads, state, params)
    return optax.apply_updates(params, updates), state


def accumulated():
    """One update of the mean gradient for every four micro-batches."""
    return optax.MultiSteps(m2.muon2(0.02, adam_learning_rate=3e-3), every_k_schedule=4)


def test_accumulation():
    params, micro = small_tree(0), [small_tree(seed) for seed in range(1, 5)]
    tx = accumulated()
    state, update, new = tx.init(params), jax.jit(tx.update), params
    for i, grads in enumerate(micro):
        updates, state = update(grads, state, new)
        new = optax.apply_updates(new, updates)
        same = all(bool(jnp.all(new[k] == params[k])) for k in params)
        assert same == (i < 3)
    assert_moved(params, new, {"up": 2.0, "down": 0.5}, ["bias"])


def skipping_bad_steps():
    """A step whose gradients are not all finite changes nothing."""
    tx = m2.muon2(0.02, adam_learning_rate=3e-3)
    return optax.apply_if_finite(tx, max_consecutive_errors=5)


def test_apply_if_finite():
    tx, params = skipping_bad_steps(), small_tree(0)
    start = tx.init(params)
    bad = small_tree(1)
    bad["bias"] = bad["bias"].at[3].set(jnp.inf)
    same, state = moved(tx, start, params, bad)
    assert int(state.total_notfinite) == 1
    for a, b in ((same, params), (state.inner_state, start.inner_state)):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_array_equal(x, y)
    new, state = moved(tx, state, params, small_tree(1))
    want, _ = moved(
        m2.muon2(0.02, adam_learning_rate=3e-3),
        start.inner_state,
        params,
        small_tree(1),
    )
    for key in params:
        # The same step in another program.
        np.testing.assert_allclose(new[key], want[key], rtol=1e-5, atol=1e-6)


def clipped():
    """Clipping comes before the optimizer, never after."""
    tx = m2.muon2(0.02, adam_learning_rate=3e-3)
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def test_clipping_does_not_act_on_the_first_step():
    """It weighs steps against each other: the size of all gradients drops out."""
    params, grads = small_tree(0), small_tree(1)
    assert optax.tree.norm(grads) > 10
    plain, tx = m2.muon2(0.02, adam_learning_rate=3e-3), clipped()
    want, state = moved(plain, plain.init(params), params, grads)
    got, clipped_state = moved(tx, tx.init(params), params, grads)
    for key in params:
        # Rounding of the gradients (6e-8) times the gain of three Newton-Schulz steps
        # (41), on updates of size 0.02.
        np.testing.assert_allclose(got[key], want[key], atol=1e-5)
    second = jax.tree.map(lambda g: g / 1000, small_tree(2))  # not clipped
    got, _ = moved(tx, clipped_state, params, second)
    want, _ = moved(plain, state, params, second)
    assert not np.allclose(got["up"], want["up"], atol=1e-3)


def with_average(params, steps, gradient):
    """An exponential moving average of the parameters, for evaluation."""
    tx = m2.muon2(0.02, adam_learning_rate=3e-3)
    state, average = tx.init(params), params

    @jax.jit
    def step(params, state, average):
        updates, state = tx.update(gradient(params), state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, step_size=0.001)
        return params, state, average

    for _ in range(steps):
        params, state, average = step(params, state, average)
    return params, average


def test_average():
    start = small_tree(0)
    params, average = with_average(start, 1, lambda p: p)
    for key in start:
        want = 0.999 * np.float64(start[key]) + 0.001 * np.float64(params[key])
        np.testing.assert_allclose(average[key], want, rtol=1e-6)


def schedule_free(learning_rate):
    """Without a decay of the rate; the average takes the place of the momentum."""
    inner = m2.muon2(learning_rate, b1=0.0)
    return optax.contrib.schedule_free(inner, learning_rate, b1=0.9)


def test_schedule_free():
    target, params = small_tree(3), small_tree(0)
    tx = schedule_free(0.1)
    state = tx.init(params)

    @jax.jit
    def train(params, state):
        def body(carry, _):
            params, state = carry
            grads = jax.tree.map(lambda p, t: p - t, params, target)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, state), length=800)[0]

    last, state = train(params, state)
    evaluated = optax.contrib.schedule_free_eval_params(state, last)

    def distance(tree):
        return sum(np.linalg.norm(np.float64(tree[k]) - target[k]) for k in target)

    # The average of all iterates forgets its start as 1 / steps.
    assert distance(evaluated) < 0.1 * distance(params)


def with_frozen_leaves(params):
    """Leaves whose path contains ``down`` stay as they are and have no state."""

    def labels(params):
        def label(path, _):
            return "frozen" if "down" in jax.tree_util.keystr(path) else "trained"

        return jax.tree_util.tree_map_with_path(label, params)

    tx = {"trained": m2.muon2(0.02, adam_learning_rate=3e-3)}
    tx["frozen"] = optax.set_to_zero()
    return optax.partition(tx, labels(params))


def test_freezing():
    params = small_tree(0)
    tx = with_frozen_leaves(params)
    state = tx.init(params)
    new, _ = moved(tx, state, params, small_tree(1))
    np.testing.assert_array_equal(new["down"], params["down"])
    assert_moved(params, new, {"up": 2.0}, ["bias"])
    sizes = [x.size for x in jax.tree.leaves(state)]
    # Two moments of each trained leaf and the counts, nothing for the frozen one.
    assert sum(sizes) < 2 * (params["up"].size + params["bias"].size) + 8


def with_rates_of_groups(params):
    """One optimizer for each group; here, what is called ``down`` learns slower."""

    def group(path, _):
        return "slow" if "down" in jax.tree_util.keystr(path) else "fast"

    labels = jax.tree_util.tree_map_with_path(group, params)
    fast = m2.muon2(0.02, adam_learning_rate=3e-3)
    slow = m2.muon2(0.005, adam_learning_rate=1e-3)
    return optax.partition({"fast": fast, "slow": slow}, labels)


def test_rates_of_groups():
    params, grads = small_tree(0), small_tree(1)
    tx, plain = with_rates_of_groups(params), m2.muon2(RATE, adam_learning_rate=3e-3)
    new, _ = moved(tx, tx.init(params), params, grads)
    assert_moved(params, new, {"up": 2.0}, ["bias"])
    want, _ = moved(plain, plain.init(params), params, grads)
    quarter = 0.25 * (np.float64(want["down"]) - params["down"])
    # The change is read off from float32 parameters of size 1.
    np.testing.assert_allclose(new["down"] - params["down"], quarter, atol=1e-6)


def with_a_rate_set_by_hand():
    """The rate is a number in the state, which the training loop sets."""
    make = optax.inject_hyperparams(m2.muon2)
    return make(learning_rate=0.02, adam_learning_rate=3e-3)


def test_inject_hyperparams():
    params, grads = small_tree(0), small_tree(1)
    tx = with_a_rate_set_by_hand()
    state = tx.init(params)
    new, _ = moved(tx, state, params, grads)
    assert_moved(params, new, {"up": 2.0, "down": 0.5}, ["bias"])
    state.hyperparams["learning_rate"] = jnp.asarray(0.04)
    twice, _ = moved(tx, state, params, grads)
    np.testing.assert_array_equal(twice["bias"], new["bias"])
    # A power of two: exact, but for reading the change off the parameters.
    change = 2 * (np.float64(new["up"]) - params["up"])
    np.testing.assert_allclose(twice["up"] - params["up"], change, atol=1e-6)


def population(params, rates, steps, gradient):
    """One run for each rate, all in one program."""

    def train(rate):
        tx = m2.muon2(rate, adam_learning_rate=0.15 * rate)

        def body(carry, _):
            params, state = carry
            updates, state = tx.update(gradient(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, tx.init(params)), length=steps)[0][0]

    return jax.jit(jax.vmap(train))(rates)


def test_population():
    params, grads = small_tree(0), small_tree(1)
    rates = jnp.array([RATE, 2 * RATE])
    found = population(params, rates, 1, lambda _: grads)
    np.testing.assert_allclose(0.15 * RATE, ADAM_RATE)
    first = {k: np.asarray(v[0]) for k, v in found.items()}
    assert_moved(params, first, {"up": 2.0, "down": 0.5}, ["bias"])
    for key in params:
        change = [np.float64(v) - params[key] for v in found[key]]
        np.testing.assert_allclose(change[1], 2 * change[0], atol=1e-6, err_msg=key)


def train_lora(x, y, steps):
    """Only the factors of the LoRA are trained, and only they have state."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.LoRALinear(16, 32, lora_rank=8, rngs=rngs)
            self.down = nnx.LoRALinear(32, 8, lora_rank=8, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.gelu(self.up(x)))

    model = Model(nnx.Rngs(0))
    rules = m2.MatrixRules(((r"lora_(a|b)$", m2.MatrixAxes(0, 1)),))
    tx = m2.muon2(0.02, adam_learning_rate=3e-3, rules=rules)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return jnp.mean((model(x) - y) ** 2)

        of_lora = nnx.DiffState(0, nnx.LoRAParam)
        optimizer.update(model, nnx.grad(loss, argnums=of_lora)(model))

    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def test_lora():
    x, y = data()
    before, _ = train_lora(x, y, 0)
    after, optimizer = train_lora(x, y, 1)
    frozen = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
    for a, b in zip(
        jax.tree.leaves(nnx.state(before, frozen)),
        jax.tree.leaves(nnx.state(after, frozen)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    shapes = {"up": ((16, 8), (8, 32)), "down": ((32, 8), (8, 8))}
    for layer, (_, b_shape) in shapes.items():
        # lora_b starts at zero, so lora_a has no gradient and stays on the first step.
        old, new = (getattr(model, layer).lora.lora_b[...] for model in (before, after))
        ratio = b_shape[1] / b_shape[0]
        assert_moved({"b": old}, {"b": new}, {"b": ratio}, [])
    sizes = [x.size for x in jax.tree.leaves(nnx.state(optimizer.opt_state))]
    trained = sum(np.prod(shape) for pair in shapes.values() for shape in pair)
    assert 2 * trained <= sum(sizes) < 2 * trained + 8
