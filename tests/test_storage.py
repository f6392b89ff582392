"""What the moments are stored in: short exponents, few bits, complex numbers."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import sample

import muon2_optax as m2
from muon2_optax import dtypes


@pytest.mark.parametrize("dtype", ["float16", "float8_e5m2", "float8_e4m3fn"])
@pytest.mark.parametrize("decay", [0.9, 0.99])
def test_averages_reach_zero(dtype, decay):
    """From every positive number of the dtype, and from its negative."""
    bits = np.arange(2 ** (8 * ml_dtypes.finfo(dtype).bits // 8)).astype(
        np.uint16 if dtype == "float16" else np.uint8
    )
    values = bits.view(jnp.dtype(dtype))
    old = jnp.asarray(values[np.isfinite(values.astype(np.float32))])

    def step(_, x):
        return dtypes.narrow_average(decay * x.astype(jnp.float32), x)

    once = np.float32(step(0, old))
    before = np.float32(old)
    assert np.all((np.abs(once) < np.abs(before)) | (before == 0))
    assert np.all(once * before >= 0)
    last = jax.jit(lambda x: jax.lax.fori_loop(0, 8000, step, x))(old)
    assert not np.any(np.float32(last))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_wide_ranges_are_stored_as_ever(dtype):
    rng = np.random.default_rng(4)
    with jax.enable_x64(dtype == "float64"):
        old = jnp.asarray(rng.standard_normal(2000) * 1e-30, dtype)
        x = (0.997 * old.astype(dtypes.compute_dtype(dtype))).block_until_ready()
        np.testing.assert_array_equal(dtypes.narrow_average(x, old), x.astype(dtype))


def test_only_numbers_that_were_stuck_change():
    """All others round to nearest, as numpy rounds."""
    old = jnp.asarray(np.random.default_rng(5).standard_normal(4000), jnp.float16)
    x = 0.9 * old.astype(jnp.float32)
    np.testing.assert_array_equal(
        dtypes.narrow_average(x, old), np.asarray(x).astype(np.float16)
    )
    grown = 1.0001 * old.astype(jnp.float32)  # rounds back, and may
    np.testing.assert_array_equal(dtypes.narrow_average(grown, old), old)


@pytest.mark.parametrize("name", ["normuon", "dion", "adamuon"])
def test_float16_momentum_stops(name):
    params = sample(0, {"w": (6, 4)}, "float16")
    tx = m2.REGISTRY[name](1.0, b1=0.7)
    state = tx.init(params)
    _, state = tx.update(params, state, params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    step = jax.jit(lambda _, s: tx.update(zeros, s, params)[1])
    state = jax.lax.fori_loop(0, 400, step, state)
    assert not np.any(np.float32(tx.update(zeros, state, params)[0]["w"]))


@pytest.mark.parametrize("dtype", ["float16", "float8_e5m2", "float8_e4m3"])
@pytest.mark.parametrize("make", ["adamuon", "muon2"])
def test_second_moments_saturate(dtype, make):
    """V stays finite after one large gradient, and comes back after it."""
    scale = m2.scale_by_second_moment if make == "muon2" else None
    tx = (scale or m2.scale_by_output_second_moment)(b2=0.9, nu_dtype=dtype)
    g = {"w": -jnp.ones((3, 5))}
    state = tx.init(g)
    _, state = tx.update({"w": g["w"].at[1, 2].set(7e4)}, state)
    assert np.isfinite(float(state.nu["w"][1, 2]))
    step = jax.jit(lambda _, s: tx.update(g, s)[1])
    state = jax.lax.fori_loop(0, 300, step, state)
    # Where the step is below half a unit, V may stay a few units above 1.
    assert 0.9 < float(state.nu["w"][1, 2]) < 1.3


@pytest.mark.parametrize(
    ("argument", "dtype"),
    [
        *(("ns_dtype", d) for d in ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")),
        *(("ns_dtype", d) for d in ("int16", "uint8", "int4")),
        *(("mu_dtype", d) for d in ("float4_e2m1fn", "float8_e8m0fnu", "uint32")),
        *(("nu_dtype", d) for d in ("float4_e2m1fn", "float8_e8m0fnu", "complex128")),
    ],
)
def test_dtypes_that_cannot_work_are_refused_by_name(argument, dtype):
    # Those that numpy does not know have a name that jax.numpy knows.
    for given in (dtype, getattr(jnp, dtype)):
        with pytest.raises(TypeError, match=f"{argument}.*{dtype}|{dtype}.*{argument}"):
            m2.muon2(0.1, **{argument: given})


@pytest.mark.parametrize("name", ["muon", "muon2", "muon2_f", "dion"])
def test_complex_momentum(name):
    params = sample(0, {"w": (4, 6), "b": (6,)}, jnp.complex64)
    params = jax.tree.map(lambda x: x * (1 + 0.5j), params)
    tx, plain = m2.REGISTRY[name](0.1, mu_dtype="complex64"), m2.REGISTRY[name](0.1)
    got, state = tx.update(params, tx.init(params), params)
    want, other = plain.update(params, plain.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, (got, state), (want, other))
    with pytest.raises(TypeError, match="'gain' is real"):
        tx.init(params | {"gain": jnp.ones(3)})
