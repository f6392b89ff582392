"""Schatten and spectral normalization, against float64 singular values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from matrices import normal
from reference import relative_error

import muon2_optax as m2

SHAPES = [(6, 6), (5, 9), (9, 5), (3, 4, 7)]
NORMS = {
    "schatten": lambda s: np.sum(s**4, axis=-1) ** 0.25,
    "spectral": lambda s: s[..., 0],
}
HOW = {"schatten": m2.Schatten, "spectral": m2.Spectral}


def normalized(x, how, steps=0, **kw):
    schedule = dataclasses.replace(m2.SCHEDULES["keller"], normalization=how(**kw))
    return m2.newton_schulz(x, steps, schedule, ns_dtype="float32")


def divided(x, name):
    singular = np.linalg.svd(x, compute_uv=False)
    return x / NORMS[name](singular)[..., None, None]


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms(name, shape):
    x = normal(shape)
    got = normalized(jnp.float32(x), HOW[name])
    assert relative_error(got, divided(x, name)) < 1e-6


@pytest.mark.parametrize("name", HOW)
def test_complex(name):
    x = normal((4, 7), dtype=np.complex128)
    got = normalized(jnp.complex64(x), HOW[name])
    assert relative_error(got, divided(x, name)) < 1e-6


@pytest.mark.parametrize("name", HOW)
def test_sizes_zeros_and_nan(name):
    """As of the others: any size, zeros stay zero, NaN stays in its matrix."""
    x = jnp.float32(normal((3, 4, 6)))
    base = normalized(x, HOW[name], 3)
    for size in (1e-30, 1e30):
        # The product rounds by 6e-8, which three steps amplify by at most 41.
        assert relative_error(normalized(x * size, HOW[name], 3), base) < 5e-6
    mixed = x.at[0].set(0).at[2, 1, 1].set(jnp.nan)
    got = normalized(mixed, HOW[name], 3)
    np.testing.assert_array_equal(got[0], 0)
    np.testing.assert_allclose(got[1], base[1], atol=1e-6)
    assert np.all(np.isnan(got[2]))


@pytest.mark.parametrize("name", HOW)
def test_eps(name):
    """Schatten's bounds the squared norm from below, the spectral one is added."""
    x = 1e-3 * normal((4, 6))
    got = normalized(jnp.float32(x), HOW[name], eps=1e-2)
    singular = np.linalg.svd(x, compute_uv=False)
    norm = NORMS[name](singular)
    want = x / (np.sqrt(max(norm**2, 1e-2)) if name == "schatten" else norm + 1e-2)
    assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("name", HOW)
def test_derivatives_are_finite(name):
    def total(x):
        return jnp.sum(normalized(x, HOW[name], 2) ** 2)

    for x in (jnp.eye(4, 6), jnp.zeros((4, 6)), jnp.float32(normal((4, 6)))):
        assert np.all(np.isfinite(jax.grad(total)(x)))


@pytest.mark.parametrize("name", HOW)
def test_divided_matrices(name):
    """Norms are of whole matrices: on a mesh, the same to rounding."""
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    x = jnp.float32(normal((2, 8, 12)))
    want = normalized(x, HOW[name], 3)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "x", "y")))
        got = jax.jit(lambda x: normalized(x, HOW[name], 3))(placed)
    assert relative_error(got, want) < 5e-6
