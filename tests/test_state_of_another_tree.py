"""A state belongs to the paths that it was made for; trees that Optax accepts."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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
