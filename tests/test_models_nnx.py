"""MatrixRules.of for Flax NNX models: layers as they compute, trees, stacks, ties."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from linear_maps import check_norm, check_orientation, filled
from routing import labels_of, matrices_of

import muon2_optax as m2
from muon2_optax import MatrixAxes, MatrixRules


def stack(size, axis, make, seed=0):
    """Layers stacked on an axis, as ``nnx.vmap`` and ``nnx.scan`` make them."""
    keys = jax.random.split(jax.random.key(seed), size)
    return nnx.vmap(lambda key: make(nnx.Rngs(key)), in_axes=0, out_axes=axis)(keys)


def run_stack(axis):
    """Runs all layers of a stack on one input; the outputs of the second one."""

    def call(layers, x):
        run = nnx.vmap(lambda layer, x: layer(x), in_axes=(axis, None), out_axes=0)
        return run(layers, x)[1]

    return call


class Zoo(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        linear = functools.partial(nnx.Linear, use_bias=False)
        self.linear = nnx.Linear(6, 15, rngs=rngs)
        self.norm_mixer = linear(9, 4, rngs=rngs)  # the name of a norm, yet no norm
        self.general = nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), rngs=rngs)
        self.groups = nnx.LinearGeneral(3, (2, 4), batch_axis={0: 2}, rngs=rngs)
        self.heads_in = nnx.Einsum("bd,ndh->bnh", (2, 6, 5), rngs=rngs)
        self.heads_out = nnx.Einsum("bnh,nhd->bd", (2, 5, 6), rngs=rngs)
        self.pair = nnx.Einsum("bd,cdkh->cbkh", (2, 6, 2, 4), rngs=rngs)
        self.columns = nnx.Einsum("bd,nd->nb", (9, 6), rngs=rngs)
        self.conv = nnx.Conv(3, 5, (3, 2), padding="VALID", rngs=rngs)
        self.upscale = nnx.ConvTranspose(3, 5, (3,), rngs=rngs)
        self.turned = nnx.ConvTranspose(3, 5, (3,), transpose_kernel=True, rngs=rngs)
        self.unpatch = nnx.ConvTranspose(3, 5, (4,), strides=4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=3, in_features=8, qkv_features=6, out_features=5, rngs=rngs
        )
        self.lstm = nnx.OptimizedLSTMCell(7, 4, rngs=rngs)
        self.gru = nnx.GRUCell(7, 4, rngs=rngs)
        self.blocks = nnx.List([nnx.Sequential(linear(4, 9, rngs=rngs), jnp.tanh)])
        self.by_name = nnx.Dict(up=linear(4, 9, rngs=rngs))
        self.first = stack(3, 0, lambda rngs: nnx.Linear(6, 4, rngs=rngs))
        self.second = stack(3, 1, lambda rngs: nnx.Linear(6, 4, rngs=rngs))
        self.last = stack(6, -1, lambda rngs: nnx.Linear(6, 4, rngs=rngs))


def cell_state(cell, x):
    """The new hidden state; the old one is not zero, or no weight of it would count."""
    h = jnp.linspace(0.1, 0.4, 4)
    carry = (h, h) if isinstance(cell, nnx.OptimizedLSTMCell) else h
    return cell(carry, x)[1]


# Per leaf: an input of its layer, how the layer runs, and how many matrices lie side by
# side in it.
LAYERS = {
    "linear/kernel": ((6,), None, 1),
    "norm_mixer/kernel": ((9,), None, 1),
    "general/kernel": ((2, 3), None, 1),
    "groups/kernel": ((2, 3), lambda layer, x: layer(x)[1], 1),
    "heads_in/kernel": ((1, 6), None, 1),
    "heads_out/kernel": ((1, 2, 5), None, 1),
    "pair/kernel": ((1, 6), lambda layer, x: layer(x)[1], 1),
    "columns/kernel": ((1, 6), None, 1),
    "conv/kernel": ((6, 5, 3), None, 1),
    "upscale/kernel": ((6, 3), None, 1),
    "turned/kernel": ((6, 3), None, 1),
    "unpatch/kernel": ((1, 3), None, 1),
    "attention/query/kernel": ((8,), None, 1),
    "attention/value/kernel": ((8,), None, 1),
    "attention/out/kernel": ((3, 2), None, 1),
    "lstm/dense_i/kernel": ((7,), cell_state, 4),
    "lstm/dense_h/kernel": ((7,), cell_state, 4),
    "gru/dense_i/kernel": ((7,), cell_state, 3),
    "gru/dense_h/kernel": ((7,), cell_state, 3),
    "blocks/0/layers/0/kernel": ((4,), None, 1),
    "by_name/up/kernel": ((4,), None, 1),
    "first/kernel": ((6,), run_stack(0), 1),
    "second/kernel": ((6,), run_stack(1), 1),
    "last/kernel": ((6,), run_stack(-1), 1),
}


@functools.cache
def zoo():
    """The model and its rules."""
    graph, state = nnx.split(nnx.eval_shape(Zoo))
    model = nnx.merge(graph, filled(state))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return model, MatrixRules.of(model)


def inside(tree, path):
    for key in filter(None, path.split("/")):
        tree = tree[int(key)] if key.isdigit() else getattr(tree, key)
    return tree


def layer_with(path, weight):
    """The layer that runs a leaf, with another weight in its place."""
    above, _, name = path.rpartition("/")
    top, _, rest = above.partition("/")
    layer = nnx.clone(getattr(zoo()[0], top))
    inner = inside(layer, rest)
    setattr(inner, name, nnx.Param(weight))
    return layer if isinstance(layer, nnx.RNNCellBase) else inner


@pytest.mark.parametrize("path", LAYERS)
def test_a_layer(path):
    model, rules = zoo()
    size, call, blocks = LAYERS[path]
    call = call or (lambda layer, x: layer(x))
    x = 0.5 + jax.random.uniform(jax.random.key(2), size)
    weight = jax.random.normal(jax.random.key(3), inside(model, path).shape)
    check_orientation(
        rules, path, weight, lambda w: call(layer_with(path, w), x), blocks=blocks
    )


def test_every_matrix_of_the_zoo_is_checked():
    model, rules = zoo()
    unchecked = {"attention/key/kernel"}  # as the value
    assert matrices_of(nnx.state(model, nnx.Param), rules) == {*LAYERS, *unchecked}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=8, use_bias=False, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(8, 24, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(24, 8, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(jax.nn.gelu(self.up(x)))


class Transformer(nnx.Module):
    """Eight scanned layers as wide as they are many: sizes alone do not tell."""

    def __init__(self, axis=0):
        rngs = nnx.Rngs(0)
        self.axis = axis
        self.tokens = nnx.Embed(32, 8, rngs=rngs)
        self.layers = stack(8, axis, Block)
        self.lm_head = nnx.Linear(8, 32, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        @nnx.scan(in_axes=(self.axis, nnx.Carry), out_axes=nnx.Carry)
        def run(block, x):
            return block(x)

        return self.lm_head(run(self.layers, self.tokens(ids)))


def test_a_transformer_with_scanned_layers():
    axis = 1
    model = Transformer(axis)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rules = MatrixRules.of(model)
        optimizer = nnx.Optimizer(model, m2.muon2(1.0, rules=rules), wrt=nnx.Param)
        before = nnx.state(nnx.clone(model), nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            def loss(model):
                return jnp.mean(model(jnp.arange(24).reshape(2, 12)) ** 2)

            optimizer.update(model, nnx.grad(loss)(model))

        step(model, optimizer)
    after = nnx.state(model, nnx.Param)
    moved = jax.tree.map(
        jnp.subtract, nnx.to_pure_dict(after), nnx.to_pure_dict(before)
    )
    layers = jax.tree.map(lambda x: np.moveaxis(x, axis, 0)[5], moved["layers"])
    check_norm(layers["up"]["kernel"], 8, 24)
    check_norm(layers["down"]["kernel"], 24, 8)
    check_norm(layers["attention"]["query"]["kernel"].reshape(8, 8), 8, 8)
    check_norm(layers["attention"]["out"]["kernel"].reshape(8, 8), 8, 8)
    vectors = [layers["norm"]["scale"], moved["lm_head"]["kernel"]]
    for vector in [*vectors, moved["tokens"]["embedding"][:24]]:
        np.testing.assert_allclose(np.abs(vector), 1, rtol=0.02)  # steps of AdamW


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(32, 8, rngs=rngs)
        self.mix = nnx.Linear(32, 8, rngs=rngs)
        self.mix.kernel = self.tokens.embedding
        self.up = nnx.Linear(8, 24, rngs=rngs)
        self.again = self.up


TREES = {
    "model": lambda model: model,
    "state": lambda model: nnx.state(model, nnx.Param),
    "split": lambda model: nnx.split(model, nnx.Param, ...)[1],
    "pure dict": lambda model: nnx.to_pure_dict(nnx.state(model, nnx.Param)),
    "pure state": lambda model: nnx.as_pure(nnx.state(model, nnx.Param)),
}


@pytest.mark.parametrize("tree", TREES)
def test_ties_in_every_form_of_tree(tree):
    """A shared variable has one role under all its paths: a table stays a table."""
    model = Tied(nnx.Rngs(0))
    labels = labels_of(MatrixRules.of(model), TREES[tree](model))
    # A State has one of the paths of a shared variable, the model all of them.
    table = {labels.pop(path, "") for path in ("tokens/embedding", "mix/kernel")}
    twice = {labels.pop(f"{name}/kernel", "") for name in ("up", "again")}
    assert table - {""} == {"adam"} and twice - {""} == {"matrix"}
    assert set(labels.values()) == {"adam"}


class Gain(nnx.Param):
    pass


class Own(nnx.Module):
    def __init__(self):
        self.w = Gain(jnp.ones((5, 3)))
        self.layers = nnx.List([nnx.Linear(3, 4, rngs=nnx.Rngs(0))])
        self.count = nnx.BatchStat(jnp.ones((3, 3)))

    def __call__(self, x):
        return self.w[...] @ x


def test_a_module_of_ones_own_is_listed_and_can_be_taught():
    model = nnx.Dict(own=Own())
    with pytest.warns(UserWarning, match=r"Own: own/w \(5, 3\)") as seen:
        rules = MatrixRules.of(model)
    assert len(seen) == 1 and "count" not in str(seen[0].message)
    assert "module Own unknown" in rules.describe(nnx.state(model, nnx.Param))
    for key in (Own, "Own"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rules = MatrixRules.of(model, modules={key: {"w": MatrixAxes(-1, -2)}})
            MatrixRules.of(model, patterns=((r"own/w$", None),))
        w = model.own.w[...]
        check_orientation(rules, "own/w", w, lambda w: w @ jnp.ones(3))
    with pytest.raises(ValueError, match="own/w"):
        MatrixRules.of(model, modules={Own: {"w": MatrixAxes(2, 3)}})
    with pytest.raises(ValueError, match="Own.*'v'.*matches no parameter.*Linear"):
        MatrixRules.of(model, modules={Own: {"v": None}})


def test_a_module_may_refer_to_itself_and_to_its_parent():
    class Node(nnx.Module):
        def __init__(self, rngs):
            self.me = self
            self.down = nnx.Linear(3, 7, rngs=rngs)
            self.down.parent = self

    rules = MatrixRules.of(Node(nnx.Rngs(0)))
    assert {x.path: x.reason for x in rules.leaves} == {
        "down/kernel": "module Linear",
        "down/bias": "module Linear",
    }


def test_patterns_come_first():
    rules = MatrixRules.of(zoo()[0], patterns=(("^linear/kernel$", None),))
    assert rules.resolve("linear/kernel", (6, 15)) is None
    assert rules.resolve("norm_mixer/kernel", (9, 4)) is not None


def test_a_stack_axis_that_sizes_leave_open_is_not_guessed():
    def build():
        linear = nnx.Linear
        return nnx.Dict(
            open=stack(4, 2, lambda rngs: linear(4, 4, use_bias=False, rngs=rngs)),
            other=stack(4, 1, lambda rngs: linear(4, 6, rngs=rngs)),
            table=nnx.Embed(4, 4, rngs=nnx.Rngs(0)),
        )

    model = nnx.eval_shape(build)
    with pytest.warns(UserWarning, match=r"Linear: open/kernel \(4, 4, 4\)"):
        rules = MatrixRules.of(model)
    with pytest.raises(ValueError, match="open/kernel"):
        m2.MatrixRules(leaves=rules.leaves, strict=True).resolve(
            "open/kernel", (4,) * 3
        )
    assert rules.resolve("other/kernel", (4, 4, 6)).batch == (1,)


def test_sizes_that_do_not_fit_their_module_are_listed():
    model = nnx.Dict(linear=nnx.Linear(6, 4, rngs=nnx.Rngs(0)))
    model.linear.kernel = nnx.Param(jnp.ones((4, 6)))  # turned by hand
    with pytest.warns(UserWarning, match="linear/kernel"):
        rules = MatrixRules.of(model)
    assert "does not fit module Linear" in rules.describe(nnx.state(model, nnx.Param))


def test_vectors_tables_groups_and_low_rank_layers():
    def build():
        rngs = nnx.Rngs(0)
        return nnx.Dict(
            depthwise=nnx.Conv(6, 6, (3,), feature_group_count=6, rngs=rngs),
            norms=stack(3, 0, lambda rngs: nnx.LayerNorm(4, rngs=rngs)),
            codes=stack(3, 1, lambda rngs: nnx.Embed(5, 4, rngs=rngs)),
            adapter=nnx.LoRALinear(6, 9, lora_rank=2, rngs=rngs),
            normed=nnx.WeightNorm(nnx.Linear(4, 6, rngs=rngs), rngs=rngs),
            recurrent=nnx.RNN(nnx.SimpleCell(3, 5, rngs=rngs)),
        )

    model = nnx.eval_shape(build)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rules = MatrixRules.of(model)
    assert matrices_of(nnx.state(model, nnx.Param), rules) == {
        "adapter/kernel",
        "adapter/lora/lora_a",
        "adapter/lora/lora_b",
        "normed/layer_instance/kernel",
        "recurrent/cell/dense_i/kernel",
        "recurrent/cell/dense_h/kernel",
    }
    assert rules.resolve("adapter/lora/lora_a", (6, 2)).ins == (0,)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_model_of_shapes_only(axis):
    model = nnx.eval_shape(lambda: Transformer(axis))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rules = MatrixRules.of(model)
    shape = tuple(np.insert([24, 8], axis, 8).tolist())
    assert rules.resolve("layers/down/kernel", shape).batch == (axis,)
    shape = tuple(np.insert([8, 2, 4], axis, 8).tolist())
    assert rules.resolve("layers/attention/key/kernel", shape).batch == (axis,)


class Positions(nnx.Module):
    """Tables whose names say what they are, beside a weight whose name does not."""

    def __init__(self):
        self.position_embedding = nnx.Param(jnp.zeros((12, 6)))
        self.mystery = nnx.Param(jnp.zeros((6, 7)))


def test_only_what_names_leave_open_is_listed_and_the_callers_line_is_shown():
    with pytest.warns(UserWarning, match=r"Positions: mystery \(6, 7\)") as seen:
        rules = MatrixRules.of(Positions())
    assert len(seen) == 1 and "position_embedding" not in str(seen[0].message)
    assert seen[0].filename == __file__
    assert rules.resolve("position_embedding", (12, 6)) is None
    assert rules.resolve("mystery", (6, 7)) is not None
    params = nnx.state(Positions(), nnx.Param)
    with pytest.raises(
        ValueError, match="1 leaf is.*\n.*'mystery'.*neither its module"
    ):
        rules.check(params)
    patterns = (("mystery$", MatrixAxes(-1, -2)),)
    MatrixRules.of(Positions(), patterns=patterns).check(params)
