"""The moments of gradients of any size, and of zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from histories import TRANSFORMS, both, gradients, run
from reference import relative_error

import muon2_optax as m2

# --- size of the gradients --------------------------------------------------------


@both
def test_scale_invariance(kind):
    """With eps=0 from 1e-15 to 1e15, where all squares are in range."""
    build, _ = TRANSFORMS[kind]
    signs = np.sign(gradients((6, 10), 5))
    grads = signs * np.random.default_rng(1).uniform(0.03, 3.0, signs.shape)
    grads = grads.astype(np.float32)
    tx = build(eps=0.0)
    base, _ = run(tx, grads)
    for size in (1e-15, 1e-9, 1e9, 1e15):
        got, _ = run(tx, grads * np.float32(size))
        assert relative_error(got, base) < 1e-6, size  # the rounding of the product
    for exponent in (-49, 49):  # 1.8e-15 and 5.6e14: not one bit
        got, _ = run(tx, np.ldexp(grads, exponent))
        np.testing.assert_array_equal(got, base)


OPTIMIZERS = {"full": m2.muon2, "factored": m2.muon2_f}


@both
def test_optimizer_is_scale_invariant(kind):
    grads = gradients((16, 24), 5, dtype=np.float32)
    tx = OPTIMIZERS[kind](1.0, eps=0.0)
    base, _ = run(tx, grads)
    for size in (1e-15, 1e-7, 1e7, 1e15):
        got, _ = run(tx, grads * np.float32(size))
        # At 1e-15 the smallest of the squares are under 1e-38.
        assert relative_error(got, base) < 1e-3, size


@both
@pytest.mark.parametrize("shape", [(6, 10), (200, 3), (3, 200)], ids=str)
def test_beyond_the_range_of_squares_it_is_muon(kind, shape):
    """All V equal, at the floor or at the ceiling: what remains is the momentum."""
    grads = np.float32(np.random.default_rng(2).standard_normal((3, *shape)))
    rules = m2.MatrixRules((("w", m2.MatrixAxes(0, 1)),))  # a side of 3 is in doubt
    tx = OPTIMIZERS[kind](1.0, eps=0.0, rules=rules)
    directions = [reference.keller(m, 3) for m in reference.momentum(grads, 0.95)]
    want = -reference.spectral(*shape) * np.stack(directions)
    for size in (1e-30, 1e-25, 1e25, 1e30):
        got, _ = run(tx, grads * np.float32(size))
        # Entries within a thousandth of zero may have squares in range.
        assert relative_error(got, want) < 1e-2, size


@both
@pytest.mark.parametrize("eps", [0.0, 1e-10])
@pytest.mark.parametrize("shape", [(6, 10), (200, 3), (3, 200)], ids=str)
def test_always_finite(kind, eps, shape):
    signs = np.sign(np.random.default_rng(2).standard_normal((4, *shape)))
    tx = TRANSFORMS[kind][0](eps=eps)
    for size in (1e-45, 1e-38, 1e-25, 1e25, 1e38, 3e38):
        updates, state = run(tx, np.float32(signs * size))
        finite = [np.all(np.isfinite(x)) for x in (updates, *jax.tree.leaves(state))]
        assert all(finite), size


@both
def test_eps_takes_over(kind):
    """Gradients far under eps: plain momentum divided by eps, and nothing else."""
    build, oracle = TRANSFORMS[kind]
    grads = gradients((6, 10), 4, dtype=np.float32) * np.float32(1e-12)
    updates, _ = run(build(eps=1e-2), grads)
    want = np.stack(reference.momentum(grads, 0.95)) / 1e-2
    assert relative_error(updates, want) < 1e-6  # float32


@both
def test_eps_is_added_outside_the_root(kind):
    """sqrt(V) + eps, not sqrt(V + eps^2): on the first step 0.05 / (0.05^.5 + eps)."""
    updates, _ = run(TRANSFORMS[kind][0](eps=0.5), np.ones((1, 2, 3), np.float32))
    np.testing.assert_allclose(updates, 0.05 / (0.05**0.5 + 0.5), rtol=1e-6)


@both
@pytest.mark.parametrize("b1, b2", [(0.95, 0.0), (0.99, 0.9)])
def test_float16_updates_stay_finite(kind, b1, b2):
    """The momentum outlives a faster V once the gradients stop."""
    grads = jnp.zeros((400, 4, 4), jnp.float16).at[0].set(1.0)
    updates, _ = run(TRANSFORMS[kind][0](b1, b2), grads)
    assert np.all(np.isfinite(updates))


# --- zeros ------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "dtype, eps, bias_correction",
    [
        ("float32", 0.0, False),
        ("float16", 0.0, True),
        ("float16", 1e-10, False),  # eps is under the smallest float16
        ("bfloat16", 1e-10, True),
    ],
)
def test_zero_gradients_from_the_start(kind, dtype, eps, bias_correction):
    build, _ = TRANSFORMS[kind]
    grads = jnp.asarray(gradients((5, 7), 6), dtype).at[:3].set(0)
    tx = build(eps=eps, bias_correction=bias_correction)
    updates, _ = run(tx, grads)
    assert not np.any(updates[:3])  # exactly, from 0/0 as well
    assert np.all(np.isfinite(updates)) and np.all(updates[3] != 0)


@both
def test_zero_gradients_later(kind):
    build, oracle = TRANSFORMS[kind]
    grads = gradients((5, 7), 9)
    grads[3:6] = 0
    with jax.enable_x64(True):
        updates, _ = run(build(eps=0.0), grads)
    assert relative_error(updates, np.stack(oracle(grads, eps=0.0))) < 1e-12


@both
def test_zero_gradients_for_ever(kind):
    """Both moments decay through the subnormal numbers to zero."""
    grads = np.zeros((4000, 2, 3), np.float32)
    grads[0] = 1.0
    updates, state = run(TRANSFORMS[kind][0](eps=0.0), grads)
    assert np.all(np.isfinite(updates)) and np.max(np.abs(updates)) < 1.0
    assert not np.any(updates[-1])


@both
@pytest.mark.parametrize("eps", [0.0, 1e-10])
def test_zero_rows_and_columns(kind, eps):
    """Padding stays exactly zero and does not reach the rest."""
    build, _ = TRANSFORMS[kind]
    core = gradients((4, 5), 4, dtype=np.float32)
    padded = np.zeros((4, 6, 8), np.float32)
    padded[:, 1:5, 2:7] = core
    want, _ = run(build(eps=eps), core)
    got = np.array(run(build(eps=eps), padded)[0])
    assert relative_error(got[:, 1:5, 2:7], want) < 1e-6  # float32 means
    got[:, 1:5, 2:7] = 0
    assert not np.any(got)


@both
def test_a_single_entry(kind):
    grads = np.zeros((2, 4, 5), np.float32)
    grads[:, 1, 2] = 3.0
    updates = np.array(run(TRANSFORMS[kind][0](eps=0.0), grads)[0])
    np.testing.assert_allclose(updates[0, 1, 2], 0.05**0.5, rtol=1e-6)
    updates[:, 1, 2] = 0
    assert not np.any(updates)
