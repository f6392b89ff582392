"""The library inside other frameworks; ``docs/recipes.md`` shows these functions.

Each recipe trains a small model and returns its parameters as a flat dict.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict
from recipes.first_step import assert_moved, data

import muon2_optax as m2


def train_with_nnx(x, y, steps):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(16, 32, rngs=rngs)
            self.down = nnx.Linear(32, 8, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.gelu(self.up(x)))

    model = Model(nnx.Rngs(0))
    tx = m2.muon2(0.02, adam_learning_rate=3e-3)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)

    for _ in range(steps):
        step(model, optimizer)
    return flatten_dict(nnx.to_pure_dict(nnx.state(model, nnx.Param)), sep="/")


def test_nnx():
    before, after = (train_with_nnx(*data(), steps) for steps in (0, 1))
    kernels = {"up/kernel": 32 / 16, "down/kernel": 8 / 32}
    assert_moved(before, after, kernels, ["up/bias", "down/bias"])


def train_with_linen(x, y, steps):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(16)(nn.gelu(x)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            x, _ = layers(name="layers")(x, None)
            return nn.Dense(8, name="project")(x)

    # Counted from the end, the axes fit a kernel (in, out) and a stack of kernels
    # (layers, in, out). With variable_axes={"params": 1} a stack is (in, layers, out):
    # then MatrixAxes(0, -1).
    rules = m2.MatrixRules(((r"kernel$", m2.MatrixAxes(-2, -1)),))
    model = Model()
    state = TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), x)["params"],
        tx=m2.muon2(0.02, adam_learning_rate=3e-3, rules=rules),
    )

    @jax.jit
    def step(state):
        def loss(params):
            return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for _ in range(steps):
        state = step(state)
    return flatten_dict(state.params, sep="/")


def test_linen_with_scanned_layers():
    before, after = (train_with_linen(*data(), steps) for steps in (0, 1))
    assert before["layers/Dense_0/kernel"].shape == (3, 16, 16)
    kernels = {"layers/Dense_0/kernel": 1.0, "project/kernel": 8 / 16}
    assert_moved(before, after, kernels, ["layers/Dense_0/bias", "project/bias"])


def train_with_equinox(x, y, steps):
    import equinox as eqx

    model = eqx.nn.MLP(16, 8, width_size=32, depth=1, key=jax.random.key(0))
    # Equinox stores weights as (out, in).
    rules = m2.MatrixRules(((r"weight$", m2.MatrixAxes(-1, -2)),))
    tx = m2.muon2(0.02, adam_learning_rate=3e-3, rules=rules)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    state = tx.init(params)

    @eqx.filter_jit
    def step(params, state):
        def loss(params):
            return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - y) ** 2)

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return eqx.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): v for p, v in leaves}


def test_equinox():
    pytest.importorskip("equinox")
    before, after = (train_with_equinox(*data(), steps) for steps in (0, 1))
    weights = {"layers/0/weight": 32 / 16, "layers/1/weight": 8 / 32}
    assert_moved(before, after, weights, ["layers/0/bias", "layers/1/bias"])


def train_with_haiku(x, y, steps):
    import haiku as hk

    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 8])(x)))
    params = model.init(jax.random.key(0), x)  # {"mlp/~/linear_0": {"w": …, "b": …}, …}
    tx = m2.muon2(0.02, adam_learning_rate=3e-3)
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda p: jnp.mean((model.apply(p, x) - y) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return flatten_dict(params, sep="/")


def test_haiku():
    pytest.importorskip("haiku")
    before, after = (train_with_haiku(*data(), steps) for steps in (0, 1))
    weights = {"mlp/~/linear_0/w": 32 / 16, "mlp/~/linear_1/w": 8 / 32}
    assert_moved(before, after, weights, ["mlp/~/linear_0/b", "mlp/~/linear_1/b"])


def test_tree_in_the_shape_of_haikus():
    """The same names and shapes, for where Haiku is not installed."""
    tree = {
        "mlp/~/linear_0": {"w": jnp.ones((16, 32)), "b": jnp.ones(32)},
        "mlp/~/linear_1": {"w": jnp.ones((32, 8)), "b": jnp.ones(8)},
        "layer_norm": {"scale": jnp.ones(8), "offset": jnp.ones(8)},
    }
    labels = flatten_dict(m2.MatrixRules().labels(tree), sep="|")
    matrices = {path for path, label in labels.items() if label == "matrix"}
    assert matrices == {"mlp/~/linear_0|w", "mlp/~/linear_1|w"}


def train_with_keras(x, y, steps):
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(32, "gelu", name="up"),
            keras.layers.Dense(8, name="down"),
        ],
        name="model",
    )
    # Keras' own loop takes Keras' optimizers only; its stateless calls take any. Keep
    # the variables by path: rules know a leaf by its name.
    params = {v.path: v.value for v in model.trainable_variables}
    others = [v.value for v in model.non_trainable_variables]
    tx = m2.muon2(0.02, adam_learning_rate=3e-3)
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        def loss(params):
            values = [params[v.path] for v in model.trainable_variables]
            outputs, _ = model.stateless_call(values, others, x)
            return jnp.mean((outputs - y) ** 2)

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    for variable in model.trainable_variables:
        variable.assign(params[variable.path])
    return params


def test_keras(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras is set to another backend")
    with jax.numpy_rank_promotion("allow"):  # Keras' layers need it
        before, after = (train_with_keras(*data(), steps) for steps in (0, 1))
    kernels = {"model/up/kernel": 32 / 16, "model/down/kernel": 8 / 32}
    assert_moved(before, after, kernels, ["model/up/bias", "model/down/bias"])
