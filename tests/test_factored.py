"""The factored second moment: its matrices, and values that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from histories import TRANSFORMS, both, gradients, run
from reference import relative_error

import muon2_optax as m2


@pytest.mark.parametrize("low, high", [(-1, 1), (-7, 7), (-8, 0), (0, 8)])
def test_factored_is_exact_on_rank_one_squares(low, high):
    """Also where the product of a row's and a column's mean is out of range."""
    rng = np.random.default_rng(0)
    rows, columns = 10 ** rng.uniform(low, high, 6), 10 ** rng.uniform(low, high, 9)
    size = np.outer(rows, columns) * rng.uniform(0.5, 2, (5, 1, 1))
    grads = np.float32(size * rng.choice([-1, 1], size.shape))
    factored, _ = run(m2.factorized_second_moment(eps=0.0), grads)
    want = reference.second_moment(grads, eps=0.0)
    np.testing.assert_allclose(factored, np.stack(want), rtol=1e-4)  # float32


def test_factored_is_not_the_full_form():
    """Off rank one they differ: tests against the oracles tell one from the other."""
    grads = gradients((5, 7))
    full, factored = (np.stack(oracle(grads)) for _, oracle in TRANSFORMS.values())
    assert relative_error(factored, full) > 0.1


LAYOUTS = {
    # name: (shape, axes, list of index or slices that cut out the matrices, 2-D shape)
    "stack": ((3, 4, 5), m2.MatrixAxes(-2, -1), [np.s_[i] for i in range(3)]),
    "stack in the middle": (
        (4, 3, 5),
        m2.MatrixAxes(0, 2),
        [np.s_[:, i] for i in range(3)],
    ),
    "transposed": ((5, 4), m2.MatrixAxes(1, 0), [np.s_[:]]),
    "two stack axes": (
        (2, 3, 4, 5),
        m2.MatrixAxes(-2, -1),
        [np.s_[i, j] for i in range(2) for j in range(3)],
    ),
    "splits": (
        (4, 12),
        m2.MatrixAxes(0, 1, (6, 3, 3)),
        [np.s_[:, :6], np.s_[:, 6:9], np.s_[:, 9:]],
    ),
    "stacked splits": (
        (2, 4, 9),
        m2.MatrixAxes(-2, -1, (6, 3)),
        [np.s_[i, :, s] for i in range(2) for s in (slice(0, 6), slice(6, 9))],
    ),
    "splits of torch weights": (
        (9, 4),
        m2.MatrixAxes(1, 0, (6, 3)),
        [np.s_[:6], np.s_[6:]],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_factored_treats_each_matrix_for_itself(name):
    shape, axes, cuts = LAYOUTS[name]
    grads = gradients(shape, 4)
    rules = m2.MatrixRules((("w", axes),))
    with jax.enable_x64(True):
        updates, state = run(m2.factorized_second_moment(rules=rules), grads)
    covered = np.zeros(shape, bool)
    for cut in cuts:
        covered[cut] = True
        want = reference.factored_second_moment([g[cut] for g in grads])
        for u, expected in zip(updates, want):
            assert relative_error(np.asarray(u)[cut], expected) < 1e-12, cut
    assert covered.all()
    numbers = sum(sum(np.zeros(shape)[cut].shape) for cut in cuts)
    stored = state.nu_row["w"].size + state.nu_col["w"].size
    assert stored == numbers  # fan_in + fan_out per matrix, and no more


@pytest.mark.parametrize(
    "shape, axes, order, matrix",
    [
        ((6, 2, 5), m2.MatrixAxes(0, (1, 2)), (0, 1, 2), (6, 10)),
        ((2, 5, 6), m2.MatrixAxes((0, 1), 2), (0, 1, 2), (10, 6)),
        ((3, 3, 2, 7), m2.MatrixAxes((0, 1, 2), 3), (0, 1, 2, 3), (18, 7)),
        ((7, 2, 3, 3), m2.MatrixAxes((1, 2, 3), 0), (1, 2, 3, 0), (18, 7)),
    ],
    ids=["qkv", "out", "HWIO", "OIHW"],
)
def test_factored_over_several_axes(shape, axes, order, matrix):
    grads = gradients(shape, 4)
    rules = m2.MatrixRules((("w", axes),))
    with jax.enable_x64(True):
        updates, state = run(m2.factorized_second_moment(rules=rules), grads)
    flat = [np.transpose(g, order).reshape(matrix) for g in grads]
    want = reference.factored_second_moment(flat)
    for u, expected in zip(updates, want):
        got = np.transpose(u, order).reshape(matrix)
        assert relative_error(got, expected) < 1e-12
    assert state.nu_row["w"].size == matrix[0]
    assert state.nu_col["w"].size == matrix[1]


def test_factored_refuses_what_is_no_matrix():
    tx = m2.factorized_second_moment()
    with pytest.raises(ValueError, match=r"'b' of shape \(4,\) is not a matrix"):
        tx.init({"b": jnp.zeros(4)})


@both
def test_non_finite_gradient_stays_in_its_place(kind):
    """One NaN reaches its entry (full) or its row and column, not other leaves."""
    tx = TRANSFORMS[kind][0]()
    g = {"a": jnp.ones((3, 4)).at[0, 0].set(jnp.nan), "b": jnp.ones((3, 4))}
    updates, state = tx.update(g, tx.init(g))
    assert np.isnan(updates["a"][0, 0])
    assert np.all(np.isfinite(updates["b"])) and np.all(np.isfinite(state.mu["b"]))


@both
def test_infinite_gradient_is_not_hidden(kind):
    tx = TRANSFORMS[kind][0]()
    g = {"w": jnp.ones((3, 4)).at[1, 1].set(jnp.inf)}
    updates, _ = tx.update(g, tx.init(g))
    assert not np.isfinite(updates["w"][1, 1])


@both
def test_missing_gradients_are_named(kind):
    tx = TRANSFORMS[kind][0]()
    params = {"a": jnp.ones((3, 4)), "b": jnp.ones((3, 4))}
    with pytest.raises(ValueError, match="needs the tree that init"):
        tx.update({"a": params["a"], "b": None}, tx.init(params))
