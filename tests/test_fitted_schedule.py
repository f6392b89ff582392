"""The named schedule "muon2": an independent iteration, SVDs, the fit's own limits."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from reference import KELLER

import muon2_optax as m2
from benchmarks import fit_schedules
from benchmarks.evidence import spectra

TABLES = m2.SCHEDULES["muon2"].tables
every_length = pytest.mark.parametrize("steps", sorted(TABLES))


load_spectra = functools.cache(spectra.load)


def measured(arm, step, count=3):
    """Quantiles of the singular values of some matrices as they entered Newton-Schulz.

    Fewer than there were, so their norm is below 1.
    """
    entries, quantiles = load_spectra()
    rows = [
        q
        for e, q in zip(entries, quantiles)
        if (e["size"], e["arm"], e["step"]) == ("llama_60m", arm, step) and q[-1] > 0
    ]
    return rows[:: len(rows) // count][:count]


def singular_vectors(rank, columns, seed=0):
    """Random orthonormal columns on either side of a matrix (rank, columns)."""
    rng = np.random.default_rng(seed)
    u = np.linalg.qr(rng.standard_normal((rank, rank)))[0]
    v = np.linalg.qr(rng.standard_normal((columns, rank)))[0]
    return u, v


def matrix(s, columns, seed=0):
    """A float64 matrix with these singular values and random singular vectors."""
    u, v = singular_vectors(s.size, columns, seed)
    return (u * s) @ v.T


def iterate(x, table):
    """Newton-Schulz by matrix products in float64: no SVD, none of our code."""
    for a, b, c in table:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def cosine_to(polar, o):
    return np.sum(o * polar) / np.linalg.norm(o) / np.sqrt(len(polar))


def test_it_has_a_table_for_two_to_five_steps():
    assert sorted(TABLES) == [2, 3, 4, 5]
    for steps, table in TABLES.items():
        assert len(table) == steps
    with pytest.raises(ValueError, match="ns_steps=6"):
        m2.muon2(0.02, ns_coeffs="muon2", ns_steps=6)


def test_it_is_what_the_fit_wrote():
    fits = json.loads(fit_schedules.FITS.read_text())
    want = {f["ns_steps"]: f["table"] for f in fits if f["schedule"] == "muon2"}
    assert {k: [list(row) for row in table] for k, table in TABLES.items()} == want


def test_it_agrees_with_an_earlier_fit():
    """To spectra of other runs at half of their length, by the same criteria."""
    earlier = [(4.1675, -11.861, 8.4565), (3.4844, -9.958, 7.258)]
    np.testing.assert_allclose(TABLES[3][:2], earlier, rtol=0.01)


@every_length
def test_the_library_runs_it(steps):
    x = matrix(measured("muon2 K=3", 350)[0], 160)
    got = m2.newton_schulz(
        jnp.asarray(x, jnp.float32), steps, "muon2", ns_dtype="float32"
    )
    want = iterate(x / np.linalg.norm(x), TABLES[steps])
    # Float32 rounding of the input, raised by at most 4.17 in each step.
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < 5 * np.finfo(np.float32).eps * 4.17**steps


@every_length
@pytest.mark.parametrize("arm", ["muon2 K=3", "muon2_f K=3", "muon K=5"])
@pytest.mark.parametrize("step", [35, 350, 665])
def test_it_is_better_aligned_than_keller(steps, arm, step):
    """In the mean over matrices, which is what the fit maximizes."""
    gains = []
    for seed, s in enumerate(measured(arm, step, 8)):
        u, v = singular_vectors(s.size, 140, seed)
        ours, keller = (
            cosine_to(u @ v.T, iterate((u * s) @ v.T, table))
            for table in (TABLES[steps], [KELLER] * steps)
        )
        gains.append(ours - keller)
    assert np.mean(gains) > 0.01


@every_length
def test_singular_values_of_the_output(steps):
    """None beyond 1.3, none negative: <O, M> > 0 in every direction."""
    grid = np.geomspace(1e-6, 1, 60)
    for s in (*measured("muon2_f K=3", 35), grid / np.linalg.norm(grid)):
        x = matrix(s, 130)
        u, _, vt = np.linalg.svd(x, full_matrices=False)
        out = np.diag(u.T @ iterate(x, TABLES[steps]) @ vt.T)
        assert out.min() > 0 and out.max() < 1.3 + 16 * 1.5e-4


@every_length
def test_it_is_safe(steps):
    """The fit's criteria up to 1.02, but for four digits.

    Each of three coefficients is off by up to 5e-5, and the last step passes the error
    of the one before on with a slope of up to 16.
    """
    s = np.r_[np.geomspace(1e-12, 1, 30_001), np.linspace(0, 1.02, 30_001)[1:]]
    s.sort()
    slack = 16 * 1.5e-4
    y = s
    for i, (a, b, c) in enumerate(TABLES[steps]):
        before, y = y, a * y + b * y**3 + c * y**5
        assert np.all(y > 0)
        assert y.max() < (1.3 if i == steps - 1 else 1) + slack
        assert np.all(y <= a * before * (1 + slack))
    risen = np.maximum.accumulate(y) >= 0.1 * y.max()
    assert y[risen].min() > 0.0999 * y.max() - slack
