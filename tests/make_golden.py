"""Writes the golden files of the rules that have no published numbers.

``PYTHONPATH=tests python -m make_golden`` writes ``tests/golden/*__own_*.npz`` anew,
from the formulas in ``reference`` alone: plain float64 numpy, without this library. The
other golden files come from published code and from the paper, and stay as they are.
"""

import json
import math
from pathlib import Path

import numpy as np
import reference as ref

FOLDER = Path(__file__).parent / "golden"
SHAPES = {"24x8": (24, 8), "8x24": (8, 24)}
# Two gradients determine the eigenvectors of the longer side.
SOAP_SHAPES = {"12x8": (12, 8), "8x12": (8, 12)}
STEPS, SEED = 6, 20261201


def keller_factor(shape):
    return math.sqrt(max(1.0, shape[1] / shape[0]))


def on_sphere(w, directions, learning_rate, **_):
    path = [ref.wide(w)]
    path += ref.hyperball(w, directions, [learning_rate] * STEPS)
    return np.diff(path, axis=0)


def muon_h(w, grads, momentum, ns_steps, **kw):
    us = [ref.keller(m, ns_steps) for m in ref.momentum(grads, momentum, nesterov=True)]
    return on_sphere(w, us, **kw)


def muon2_h(w, grads, beta1, beta2, eps, ns_steps, **kw):
    us = ref.second_moment(grads, beta1, beta2, eps)
    return on_sphere(w, [ref.keller(u, ns_steps) for u in us], **kw)


def muon2f_h(w, grads, beta1, beta2, eps, ns_steps, **kw):
    us = ref.factored_second_moment(grads, beta1, beta2, eps)
    return on_sphere(w, [ref.keller(u, ns_steps) for u in us], **kw)


def muon_eq(w, grads, momentum, ns_steps, form, learning_rate):
    equalize = {"roots": ref.equalize_by_roots, "sweeps": ref.equalize_by_sweeps}[form]
    ms = ref.momentum(grads, momentum, nesterov=True)
    factor = -learning_rate * keller_factor(np.shape(w))
    return [factor * ref.keller(equalize(m), ns_steps) for m in ms]


def muon_cautious(w, grads, momentum, ns_steps, weight_decay, learning_rate):
    w, updates = ref.wide(w), []
    for m in ref.momentum(grads, momentum, nesterov=True):
        u = keller_factor(w.shape) * ref.keller(m, ns_steps)
        updates.append(-learning_rate * ref.cautious_decay(u, w, weight_decay))
        w = w + updates[-1]
    return updates


def soap_muon(w, grads, beta1, beta2, eps, shampoo_beta, precondition_frequency, **kw):
    us = ref.soap(
        grads,
        beta1,
        beta2,
        eps,
        shampoo_beta=shampoo_beta,
        frequency=precondition_frequency,
        nesterov=True,
    )
    factor = -kw["learning_rate"] * ref.spectral(*np.shape(w))
    return [factor * ref.keller(u, kw["ns_steps"]) for u in us]


def muon_ema_nesterov(w, grads, momentum, ns_steps, learning_rate, beta, decay):
    steps = ref.muon(grads, learning_rate, momentum, steps=ns_steps)
    betas = [beta] * (STEPS + 1)
    _, points = ref.ema_nesterov(w, lambda t, _: steps[t], betas, decay)
    return np.diff(points, axis=0)


MUON = {"learning_rate": 0.02, "momentum": 0.95, "ns_steps": 5}
MUON2 = {"learning_rate": 0.03, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "ns_steps": 3}
SOAP = MUON2 | {"shampoo_beta": 0.9, "precondition_frequency": 2}
# float32 knows eigenvectors to its rounding times the ratio of the largest eigenvalue
# to theirs, 1e3 to 1e4 for these gradients.
TOLERANCES = {"soap_muon": 2e-3}
METHODS = {
    "muon_h": (muon_h, MUON),
    "muon2_h": (muon2_h, MUON2),
    "muon2f_h": (muon2f_h, MUON2),
    "muon_eq_roots": (muon_eq, MUON | {"form": "roots"}),
    "muon_eq_sweeps": (muon_eq, MUON | {"form": "sweeps"}),
    "muon_cautious": (muon_cautious, MUON | {"weight_decay": 0.5}),
    "soap_muon": (soap_muon, SOAP),
    "muon_ema_nesterov": (muon_ema_nesterov, MUON | {"beta": 0.5, "decay": 0.9}),
}


def build(method, shape):
    """The arrays of one file."""
    function, hyperparams = METHODS[method]
    rng = np.random.default_rng((SEED, *shape, len(method)))
    params = rng.standard_normal(shape).astype(np.float32)
    # Rows and columns of unequal sizes, as gradients have.
    sizes = np.exp(rng.standard_normal((STEPS, *shape[:1], 1)))
    grads = rng.standard_normal((STEPS, *shape)) * sizes
    grads = (grads * np.exp(rng.standard_normal(shape[1]))).astype(np.float32)
    updates = np.stack(function(params, grads, **hyperparams))
    meta = {
        "kind": "trajectory",
        "method": method,
        "case": "own",
        "shape_fan_in_fan_out": shape,
        "steps": STEPS,
        "source": "the formulas of tests/reference.py, in float64 numpy",
        "tol_f32": TOLERANCES.get(method, 1e-4),
    }
    return {
        "params0": params,
        "grads": grads,
        "update": updates,
        "hyperparams": np.array(json.dumps(hyperparams)),
        "meta": np.array(json.dumps(meta)),
    }


def files():
    """Every file's path and arrays."""
    for method in METHODS:
        shapes = SOAP_SHAPES if method == "soap_muon" else SHAPES
        for name, shape in shapes.items():
            yield FOLDER / f"{method}__own_{name}.npz", build(method, shape)


if __name__ == "__main__":
    for path, arrays in files():
        np.savez(path, **arrays)
        print(path.name)
