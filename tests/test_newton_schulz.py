"""Newton-Schulz against the scalar polynomial on the singular values of an SVD."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hlo import dot_generals
from matrices import newton_schulz, normal, spectra
from reference import KELLER, relative_error

import muon2_optax as m2
from muon2_optax import iteration
from muon2_optax.arrays import limits
from muon2_optax.execution import on_device
from muon2_optax.schedules import coefficients, plans

SHAPES = [
    (12, 12),
    (20, 7),
    (7, 20),
    (9, 8),  # tall, under the ratio from which the Gram form is used
    (1, 11),
    (11, 1),
    (1, 1),
    (3, 5, 8),
    (2, 3, 8, 5),
]


# --- the value --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.complex128], ids=lambda d: d.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_applies_the_polynomial_to_the_singular_values(shape, dtype):
    x = normal(shape, dtype=dtype)
    with jax.enable_x64(True):
        got = newton_schulz(jnp.asarray(x), 5)
    assert got.dtype == dtype and got.shape == shape
    # Double rounding (1e-16) times the slope 3.4^5 = 485 of five steps at 0, times 20.
    assert relative_error(got, reference.keller(x, 5)) < 1e-12


@pytest.mark.parametrize("dtype", [np.float32, np.complex64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("shape", [(12, 12), (20, 7), (3, 5, 8)], ids=str)
def test_single_precision(shape, dtype):
    x = normal(shape, dtype=dtype)
    got = newton_schulz(jnp.asarray(x), 5)
    assert got.dtype == dtype
    # As above with 6e-8 in place of 1e-16; Gaussian matrices stay far below it.
    assert relative_error(got, reference.keller(x, 5)) < 1e-4


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)], ids=str)
@pytest.mark.parametrize(
    "dtype, steps, bound, easy",
    [
        # Rounding u of the input grows by the slope 3.4^K of the map at 0 (41 for
        # three steps, 485 for five), the Gram form's about ten times more. ``easy``:
        # where all singular values matter alike, noise near 0 is no concern.
        ("float64", 5, 1e-12, 1e-13),
        ("float32", 5, 2e-4, 1e-5),
        ("float16", 3, 0.2, 0.02),
        ("bfloat16", 3, 0.2, 0.06),
    ],
)
def test_spectra(shape, dtype, steps, bound, easy):
    with jax.enable_x64(dtype == "float64"):
        source = np.float64 if dtype == "float64" else np.float32
        for name, x in spectra(shape).items():
            x = x.astype(source)
            got = newton_schulz(jnp.asarray(x), steps, ns_dtype=dtype)
            error = relative_error(got, reference.keller(x, steps))
            assert error <= (easy if name in ("gauss", "flat") else bound), name


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7])
def test_every_number_of_steps(steps):
    x = normal((6, 10))
    with jax.enable_x64(True):
        got = newton_schulz(jnp.asarray(x), steps)
    assert relative_error(got, reference.keller(x, steps)) < 1e-12


def test_no_steps_only_normalize():
    x = normal((2, 6, 10)) * np.array([1e-3, 1e3])[:, None, None]
    with jax.enable_x64(True):
        got = np.asarray(newton_schulz(jnp.asarray(x), 0))
    want = x / np.linalg.norm(x, axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(got, want, rtol=1e-14)


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (5, 5)], ids=str)
def test_steps_of_a_table_come_in_order(shape):
    table = ((4.0, -6.0, 2.5), (3.0, -3.5, 1.2), (2.0, -1.5, 0.5))
    x = normal(shape)
    with jax.enable_x64(True):
        got = newton_schulz(jnp.asarray(x), 3, table)
    assert relative_error(got, reference.newton_schulz(x, table)) < 1e-12
    # The composition does not commute: the test would notice another order.
    assert relative_error(got, reference.newton_schulz(x, table[::-1])) > 1e-3


def test_singular_values_end_near_one():
    """What it is for: five steps bring a Gaussian matrix near its polar factor."""
    x = normal((16, 40), 5).astype(np.float32)
    o = np.asarray(newton_schulz(jnp.asarray(x), 5), np.float64)
    s = np.linalg.svd(o, compute_uv=False)
    assert 0.65 < s.min() and s.max() < 1.25  # Keller's triple: about [0.68, 1.14]
    cosine = np.sum(o * reference.polar(x)) / np.linalg.norm(o) / 4.0
    assert cosine > 0.98  # the paper reports .98 for uniform singular values


def test_published_normalization():
    """``factor`` and ``eps`` of a schedule: x / (factor ||x|| + eps)."""
    how = m2.Frobenius(factor=1.02, eps=1e-3)
    schedule = m2.Schedule((KELLER,), normalization=how)
    x = normal((6, 10)) * 1e-3
    scaled = x / (1.02 * np.linalg.norm(x) + 1e-3)
    with jax.enable_x64(True):
        zero_steps = newton_schulz(jnp.asarray(x), 0, schedule)
        got = newton_schulz(jnp.asarray(x), 3, schedule)
        zero = newton_schulz(jnp.zeros((6, 10)), 3, schedule)
    np.testing.assert_allclose(zero_steps, scaled, rtol=1e-14)
    u, s, vh = np.linalg.svd(scaled, full_matrices=False)
    want = (u * reference.scalar_newton_schulz(s, [KELLER] * 3)) @ vh
    assert relative_error(got, want) < 1e-12
    assert not np.any(zero)


@pytest.mark.parametrize("size, divisor", [(1.0, 1.0), (1e-3, 1e-2)])
def test_clamped_normalization(size, divisor):
    """``floor``: x / max(||x||, floor), as torch.optim.Muon divides."""
    schedule = m2.Schedule((KELLER,), normalization=m2.Frobenius(floor=1e-2))
    x = normal((6, 10))
    x = x / np.linalg.norm(x) * size
    with jax.enable_x64(True):
        got = newton_schulz(jnp.asarray(x), 0, schedule)
    np.testing.assert_allclose(got, x / divisor, rtol=1e-14)


# --- the Gram form ----------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, steps, bound",
    # Rounding times the slope of the map at 0, as in test_spectra.
    [("float64", 5, 1e-12), ("float32", 5, 2e-4), ("float16", 3, 0.2)],
)
def test_gram_form_equals_the_standard_form(monkeypatch, dtype, steps, bound):
    with jax.enable_x64(dtype == "float64"):
        arrays = {k: jnp.asarray(x, dtype) for k, x in spectra((8, 24)).items()}
        run = functools.partial(m2.newton_schulz, ns_steps=steps, ns_dtype=dtype)
        gram = {k: newton_schulz(x, steps, ns_dtype=dtype) for k, x in arrays.items()}
        monkeypatch.setattr(iteration, "GRAM_ASPECT", math.inf)
        standard = jax.jit(run)
        for name, x in arrays.items():
            assert relative_error(gram[name], standard(x)) <= bound, name


@pytest.mark.parametrize("steps, reads", [(1, 2), (3, 2), (5, 4)])
def test_gram_form_reads_the_long_side_rarely(steps, reads):
    """Twice per run of up to three steps, whatever the number of steps in it."""
    text = jax.jit(lambda x: m2.newton_schulz(x, steps)).lower(jnp.ones((8, 24)))
    long = [d for d in dot_generals(text.as_text()) if "x24x" in d or "<24x" in d]
    assert len(long) == reads


# --- refusals ---------------------------------------------------------------------


def test_refusals():
    with pytest.raises(ValueError, match=r"\(\.\.\., m, n\), got shape \(4,\)"):
        m2.newton_schulz(jnp.ones(4))
    with pytest.raises(ValueError, match="floating point values, got int32"):
        m2.newton_schulz(jnp.ones((4, 4), jnp.int32))
    with pytest.raises(TypeError):
        m2.newton_schulz(jnp.ones((4, 4)), ns_dtype="float17")
    with pytest.raises(ValueError, match="must be an integer, got 2.5"):
        m2.newton_schulz(jnp.ones((4, 4)), 2.5)
    with pytest.raises(ValueError, match="0 or more, got -1"):
        m2.newton_schulz(jnp.ones((4, 4)), -1)


def test_the_normalization_may_hold_arrays():
    """Its numbers may be traced, as under a gradient with respect to eps."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 6)), jnp.float32)

    def total(eps):
        how = coefficients.Frobenius(eps=eps)
        return jnp.sum(iteration.normalize(x, how)[0] ** 2)

    norm = float(jnp.linalg.norm(x))
    for eps in (np.asarray(0.5), jnp.float32(0.5)):
        np.testing.assert_allclose(total(eps), (norm / (norm + 0.5)) ** 2, rtol=1e-5)
    want = -2 * norm**2 / (norm + 0.5) ** 3
    np.testing.assert_allclose(jax.jit(jax.grad(total))(0.5), want, rtol=1e-5)


def test_chunks_bound_the_memory_and_keep_the_values(monkeypatch):
    """Stacks, tall leaves and lone matrices, cut anywhere, against float64."""
    # Three of thirteen at a time.
    monkeypatch.setattr(limits, "BYTES_ON_DEVICE", 3 * 16 * 32 * 4)
    shapes = [(5, 16, 32), (32, 16), (0, 16, 32), (2, 3, 16, 32), (16, 32), (0, 32, 16)]
    xs = [
        jnp.asarray(normal(shape, seed), jnp.float32)
        for seed, shape in enumerate(shapes)
    ]
    step = jax.jit(lambda xs: on_device.orthogonalize(xs, plans.resolve("keller", 3)))
    for x, got in zip(xs, step(xs), strict=True):
        assert got.shape == x.shape and got.dtype == x.dtype
        if x.size:
            # Rounding to float32 (6e-8) times the slope 3.4^3 = 41 of three steps at 0.
            assert relative_error(got, reference.keller(x, 3)) < 5e-6
    assert step.lower(xs).as_text().count("dot_general") > 4 * 6
