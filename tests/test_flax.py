"""Every optimizer inside Flax: NNX and Linen take the steps that plain trees take."""

import functools

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers import assert_close, every, leaves, make, sample, types
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muon2_optax as m2

SHAPES = {
    "embed": {"embedding": (8, 8)},
    "first": {"kernel": (8, 16)},
    "second": {"kernel": (16, 8)},
}
# Anchored at both ends, and against the defaults: a parameter must have one path,
# whether it is boxed (as in init), bare (as in update) or in a plain tree.
RULES = m2.MatrixRules(
    (
        (r"^first/kernel$", m2.MatrixAxes(1, 0)),
        (r"^embed/embedding$", m2.MatrixAxes(0, 1)),
        (r"^second/kernel$", None),
    )
)
STEPS = 2


def loss(params):
    """Elementwise, so that it runs on any mesh as it is."""
    return sum(jnp.sum(jnp.sin(2 * x)) for x in jax.tree.leaves(params))


@functools.cache
def plain(name):
    """Parameters and statistics after training a dict of arrays."""
    tx, params = make(name, rules=RULES), sample(0, SHAPES)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(STEPS):
        updates, state = update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    return params, jax.tree.leaves(state)


class Net(nnx.Module):
    """The parameters of SHAPES; ``axes`` says how the kernels are sharded."""

    def __init__(self, axes=None):
        rngs = nnx.Rngs(0)
        kw = {} if axes is None else {"kernel_metadata": {"out_sharding": axes}}
        self.embed = nnx.Embed(8, 8, rngs=rngs)
        self.first = nnx.Linear(8, 16, use_bias=False, rngs=rngs, **kw)
        self.second = nnx.Linear(16, 8, use_bias=False, rngs=rngs, **kw)
        state = nnx.state(self, nnx.Param)
        where = jax.tree.map(lambda x: x.sharding, nnx.to_pure_dict(state))
        nnx.replace_by_pure_dict(state, jax.device_put(sample(0, SHAPES), where))
        nnx.update(self, state)


