"""Trajectories of published implementations and of the printed algorithms.

``golden/*.npz`` hold float64 numbers: gradients in, updates out (or a matrix in, its
orthogonalization out), with the hyperparameters as JSON. A method is one entry of
``TRAJECTORIES`` or ``ORTHOGONALIZERS``.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import make_golden
import numpy as np
import optax
import pytest
from reference import relative_error

import muon2_optax as m2

FILES = sorted((Path(__file__).parent / "golden").glob("*.npz"))


def _published(name, normalization):
    """A schedule with the epsilon of the published code; "tiny" files show it."""
    return dataclasses.replace(m2.SCHEDULES[name], normalization=normalization)


PUBLISHED_KELLER = _published("keller", m2.Frobenius(eps=1e-7))
PUBLISHED_POLAR_EXPRESS = _published("polar_express", m2.Frobenius(1.01, eps=1e-7))
ONE_MATRIX = m2.MatrixRules(((r"^w$", m2.MatrixAxes(-2, -1)),))


def _muon(momentum, **kw):
    return m2.muon(b1=momentum, ns_coeffs=PUBLISHED_KELLER, rules=ONE_MATRIX, **kw)


def _muon2(beta1, beta2, **kw):
    return m2.muon2(b1=beta1, b2=beta2, rules=ONE_MATRIX, **kw)


def _muon2_f(beta1, beta2, **kw):
    return m2.muon2_f(b1=beta1, b2=beta2, rules=ONE_MATRIX, **kw)


def _polar_express(momentum, **kw):
    return m2.muon(
        b1=momentum, ns_coeffs=PUBLISHED_POLAR_EXPRESS, rules=ONE_MATRIX, **kw
    )


def _turbo(momentum, aol_eps, **kw):
    schedule = _published("turbo", m2.AOL(eps=aol_eps))
    return m2.muon(b1=momentum, ns_coeffs=schedule, rules=ONE_MATRIX, **kw)


def _moonlight(momentum, **kw):
    return _muon(momentum, dampening=0.0, shape_scale="match_rms", **kw)


def _torch(momentum, ns_coefficients, ns_eps, **kw):
    schedule = m2.Schedule(
        (tuple(ns_coefficients),), normalization=m2.Frobenius(floor=ns_eps)
    )
    return m2.muon(b1=momentum, ns_coeffs=schedule, rules=ONE_MATRIX, **kw)


def _torch_match_rms(**kw):
    return _torch(shape_scale="match_rms", **kw)


def _normuon(momentum, beta2, **kw):
    return m2.normuon(
        b1=momentum, b2=beta2, ns_coeffs=PUBLISHED_KELLER, rules=ONE_MATRIX, **kw
    )


def _adamuon(momentum, **kw):
    return m2.adamuon(
        b1=momentum, b2=momentum, ns_coeffs=PUBLISHED_KELLER, rules=ONE_MATRIX, **kw
    )


def _dion(mu, q_rows, power_iters=1, **kw):
    assert q_rows in ("fan_in", "fan_out") and power_iters == 1
    return m2.dion(b1=mu, rules=ONE_MATRIX, **kw)


def _muon_h(momentum, **kw):
    return m2.muon_h(b1=momentum, rules=ONE_MATRIX, **kw)


def _muon2_h(beta1, beta2, **kw):
    return m2.muon2_h(b1=beta1, b2=beta2, rules=ONE_MATRIX, **kw)


def _muon2_f_h(beta1, beta2, **kw):
    return m2.muon2_f_h(b1=beta1, b2=beta2, rules=ONE_MATRIX, **kw)


def _muon_eq(momentum, **kw):
    return m2.muon_eq(b1=momentum, rules=ONE_MATRIX, **kw)


def _soap_muon(beta1, beta2, **kw):
    return m2.soap_muon(b1=beta1, b2=beta2, rules=ONE_MATRIX, **kw)


def _muon_cautious(momentum, **kw):
    return m2.muon(b1=momentum, rules=ONE_MATRIX, cautious_weight_decay=True, **kw)


def _muon_ema_nesterov(momentum, beta, decay, **kw):
    return m2.ema_nesterov(m2.muon(b1=momentum, rules=ONE_MATRIX, **kw), beta, decay)


# method -> optimizer from the file's hyperparameters (every one must be used)
TRAJECTORIES = {
    "muon_keller": _muon,
    "muon_keller_no_nesterov": _muon,
    "muon2_k3": _muon2,
    "muon2_k5": _muon2,
    "muon2f_k3": _muon2_f,
    "muon2f_k5": _muon2_f,
    "muon_polar_express": _polar_express,
    "turbo_muon": _turbo,
    "moonlight": _moonlight,
    "torch_muon_original": _torch,
    "torch_muon_match_rms": _torch_match_rms,
    "normuon": _normuon,
    "adamuon": _adamuon,
    "dion": _dion,
    # The reference without the transposed branch: the first Q says which side it is on.
    "dion_simple": _dion,
    # Written by make_golden.
    "muon_h": _muon_h,
    "muon2_h": _muon2_h,
    "muon2f_h": _muon2_f_h,
    "muon_eq_roots": _muon_eq,
    "muon_eq_sweeps": _muon_eq,
    "soap_muon": _soap_muon,
    "muon_cautious": _muon_cautious,
    "muon_ema_nesterov": _muon_ema_nesterov,
}

# method -> function of (x, steps, **the file's other hyperparameters)
ORTHOGONALIZERS = {
    "orth_keller": lambda x, steps: m2.newton_schulz(x, steps, PUBLISHED_KELLER),
    "orth_polar_express": lambda x, steps, **_: m2.newton_schulz(
        x, steps, PUBLISHED_POLAR_EXPRESS
    ),
    "orth_polar_express_generated": lambda x, steps, coefficients, **_: (
        m2.newton_schulz(
            x,
            steps,
            m2.Schedule(coefficients, normalization=m2.Frobenius(1.01, eps=1e-7)),
        )
    ),
    "orth_turbo_aol": lambda x, steps, aol_eps: m2.newton_schulz(
        x, steps, _published("turbo", m2.AOL(eps=aol_eps))
    ),
}


def _load(path):
    data = np.load(path, allow_pickle=False)
    return data, json.loads(str(data["meta"])), json.loads(str(data["hyperparams"]))


@functools.cache
def _optimizer(method, hyperparams):
    """Files of one method and shape share a compiled step."""
    optimizer = TRAJECTORIES[method](**json.loads(hyperparams))
    return optimizer.init, jax.jit(optimizer.update)


def _replay(path, dtype):
    """The largest relative error over the file's steps; NaN if any is."""
    data, meta, hyperparams = _load(path)
    if meta["kind"] == "orthogonaliser":
        run = ORTHOGONALIZERS[meta["method"]]
        steps = hyperparams.pop("steps")
        x = jnp.asarray(data["input"], dtype)
        errors = [
            relative_error(run(x, k, **hyperparams), want)
            for k, want in zip(steps, data["output"], strict=True)
        ]
        return np.max(errors)
    init, update = _optimizer(meta["method"], json.dumps(hyperparams))
    params = {"w": jnp.asarray(data["params0"], dtype)}
    state = init(params)
    if "q0" in data.files:  # Dion starts from a random Q, of which the file has one
        q0 = {"w": jnp.asarray(data["q0"], dtype)}
        state = optax.tree.set(state, q=q0)
    errors = []
    for grad, want in zip(data["grads"], data["update"], strict=True):
        step, state = update({"w": jnp.asarray(grad, dtype)}, state, params)
        assert step["w"].dtype == dtype
        params = {"w": params["w"] + step["w"]}
        errors.append(relative_error(step["w"], want))
    return np.max(errors)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_float64(path):
    with jax.enable_x64(True):
        error = _replay(path, jnp.float64)
    # A faithful restatement reaches 1e-11; another nesterov, factor or axis is 1e-2.
    assert error < 1e-9


def _in_float32():
    """One shape of every method by default, and the files about small numbers."""
    for path in FILES:
        default = path.stem.endswith("_8x24") or "tiny" in path.stem
        marks = () if default else pytest.mark.slow
        yield pytest.param(path, marks=marks, id=path.stem)


@pytest.mark.parametrize("path", list(_in_float32()))
def test_float32(path):
    # The file's own bound: max(1e-4, 20 x the float32 noise of the published code).
    assert _replay(path, jnp.float32) < _load(path)[1]["tol_f32"]


def test_our_own_files_are_what_the_formulas_give():
    for path, want in make_golden.files():
        got = np.load(path)
        assert set(got.files) == set(want), path.name
        for key in want:
            if want[key].dtype.kind == "U":
                assert str(got[key]) == str(want[key]), (path.name, key)
            else:  # other BLAS libraries round otherwise
                np.testing.assert_allclose(got[key], want[key], rtol=1e-9, atol=1e-12)


def test_every_method_has_its_files():
    """No method of the tables, and none of this library's, goes unchecked."""
    methods = {_load(path)[1]["method"] for path in FILES}
    assert methods == set(TRAJECTORIES) | set(ORTHOGONALIZERS)
