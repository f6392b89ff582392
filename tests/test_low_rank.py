"""Dion where the momentum has a lower rank than the update may have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muon2_optax as m2


def low_rank(shape, rank, seed):
    """Integers, so that float32 holds the matrix, and its rank, exactly."""
    rng = np.random.default_rng(seed)
    left, right = rng.integers(-4, 5, (2, max(shape), rank))
    return (left[: shape[0]] @ right[: shape[1]].T).astype(np.float32)


def steps(tx, grads, count):
    state, update = tx.init(grads), jax.jit(tx.update)
    for _ in range(count):
        updates, state = update(grads, state, grads)
    return -np.float64(updates["w"]), state


@pytest.mark.parametrize(
    ("shape", "rank", "fraction"),
    [((40, 24), 1, None), ((24, 40), 3, 0.5), ((3, 16, 16), 2, None)],
)
def test_update_has_the_rank_of_the_momentum(shape, rank, fraction):
    *batch, m, n = shape
    g = np.stack([low_rank((m, n), rank, seed) for seed in range(*batch or (1,))])
    rules = m2.MatrixRules((("w", m2.MatrixAxes(-2, -1)),))
    tx = m2.dion(1.0, rank_fraction=fraction, shape_scale="none", rules=rules)
    got, _ = steps(tx, {"w": jnp.asarray(g.reshape(shape))}, 4)
    for u, x in zip(got.reshape(g.shape), np.float64(g)):
        left, values, right = np.linalg.svd(x, full_matrices=False)
        keep = values > 1e-9 * values[0]
        assert keep.sum() == rank
        # Nothing outside of the momentum's own spaces, but for float32's rounding.
        inside = left[:, keep] @ left[:, keep].T @ u @ right[keep].T @ right[keep]
        assert np.linalg.norm(u - inside, 2) < 1e-4
        sizes = np.linalg.svd(u, compute_uv=False)
        # Columns of Q have length 1: the squares of the values add up to the rank.
        np.testing.assert_allclose(np.sum(sizes**2), rank, rtol=1e-4)


def test_rank_that_grows_is_followed():
    """Columns of Q that were 0 come back with the gradients."""
    thin, full = low_rank((16, 16), 2, 0), low_rank((16, 16), 16, 1)
    assert np.linalg.matrix_rank(full) == 16
    tx = m2.dion(1.0, shape_scale="none")
    _, state = steps(tx, {"w": jnp.asarray(thin)}, 3)
    grads = {"w": jnp.asarray(full)}
    for _ in range(2):
        updates, state = tx.update(grads, state, grads)
    assert np.linalg.svd(updates["w"], compute_uv=False)[-1] > 0.05


def test_columns_above_the_noise_are_normalized():
    """A ratio of 1e-4 is far above float32's rounding, and is no noise."""
    values = np.array([1.0, 0.5, 1e-2, 1e-4])
    g = {"w": jnp.asarray(np.diag(values), jnp.float32)}
    got, _ = steps(m2.dion(1.0, shape_scale="none"), g, 12)
    np.testing.assert_allclose(np.abs(np.diag(got)), 1, atol=0.05)


def test_a_fraction_of_the_rank_is_rounded_up():
    params = {"w": jax.ShapeDtypeStruct((8, 12), jnp.float32)}
    for fraction, rank in ((0.3, 3), (0.25, 2), (1e-3, 1), (None, 8)):
        state = jax.eval_shape(m2.dion(0.1, rank_fraction=fraction).init, params)
        (q,) = (x for x in jax.tree.leaves(state) if x.shape[-1:] == (rank,))
        assert q.ndim == 2, fraction
