"""MatrixRules.of for Flax Linen: module types, logical axis names, scanned layers."""

import warnings

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import partitioning
from linear_maps import check_norm, check_orientation, filled
from routing import labels_of, matrices_of

import muon2_optax as m2
from muon2_optax import MatrixAxes, MatrixRules

IDS = jax.ShapeDtypeStruct((2, 12), jnp.int32)


def quiet(*args, **kwargs):
    """The rules of a model of which everything is known."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return MatrixRules.of(*args, **kwargs)


def shapes_of(module, *args):
    """The variables as shapes, in their boxes."""
    return jax.eval_shape(lambda *args: module.init(jax.random.key(0), *args), *args)


def stack(module, axis):
    return nn.vmap(
        module,
        variable_axes={"params": axis},
        split_rngs={"params": True},
        in_axes=None,
        out_axes=0,
        axis_size=3,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )


class Cell(nn.Module):
    kind: type

    @nn.compact
    def __call__(self, x):
        h = jnp.linspace(0.1, 0.4, 4)
        lstm = issubclass(self.kind, nn.OptimizedLSTMCell)
        return self.kind(4, name="cell")((h, h) if lstm else h, x)[1]


# Per name: the layer, an input, which outputs are one matrix's, and its leaf.
LAYERS = {
    "dense": (nn.Dense(15), (6,), None, "kernel"),
    "general": (nn.DenseGeneral((4, 5), axis=(-2, -1)), (2, 3), None, "kernel"),
    "out": (nn.DenseGeneral(5, axis=(-2, -1)), (2, 3), None, "kernel"),
    "groups": (nn.DenseGeneral(4, batch_dims=(0,)), (2, 3), 1, "kernel"),
    "einsum": (nn.Einsum((2, 6, 5), "bd,ndh->bnh"), (1, 6), None, "kernel"),
    "conv": (nn.Conv(5, (3, 2), padding="VALID"), (6, 5, 3), None, "kernel"),
    "local": (nn.ConvLocal(5, (3,), padding="VALID"), (6, 3), 1, "kernel"),
    "upscale": (nn.ConvTranspose(5, (3,)), (6, 3), None, "kernel"),
    "turned": (
        nn.ConvTranspose(5, (3,), transpose_kernel=True),
        (6, 3),
        None,
        "kernel",
    ),
    "unpatch": (nn.ConvTranspose(5, (4,), strides=(4,)), (1, 3), None, "kernel"),
    "lstm": (Cell(nn.OptimizedLSTMCell), (7,), None, "cell/if/kernel"),
    "gru": (Cell(nn.GRUCell), (7,), None, "cell/hn/kernel"),
    "first": (stack(nn.Dense, 0)(4), (6,), 1, "kernel"),
    "second": (stack(nn.Dense, 1)(4), (6,), 1, "kernel"),
    "last": (stack(nn.DenseGeneral, -1)((2, 4)), (6,), 1, "kernel"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name):
    layer, size, part, path = LAYERS[name]
    x = 0.5 + jax.random.uniform(jax.random.key(2), size)
    params = filled(shapes_of(layer, x)["params"])
    rules = quiet(layer, x)
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    keys = [key for key in flat if key.endswith(path)]
    (path,) = keys if len(keys) == 1 else [path]

    def outputs(weight):
        params = flax.traverse_util.unflatten_dict({**flat, path: weight}, sep="/")
        y = layer.apply({"params": params}, x)
        return y if part is None else y[part]

    weight = jax.random.normal(jax.random.key(3), flat[path].shape)
    check_orientation(rules, path, weight, outputs)
    check_orientation(rules, f"params/{path}", weight, outputs)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.RMSNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2, use_bias=False, name="attention")(y)
        up = nn.Dense(24, use_bias=False, name="up")(x)
        return x + nn.Dense(8, use_bias=False, name="down")(jax.nn.gelu(up)), None


class Transformer(nn.Module):
    """Eight scanned layers as wide as they are many: sizes alone do not tell."""

    axis: int = 0

    @nn.compact
    def __call__(self, ids, train=False):
        tokens = nn.Embed(32, 8, name="tokens")
        x = tokens(ids)
        scan = nn.scan(
            nn.remat(Block),
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=8,
        )
        x, _ = scan(name="layers")(x, None)
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(32, use_bias=False, name="lm_head")(x) + tokens.attend(x)


@pytest.mark.parametrize("axis", [0, 1])
def test_routing_of_scanned_layers(axis):
    model = Transformer(axis)
    rules = quiet(model, IDS, train=True)
    variables = shapes_of(model, IDS)
    want = {f"layers/attention/{n}/kernel" for n in ("query", "key", "value", "out")}
    want |= {"layers/up/kernel", "layers/down/kernel"}
    assert matrices_of(variables["params"], rules) == want
    assert matrices_of(flax.core.freeze(variables["params"]), rules) == want
    assert matrices_of(variables, rules) == {f"params/{path}" for path in want}
    for path, matrix in (("up", (8, 24)), ("attention/out", (2, 4, 8))):
        shape = tuple(np.insert(matrix, axis, 8).tolist())
        assert rules.resolve(f"layers/{path}/kernel", shape).batch == (axis,)


def test_a_step_of_a_transformer():
    model = Transformer(axis=1)
    rules = quiet(model, IDS)
    params = filled(shapes_of(model, IDS)["params"])
    tx = m2.muon2(1.0, rules=rules)

    @jax.jit
    def step(params):
        def loss(params):
            ids = jnp.arange(24).reshape(2, 12)
            return jnp.mean(model.apply({"params": params}, ids) ** 2)

        return tx.update(jax.grad(loss)(params), tx.init(params), params)[0]

    moved = step(params)
    layer = jax.tree.map(lambda x: np.moveaxis(x, 1, 0)[5], moved["layers"])
    check_norm(layer["up"]["kernel"], 8, 24)
    check_norm(layer["down"]["kernel"], 24, 8)
    check_norm(layer["attention"]["value"]["kernel"].reshape(8, 8), 8, 8)
    for table in (moved["tokens"]["embedding"], moved["lm_head"]["kernel"]):
        np.testing.assert_allclose(np.abs(table), 1, rtol=0.02)  # a step of AdamW


def named(shape, *names):
    return nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)


# As MaxText names and stacks them: layers on axis 1, experts in front.
LEAVES = {
    "token_embedder": (named((32, 6), "vocab", "embed"), None),
    "logits": (named((6, 32), "embed", "vocab"), None),
    "query": (named((6, 9, 2, 4), "embed", "layers", "q_heads", "kv"), (6, 8)),
    "output": (named((2, 9, 4, 6), "heads", "layers", "kv", "embed"), (8, 6)),
    "wq_a": (named((6, 9, 3), "embed", "layers", "q_lora"), (6, 3)),
    "wkv_b": (
        named((3, 9, 2, 4), "kv_lora", "layers", "kv_heads", "kv_head_dim"),
        (3, 8),
    ),
    "fused": (named((6, 3, 2, 4), "embed", "qkv", "heads", "kv"), (6, 8)),
    "joined": (named((8, 6), "joined_kv", "embed"), (8, 6)),
    "wi": (named((5, 9, 6, 10), "exp", "layers", "embed_no_exp", "mlp"), (6, 10)),
    "wo": (named((5, 9, 10, 6), "exp", "layers", "mlp", "embed_no_exp"), (10, 6)),
    "gate": (named((6, 9, 5), "embed", "layers", "exp"), None),
    "query_bias": (named((9, 2, 4), "layers", "q_heads", "kv"), None),
    "expert_bias": (named((5, 10), "exp", "mlp"), None),
    "norm": (named((6, 9), "norm", "layers"), None),
    "relative": (named((2, 32), "heads", "relpos_buckets"), None),
    "square": (named((6, 6), "embed", "embed"), (6, 6)),
    "window": (named((3, 4, 6), "conv_width", "input", "embed"), (12, 6)),
    "depthwise": (named((3, 10), "conv_width", "mlp"), None),
}


@pytest.mark.parametrize("form", ["boxed", "in a collection", "T5X"])
def test_logical_axis_names(form):
    tree = {name: {"x": leaf} for name, (leaf, _) in LEAVES.items()}
    variables = tree if form == "boxed" else {"params": tree}
    if form == "T5X":  # names in a collection of their own, as param_with_axes has them
        axes = {
            name: {"x_axes": partitioning.AxisMetadata(leaf.names)}
            for name, (leaf, _) in LEAVES.items()
        }
        variables = {"params": nn.unbox(tree), "params_axes": axes}
    rules = quiet(variables)
    for name, (leaf, matrix) in LEAVES.items():
        found = rules.resolve(f"{name}/x", leaf.value.shape)
        sides = None if found is None else (found.fan_in, sum(found.splits))
        assert sides == matrix, name
    assert "logical axes (exp, mlp)" in rules.describe(tree)


class Named(nn.Module):
    """A dense layer of one's own, whose axes have names."""

    features: int
    names: tuple

    @nn.compact
    def __call__(self, x, _=None):
        init = nn.with_logical_partitioning(nn.initializers.ones, self.names)
        w = self.param("w", init, (x.shape[-1], self.features))
        return x @ w, None


