"""Newton-Schulz against the scalar polynomial on the singular values of an SVD."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from reference import KELLER, relative_error

import muon2_optax as m2
from muon2_optax import coefficients, iteration, polar

# One compilation per shape, dtype and setting for the whole file.
newton_schulz = jax.jit(
    m2.newton_schulz, static_argnames=("ns_steps", "ns_coeffs", "ns_dtype")
)


def _normal(shape, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * rng.standard_normal(shape)
    return x.astype(dtype)


def _with_spectrum(shape, singular_values, seed=1):
    rng = np.random.default_rng(seed)
    k = min(shape)
    u, _ = np.linalg.qr(rng.standard_normal((shape[0], k)))
    v, _ = np.linalg.qr(rng.standard_normal((shape[1], k)))
    return (u * singular_values) @ v.T


def _spectra(shape):
    k = min(shape)
    return {
        "gauss": _normal(shape, 3),
        "flat": _with_spectrum(shape, np.ones(k)),
        "decay": _with_spectrum(shape, np.logspace(0, -6, k)),
        "spike": _with_spectrum(shape, np.r_[1.0, np.full(k - 1, 1e-3)]),
        "deficient": _with_spectrum(
            shape, np.r_[np.ones(k // 2), np.zeros(k - k // 2)]
        ),
        "rank one": _with_spectrum(shape, np.r_[1.0, np.zeros(k - 1)]),
        "zero": np.zeros(shape),
    }


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
    x = _normal(shape, dtype=dtype)
    with jax.enable_x64(True):
        got = newton_schulz(jnp.asarray(x), 5)
    assert got.dtype == dtype and got.shape == shape
    # Double rounding (1e-16) times the slope 3.4^5 = 485 of five steps at 0, times 20.
    assert relative_error(got, reference.keller(x, 5)) < 1e-12


@pytest.mark.parametrize("dtype", [np.float32, np.complex64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("shape", [(12, 12), (20, 7), (3, 5, 8)], ids=str)
def test_single_precision(shape, dtype):
    x = _normal(shape, dtype=dtype)
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
        for name, x in _spectra(shape).items():
            x = x.astype(source)
            got = newton_schulz(jnp.asarray(x), steps, ns_dtype=dtype)
            error = relative_error(got, reference.keller(x, steps))
            assert error <= (easy if name in ("gauss", "flat") else bound), name


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7])
def test_every_number_of_steps(steps):
    x = _normal((6, 10))
    with jax.enable_x64(True):
        got = newton_schulz(jnp.asarray(x), steps)
    assert relative_error(got, reference.keller(x, steps)) < 1e-12


def test_no_steps_only_normalize():
    x = _normal((2, 6, 10)) * np.array([1e-3, 1e3])[:, None, None]
    with jax.enable_x64(True):
        got = np.asarray(newton_schulz(jnp.asarray(x), 0))
    want = x / np.linalg.norm(x, axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(got, want, rtol=1e-14)


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (5, 5)], ids=str)
def test_steps_of_a_table_come_in_order(shape):
    table = ((4.0, -6.0, 2.5), (3.0, -3.5, 1.2), (2.0, -1.5, 0.5))
    x = _normal(shape)
    with jax.enable_x64(True):
        got = newton_schulz(jnp.asarray(x), 3, table)
    assert relative_error(got, reference.newton_schulz(x, table)) < 1e-12
    # The composition does not commute: the test would notice another order.
    assert relative_error(got, reference.newton_schulz(x, table[::-1])) > 1e-3


def test_singular_values_end_near_one():
    """What it is for: five steps bring a Gaussian matrix near its polar factor."""
    x = _normal((16, 40), 5).astype(np.float32)
    o = np.asarray(newton_schulz(jnp.asarray(x), 5), np.float64)
    s = np.linalg.svd(o, compute_uv=False)
    assert 0.65 < s.min() and s.max() < 1.25  # Keller's triple: about [0.68, 1.14]
    cosine = np.sum(o * reference.polar(x)) / np.linalg.norm(o) / 4.0
    assert cosine > 0.98  # the paper reports .98 for uniform singular values


def test_published_normalization():
    """``factor`` and ``eps`` of a schedule: x / (factor ||x|| + eps)."""
    how = m2.Frobenius(factor=1.02, eps=1e-3)
    schedule = m2.Schedule((KELLER,), normalization=how)
    x = _normal((6, 10)) * 1e-3
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
    x = _normal((6, 10))
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
        arrays = {k: jnp.asarray(x, dtype) for k, x in _spectra((8, 24)).items()}
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
    long = [d for d in _dots(text.as_text()) if "x24x" in d or "<24x" in d]
    assert len(long) == reads


# --- size of the input ------------------------------------------------------------


@pytest.mark.parametrize("shape", [(10, 14), (3, 6, 20)], ids=str)
def test_powers_of_two_change_no_bit(shape):
    x = jnp.asarray(_normal(shape, dtype=np.float32))
    base = np.asarray(newton_schulz(x, 5))
    for exponent in (-100, -60, -1, 1, 60, 100):  # 8e-31 to 1e30
        scaled = newton_schulz(jnp.ldexp(x, exponent), 5)
        np.testing.assert_array_equal(scaled, base, err_msg=f"2^{exponent}")


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e-7, 1e7, 1e18, 1e30])
def test_any_size_in_float32(size):
    x = jnp.asarray(_normal((10, 14), dtype=np.float32))
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
            x = jnp.asarray(_normal((10, 14), dtype=source) * size, dtype)
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
    signs = np.sign(_normal((64, 64)))
    got = newton_schulz(jnp.asarray(signs * value, dtype), 3, ns_dtype=ns_dtype)
    # 16-bit products, as for the Gaussian matrix of test_spectra; the rest is less.
    assert relative_error(got, reference.keller(signs, 3)) < 0.06


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "complex64"]
)
def test_zero_stays_zero(dtype, steps):
    with jax.enable_x64(dtype == "float64"):
        one = newton_schulz(jnp.zeros((6, 4), dtype), steps)
        stack = jnp.asarray(_normal((3, 6, 4)), dtype).at[1].set(0)
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
    x = jnp.asarray(_normal(shape, dtype=np.float32))
    base = np.asarray(newton_schulz(x, 5))
    for change in (x[1] * 1e20, x[1] * 0, x[1] + jnp.nan, x[1].at[0, 0].set(jnp.inf)):
        got = np.asarray(newton_schulz(x.at[1].set(change), 5))
        # The same program on the same numbers: not one bit differs.
        np.testing.assert_array_equal(got[[0, 2, 3]], base[[0, 2, 3]])


def test_stack_equals_single_matrices():
    x = _normal((2, 3, 5, 8), dtype=np.float32)
    got = newton_schulz(jnp.asarray(x), 5)
    for index in np.ndindex(2, 3):
        alone = newton_schulz(jnp.asarray(x[index]), 5)
        assert relative_error(got[index], alone) < 1e-5  # float32, another batch


def test_vmap_equals_stack():
    x = jnp.asarray(_normal((3, 5, 8), dtype=np.float32))
    got = jax.jit(jax.vmap(m2.newton_schulz))(x)
    assert relative_error(got, newton_schulz(x, 3)) < 1e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_entry_makes_its_matrix_nan(bad):
    x = jnp.asarray(_normal((3, 5, 8), dtype=np.float32)).at[1, 2, 3].set(bad)
    got = np.asarray(newton_schulz(x, 3))
    assert np.all(np.isnan(got[1]))  # nothing half right that looks healthy
    assert np.all(np.isfinite(got[[0, 2]]))


def test_leaves_of_one_shape_do_not_see_one_another():
    tx = m2.newton_schulz_orthogonalize()
    tree = {
        k: jnp.asarray(_normal(s, i, np.float32))
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
    longest = len(schedule.triples) if schedule.take == "last" else 8
    x = np.stack([x for k, x in _spectra((8, 20)).items() if k != "zero"])
    run = jax.jit(lambda x, steps: m2.newton_schulz(x, steps, name))
    for steps in range(1, longest + 1):
        o = np.asarray(run(jnp.asarray(x, jnp.float32), steps))
        assert np.all(np.sum(o * x, axis=(1, 2)) > 0), steps


@pytest.mark.parametrize("shape", [(7, 7), (6, 16)], ids=str)
def test_transposing_only_transposes(shape):
    x = _normal(shape, dtype=np.complex128)
    with jax.enable_x64(True):
        a = newton_schulz(jnp.asarray(x), 5)
        b = newton_schulz(jnp.asarray(x.T), 5)
        c = newton_schulz(jnp.asarray(x.conj()), 5)
    assert relative_error(b, np.asarray(a).T) < 1e-12
    assert relative_error(c, np.asarray(a).conj()) < 1e-12


@pytest.mark.parametrize("shape", [(7, 7), (6, 16)], ids=str)
def test_rotations_pass_through(shape):
    m, n = shape
    x = _normal(shape)
    q, _ = np.linalg.qr(_normal((m, m), 1))
    p, _ = np.linalg.qr(_normal((n, n), 2))
    with jax.enable_x64(True):
        plain = np.asarray(newton_schulz(jnp.asarray(x), 5))
        turned = newton_schulz(jnp.asarray(q @ x @ p), 5)
    assert relative_error(turned, q @ plain @ p) < 1e-12


def test_odd():
    x = jnp.asarray(_normal((6, 16), dtype=np.float32))
    np.testing.assert_array_equal(newton_schulz(-x, 5), -newton_schulz(x, 5))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 4), (2, 0, 0)], ids=str)
@pytest.mark.parametrize("steps", [0, 3])
def test_empty_arrays(shape, steps):
    got = newton_schulz(jnp.zeros(shape), steps)
    assert got.shape == shape and got.dtype == jnp.float32


# --- what the products run in -----------------------------------------------------


def _dots(text):
    return [line for line in text.splitlines() if "stablehlo.dot_general" in line]


def _products(platform, dtype="float32", **kw):
    """(operand types, all products at HIGHEST?) of the program for one platform."""
    x = jax.ShapeDtypeStruct((8, 24), dtype)
    traced = jax.jit(lambda x: m2.newton_schulz(x, **kw)).trace(x)
    dots = _dots(traced.lower(lowering_platforms=(platform,)).as_text())
    operands = [re.search(r": \((.*)\) ->", d).group(1) for d in dots]
    types = set(re.findall(r"x(b?f\d+|complex<f\d+>)>", " ".join(operands)))
    return types, all("precision = [HIGHEST, HIGHEST]" in d for d in dots)


@pytest.mark.parametrize(
    "platform, want",
    [("cpu", "f32"), ("cuda", "f16"), ("rocm", "f16"), ("tpu", "bf16")],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_default_precision_of_each_platform(platform, want, dtype):
    types, highest = _products(platform, dtype)
    assert types == {want}
    assert highest  # float32 never by TF32 or single-pass bfloat16


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize(
    "ns_dtype, want", [("float32", "f32"), ("bfloat16", "bf16"), ("float16", "f16")]
)
def test_explicit_precision(platform, ns_dtype, want):
    assert _products(platform, ns_dtype=ns_dtype) == ({want}, True)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize(
    "dtype, want",
    [
        ("float64", "f64"),
        ("complex64", "complex<f32>"),
        ("complex128", "complex<f64>"),
    ],
)
def test_double_and_complex_keep_their_own_precision(platform, dtype, want):
    with jax.enable_x64(True):
        assert _products(platform, dtype) == ({want}, True)


def test_explicit_precision_of_float64_input():
    with jax.enable_x64(True):
        assert _products("cpu", "float64", ns_dtype="float32") == ({"f32"}, True)


@pytest.mark.parametrize("ns_dtype", [jnp.bfloat16, jnp.dtype("bfloat16"), "bfloat16"])
def test_precision_may_be_any_dtype_like(ns_dtype):
    assert _products("cpu", ns_dtype=ns_dtype) == ({"bf16"}, True)


@pytest.mark.parametrize("ns_dtype", [None, "bfloat16"])
def test_traced_settings_keep_the_precision(ns_dtype):
    x = jax.ShapeDtypeStruct((8, 24), jnp.float32)
    run = jax.jit(lambda x, k, t: m2.newton_schulz(x, k, t, ns_dtype=ns_dtype))
    traced = run.trace(x, 3, jnp.asarray(KELLER))
    dots = _dots(traced.lower(lowering_platforms=("cpu",)).as_text())
    assert dots and all(("bf16" if ns_dtype else "f32") in d for d in dots)


def _count_dots(tree):
    tx = m2.newton_schulz_orthogonalize()
    text = jax.jit(lambda u: tx.update(u, tx.init(u))[0]).lower(tree).as_text()
    return len(_dots(text))


def test_equal_shapes_run_as_one_batch():
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    one = _count_dots({"a": leaf(8, 11)})
    assert one == 9  # three steps of three products
    many = {f"w{i}": leaf(8, 11) for i in range(5)}
    assert _count_dots(many) == one
    assert _count_dots({**many, "turned": leaf(11, 8)}) == one  # and the transposes
    assert _count_dots({**many, "other": leaf(8, 10)}) == 2 * one


# --- traced settings --------------------------------------------------------------


def test_traced_number_of_steps():
    x = jnp.asarray(_normal((6, 16), dtype=np.float32))
    traced = jax.jit(lambda x, k: m2.newton_schulz(x, k))
    for steps in range(6):
        # float32; the loop has no Gram form.
        assert relative_error(traced(x, steps), newton_schulz(x, steps)) < 1e-5, steps


@pytest.mark.parametrize("take", ["first", "last"])
def test_traced_number_of_steps_picks_the_right_triples(take):
    rows = ((4.0, -6.0, 2.5), (3.0, -3.5, 1.2), (2.0, -1.5, 0.5))
    schedule = m2.Schedule(rows, take=take)
    x = jnp.asarray(_normal((6, 9), dtype=np.float32))
    traced = jax.jit(lambda x, k: m2.newton_schulz(x, k, schedule))
    for steps in range(4):
        part = rows[:steps] if take == "first" else rows[len(rows) - steps :]
        want = reference.newton_schulz(x, part)
        assert relative_error(traced(x, steps), want) < 1e-5, steps
    if take == "first":  # the last triple repeats
        want = reference.newton_schulz(x, rows + rows[-1:] * 2)
        assert relative_error(traced(x, 5), want) < 1e-5


def test_traced_coefficients():
    x = jnp.asarray(_normal((6, 9), dtype=np.float32))
    traced = jax.jit(m2.newton_schulz, static_argnums=1)
    triple = np.float32(KELLER)
    assert relative_error(traced(x, 5, triple), reference.keller(x, 5)) < 1e-5
    table = np.float32([(4.0, -6.0, 2.5), (3.0, -3.5, 1.2)])
    want = reference.newton_schulz(x, table)
    assert relative_error(traced(x, 2, table), want) < 1e-5
    with pytest.raises(ValueError, match="2 rows but ns_steps is 3"):
        traced(x, 3, table)


def test_traced_steps_and_coefficients():
    x = jnp.asarray(_normal((6, 9), dtype=np.float32))
    traced = jax.jit(m2.newton_schulz)
    got = traced(x, 4, np.float32(KELLER))
    assert relative_error(got, reference.keller(x, 4)) < 1e-5


def test_inject_hyperparams():
    """Every numeric argument arrives traced, and may change between steps."""
    build = optax.inject_hyperparams(m2.newton_schulz_orthogonalize)
    tx = build(ns_steps=3, ns_coeffs=np.float32(KELLER))
    x = {"w": jnp.asarray(_normal((6, 16), dtype=np.float32))}
    state = jax.jit(tx.init)(x)
    assert set(state.hyperparams) == {"ns_steps", "ns_coeffs"}
    update = jax.jit(tx.update)
    got, state = update(x, state, x)
    assert relative_error(got["w"], reference.keller(x["w"], 3)) < 1e-5
    state.hyperparams["ns_steps"] = jnp.asarray(1)
    got, state = update(x, state, x)
    assert relative_error(got["w"], reference.keller(x["w"], 1)) < 1e-5
    state.hyperparams["ns_coeffs"] = jnp.asarray([2.0, -1.5, 0.5])
    got, _ = update(x, state, x)
    want = reference.newton_schulz(x["w"], [(2.0, -1.5, 0.5)])
    assert relative_error(got["w"], want) < 1e-5


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
        return jnp.sum(polar.normalize(x, how)[0] ** 2)

    norm = float(jnp.linalg.norm(x))
    for eps in (np.asarray(0.5), jnp.float32(0.5)):
        np.testing.assert_allclose(total(eps), (norm / (norm + 0.5)) ** 2, rtol=1e-5)
    want = -2 * norm**2 / (norm + 0.5) ** 3
    np.testing.assert_allclose(jax.jit(jax.grad(total))(0.5), want, rtol=1e-5)


def test_lots_bound_the_memory_and_keep_the_values(monkeypatch):
    """Stacks, tall leaves and lone matrices, cut anywhere, against float64."""
    monkeypatch.setattr(polar, "LOT", 3 * 16 * 32 * 4)  # three of thirteen at a time
    shapes = [(5, 16, 32), (32, 16), (0, 16, 32), (2, 3, 16, 32), (16, 32), (0, 32, 16)]
    xs = [
        jnp.asarray(_normal(shape, seed), jnp.float32)
        for seed, shape in enumerate(shapes)
    ]
    step = jax.jit(
        lambda xs: polar.orthogonalize(xs, coefficients.resolve("keller", 3))
    )
    for x, got in zip(xs, step(xs), strict=True):
        assert got.shape == x.shape and got.dtype == x.dtype
        if x.size:
            # Rounding to float32 (6e-8) times the slope 3.4^3 = 41 of three steps at 0.
            assert relative_error(got, reference.keller(x, 3)) < 5e-6
    assert step.lower(xs).as_text().count("dot_general") > 4 * 6
