"""What the products of Newton-Schulz run in; its settings traced."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from hlo import dot_generals
from matrices import newton_schulz, normal
from reference import KELLER, relative_error

import muon2_optax as m2

# --- what the products run in -----------------------------------------------------


def _products(platform, dtype="float32", **kw):
    """(operand types, all products at HIGHEST?) of the program for one platform."""
    x = jax.ShapeDtypeStruct((8, 24), dtype)
    traced = jax.jit(lambda x: m2.newton_schulz(x, **kw)).trace(x)
    dots = dot_generals(traced.lower(lowering_platforms=(platform,)).as_text())
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
    dots = dot_generals(traced.lower(lowering_platforms=("cpu",)).as_text())
    assert dots and all(("bf16" if ns_dtype else "f32") in d for d in dots)


def _count_dots(tree):
    tx = m2.newton_schulz_orthogonalize()
    text = jax.jit(lambda u: tx.update(u, tx.init(u))[0]).lower(tree).as_text()
    return len(dot_generals(text))


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
    x = jnp.asarray(normal((6, 16), dtype=np.float32))
    traced = jax.jit(lambda x, k: m2.newton_schulz(x, k))
    for steps in range(6):
        # float32; the loop has no Gram form.
        assert relative_error(traced(x, steps), newton_schulz(x, steps)) < 1e-5, steps


@pytest.mark.parametrize("take", ["first", "last"])
def test_traced_number_of_steps_picks_the_right_triples(take):
    rows = ((4.0, -6.0, 2.5), (3.0, -3.5, 1.2), (2.0, -1.5, 0.5))
    schedule = m2.Schedule(rows, take=take)
    x = jnp.asarray(normal((6, 9), dtype=np.float32))
    traced = jax.jit(lambda x, k: m2.newton_schulz(x, k, schedule))
    for steps in range(4):
        part = rows[:steps] if take == "first" else rows[len(rows) - steps :]
        want = reference.newton_schulz(x, part)
        assert relative_error(traced(x, steps), want) < 1e-5, steps
    if take == "first":  # the last triple repeats
        want = reference.newton_schulz(x, rows + rows[-1:] * 2)
        assert relative_error(traced(x, 5), want) < 1e-5


def test_traced_coefficients():
    x = jnp.asarray(normal((6, 9), dtype=np.float32))
    traced = jax.jit(m2.newton_schulz, static_argnums=1)
    triple = np.float32(KELLER)
    assert relative_error(traced(x, 5, triple), reference.keller(x, 5)) < 1e-5
    table = np.float32([(4.0, -6.0, 2.5), (3.0, -3.5, 1.2)])
    want = reference.newton_schulz(x, table)
    assert relative_error(traced(x, 2, table), want) < 1e-5
    with pytest.raises(ValueError, match="2 rows but ns_steps is 3"):
        traced(x, 3, table)


def test_traced_steps_and_coefficients():
    x = jnp.asarray(normal((6, 9), dtype=np.float32))
    traced = jax.jit(m2.newton_schulz)
    got = traced(x, 4, np.float32(KELLER))
    assert relative_error(got, reference.keller(x, 4)) < 1e-5


def test_inject_hyperparams():
    """Coefficients may arrive traced, and change between steps."""
    build = optax.inject_hyperparams(
        m2.newton_schulz_orthogonalize, static_args=("ns_steps",)
    )
    tx = build(ns_steps=3, ns_coeffs=np.float32(KELLER))
    x = {"w": jnp.asarray(normal((6, 16), dtype=np.float32))}
    state = jax.jit(tx.init)(x)
    assert set(state.hyperparams) == {"ns_coeffs"}
    update = jax.jit(tx.update)
    got, state = update(x, state, x)
    assert relative_error(got["w"], reference.keller(x["w"], 3)) < 1e-5
    state.hyperparams["ns_coeffs"] = jnp.asarray([2.0, -1.5, 0.5])
    got, _ = update(x, state, x)
    want = reference.newton_schulz(x["w"], [(2.0, -1.5, 0.5)] * 3)
    assert relative_error(got["w"], want) < 1e-5
