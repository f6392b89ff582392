"""Spectra and the quality of polar factors against numpy's SVD and the paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrices import normal, normal32, svd
from reference import KELLER

from muon2_optax import diagnostics

SHAPES = [(5, 8), (8, 5), (2, 3, 4, 6)]


# --- spectra ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "complex64", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values(shape, dtype):
    x = normal(shape, dtype=np.dtype(dtype))
    got = jax.jit(diagnostics.singular_values)(jnp.asarray(x))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, svd(x)[1], rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_size_of_the_matrix_is_no_limit(size):
    x = normal32((4, 6))
    s = svd(x)[1]
    scaled = jnp.asarray(x) * size
    got = diagnostics.singular_values(scaled)
    np.testing.assert_allclose(np.asarray(got, np.float64) / size, s, rtol=1e-5)
    rank = diagnostics.effective_rank(scaled)
    assert rank == pytest.approx(float(diagnostics.effective_rank(x)), rel=1e-5)
    assert diagnostics.stable_rank(scaled) == pytest.approx(
        np.sum(s**2) / s[0] ** 2, rel=1e-5
    )
    polar = svd(x)[0] @ svd(x)[2]
    assert diagnostics.cosine_to_polar(scaled, scaled) == pytest.approx(
        np.sum(polar * x) / np.linalg.norm(x) / 2, rel=1e-5
    )


def test_ranks_in_closed_form():
    x = jnp.stack(
        [
            jnp.eye(4, 6),
            jnp.zeros((4, 6)).at[1, 2].set(-7.0),
            jnp.zeros((4, 6)),
            jnp.diag(jnp.array([0.5, 0.25, 0.125, 0.125])) @ jnp.eye(4, 6),
        ]
    )
    # The entropy of (1/2, 1/4, 1/8, 1/8) is 1.75 bits.
    np.testing.assert_allclose(
        diagnostics.effective_rank(x), [4, 1, 0, 2**1.75], rtol=1e-5
    )
    np.testing.assert_allclose(diagnostics.stable_rank(x), [4, 1, 0, 1.375], rtol=1e-5)


def test_a_vector_is_refused():
    with pytest.raises(ValueError, match="matrices"):
        diagnostics.singular_values(jnp.ones(3))


# --- polar quality ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cosine_of_a_mapped_spectrum(shape, dtype):
    u, s, vh = svd(normal(shape, 1, np.dtype(dtype)))
    y = np.cos(3 * s)  # any values, of both signs
    x = (u * s[..., None, :]) @ vh
    o = (u * y[..., None, :]) @ vh
    got = jax.jit(diagnostics.cosine_to_polar)(
        jnp.asarray(o, dtype), jnp.asarray(x, dtype)
    )
    want = y.sum(-1) / np.sqrt(s.shape[-1] * (y**2).sum(-1))
    np.testing.assert_allclose(got, want, atol=3e-6)


def test_cosine_of_matrices_without_full_rank():
    u, _, vh = svd(normal32((3, 20, 30), 2))
    s = np.r_[np.ones(4), np.full(3, 1e-3), np.zeros(13)]
    x = jnp.asarray((u * s) @ vh, jnp.float32)
    # Its polar factor has rank 7: itself, and what plain rescaling makes of it.
    exact = jnp.asarray(u[..., :7] @ vh[:, :7], jnp.float32)
    np.testing.assert_allclose(diagnostics.cosine_to_polar(exact, x), 1, atol=1e-5)
    np.testing.assert_allclose(
        diagnostics.cosine_to_polar(x, x),
        s.sum() / np.sqrt(7 * (s**2).sum()),
        atol=1e-5,
    )
    # With the small ones out of account, rank 4.
    np.testing.assert_allclose(diagnostics.cosine_to_polar(x, x, 1e-2), 1, atol=1e-5)
    assert np.all(diagnostics.cosine_to_polar(x, 0 * x) == 0)
    assert np.all(diagnostics.cosine_to_polar(0 * x, x) == 0)


def test_only_the_broken_matrix_of_a_stack_is_nan():
    x = jnp.asarray(normal32((3, 4, 5))).at[1, 0, 0].set(jnp.nan)
    cosine = diagnostics.cosine_to_polar(x, x)
    assert np.isnan(cosine).tolist() == [False, True, False]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_orthogonality_error(shape, dtype):
    q = 0.4 * normal(shape, 3, np.dtype(dtype))
    deviation = np.abs(svd(q)[1] ** 2 - 1)
    for norm, want in {
        "mean": deviation.mean(-1),
        "frobenius": np.sqrt((deviation**2).sum(-1)),
        "spectral": deviation.max(-1),
    }.items():
        got = diagnostics.orthogonality_error(jnp.asarray(q), norm)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_orthogonality_error_is_the_norm_of_the_paper():
    q = normal32((7, 4), 4)
    want = np.linalg.norm(q.T @ q - np.eye(4))
    assert diagnostics.orthogonality_error(q, "frobenius") == pytest.approx(
        want, rel=1e-5
    )
    with pytest.raises(ValueError, match="unknown norm"):
        diagnostics.orthogonality_error(q, "nuclear")


@pytest.mark.parametrize(
    "triple, error, paper", [(KELLER, 0.305, 0.31), ((2.0, -1.5, 0.5), 0.027, 0.03)]
)
def test_errors_of_the_appendix(triple, error, paper):
    # A uniform grid of singular values, five steps.
    s = jnp.asarray((np.arange(400) + 0.5) / 400)
    y = diagnostics.scalar_map(triple, 5, s)
    got = float(diagnostics.orthogonality_error(jnp.diag(y)))
    assert got == pytest.approx(error, abs=1e-3)
    assert got == pytest.approx(paper, abs=0.006)


def test_cosine_of_the_appendix():
    s = jnp.asarray((np.arange(400) + 0.5) / 400)
    o = jnp.diag(diagnostics.scalar_map(KELLER, 5, s))
    got = float(diagnostics.cosine_to_polar(o, jnp.diag(s)))
    assert got == pytest.approx(0.9819, abs=2e-4)  # the paper: 0.98
