"""Matrices for the tests of the iteration, by values or by singular values."""

import jax
import numpy as np

import muon2_optax as m2

# One compilation per shape, dtype and setting for all files.
newton_schulz = jax.jit(
    m2.newton_schulz, static_argnames=("ns_steps", "ns_coeffs", "ns_dtype")
)


def normal(shape, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * rng.standard_normal(shape)
    return x.astype(dtype)


def normal32(shape, seed=0):
    return normal(shape, seed, np.float32)


def with_spectrum(shape, singular_values, seed=1):
    rng = np.random.default_rng(seed)
    k = min(shape)
    u, _ = np.linalg.qr(rng.standard_normal((shape[0], k)))
    v, _ = np.linalg.qr(rng.standard_normal((shape[1], k)))
    return (u * singular_values) @ v.T


def spectra(shape):
    k = min(shape)
    return {
        "gauss": normal(shape, 3),
        "flat": with_spectrum(shape, np.ones(k)),
        "decay": with_spectrum(shape, np.logspace(0, -6, k)),
        "spike": with_spectrum(shape, np.r_[1.0, np.full(k - 1, 1e-3)]),
        "deficient": with_spectrum(shape, np.r_[np.ones(k // 2), np.zeros(k - k // 2)]),
        "rank one": with_spectrum(shape, np.r_[1.0, np.zeros(k - 1)]),
        "zero": np.zeros(shape),
    }


def svd(x):
    wide = np.complex128 if np.iscomplexobj(x) else np.float64
    return np.linalg.svd(np.asarray(x).astype(wide), full_matrices=False)
