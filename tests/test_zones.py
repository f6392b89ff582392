"""Scalar maps and their zones against closed forms and the paper's numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrices import normal32
from reference import KELLER, scalar_newton_schulz

import muon2_optax as m2
from muon2_optax import diagnostics


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("name", ["keller", "polar_express", "you5"])
def test_scalar_map_composes_the_steps(name, steps):
    s = np.linspace(0, 1, 12).reshape(3, 4)
    want = scalar_newton_schulz(s, m2.SCHEDULES[name].rows(steps))
    np.testing.assert_allclose(
        diagnostics.scalar_map(name, steps, jnp.asarray(s)), want, atol=1e-5
    )
    traced = jax.jit(lambda k: diagnostics.scalar_map(name, k, jnp.asarray(s)))(steps)
    np.testing.assert_allclose(traced, want, atol=1e-5)


def test_scalar_map_is_what_newton_schulz_does():
    x = normal32((6, 9), 5)
    s = diagnostics.singular_values(x / np.linalg.norm(x))
    out = m2.newton_schulz(jnp.asarray(x), 3, "keller", ns_dtype="float32")
    want = np.sort(diagnostics.singular_values(out))
    np.testing.assert_allclose(
        np.sort(diagnostics.scalar_map("keller", 3, s)), want, atol=1e-5
    )


@pytest.mark.parametrize(
    "name, dead, convergent, paper",
    [
        ("keller", 0.001552, 0.2171, (0.001, 0.2)),
        ("polar_express", 0.000783, 0.0871, (0.0008, 0.1)),
    ],
)
def test_zones_of_the_paper(name, dead, convergent, paper):
    zones = diagnostics.convergence_zones(name, 5)
    assert zones.dead == pytest.approx(dead, rel=2e-3)
    assert zones.convergent == pytest.approx(convergent, rel=2e-3)
    # The paper rounds to one digit, and 0.00155 down.
    assert abs(zones.dead - paper[0]) < 0.6e-3
    assert abs(zones.convergent - paper[1]) < 0.02


@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("tolerance", [0.1, 0.3, 0.5])
def test_zones_are_the_first_crossings(steps, tolerance):
    rows = m2.SCHEDULES["you5"].rows(steps)
    s = np.linspace(0, 1, 2_000_001)
    want = [
        s[np.argmax(scalar_newton_schulz(s, part) >= 1 - tolerance)]
        for part in (rows, rows[:1])
    ]
    zones = diagnostics.convergence_zones("you5", steps, tolerance)
    np.testing.assert_allclose(zones, want, rtol=1e-4, atol=1e-6)


def test_zones_of_special_schedules():
    # 0.5 s, then 0.25 s, never reach 0.7.
    half = diagnostics.convergence_zones((0.5, 0.0, 0.0), 2)
    assert np.isinf(half).all()
    # Without steps, a value is convergent if it is there already.
    none = diagnostics.convergence_zones("keller", 0)
    np.testing.assert_allclose(none, [0.7, 0.7], rtol=1e-5)
    for tolerance in (0.0, 1.0):
        with pytest.raises(ValueError, match="tolerance"):
            diagnostics.convergence_zones("keller", 5, tolerance)


def test_zones_of_traced_arguments():
    want = diagnostics.convergence_zones("you5", 3)
    np.testing.assert_allclose(
        jax.jit(lambda k: diagnostics.convergence_zones("you5", k))(3), want, rtol=1e-5
    )
    want = diagnostics.convergence_zones(KELLER, 2)
    got = jax.jit(lambda c: diagnostics.convergence_zones(c, 2))(jnp.array(KELLER))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_zone_fractions_count():
    zones = diagnostics.Zones(jnp.array(0.1), jnp.array(0.5))
    s = jnp.array([[0.0, 0.05, 0.1, 0.7], [0.2, 0.5, 0.6, 0.9]])
    got = diagnostics.zone_fractions(s, zones)
    np.testing.assert_allclose(got, [[0.5, 0], [0.25, 0.25], [0.25, 0.75]])
    broken = diagnostics.zone_fractions(s.at[0].set(jnp.nan), zones)
    np.testing.assert_allclose(jnp.stack(broken)[:, 0], 0)
    everything_dead = diagnostics.zone_fractions(s, diagnostics.Zones(jnp.inf, jnp.inf))
    np.testing.assert_allclose(everything_dead.dead, 1)
