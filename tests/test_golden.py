"""Trajectories of published implementations and of the printed algorithms.

``golden/*.npz`` hold float64 numbers: gradients in, updates out (or a matrix in, its
orthogonalization out), with the hyperparameters as JSON. A method is one entry of
``TRAJECTORIES`` or ``ORTHOGONALIZERS``.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import relative_error

import muon2_optax as m2

FILES = sorted((Path(__file__).parent / "golden").glob("*.npz"))

# The published Muon adds 1e-7 to the norm; it shows in the files named "tiny".
PUBLISHED_KELLER = m2.Schedule(
    m2.SCHEDULES["keller"].triples, normalization=m2.Frobenius(eps=1e-7)
)
ONE_MATRIX = m2.MatrixRules(((r"^w$", m2.MatrixAxes(-2, -1)),))


def _muon(momentum, **kw):
    return m2.muon(b1=momentum, ns_coeffs=PUBLISHED_KELLER, rules=ONE_MATRIX, **kw)


def _muon2(beta1, beta2, **kw):
    return m2.muon2(b1=beta1, b2=beta2, rules=ONE_MATRIX, **kw)


def _muon2_f(beta1, beta2, **kw):
    return m2.muon2_f(b1=beta1, b2=beta2, rules=ONE_MATRIX, **kw)


# method -> optimizer from the file's hyperparameters (every one must be used)
TRAJECTORIES = {
    "muon_keller": _muon,
    "muon_keller_no_nesterov": _muon,
    "muon2_k3": _muon2,
    "muon2_k5": _muon2,
    "muon2f_k3": _muon2_f,
    "muon2f_k5": _muon2_f,
}

# method -> function of (x, steps, **the file's other hyperparameters)
ORTHOGONALIZERS = {
    "orth_keller": lambda x, steps: m2.newton_schulz(x, steps, PUBLISHED_KELLER),
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


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_float32(path):
    # The file's own bound: max(1e-4, 20 x the float32 noise of the published code).
    assert _replay(path, jnp.float32) < _load(path)[1]["tol_f32"]


def test_every_method_has_its_files():
    """No method of the tables, and none of this library's, goes unchecked."""
    methods = {_load(path)[1]["method"] for path in FILES}
    assert methods == set(TRAJECTORIES) | set(ORTHOGONALIZERS)
