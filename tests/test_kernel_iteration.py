"""The iteration on the symmetric kernel's arithmetic: values, and its programs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from kernels import (  # noqa: F401
    PLAN,
    emulated_products,
    joints,
    orthogonal,
    stack,
)
from reference import relative_error

from muon2_optax import iteration
from muon2_optax.execution import on_device, transport
from muon2_optax.kernels import newton_schulz, symmetric
from muon2_optax.schedules import plans

KELLER3 = PLAN.triples


def _with_spectrum(m, n, s, seed=0):
    return (orthogonal(m, seed) * s) @ np.eye(m, n) @ orthogonal(n, seed + 1).T


def _spectra(m, n):
    return {
        "normal": stack((m, n), 5, np.float64),
        "flat": _with_spectrum(m, n, np.ones(m)),
        "decaying": _with_spectrum(m, n, np.logspace(0, -6, m)),
        "deficient": _with_spectrum(m, n, np.r_[np.ones(m // 2), np.zeros(m - m // 2)]),
        "spike": _with_spectrum(m, n, np.r_[1.0, np.full(m - 1, 1e-3)]),
    }


def _run(matrices, plan=PLAN, size=2, dtype=jnp.float16):
    """In stacks of so many matrices."""
    m, n = sorted(matrices[0].shape[-2:])
    size = newton_schulz.StackSize(size * symmetric.panels(m, n), size)
    runs = iteration.gram_runs(plan, m, n, jnp.dtype(dtype))
    run = functools.partial(
        newton_schulz.run, plan=plan, runs=runs, size=size, dtype=jnp.dtype(dtype)
    )
    return run([jnp.asarray(x, jnp.float32) for x in matrices])


@functools.partial(jax.jit, static_argnames="rows")
def _plain_bfloat16(x, rows):
    y = (x / jnp.linalg.norm(x)).astype(jnp.bfloat16)
    for a, b, c in rows:
        gram = y @ y.T
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y


@pytest.mark.parametrize("shape", [(128, 128), (128, 320)], ids=str)
@pytest.mark.parametrize("name", list(_spectra(2, 2)))
def test_at_least_as_accurate_as_plain_bfloat16(name, shape, emulated):
    x = _spectra(*shape)[name]
    want = reference.keller(x, 3)
    got = np.asarray(_run([x])[0], np.float64)
    plain = np.asarray(
        _plain_bfloat16(jnp.asarray(x, jnp.float32), KELLER3), np.float64
    )
    assert np.isfinite(got).all()
    assert relative_error(got, want) <= relative_error(plain, want)
    assert np.vdot(got, x) > 0


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(96, 96), (64, 192)], ids=str)
def test_every_number_of_steps(shape, steps, emulated):
    x = stack(shape, 3, np.float64)
    got = _run([x], plans.resolve("keller", steps))[0]
    # Five steps of the Gram form multiply float16's 5e-4 by up to 3.4^2.
    assert relative_error(got, reference.keller(x, steps)) < (3e-3, 2e-2)[steps > 3]


@pytest.mark.parametrize("grams", [2, 6, 7])
def test_as_many_gram_matrices_as_panels(grams, emulated):
    xs = [stack(s, i, np.float64) for i, s in enumerate([(160, 64), (4, 64, 160)])]
    runs = iteration.gram_runs(PLAN, 64, 160, jnp.dtype(jnp.float16))
    wide = [jnp.asarray(x, jnp.float32) for x in xs]
    size = newton_schulz.StackSize(7, grams)
    one, several = newton_schulz.run(wide, PLAN, runs, size, jnp.dtype(jnp.float16))
    assert relative_error(one, reference.keller(xs[0], 3)) < 3e-3
    for got, x in zip(several, xs[1]):
        assert relative_error(got, reference.keller(x, 3)) < 3e-3


@pytest.mark.parametrize("steps", [1, 2])
def test_negative_coefficients(steps, emulated):
    """The gain, whose root scales the input, has the sign of their product."""
    x = stack((64, 96), 3, np.float64)
    rows = tuple(tuple(-v for v in row) for row in KELLER3[:steps])
    got = _run([x], dataclasses.replace(PLAN, triples=rows))[0]
    want = (-1) ** steps * reference.keller(x, steps)
    assert relative_error(got, want) < 3e-3


@pytest.mark.slow
def test_chunks_stacks_and_tall_members(emulated):
    shapes = [(64, 160), (3, 64, 160), (160, 64), (2, 2, 160, 64), (64, 160)]
    xs = [stack(s, i, np.float64) for i, s in enumerate(shapes)]
    for size in (1, 2, 4, 100):
        for x, got in zip(xs, _run(xs, size=size)):
            want = np.empty(x.shape)
            for index in np.ndindex(x.shape[:-2]):
                want[index] = reference.keller(x[index], 3)
            assert got.shape == x.shape and relative_error(got, want) < 3e-3


def test_a_stack_without_members(emulated):
    xs = [stack(s, i, np.float64) for i, s in enumerate([(3, 64, 160), (0, 64, 160)])]
    for size in (1, 100):
        got = _run([xs[1], xs[0], xs[1]], size=size)
        assert [g.shape for g in got] == [xs[1].shape, xs[0].shape, xs[1].shape]
        for x, y in zip(xs[0], got[1]):
            assert relative_error(y, reference.keller(x, 3)) < 3e-3


@pytest.mark.parametrize("scale", [1e-34, 1e-20, 1.0, 1e20, 7e37])
def test_any_magnitude(scale, emulated):
    x = stack((64, 96), 4, np.float64)
    assert relative_error(_run([x * scale])[0], reference.keller(x, 3)) < 3e-3


def test_zero_members_stay_zero_and_bad_ones_stay_alone(emulated):
    x = stack((4, 64, 96), 2, np.float32)
    x[1] = 0
    x[2, 3, 4] = np.inf
    got = np.asarray(_run([x], size=4)[0])
    assert not got[1].any() and np.isnan(got[2]).all()
    assert np.isfinite(got[[0, 3]]).all()


def test_no_more_than_ten_arrays_are_joined_at_once(emulated):
    """XLA for GPUs writes one element per thread from eleven on: the widest pass of a
    step would take three times as long."""
    xs = [jnp.ones((128, 192))] * 29
    counts = joints(lambda *xs: _run(xs, size=100), *xs)
    assert max(counts) == 10
    pieces = [jnp.ones((1, 64, 96), jnp.float16)] * 29
    packed = joints(lambda *xs: transport.pack(xs, jnp.ones(29), 8, 4), *pieces)
    assert max(packed) <= 10


def test_the_kernels_have_the_derivative_of_the_plain_path(monkeypatch):
    def without_derivative(xs, plan, runs, size, dtype):
        kinds = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs]
        return tuple(jax.pure_callback(lambda *xs: xs, kinds, *xs))

    monkeypatch.setattr(newton_schulz, "run", without_derivative)
    x = jnp.asarray(stack((8, 768, 768), 1, np.float32))

    def inner(run, x):
        return jnp.vdot(run(x, plan=PLAN, dtype=jnp.dtype(jnp.float16))[0], x + 1)

    on_kernels = functools.partial(on_device.orthogonalize_batch, kernels=True)
    got = jax.grad(functools.partial(inner, on_kernels))(x)
    want = jax.grad(functools.partial(inner, on_device._orthogonalize_on_xla))(x)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