@pytest.mark.parametrize("axis", [0, 1])
def test_axis_names_of_a_live_model(axis):
    """Names that scan has put the stack among; names of Dense that tell a head."""
    scan = nn.scan(
        Named,
        variable_axes={"params": axis},
        split_rngs={"params": True},
        length=6,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    x = jnp.ones((2, 6))
    rules = quiet(scan(6, ("embed", "mlp")), x, None)
    assert rules.resolve("w", (6, 6, 6)).batch == (axis,)
    init = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "vocab"))
    rules = quiet(nn.Dense(32, kernel_init=init), x)
    assert rules.resolve("kernel", (6, 32)) is None
    init = nn.with_partitioning(nn.initializers.ones, ("data", None))  # of a mesh
    rules = quiet(nn.Dense(32, kernel_init=init), x)
    assert rules.resolve("kernel", (6, 32)).fan_in == 6


def test_unknown_modules_and_names_are_listed_and_can_be_taught():
    x = jnp.ones((2, 6))
    model = nn.Sequential([nn.Dense(6), stack(Named, 1)(4, ("embed", "facets"))])
    path = "layers_1/w"
    with pytest.warns(UserWarning, match=rf"Named: {path} \(6, 3, 4\)") as seen:
        rules = MatrixRules.of(model, x)
    assert len(seen) == 1
    shape = (6, 3, 4)
    # Its name makes it a matrix, its shape in one layer shows the stack.
    assert rules.resolve(path, shape).batch == (1,)
    assert rules.resolve(path, shape).fan_in == 6
    taught = quiet(model, x, modules={Named: {"w": MatrixAxes(-1, -2)}})
    assert taught.resolve(path, shape).fan_in == 4
    assert taught.resolve(path, shape).batch == (1,)
    extended = quiet(model, x, logical_axes={"facets": "stack"})
    assert extended.resolve(path, shape) is None  # a vector for each facet
    extended = quiet(model, x, logical_axes={"facets": "hidden"})
    assert extended.resolve(path, shape).fan_in == 6


