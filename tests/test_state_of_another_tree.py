"""A state belongs to the paths that it was made for; trees that Optax accepts."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import OPTIMIZERS, accepts, sample
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muon2_optax as m2
from muon2_optax import trees

OLD = {"up": (4, 6), "down": (6, 4), "gain": (4,)}


def _named(leaf, other):
    return f"{leaf!r}.* of the updates and {other!r}.* of the state"


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: OrderedDict(up=t["up"], down=t["down"], gain=t["gain"]),
            "'up' of the updates and 'down'",
        ),
        (
            lambda t: {"up": t["up"], "a": t["down"], "gain": t["gain"]},
            "'a' of the updates and 'down'",
        ),
        (
            lambda t: {"net": t},
            "'net/down' of the updates and 'down'",
        ),
        (
            lambda t: t | {"zoom": t["up"]},
            "'zoom' of the updates and no leaf",
        ),
        (
            lambda t: {k: t[k] for k in ("down", "gain")},
            "no leaf of the updates and 'up'",
        ),
    ],
    ids=["order", "name", "depth", "more", "less"],
)
def test_updates_of_another_tree(name, change, message):
    params = sample(0, OLD)
    tx = m2.REGISTRY[name](0.1)
    state = tx.init(params)
    other = change(params)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(tx.update, other, state, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "other", [optax.contrib.muon(0.3), optax.lion(0.01)], ids=["muon", "lion"]
)
def test_the_state_of_another_optimizer(name, other):
    params = sample(3, OLD)
    with pytest.raises(ValueError, match=r"of another optimizer.*init\(params\)"):
        jax.eval_shape(m2.REGISTRY[name](0.1).update, params, other.init(params))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {k: t[k] for k in ("down", "up")},
            "2 leaves and the parameters 3 .* no leaf of the updates and 'gain' of the",
        ),
        (
            lambda t: {"up": t["up"], "out": t["down"], "gain": t["gain"]},
            "'out' of the updates and 'down' of the parameters",
        ),
        (lambda t: t | {"up": None}, "'up' of the parameters.* zeros, not None"),
        (lambda t: t | {"in": t["up"]}, "'in' of the updates and no leaf of the"),
        (
            lambda t: t | {"down": optax.MaskedNode()},
            "no leaf of the updates and 'down' of the parameters",
        ),
    ],
    ids=["less", "name", "none", "more", "masked"],
)
def test_updates_of_another_tree_than_the_parameters(name, change, message):
    params = sample(1, OLD)
    tx = m2.REGISTRY[name](0.1)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(tx.update, change(params), tx.init(params), params)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("leaf", "shape"),
    [("up", (1, 6)), ("up", (4, 1)), ("up", (6,)), ("up", (4, 5)), ("gain", (1,))],
    ids=str,
)
@pytest.mark.parametrize("given", [True, False], ids=["params", "no params"])
def test_updates_of_other_shapes(name, leaf, shape, given):
    """Those that would broadcast, too."""
    if not given and accepts(name, "radius"):
        pytest.skip("the hyperball moves the parameters from where they are")
    params = sample(2, OLD)
    # Without rules, the rank of a leaf decides which optimizer it goes to. These rules
    # send every leaf to the same optimizer as before, so that only its shape is wrong.
    rules = m2.MatrixRules((("up|down", m2.MatrixAxes(-2, -1)), ("gain", None)))
    tx = m2.REGISTRY[name](0.1, rules=rules)
    wrong = params | {leaf: jnp.ones(shape)}
    text = f"{leaf!r}.*{shape}" if len(shape) == params[leaf].ndim else repr(leaf)
    with pytest.raises(ValueError, match=text.replace("(", r"\(").replace(")", r"\)")):
        jax.eval_shape(tx.update, wrong, tx.init(params), *([params] if given else []))


TRANSFORMS = {
    "momentum": m2.scale_by_momentum(),
    "corrected momentum": m2.scale_by_momentum(bias_correction=True),
    "second moment": m2.scale_by_second_moment(),
    "factored": m2.factorized_second_moment(),
    "low rank": m2.scale_by_low_rank_orthonormal(),
    "soap": m2.scale_by_soap(),
    "outputs": m2.scale_by_output_second_moment(),
    "neurons": m2.scale_by_neuron_second_moment(),
    "hyperball": m2.hyperball(0.1),
    "cautious": m2.add_cautious_weight_decay(0.1),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_refuse_other_shapes(name):
    tx, params = TRANSFORMS[name], {"net": {"w": sample(3, (5, 7))}}
    wrong = {"net": {"w": jnp.ones((5, 1))}}
    if name == "neurons":  # whose average has one number for each output
        wrong = {"net": {"w": jnp.ones((7, 1))}}
    with pytest.raises(ValueError, match="'net/w'"):
        jax.eval_shape(tx.update, wrong, tx.init(params), params)


@pytest.mark.parametrize("name", sorted(set(TRANSFORMS) - {"cautious"}))
def test_transforms_refuse_states_of_others(name):
    tx, params = TRANSFORMS[name], {"w": sample(3, (5, 7))}
    for other in (optax.trace(0.9), optax.scale(2.0), optax.chain(tx)):
        with pytest.raises(ValueError, match=r"where this transform keeps .*init\("):
            jax.eval_shape(tx.update, params, other.init(params), params)


def kept(name, **arguments):
    """The state of an optimizer for the tree ``OLD``: shapes."""
    return jax.eval_shape(m2.REGISTRY[name](0.1, **arguments).init, sample(0, OLD))


def form(state):
    """Whatever two optimizers must have in common to go on from one another."""
    flat, structure = jax.tree.flatten(state)
    return structure, [(x.shape, x.dtype) for x in flat]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_other_optimizer(name):
    params = sample(4, OLD)
    tx, own = m2.REGISTRY[name](0.2, b1=0.8), kept(name)
    for other in OPTIMIZERS:
        state = kept(other)
        if form(state) == form(own):
            jax.eval_shape(tx.update, params, state, params)
            continue
        with pytest.raises(ValueError, match=r"of another optimizer.*init\(params\)"):
            jax.eval_shape(tx.update, params, state, params)


@pytest.mark.parametrize(
    ("name", "other", "arguments"),
    [
        ("muon2", "muon", "SecondMomentState.count, mu, nu. .* keeps MomentumState.mu"),
        ("muon2_f", "muon2", "holds Factorized.* keeps SecondMomentState.count, mu"),
        ("muon", "muon_bp", "holds .MomentumState.*PeriodicState"),
        ("normuon", "adamuon", "'matrix' holds .*OutputSecondMomentState"),
    ],
)
def test_both_states_are_named(name, other, arguments):
    params = sample(5, OLD)
    with pytest.raises(ValueError, match=arguments):
        jax.eval_shape(m2.REGISTRY[other](0.1).update, params, kept(name), params)


def later(step):
    return 0.1 / (step + 1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"adam_weight_decay": later}),
        ({}, {"weight_decay": later}),
        ({}, {"weight_decay_mask": {"up": True, "down": False, "gain": False}}),
        ({}, {"bias_correction": True}),
        ({"rest": optax.sgd(0.1)}, {}),
    ],
)
def test_the_state_of_other_arguments(before, after):
    params = sample(6, OLD)
    tx = m2.muon(0.1, **after)
    with pytest.raises(ValueError, match=r"of the same one with other arguments.*init"):
        jax.eval_shape(tx.update, params, kept("muon", **before), params)


@pytest.mark.parametrize("name", ["muon", "muon2", "muon_bp", "adamuon"])
def test_counters_may_be_left_behind(name):
    """A run that goes on with constants where it had schedules loses nothing."""
    params = sample(7, OLD)
    before = {"weight_decay": later, "adam_weight_decay": later}
    mask = {"up": True, "down": False, "gain": False}
    for arguments in (before, before | {"weight_decay_mask": mask}):
        state = kept(name, adam_learning_rate=later, **arguments)
        jax.eval_shape(m2.REGISTRY[name](0.3).update, params, state, params)
    plain = m2.muon(0.1)
    jax.eval_shape(plain.update, params, kept("muon", bias_correction=True), params)


def test_another_adamw_may_have_made_the_state_of_the_rest():
    params = sample(8, OLD)
    state = kept("muon2", rest=optax.adamw(0.1))
    jax.eval_shape(m2.muon2(0.1).update, params, state, params)
    state = kept("muon2")
    jax.eval_shape(m2.muon2(0.1, rest=optax.adamw(0.1)).update, params, state, params)


def test_states_in_other_containers():
    """Lists for chains are as good as tuples; dictionaries for states are refused."""
    params = sample(9, OLD)
    tx = m2.muon2(0.1)
    state = tx.init(params)
    chain = state.inner_states["matrix"].inner_state
    lists = optax.MaskedState(list(chain))
    groups = dict(state.inner_states)
    good = type(state)(groups | {"matrix": lists})
    jax.eval_shape(tx.update, params, good, params)
    fields = optax.MaskedState((chain[0]._asdict(), *chain[1:]))
    for wrong in (
        {"inner_states": groups},
        type(state)(groups | {"matrix": {"inner_state": chain}}),
        type(state)(groups | {"matrix": fields}),
        type(state)(groups | {"matrix": optax.MaskedState(())}),
        tuple(state),
    ):
        with pytest.raises(ValueError, match="of another optimizer"):
            jax.eval_shape(tx.update, params, wrong, params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_arguments_of_update_in_another_order(name):
    params = sample(10, OLD)
    tx = m2.REGISTRY[name](0.1)
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"updates, state, params\), in this order"):
        jax.eval_shape(tx.update, state, params, params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_leaves_that_are_absent_from_both_trees(name):
    params = sample(11, OLD) | {"frozen": None, "masked": optax.MaskedNode()}
    tx = m2.REGISTRY[name](0.1)
    updates, _ = jax.eval_shape(tx.update, params, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_bare_updates_of_boxed_parameters():
    bare = sample(12, OLD)
    boxed = {k: nnx.Param(x) for k, x in bare.items()}
    tx = m2.muon2(0.1)
    want, _ = tx.update(bare, tx.init(bare), bare)
    got, _ = tx.update(bare, tx.init(boxed), boxed)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    with pytest.raises(ValueError, match="'up' has shape .4, 1."):
        tx.update(bare | {"up": jnp.ones((4, 1))}, tx.init(boxed), boxed)


def test_the_checks_leave_the_program_alone():
    """What is compared is known while tracing: the step has no operation of theirs."""
    params = sample(13, OLD)
    tx = m2.muon2(0.1)
    with_params = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    without = jax.make_jaxpr(tx.update)(params, tx.init(params))
    assert len(with_params.eqns) == len(without.eqns)


def test_keys_that_print_like_a_deeper_tree():
    tx = m2.scale_by_momentum()
    state = tx.init({"a/b": jnp.ones(3)})
    with pytest.raises(ValueError, match="'b' under 'a' of the updates and 'a/b' of"):
        tx.update({"a": {"b": jnp.ones(3)}}, state)


def test_boxes_and_containers_with_the_same_paths_are_the_same_tree():
    tx = m2.scale_by_second_moment()
    state = tx.init([jnp.ones(3), {"b": jnp.ones(2)}])
    updates, _ = tx.update((jnp.ones(3), OrderedDict(b=jnp.ones(2))), state)
    assert type(updates) is tuple


def test_equal_structures_are_not_compared_path_by_path(monkeypatch):
    tree = sample(0, OLD)
    monkeypatch.setattr(trees, "_paths", None)
    trees.map_leaves(lambda name, x, y: (x, y), tree, tree)


class Counted(str):
    """A path that counts how often it is looked at."""

    count = 0

    def __hash__(self):
        Counted.count += 1
        return super().__hash__()

    def __eq__(self, other):
        Counted.count += 1
        return super().__eq__(other)


def test_shardings_look_at_each_path_a_few_times(monkeypatch):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, P())
    leaf = jax.ShapeDtypeStruct((2, 2), jnp.float32, sharding=place)
    named = [(Counted(f"layers/{i}/kernel"), leaf) for i in range(300)]
    monkeypatch.setattr(trees, "named_leaves", lambda tree: named)
    Counted.count = 0
    shardings = m2.Shardings.of(None)
    for name, _ in named:
        assert shardings.spec(name) == P()
    assert Counted.count < 10 * len(named)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_without_params(name):
    if accepts(name, "radius"):
        pytest.skip("the hyperball moves the parameters from where they are")
    params = sample(0, OLD)
    tx = m2.REGISTRY[name](0.1)
    got, _ = jax.jit(tx.update)(params, tx.init(params))
    want, _ = jax.jit(tx.update)(params, tx.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    for decay in (
        {"weight_decay": 0.01},
        {"adam_weight_decay": optax.constant_schedule(0)},
    ):
        tx = m2.REGISTRY[name](0.1, **decay)
        with pytest.raises(ValueError, match=r"update\(updates, state, params\)"):
            jax.eval_shape(tx.update, params, tx.init(params))


@pytest.mark.parametrize("number", [0.25, np.float32(0.25), 1])
@pytest.mark.parametrize("name", ["muon2", "muon2_f", "teon"])
def test_numbers_as_leaves(name, number):
    """As ``optax.adamw`` of the same numbers."""
    params = {"w": sample(0, OLD)["up"], "temperature": number}
    grads = {"w": params["w"], "temperature": -0.5}
    adam = {"adam_b2": 0.9, "adam_eps": 1e-3}
    tx = m2.REGISTRY[name](0.1, **adam)
    updates, state = tx.update(grads, tx.init(params), params)
    updates, _ = tx.update(grads, state, params)
    ref = optax.adamw(0.1, b2=0.9, eps=1e-3, weight_decay=0.0)
    want, state = ref.update(grads, ref.init(params), params)
    want, _ = ref.update(grads, state, params)
    if isinstance(number, float | np.floating):
        np.testing.assert_allclose(
            updates["temperature"], want["temperature"], rtol=1e-5
        )
    optax.apply_updates(params, updates)
