"""Newton-Schulz as a map: sizes of its input, members of a stack, geometry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from matrices import newton_schulz, normal, spectra
from reference import relative_error

import muon2_optax as m2

# --- size of the input ------------------------------------------------------------


@pytest.mark.parametrize("shape", [(10, 14), (3, 6, 20)], ids=str)
def test_powers_of_two_change_no_bit(shape):
    x = jnp.asarray(normal(shape, dtype=np.float32))
    base = np.asarray(newton_schulz(x, 5))
    for exponent in (-100, -60, -1, 1, 60, 100):  # 8e-31 to 1e30
        scaled = newton_schulz(jnp.ldexp(x, exponent), 5)
        np.testing.assert_array_equal(scaled, base, err_msg=f"2^{exponent}")


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e-7, 1e7, 1e18, 1e30])
def test_any_size_in_float32(size):
    x = jnp.asarray(normal((10, 14), dtype=np.float32))
    got = newton_schulz(x * np.float32(size), 5)
    # The product rounds each entry by 6e-8, which five steps amplify by at most 485.
    assert relative_error(got, newton_schulz(x, 5)) < 3e-5


@pytest.mark.parametrize(
    "dtype, sizes",
    [
        # From where all but the smallest entries are still normal numbers.
        ("float16", [1e-3, 1.0, 1.6e4]),
        ("bfloat16", [1e-33, 1e-20, 1e20, 1e38]),
        ("float32", [1e-33, 1e38]),
        ("float64", [1e-300, 1e-160, 1e160, 1e307]),
        ("complex64", [1e-30, 1e30]),
    ],
)
def test_extreme_values_of_each_dtype(dtype, sizes):
    with jax.enable_x64(dtype == "float64"):
        for size in sizes:
            source = np.complex128 if dtype == "complex64" else np.float64
            x = jnp.asarray(normal((10, 14), dtype=source) * size, dtype)
            got = newton_schulz(x, 3)
            assert got.dtype == dtype
            # The output's own rounding: half a unit in the last of 8 or 11 bits.
            bound = {"bfloat16": 4e-3, "float16": 5e-4}.get(dtype, 1e-5)
            assert relative_error(got, reference.keller(x, 3)) < bound, size


@pytest.mark.parametrize("ns_dtype", [None, "float16", "bfloat16"])
@pytest.mark.parametrize(
    "dtype, value",
    [
        ("float16", 65504.0),
        ("float16", 6e-8),
        ("bfloat16", 3.3e38),
        ("bfloat16", 2e-38),
    ],
)
def test_all_entries_at_the_end_of_the_range(dtype, value, ns_dtype):
    """Squares and their sum (64 times as large) would leave the range of 16 bits."""
    signs = np.sign(normal((64, 64)))
    got = newton_schulz(jnp.asarray(signs * value, dtype), 3, ns_dtype=ns_dtype)
    # 16-bit products, as for test_newton_schulz's Gaussian matrix; the rest is less.
    assert relative_error(got, reference.keller(signs, 3)) < 0.06


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "complex64"]
)
def test_zero_stays_zero(dtype, steps):
    with jax.enable_x64(dtype == "float64"):
        one = newton_schulz(jnp.zeros((6, 4), dtype), steps)
        stack = jnp.asarray(normal((3, 6, 4)), dtype).at[1].set(0)
        got = newton_schulz(stack, steps)
        assert one.dtype == got.dtype == dtype
        assert not np.any(one) and not np.any(got[1])
        assert np.all(np.isfinite(got)) and np.all(np.any(got[::2], axis=(1, 2)))


def test_subnormal_entries_are_finite():
    x = jnp.full((4, 6), 1e-42, jnp.float32)
    assert np.all(np.isfinite(newton_schulz(x, 3)))


# --- one matrix and the others ----------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 6, 6), (4, 6, 16), (4, 16, 6)], ids=str)
def test_stack_members_do_not_see_one_another(shape):
    x = jnp.asarray(normal(shape, dtype=np.float32))
    base = np.asarray(newton_schulz(x, 5))
    for change in (x[1] * 1e20, x[1] * 0, x[1] + jnp.nan, x[1].at[0, 0].set(jnp.inf)):
        got = np.asarray(newton_schulz(x.at[1].set(change), 5))
        # The same program on the same numbers: not one bit differs.
        np.testing.assert_array_equal(got[[0, 2, 3]], base[[0, 2, 3]])


def test_stack_equals_single_matrices():
    x = normal((2, 3, 5, 8), dtype=np.float32)
    got = newton_schulz(jnp.asarray(x), 5)
    for index in np.ndindex(2, 3):
        alone = newton_schulz(jnp.asarray(x[index]), 5)
        assert relative_error(got[index], alone) < 1e-5  # float32, another batch


def test_vmap_equals_stack():
    x = jnp.asarray(normal((3, 5, 8), dtype=np.float32))
    got = jax.jit(jax.vmap(m2.newton_schulz))(x)
    assert relative_error(got, newton_schulz(x, 3)) < 1e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_entry_makes_its_matrix_nan(bad):
    x = jnp.asarray(normal((3, 5, 8), dtype=np.float32)).at[1, 2, 3].set(bad)
    got = np.asarray(newton_schulz(x, 3))
    assert np.all(np.isnan(got[1]))  # nothing half right that looks healthy
    assert np.all(np.isfinite(got[[0, 2]]))


def test_leaves_of_one_shape_do_not_see_one_another():
    tx = m2.newton_schulz_orthogonalize()
    tree = {
        k: jnp.asarray(normal(s, i, np.float32))
        for i, (k, s) in enumerate({"a": (6, 16), "b": (16, 6), "c": (6, 16)}.items())
    }
    update = jax.jit(lambda u: tx.update(u, tx.init(u))[0])
    base = update(tree)
    for bad in (tree["b"] * 1e20, tree["b"] * 0, tree["b"] + jnp.nan):
        got = update({**tree, "b": bad})
        np.testing.assert_array_equal(got["a"], base["a"])
        np.testing.assert_array_equal(got["c"], base["c"])
    for name, x in tree.items():
        assert relative_error(base[name], reference.keller(x, 3)) < 1e-5


# --- geometry ---------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(m2.SCHEDULES))
def test_descent_direction(name):
    """<O, M> > 0 for every schedule, length and spectrum: never a flipped sign."""
    schedule = m2.SCHEDULES[name]
    longest = 8 if schedule.take == "first" else len(schedule.triples)
    x = np.stack([x for k, x in spectra((8, 20)).items() if k != "zero"])
    run = jax.jit(lambda x, steps: m2.newton_schulz(x, steps, name))
    lengths = schedule.tables if schedule.take == "whole" else range(1, longest + 1)
    for steps in lengths:
        o = np.asarray(run(jnp.asarray(x, jnp.float32), steps))
        assert np.all(np.sum(o * x, axis=(1, 2)) > 0), steps


@pytest.mark.parametrize("shape", [(7, 7), (6, 16)], ids=str)
def test_transposing_only_transposes(shape):
    x = normal(shape, dtype=np.complex128)
    with jax.enable_x64(True):
        a = newton_schulz(jnp.asarray(x), 5)
        b = newton_schulz(jnp.asarray(x.T), 5)
        c = newton_schulz(jnp.asarray(x.conj()), 5)
    assert relative_error(b, np.asarray(a).T) < 1e-12
    assert relative_error(c, np.asarray(a).conj()) < 1e-12


@pytest.mark.parametrize("shape", [(7, 7), (6, 16)], ids=str)
def test_rotations_pass_through(shape):
    m, n = shape
    x = normal(shape)
    q, _ = np.linalg.qr(normal((m, m), 1))
    p, _ = np.linalg.qr(normal((n, n), 2))
    with jax.enable_x64(True):
        plain = np.asarray(newton_schulz(jnp.asarray(x), 5))
        turned = newton_schulz(jnp.asarray(q @ x @ p), 5)
    assert relative_error(turned, q @ plain @ p) < 1e-12


def test_odd():
    x = jnp.asarray(normal((6, 16), dtype=np.float32))
    np.testing.assert_array_equal(newton_schulz(-x, 5), -newton_schulz(x, 5))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 4), (2, 0, 0)], ids=str)
@pytest.mark.parametrize("steps", [0, 3])
def test_empty_arrays(shape, steps):
    got = newton_schulz(jnp.zeros(shape), steps)
    assert got.shape == shape and got.dtype == jnp.float32