def test_vectors_and_tables():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            x = nn.Embed(32, 6, name="mixer")(ids)
            x = nn.Conv(6, (3,), feature_group_count=6)(x)
            x = stack(nn.LayerNorm, 1)(name="gains")(x)[0]
            x = nn.WeightNorm(nn.Dense(4, name="normed"))(x)
            return nn.MultiHeadDotProductAttention(2, normalize_qk=True)(x)

    rules = quiet(Model(), IDS)
    labels = labels_of(rules, shapes_of(Model(), IDS)["params"])
    matrices = {path for path, label in labels.items() if label == "matrix"}
    attention = "MultiHeadDotProductAttention_0"
    want = {f"{attention}/{n}/kernel" for n in ("query", "key", "value", "out")}
    assert matrices == want | {"normed/kernel"}


def test_what_cannot_be_asked():
    class Transformed:
        pass

    Transformed.__module__ = "haiku._src.transform"
    for model, words in (
        (Transformed(), "Haiku.*names of the parameters"),
        ({"w": jnp.ones((3, 4))}, "dict does not say"),
        (nn.Dense(3), "example inputs"),
        ([1, 2], "NNX.*Equinox.*Linen"),
        (jnp.ones(3), "plain tree of arrays"),
    ):
        with pytest.raises(TypeError, match=words):
            MatrixRules.of(model)
    with pytest.raises(TypeError, match="example inputs"):
        MatrixRules.of({"w": named((6, 4), "embed", "mlp")}, jnp.ones(3))
