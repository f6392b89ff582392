"""The scripts of ``docs/migration.md``, before and after, and what its tables say."""

import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from routing import quick_compilation  # noqa: F401

import muon2_optax as m2

SCRIPTS = pathlib.Path(__file__).parent / "migration"


def run(name):
    return runpy.run_path(str(SCRIPTS / f"{name}.py"))


def test_optax_script():
    """Nesterov's mix and NAdam differ a little, so the ends agree roughly only."""
    before, after = run("optax_before")["losses"], run("optax_after")["losses"]
    assert before[0] == after[0] and before[-1] < 0.2 * before[0]
    assert 0.8 < after[-1] / before[-1] < 1.25


def test_torch_script():
    losses = run("torch_after")["losses"]
    assert losses[-1] < losses[0]
    # What the argument table of the page says is checked number by number with the
    # files golden/torch_muon_*.npz (tests/test_golden.py).


def test_torch_script_before():
    torch = pytest.importorskip("torch")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no torch.optim.Muon")
    losses = run("torch_before")["losses"]
    assert losses[-1] < losses[0]


def test_adamw_script():
    before, after = run("adamw_before")["losses"], run("adamw_after")["losses"]
    assert after[0] == before[0] and after[-1] < 1.1 * before[-1] < 0.2


SHAPES = {"up": (16, 64), "down": (64, 16), "square": (24, 24), "bias": (16,)}


def trees(count):
    """Parameters, then ``count`` trees of gradients."""
    draw = np.random.default_rng(0).standard_normal
    return [
        {k: jnp.asarray(draw(shape), "f4") for k, shape in SHAPES.items()}
        for _ in range(1 + count)
    ]


def updates_of(tx, params, grads):
    state, update, found = tx.init(params), jax.jit(tx.update), []
    for g in grads:
        updates, state = update(g, state, params)
        found.append(updates)
    return found


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ({}, {}),
        ({"consistent_rms": 0.2}, {"shape_scale": "match_rms"}),
        ({"ns_steps": 3}, {"ns_steps": 3}),
        ({"weight_decay": 0.1, "adam_weight_decay": 0.1},) * 2,
        ({"adam_learning_rate": 1e-3},) * 2,
        ({"ns_coeffs": (2.0, -1.5, 0.5)},) * 2,
    ],
    ids=str,
)
def test_table_of_optax(theirs, ours):
    """Without Nesterov both are one method: bias correction is a factor per step."""
    params, *grads = trees(3)
    theirs = optax.contrib.muon(0.02, nesterov=False, **theirs)
    rules = m2.MatrixRules(by_name=False)
    ours = m2.muon(0.02, nesterov=False, rules=rules, **ours)
    wanted = updates_of(theirs, params, grads)
    for got, want in zip(updates_of(ours, params, grads), wanted, strict=True):
        for key in SHAPES:
            error = np.linalg.norm(np.float64(got[key]) - want[key])
            # Rounding of float32, 6e-8, times the gain of five steps, 485; the eps that
            # Optax adds to the norm is 1e-8 of about 20.
            assert error <= 1e-4 * np.linalg.norm(want[key]), key


def test_first_step_with_nesterov_is_the_same():
    """One gradient is a multiple of itself in either mix."""
    params, grads = trees(1)
    rules = m2.MatrixRules(by_name=False)
    (want,) = updates_of(optax.contrib.muon(0.02), params, [grads])
    (got,) = updates_of(m2.muon(0.02, rules=rules), params, [grads])
    for key in ("up", "down", "square"):
        error = np.linalg.norm(np.float64(got[key]) - want[key])
        assert error <= 1e-4 * np.linalg.norm(want[key]), key


@pytest.mark.parametrize("fan_in, fan_out", [(64, 64), (64, 256), (256, 64)])
def test_rates_of_shape_factors(fan_in, fan_out):
    """The page's conversions: the factors' ratios, from their definitions."""
    factor = {
        "keller": max(1.0, fan_out / fan_in) ** 0.5,
        "match_rms": 0.2 * max(fan_in, fan_out) ** 0.5,
        "spectral": (fan_out / fan_in) ** 0.5,
    }
    ones = {"w": jnp.ones((fan_in, fan_out))}
    for kind, want in factor.items():
        tx = m2.scale_by_shape(kind)
        got, _ = tx.update(ones, tx.init(ones))
        np.testing.assert_allclose(got["w"], want, rtol=1e-6)
    ratio = factor["match_rms"] / factor["keller"]
    np.testing.assert_allclose(ratio, 0.2 * fan_in**0.5)


def test_match_rms_is_the_size_of_adamws_updates():
    """0.2 of the rate, times the root mean square of the singular values after K steps,
    which for Keller's triple and K = 5 lie between 0.68 and 1.21 (from 0.0016 up)."""
    params, grads = trees(1)
    (got,) = updates_of(
        m2.muon2(1.0, ns_steps=5, shape_scale="match_rms"), params, [grads]
    )
    for key in ("up", "down"):
        rms = np.sqrt(np.mean(np.square(np.float64(got[key]))))
        assert 0.68 * 0.2 < rms < 1.21 * 0.2, key
