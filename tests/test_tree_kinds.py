"""Routing in every kind of tree, among wrappers and in partitions."""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from flax import nnx
from flax.core import freeze
from matrices import normal32
from reference import relative_error
from routing import leaf, matrices_of

import muon2_optax as m2
from muon2_optax import MatrixAxes, MatrixRules


class Layer(NamedTuple):
    kernel: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Dense:
    kernel: Any
    bias: Any


KERNEL, BIAS = normal32((6, 4), 1), normal32((2, 4), 2)
# One rule and one name decide: the kernel is (out, in), the stacked bias no matrix.
FORMS = {
    "dict": {"a": {"kernel": KERNEL, "bias": BIAS}},
    "frozen dict": freeze({"a": {"kernel": KERNEL, "bias": BIAS}}),
    "list": [{"kernel": KERNEL}, {"bias": BIAS}],
    "tuple": ({"kernel": KERNEL}, ({"bias": BIAS},)),
    "named tuple": {"a": Layer(KERNEL, BIAS)},
    "dataclass": [Dense(KERNEL, BIAS)],
    "flat keys": {"a/kernel": KERNEL, "a/bias": BIAS},
    "integer keys": {0: {"kernel": KERNEL}, 1: {"bias": BIAS}},
    "linen boxes": {
        "a": {
            "kernel": linen.Partitioned(KERNEL, names=(None, "model")),
            "bias": linen.Partitioned(BIAS, names=(None, None)),
        }
    },
    "nnx state": nnx.State(
        {"a": {"kernel": nnx.Param(KERNEL), "bias": nnx.Param(BIAS)}}
    ),
    "absent leaves": {"a": {"kernel": KERNEL, "bias": BIAS, "none": None}},
}
TRANSPOSED = MatrixRules(((r"(^|/)kernel$", MatrixAxes(1, 0)),))


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_trees(form):
    tree = jax.tree.map(jnp.asarray, FORMS[form])
    tx = m2.muon2_f(1.0, rules=TRANSPOSED)
    update = jax.jit(tx.update)
    updates, state = update(tree, tx.init(tree), tree)
    updates, _ = update(tree, state, tree)  # and once with a state of its own making
    assert jax.tree.structure(updates) == jax.tree.structure(tree)
    by_shape = {x.shape: x for x in jax.tree.leaves(updates)}
    want = reference.muon2_f([KERNEL.T, KERNEL.T], 1.0)[1]
    assert relative_error(by_shape[6, 4], want.T) < 1e-4  # float32
    assert relative_error(by_shape[2, 4], -np.sign(BIAS)) < 1e-4  # a step of AdamW


def test_paths_are_the_same_at_init_and_update_in_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 4, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            for layer in (self.first, *self.layers):
                x = layer(x)
            return x

    model = Model(nnx.Rngs(0))
    rules = MatrixRules(
        ((r"^layers/1/kernel$", MatrixAxes(1, 0)), (r"^first/kernel$", None))
    )
    optimizer = nnx.Optimizer(model, m2.muon(1.0, rules=rules), wrt=nnx.Param)
    grads = nnx.grad(lambda m: jnp.sum(m(jnp.ones((3, 4))) ** 2))(model)
    before = nnx.state(model, nnx.Param)
    want = {"layers/0/kernel", "layers/1/kernel"}
    assert matrices_of(before, rules) == matrices_of(grads, rules) == want
    kernels = [jnp.array(m.kernel[...]) for m in (model.first, model.layers[1])]
    optimizer.update(model, grads)
    moved = [m.kernel[...] - k for m, k in zip((model.first, model.layers[1]), kernels)]
    assert relative_error(jnp.abs(moved[0]), jnp.ones((4, 4))) < 1e-2  # AdamW
    top = np.linalg.norm(moved[1], 2)
    assert 0.6 < top < 1.3  # a Muon step


@pytest.mark.parametrize("form", ["dict", "nnx state", "linen boxes"])
def test_a_masked_leaf_still_counts_for_its_pattern(form):
    """An outer ``optax.masked`` hides a leaf, not the fact that it exists."""
    tree = jax.tree.map(jnp.asarray, FORMS[form])
    rules = MatrixRules(((r"(^|/)kernel$", MatrixAxes(1, 0)), (r"bias$", None)))
    mask = jax.tree.map(lambda x: x.shape == (6, 4), tree)
    tx = optax.masked(m2.muon(1.0, rules=rules), mask)
    updates, _ = tx.update(tree, tx.init(tree), tree)
    by_shape = {x.shape: x for x in jax.tree.leaves(updates)}
    np.testing.assert_array_equal(by_shape[2, 4], BIAS)
    assert np.linalg.norm(by_shape[6, 4] + KERNEL) > 1  # not passed through


@jax.tree_util.register_pytree_with_keys_class
class Named:
    """An array with named axes, as Haliax has: a node around one array."""

    def __init__(self, array):
        self.array = array

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("array"), self.array),), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


@pytest.mark.parametrize(
    "path",
    ["mlp/bias", "block/scale", "norm/scale", "wte/embedding", "lm_head/kernel"],
)
def test_a_wrapper_around_a_table_changes_nothing(path):
    """The names decide also where the path goes on to the array inside."""
    tree = leaf(3, 4)
    wrapped = Named(tree)
    for key in reversed(path.split("/")):
        tree, wrapped = {key: tree}, {key: wrapped}
    assert not matrices_of(tree)
    assert not matrices_of(wrapped)


def test_outer_partition_with_rules_for_one_group():
    """Rules inside an outer partition see masked leaves for the rest."""
    tree = {"a": normal32((3, 6, 4), 1), "b": normal32((6, 4), 2)}
    inner = m2.muon2(1.0, rules=MatrixRules((("a", MatrixAxes(-2, -1)),)))
    tx = optax.partition({"m": inner, "s": optax.sgd(1.0)}, {"a": "m", "b": "s"})
    updates, _ = jax.jit(tx.update)(tree, tx.init(tree), tree)
    np.testing.assert_array_equal(updates["b"], -tree["b"])
    for i in range(3):
        want = reference.muon2([tree["a"][i]], 1.0)[0]
        assert relative_error(updates["a"][i], want) < 1e-4


def test_nothing_to_train():
    for tree in ({}, [], (), {"a": None}):
        tx = m2.muon2(0.1)
        updates, _ = tx.update(tree, tx.init(tree), tree)
        assert jax.tree.structure(updates) == jax.tree.structure(tree)