def values(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def nnx_step(model, opt):
    grads = nnx.grad(lambda model: loss(nnx.state(model, nnx.Param)))(model)
    opt.update(model, grads)


@every
def test_nnx_optimizer(name):
    model = Net()
    opt = nnx.Optimizer(model, make(name, rules=RULES), wrt=nnx.Param)
    step = nnx.jit(nnx_step)
    for _ in range(STEPS):
        step(model, opt)
    want, statistics = plain(name)
    assert_close(values(model), want)
    assert_close(jax.tree.leaves(nnx.as_pure(opt.opt_state)), statistics)


@every
def test_nnx_state_as_a_tree(name):
    """The functional style: nnx.split, then jax.grad and optax on the State."""
    tx = make(name, rules=RULES)
    graph, params = nnx.split(Net(), nnx.Param)
    state, update = tx.init(params), jax.jit(tx.update)
    start = types(state)
    for _ in range(STEPS):
        grads = jax.grad(loss)(params)
        updates, state = update(grads, state, params)
        assert jax.tree.structure(updates) == jax.tree.structure(grads)
        assert [kind[1:] for kind in types(state)] == [kind[1:] for kind in start]
        params = optax.apply_updates(params, updates)
    want, statistics = plain(name)
    assert_close(values(nnx.merge(graph, params)), want)
    assert_close(jax.tree.leaves(state), statistics)


@every
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_nnx_optimizer_on_a_mesh(name, kind):
    """Statistics of another rank than their Param must not take its sharding."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        model = Net(("x", "y"))
        opt = nnx.Optimizer(model, make(name, rules=RULES), wrt=nnx.Param)
        graph, state = nnx.split((model, opt))
        start = [jax.typeof(x) for x in jax.tree.leaves(state)]

        @jax.jit
        def step(state):
            both = nnx.merge(graph, state)
            nnx_step(*both)
            return nnx.state(both)

        for _ in range(STEPS):
            state = step(state)
            assert [jax.typeof(x) for x in jax.tree.leaves(state)] == start
        model, opt = nnx.merge(graph, state)
    kernel = model.first.kernel[...]
    assert kernel.sharding.is_equivalent_to(NamedSharding(mesh, P("x", "y")), 2)
    want, statistics = plain(name)
    assert_close(values(model), want)
    # Two gradients of 8x16 leave SOAP some directions of the longer side without a
    # gradient. Their basis is any, and rounding decides, which differs on a mesh.
    if name != "soap_muon":
        assert_close(jax.tree.leaves(nnx.as_pure(opt.opt_state)), statistics)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, ids):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("x", "y"))
        dense = functools.partial(nn.Dense, use_bias=False, kernel_init=init)
        x = nn.Embed(8, 8, name="embed")(ids)
        return dense(8, name="second")(dense(16, name="first")(x))


def is_box(x):
    return isinstance(x, nn.Partitioned)


@every
@pytest.mark.parametrize("kind", ["frozen", "boxed"])
def test_linen_train_state(name, kind):
    net = LinenNet()
    params = net.init(jax.random.key(0), jnp.zeros(1, int))["params"]
    params = jax.tree.map(
        lambda x, new: x.replace_boxed(new) if is_box(x) else new,
        params if kind == "boxed" else nn.unbox(params),
        sample(0, SHAPES),
        is_leaf=is_box,
    )
    if kind == "frozen":
        params = flax.core.freeze(params)
    tx = make(name, rules=RULES)
    state = TrainState.create(apply_fn=net.apply, params=params, tx=tx)
    start = types((state.params, state.opt_state))

    @jax.jit
    def step(state):
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for _ in range(STEPS):
        state = step(state)
        assert types((state.params, state.opt_state)) == start
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    want, statistics = plain(name)
    assert_close(flax.core.unfreeze(nn.unbox(state.params)), want)
    assert_close(jax.tree.leaves(state.opt_state), statistics)
    # Flax derives the state's shardings from the boxes: of the momentum, the
    # parameter's; of a statistic of another rank, none that does not fit it.
    specs = nn.get_partition_spec(state.opt_state)
    bare = nn.unbox(state.opt_state)
    for (path, spec), (_, x) in zip(leaves(specs), leaves(bare), strict=True):
        assert len(spec) <= x.ndim, path
        if kind == "boxed" and ".mu" in path and path.endswith("['kernel']"):
            assert spec == P("x", "y"), path


@pytest.mark.parametrize("name", ["muon2_f", "normuon", "dion"])
@pytest.mark.parametrize("names", [(None, "model", "data"), ("data", None, "model")])
def test_metadata_says_how_statistics_are_divided(name, names):
    """Of a stack, stored (layers, out, in): as the running state has them."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rules = m2.MatrixRules((("weights", m2.MatrixAxes(-1, -2)),))

    class Stack(nnx.Module):
        def __init__(self):
            self.weights = nnx.Param(jnp.ones((4, 6, 8)), out_sharding=names)
            self.plain = nnx.Param(jnp.ones((4, 6)))

    with jax.set_mesh(mesh):
        tx = m2.REGISTRY[name](1e-3, rules=rules)
        optimizer = nnx.Optimizer(Stack(), tx, wrt=nnx.Param)
        state = nnx.state(optimizer, nnx.optimizer.OptState)
    specs = jax.tree.leaves(
        nnx.get_partition_spec(state), is_leaf=lambda s: isinstance(s, P)
    )
    leaves = jax.tree.leaves(state)
    found = 0
    for spec, x in zip(specs, leaves, strict=True):
        if isinstance(x.sharding, NamedSharding):
            whole = NamedSharding(mesh, spec)
            assert x.sharding.is_equivalent_to(whole, x.ndim), (x.shape, spec)
            found += any(spec)
    # The momentum and a statistic; of Dion's Q, only the layers can be divided.
    assert found >= (1 if name == "dion" else 2)


@pytest.mark.parametrize("name", ["muon2_f", "normuon"])
def test_an_older_name_beside_the_metadata_is_cut_alike(name):
    """MaxText's variables have both, and the optimizer's take the older one."""
    names = ("embed", "layers", "mlp")
    weights = nnx.Param(jnp.ones((4, 3, 6)), eager_sharding=False)
    weights = weights.replace(out_sharding=names, sharding_names=names)
    rules = m2.MatrixRules(((r"weights", m2.MatrixAxes(0, -1)),))
    state = m2.REGISTRY[name](1e-3, rules=rules).init(nnx.State({"weights": weights}))
    with pytest.warns(DeprecationWarning, match="sharding_names"):
        state = nnx.optimizer.to_opt_state(state)
    boxes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    named = [x for x in boxes if x.get_metadata().get("out_sharding")]
    sizes = {"embed": 4, "layers": 3, "mlp": 6, None: 1}
    for x in named:
        spec = x.get_metadata()["out_sharding"]
        assert tuple(sizes[axis] for axis in spec) == x.shape, (spec, x.shape)
    assert len(named) >= 2
