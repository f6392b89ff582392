"""Rules for those who come from ``optax.contrib.muon``."""

import jax
import optax
import pytest
from matrices import normal32
from reference import relative_error
from routing import labels_of, leaf, matrices_of

import muon2_optax as m2
from muon2_optax import MatrixRules

SPEC = optax.contrib.MuonDimensionNumbers
MODEL = {
    "blocks": {
        "conv": normal32((3, 3, 4, 6), 1),
        "out": normal32((2, 4, 6), 2),
        "w": normal32((6, 10), 3),
    },
    "embedding": normal32((12, 6), 4),
    "norm": {"scale": normal32((6,), 5), "gate": normal32((6, 6), 6)},
}
NUMBERS = {
    "None": None,
    "tree": {
        "blocks": {
            "conv": SPEC((0, 1, 2), 3),
            "out": SPEC((0, 1), (2,)),
            "w": SPEC(0, 1),
        },
        "embedding": None,
        "norm": {"scale": None, "gate": SPEC(1, 0)},
    },
    "prefix": {
        "blocks": {"conv": SPEC((-4, -3, -2), -1), "out": SPEC(-2, -1), "w": SPEC()},
        "embedding": SPEC(),
        "norm": None,
    },
    "function": lambda params: jax.tree.map(
        lambda p: SPEC(-2, -1) if p.ndim >= 2 else None, params
    ),
}


def _optax_matrices(numbers):
    state = optax.contrib.muon(1.0, muon_weight_dimension_numbers=numbers).init(MODEL)
    momentum = state.inner_states["muon"].inner_state[0].mu
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_flatten_with_path(momentum)[0]
    }


@pytest.mark.filterwarnings("ignore:no matrix rule:UserWarning")
@pytest.mark.parametrize("name", NUMBERS)
def test_from_dimension_numbers_routes_as_optax(name):
    rules = MatrixRules.from_dimension_numbers(NUMBERS[name], MODEL)
    routed = matrices_of(MODEL, rules)
    assert routed == _optax_matrices(NUMBERS[name])
    assert routed not in (set(), set(labels_of(rules, MODEL)))  # neither all nor none


@pytest.mark.parametrize("name", ["tree", "prefix"])
def test_from_dimension_numbers_steps_as_optax(name):
    """A first step without nesterov is the same in both: directions and factors."""
    rules = MatrixRules.from_dimension_numbers(NUMBERS[name])
    theirs = optax.contrib.muon(
        1.0, muon_weight_dimension_numbers=NUMBERS[name], nesterov=False
    )
    ours = m2.muon(1.0, rules=rules, nesterov=False)

    def step(tx):
        return jax.jit(lambda g: tx.update(g, tx.init(g), g)[0])(MODEL)

    errors = jax.tree.map(relative_error, step(ours), step(theirs))
    assert max(jax.tree.leaves(errors)) < 1e-4, errors  # float32


def test_single_dimension_numbers_for_every_leaf():
    tree = {"a": leaf(3, 8, 4), "embedding": leaf(4, 8)}
    rules = MatrixRules.from_dimension_numbers(SPEC(-2, -1))
    assert matrices_of(tree, rules) == {"a", "embedding"}
    assert rules.resolve("a", (3, 8, 4)).fan_in == 8


def test_prefix_reaches_whole_subtrees_and_no_namesakes():
    tree = {
        "a": {"x": leaf(4, 4), "y": [leaf(4, 4)]},
        "ab": leaf(4, 4),
        "a.": leaf(4, 4),
    }
    rules = MatrixRules.from_dimension_numbers(
        {"a": SPEC(1, 0), "a.": None, "ab": SPEC(1, 0)}
    )
    assert matrices_of(tree, rules) == {"a/x", "a/y/0", "ab"}
    rules = MatrixRules.from_dimension_numbers(
        {"a": SPEC(1, 0), "a.": None, "ab": None}
    )
    assert matrices_of(tree, rules) == {"a/x", "a/y/0"}


def test_a_leaf_that_the_tree_leaves_out_is_named():
    tree = {"mix": {"a": leaf(6, 4), "z": leaf(4, 4)}, "gain": leaf(4), "u": leaf(4, 6)}
    rules = MatrixRules.from_dimension_numbers({"mix": {"a": SPEC(1, 0)}, "u": None})
    with pytest.warns(UserWarning, match="'mix/z'.*dimension numbers leaves") as seen:
        assert matrices_of(tree, rules) == {"mix/a", "mix/z"}
    assert len(seen) == 1 and "'u'" not in str(seen[0].message)
    with pytest.raises(ValueError, match="'mix/z'"):
        rules.check(tree)
    assert "(DOUBTFUL)" in rules.describe(tree)


def test_from_dimension_numbers_is_a_value():
    make = lambda: MatrixRules.from_dimension_numbers(NUMBERS["tree"])  # noqa: E731
    assert make() == make() and hash(make()) == hash(make())


def test_from_dimension_numbers_refusals():
    with pytest.raises(ValueError, match="needs params"):
        MatrixRules.from_dimension_numbers(NUMBERS["function"])
    with pytest.raises(TypeError, match="'w'.*MuonDimensionNumbers or None"):
        MatrixRules.from_dimension_numbers({"w": "in out"})
