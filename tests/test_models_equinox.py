"""MatrixRules.of for Equinox models: layers as they compute, stacks, ties."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_maps import check_norm, check_orientation, filled
from routing import matrices_of

import muon2_optax as m2
from muon2_optax import MatrixAxes, MatrixRules

eqx = pytest.importorskip("equinox")
nn = eqx.nn


def stack(size, make, axis=0):
    keys = jax.random.split(jax.random.key(0), size)
    return eqx.filter_vmap(make, out_axes=axis)(keys)


class Zoo(eqx.Module):
    layers: dict
    blocks: list

    def __init__(self):
        key = jax.random.key(0)
        self.layers = {
            "linear": nn.Linear(6, 15, key=key),
            "to_scalar": nn.Linear(6, "scalar", key=key),
            "norm_mixer": nn.Linear(9, 4, use_bias=False, key=key),
            "conv": nn.Conv2d(3, 5, (3, 2), key=key),
            "upscale": nn.ConvTranspose1d(3, 5, 3, key=key),
            "unpatch": nn.ConvTranspose1d(3, 5, 4, stride=4, key=key),
            "attention": nn.MultiheadAttention(2, 8, qk_size=3, vo_size=5, key=key),
            "lstm": nn.LSTMCell(7, 4, key=key),
            "gru": nn.GRUCell(7, 4, key=key),
            "first": stack(3, lambda key: nn.Linear(6, 4, key=key)),
            "second": stack(3, lambda key: nn.Linear(6, 4, key=key), axis=1),
        }
        self.blocks = [nn.MLP(4, 2, 9, 1, key=key)]


def cell_state(cell, x):
    h = jnp.linspace(0.1, 0.4, 4)  # not zero, or no weight of it would count
    return cell(x, (h, h))[0] if isinstance(cell, nn.LSTMCell) else cell(x, h)


def run_stack(axis):
    def call(layers, x):
        return eqx.filter_vmap(lambda m, x: m(x), in_axes=(axis, None))(layers, x)[1]

    return call


# Per leaf: the layer that runs it, an input, how it runs, and how many matrices lie
# side by side in it.
LAYERS = {
    "layers/linear/weight": ((6,), None, 1),
    "layers/to_scalar/weight": ((6,), None, 1),
    "layers/norm_mixer/weight": ((9,), None, 1),
    "layers/conv/weight": ((3, 6, 5), None, 1),
    "layers/upscale/weight": ((3, 6), None, 1),
    "layers/unpatch/weight": ((3, 2), None, 1),
    "layers/attention/query_proj/weight": ((8,), None, 1),
    "layers/attention/value_proj/weight": ((8,), None, 1),
    "layers/attention/output_proj/weight": ((10,), None, 1),
    "layers/lstm/weight_ih": ((7,), cell_state, 4),
    "layers/lstm/weight_hh": ((7,), cell_state, 4),
    "layers/gru/weight_ih": ((7,), cell_state, 3),
    "layers/gru/weight_hh": ((7,), cell_state, 3),
    "layers/first/weight": ((6,), run_stack(0), 1),
    "layers/second/weight": ((6,), run_stack(1), 1),
    "blocks/0/layers/0/weight": ((4,), None, 1),
    "blocks/0/layers/1/weight": ((9,), None, 1),
}


@functools.cache
def zoo():
    """The model and its rules."""
    arrays, rest = eqx.partition(
        eqx.filter_eval_shape(Zoo), lambda x: isinstance(x, jax.ShapeDtypeStruct)
    )
    model = eqx.combine(filled(arrays), rest)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return model, MatrixRules.of(model)


def inside(tree, path):
    for key in path:
        if isinstance(tree, dict):
            tree = tree[key]
        else:
            tree = tree[int(key)] if key.isdigit() else getattr(tree, key)
    return tree


@pytest.mark.parametrize("path", LAYERS)
def test_a_layer(path):
    model, rules = zoo()
    size, call, blocks = LAYERS[path]
    call = call or (lambda layer, x: layer(x))
    *above, name = path.split("/")
    layer = inside(model, above)
    x = 0.5 + jax.random.uniform(jax.random.key(2), size)
    weight = jax.random.normal(jax.random.key(3), getattr(layer, name).shape)

    def outputs(weight):
        return call(eqx.tree_at(lambda m: getattr(m, name), layer, weight), x)

    check_orientation(rules, path, weight, outputs, blocks=blocks)


def test_every_matrix_of_the_zoo_is_checked():
    model, rules = zoo()
    unchecked = {"layers/attention/key_proj/weight"}  # as the value
    params = eqx.filter(model, eqx.is_array)
    assert matrices_of(params, rules) == {*LAYERS, *unchecked}


class Block(eqx.Module):
    norm: nn.RMSNorm
    attention: nn.MultiheadAttention
    up: nn.Linear
    down: nn.Linear

    def __init__(self, key):
        self.norm = nn.RMSNorm(8)
        self.attention = nn.MultiheadAttention(2, 8, key=key)
        self.up = nn.Linear(8, 24, use_bias=False, key=key)
        self.down = nn.Linear(24, 8, use_bias=False, key=key)

    def __call__(self, x):
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y, inference=True)
        return x + jax.vmap(lambda x: self.down(jax.nn.gelu(self.up(x))))(x)


class Transformer(eqx.Module):
    """Eight scanned layers as wide as they are many; the head is the embedding."""

    tied: nn.Shared
    layers: Block

    def __init__(self):
        key = jax.random.key(0)
        pair = (nn.Embedding(32, 8, key=key), nn.Linear(8, 32, key=key))
        where, get = (lambda p: p[1].weight), (lambda p: p[0].weight)
        self.tied = nn.Shared(pair, where, get)
        self.layers = stack(8, Block)

    def __call__(self, ids):
        tokens, head = self.tied()
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        def run(x, arrays):
            return eqx.combine(arrays, static)(x), None

        return jax.vmap(head)(jax.lax.scan(run, jax.vmap(tokens)(ids), arrays)[0])


def test_a_transformer_with_scanned_layers():
    model = Transformer()
    params, static = eqx.partition(model, eqx.is_inexact_array)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx = m2.muon2(1.0, rules=MatrixRules.of(model))

        @jax.jit
        def step(params):
            def loss(params):
                model = eqx.combine(params, static)
                return jnp.mean(model(jnp.arange(24)) ** 2)

            grads = jax.grad(loss)(params)
            return tx.update(grads, tx.init(params), params)[0]

        moved = step(params)
    layer = jax.tree.map(lambda x: np.asarray(x)[5], moved.layers)
    check_norm(layer.up.weight, 8, 24)
    check_norm(layer.down.weight, 24, 8)
    check_norm(layer.attention.query_proj.weight, 8, 8)
    table = np.abs(moved.tied.pytree[0].weight)
    np.testing.assert_allclose(table, 1, rtol=0.02)  # a step of AdamW


TIES = {
    "embedding kept": (lambda p: p[1].weight, lambda p: p[0].weight, (11, 8)),
    "linear kept": (lambda p: p[0].weight, lambda p: p[1].weight, (11, 8)),
    "linear kept, turned": (lambda p: p[0].weight, lambda p: p[1].weight.T, (8, 11)),
}


@pytest.mark.parametrize("kind", TIES)
def test_a_shared_embedding_stays_a_table(kind):
    where, get, (outs, ins) = TIES[kind]
    key = jax.random.key(0)
    pair = (nn.Embedding(11, 8, key=key), nn.Linear(ins, outs, key=key))
    model = [nn.Shared(pair, where, get), nn.Linear(8, 11, key=key)]
    params = eqx.filter(model, eqx.is_array)
    assert matrices_of(params, MatrixRules.of(model)) == {"1/weight"}


def test_vectors_tables_and_groups():
    key = jax.random.key(0)
    model = {
        "depthwise": nn.Conv1d(6, 6, 3, groups=6, key=key),
        "field": nn.LayerNorm((3, 4)),
        "norms": stack(3, lambda key: nn.LayerNorm(4)),
        "codes": stack(3, lambda key: nn.Embedding(5, 4, key=key)),
        "normed": nn.WeightNorm(nn.Linear(4, 6, key=key)),
        "slope": nn.PReLU(jnp.ones((3, 4))),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rules = MatrixRules.of(model)
    found = matrices_of(eqx.filter(model, eqx.is_array), rules)
    assert found == {"normed/layer/weight"}


class Own(eqx.Module):
    mix: jax.Array
    turned: nn.Linear

    def __init__(self):
        self.mix = jnp.ones((5, 3))
        linear = nn.Linear(6, 4, key=jax.random.key(0))
        self.turned = eqx.tree_at(lambda m: m.weight, linear, jnp.ones((6, 4)))


def test_what_is_not_known_is_listed_and_can_be_taught():
    model = Own()
    with pytest.warns(UserWarning, match=r"Own: mix \(5, 3\)\n  Linear: turned/weight"):
        rules = MatrixRules.of(model)
    table = rules.describe(eqx.filter(model, eqx.is_array))
    assert "module Own unknown" in table and "does not fit module Linear" in table
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taught = {"mix": MatrixAxes(-1, -2), "turned/weight": MatrixAxes(0, 1)}
        rules = MatrixRules.of(model, modules={Own: taught})
    assert rules.resolve("mix", (5, 3)).fan_in == 3
    assert rules.resolve("turned/weight", (6, 4)).fan_in == 6


OUT_IN = MatrixRules((("weight$", MatrixAxes(-1, -2)),))


class Labelled(eqx.Module):
    """A model with a leaf that is neither array nor function; callable as a tree."""

    weight: jax.Array
    unit: str

    def __call__(self, x):
        return self.weight @ x


@pytest.mark.parametrize("optimizer", ["muon", "muon2_h", "dion"])
def test_models_that_are_not_filtered(optimizer):
    """The error names the leaf and ``eqx.filter``, in init and in update."""
    key = jax.random.key(1)
    mlp = nn.MLP(3, 4, 8, 1, activation=jnp.tanh, key=key)
    labelled = Labelled(jnp.ones((4, 6)), "volt")
    tx = m2.REGISTRY[optimizer](0.1, rules=OUT_IN)
    for model, leaf, what in (
        (mlp, "activation", "a function"),
        (labelled, "unit", "of type str"),
    ):
        want = rf"'{leaf}', which is {what}.*eqx\.filter\(model, eqx\.is_array\)"
        with pytest.raises(TypeError, match=want):
            tx.init(model)
        arrays = eqx.filter(model, eqx.is_array)
        state = jax.eval_shape(tx.init, arrays)
        with pytest.raises(TypeError, match=want):
            tx.update(arrays, state, model)
    with pytest.raises(TypeError, match=r"eqx\.filter"):
        m2.scale_by_momentum().init(mlp)


def test_a_filtered_model_may_be_callable():
    """As a tree, a module with ``__call__`` is no mask and no function to Optax."""
    model = eqx.filter(Labelled(jnp.ones((4, 6)), "volt"), eqx.is_array)
    assert callable(model)
    tx = m2.muon2(0.1, rules=OUT_IN, weight_decay=0.1)
    updates, _ = tx.update(model, tx.init(model), model)
    assert updates.weight.shape == (4, 6) and jnp.any(updates.weight != 0)
