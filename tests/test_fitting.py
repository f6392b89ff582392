"""Generated and fitted schedules against published tables and independent optima."""

import functools
from statistics import NormalDist

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog

import muon2_optax as m2
from muon2_optax.fitting import fit_coefficients, polar_express_coefficients

KELLER = (3.4445, -4.7750, 2.0315)

# arXiv:2505.16932, github.com/NoahAmsel/PolarExpress: before its safety factor.
PAPER = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# The same after it, as the paper's code runs them; the last row stays.
PAPER_SAFE = (
    (8.205160414005574, -22.90193498705605, 16.460724910180314),
    (4.066395159942775, -2.8611540867551426, 0.5183995226694741),
    (3.9095949044379155, -2.823351735039516, 0.5250369769390025),
    (3.2855640171986153, -2.415301959635945, 0.48529406552790866),
    (2.277873287083977, -1.619821765265441, 0.39848078704168355),
    (1.8725756512746514, -1.2307042574884297, 0.35851616209511666),
    (1.856437109755889, -1.2132392819185351, 0.35679978941375945),
    (1.875, -1.25, 0.375),
)
# github.com/KellerJordan/modded-nanogpt; also nanochat and github.com/microsoft/dion.
NANOGPT = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# What the authors' generator prints by default (ten steps), the first five.
GENERATOR = (
    (8.237312490495555, -23.1577474145582, 16.68056841144592),
    (4.082441999064836, -2.8930477353325887, 0.5252849256975651),
    (3.9263479922546556, -2.8547468034765293, 0.5318022422894989),
    (3.2982187133085143, -2.424541981026706, 0.48632008358844075),
    (2.297036943455258, -1.636625581259032, 0.40026284559536324),
)
PAPER_CUSHION = 0.02407327424182761


def compose(triples, s):
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return s


# --- the minimax generator --------------------------------------------------------


@pytest.mark.parametrize(
    "table, arguments",
    [
        (PAPER, {"steps": 8, "cushion": PAPER_CUSHION, "safety": 0.0}),
        (
            PAPER_SAFE,
            {"steps": 8, "cushion": PAPER_CUSHION, "safety_applied": "after"},
        ),
        (NANOGPT, {"steps": 5, "safety": 0.02}),
        (GENERATOR, {"steps": 10}),
    ],
    ids=["paper", "paper with safety", "modded-nanogpt", "generator"],
)
def test_reproduces_the_published_tables(table, arguments):
    triples = polar_express_coefficients(1e-3, **arguments).triples
    error = np.abs(np.array(triples[: len(table)]) - np.array(table)).max(axis=1)
    assert error[:6].max() < 1e-12
    # Step 7 acts on 1 +- 1e-3, step 8 on 1 +- 1e-9: three coefficients are not better
    # determined there in float64 (and row 8 is published rounded).
    assert error[6:7].max(initial=0) < 2e-10
    assert error[7:].max(initial=0) < 1e-8


@pytest.mark.parametrize("low, high", [(0.01, 1.0), (0.1, 1.0), (0.5, 1.0), (0.2, 3.0)])
def test_one_step_is_the_minimax_polynomial(low, high):
    # The same problem as a linear program on a grid: min E, |p(x) - 1| <= E.
    x = np.linspace(low, high, 4001)
    powers = np.stack([x, x**3, x**5], axis=1)
    column = np.ones((len(x), 1))
    best = linprog(
        [0, 0, 0, 1],
        A_ub=np.block([[powers, -column], [-powers, -column]]),
        b_ub=np.r_[np.ones(len(x)), -np.ones(len(x))],
        bounds=[(None, None)] * 4,
    ).fun
    schedule = polar_express_coefficients(low, high, 1, cushion=0.0, safety=0.0)
    error = np.abs(compose(schedule.triples, x) - 1).max()
    assert error == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("lower", [1e-5, 1e-3, 0.3])
def test_every_interval_is_centered_at_one(lower):
    s = np.r_[np.geomspace(lower, 1, 40_001), np.linspace(lower, 1, 40_001)]
    triples = polar_express_coefficients(lower, steps=6, safety=0.0).triples
    for k in range(1, 6):
        y = compose(triples[:k], s)
        assert y[0] == pytest.approx(y.min(), abs=1e-9)
        assert y.min() + y.max() == pytest.approx(2, abs=1e-6)


def test_error_falls_with_every_step():
    s = np.geomspace(1e-3, 1, 20_001)
    triples = polar_express_coefficients(1e-3, steps=8, safety=0.0).triples
    errors = [np.abs(compose(triples[:k], s) - 1).max() for k in range(1, 9)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-12


def test_safety_leaves_room_above_the_upper_bound():
    s = np.linspace(1e-3, 1.02, 20_001)
    safe = polar_express_coefficients(1e-3, steps=5, safety=0.02).triples
    plain = polar_express_coefficients(1e-3, steps=5, safety=0.0).triples
    assert np.abs(compose(safe, s) - 1).max() < 0.2
    assert np.abs(compose(plain, s) - 1).max() > 0.2


def test_the_interval_scales():
    narrow = polar_express_coefficients(1e-4, 0.1, 4).triples
    unit = polar_express_coefficients(1e-3, 1.0, 4).triples
    first = np.array(narrow[0]) * 0.1 ** np.array([1, 3, 5])
    np.testing.assert_allclose(first, unit[0], rtol=1e-12)
    np.testing.assert_allclose(narrow[1:], unit[1:], rtol=1e-10)


def test_degenerate_interval_gives_the_limit():
    triples = polar_express_coefficients(2.0, 2.0, 1).triples
    np.testing.assert_allclose(triples[0], [15 / 16, -10 / 64, 3 / 256], rtol=1e-14)


def test_is_a_schedule_that_takes_the_first_steps():
    schedule = polar_express_coefficients(1e-3, steps=3)
    assert schedule.rows(2) == schedule.triples[:2]
    assert schedule.rows(5) == schedule.triples + schedule.triples[-1:] * 2
    assert schedule.normalization == m2.Frobenius()
    assert "2505.16932" in schedule.source and "0.001" in schedule.source


@pytest.mark.parametrize(
    "arguments",
    [
        {"lower": 0.0},
        {"lower": -1.0},
        {"lower": 2.0},
        {"lower": float("nan")},
        {"lower": 0.1, "upper": float("inf")},
        {"lower": 0.1, "steps": 0},
        {"lower": 0.1, "cushion": 1.0},
        {"lower": 0.1, "safety": -0.1},
        {"lower": 0.1, "safety_applied": "later"},
    ],
    ids=str,
)
def test_minimax_rejects(arguments):
    with pytest.raises(ValueError):
        polar_express_coefficients(**arguments)


# --- the fit ----------------------------------------------------------------------

_NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)])


def log_normal(sigma):
    """Quantiles; 0.9 is about as wide as Muon^2's spectra are, 1.6 as Muon's."""
    s = np.exp(sigma * _NORMAL)
    return s / np.linalg.norm(s)


SPECTRA = {
    "muon2": log_normal(0.9),
    "muon": log_normal(1.6),
    "both": np.stack([log_normal(0.6), log_normal(1.2)]),
}


def cosine(triples, spectrum):
    y = compose(triples, np.atleast_2d(spectrum))
    return np.mean(y.mean(axis=1) / np.sqrt((y**2).mean(axis=1)))


fitted = functools.cache(lambda name, steps: fit_coefficients(SPECTRA[name], steps))
every_fit = pytest.mark.parametrize(
    "name, steps", [("muon2", 2), ("muon2", 3), ("muon2", 4), ("muon", 3), ("both", 3)]
)


@every_fit
def test_fit_beats_the_known_schedules(name, steps):
    known = [
        polar_express_coefficients(lower, steps=steps).triples
        for lower in (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    ]
    for key, schedule in m2.SCHEDULES.items():
        # CANS is made for five steps. Cut to fewer it comes within 0.003 of a sign
        # change, which the fit must not.
        if key == "cans":
            continue
        for rows in (schedule.triples[:steps], schedule.triples[-steps:]):
            known.append(rows + rows[-1:] * (steps - len(rows)))
    best = max(cosine(rows, SPECTRA[name]) for rows in known)
    assert cosine(fitted(name, steps), SPECTRA[name]) > best - 1e-6


@pytest.mark.parametrize(
    "name, steps, gain",
    [("muon2", 2, 0.05), ("muon2", 3, 0.03), ("muon2", 4, 0.01), ("muon", 3, 0.07)],
)
def test_fit_clearly_beats_keller(name, steps, gain):
    keller = cosine([KELLER] * steps, SPECTRA[name])
    assert cosine(fitted(name, steps), SPECTRA[name]) > keller + gain


@every_fit
def test_fit_is_safe(name, steps):
    triples = fitted(name, steps)
    s = np.r_[np.geomspace(1e-12, 1, 30_001), np.linspace(0, 1.02, 30_001)[1:]]
    s.sort()
    for a, b, c in triples[:-1]:
        y = compose([(a, b, c)], s)
        assert 0 < y.min() and y.max() < 1 + 1e-9
        assert np.all(y <= a * s * (1 + 1e-12))
    y = compose(triples, s)
    assert 0 < y.min() and y.max() < 1.3 + 1e-6
    # Once up, it stays above a tenth of its maximum.
    risen = np.maximum.accumulate(y) >= 0.1 * y.max()
    assert y[risen].min() > 0.0999 * y.max()


def test_floor_keeps_the_large_singular_values_up():
    triples = fit_coefficients(SPECTRA["muon2"], 2, floor=0.5)
    y = compose(triples, np.linspace(0.05, 1.02, 10_001))
    assert y.min() / y.max() > 0.4999
    assert cosine([KELLER] * 2, SPECTRA["muon2"]) < cosine(triples, SPECTRA["muon2"])
    assert cosine(triples, SPECTRA["muon2"]) < cosine(
        fitted("muon2", 2), SPECTRA["muon2"]
    )


def test_one_step_is_as_good_as_any_found_by_search():
    spectrum, floor = SPECTRA["muon2"], 0.3
    got = cosine(fit_coefficients(spectrum, 1, floor=floor, blend=0.0), spectrum)
    # All polynomials x + b x^3 + c x^5 of a grid; the same limits, written differently.
    b, c = np.meshgrid(np.linspace(-4, 0, 401), np.linspace(-1, 4, 501), indexing="ij")
    b, c = b.reshape(-1, 1), c.reshape(-1, 1)
    s = np.linspace(0.01, 1.02, 102)
    y = s + b * s**3 + c * s**5
    level = floor * y.max(axis=1, keepdims=True)
    safe = np.all(y >= np.minimum(level, 0.7 * s), axis=1) & np.all(y <= s, axis=1)
    y = spectrum + b[safe] * spectrum**3 + c[safe] * spectrum**5
    best = np.max(y.mean(axis=1) / np.sqrt((y**2).mean(axis=1)))
    assert best - 1e-4 < got < best + 2e-3


def test_fit_is_scaled_to_come_nearest_to_the_polar_factor():
    y = compose(fitted("muon2", 4), SPECTRA["muon2"])
    assert y.max() < 1.29  # the bound of 1.3 is not what decides here
    # d/dscale of the mean of (scale y - 1)^2 vanishes at 1.
    assert np.mean(y * (y - 1)) == pytest.approx(0, abs=1e-9)


def test_fit_is_deterministic_and_made_of_floats():
    again = fit_coefficients(SPECTRA["muon2"], 2)
    assert again == fitted("muon2", 2)
    assert all(type(v) is float for row in again for v in row)


def test_forms_of_the_same_spectrum_agree():
    s = log_normal(0.7)[::4] * 2
    want = fit_coefficients(s, 2)
    assert fit_coefficients(s[None], 2) == want
    assert fit_coefficients([s], 2) == want
    assert fit_coefficients(list(s), 2) == want
    assert fit_coefficients(s, 2, weights=np.full(64, 3.0)) == want
    # Missing rank and padding do not count, nor do matrices that are zero.
    assert fit_coefficients([np.r_[s, 1e-9, 0.0]], 2) == want
    assert fit_coefficients([s, np.zeros((2, 3))], 2) == want


def test_weights_are_multiplicities():
    s = np.array([0.02, 0.05, 0.3])
    spectrum = np.repeat(s, [6, 3, 1])
    weighted = fit_coefficients(s, 2, weights=[6, 3, 1])
    repeated = fit_coefficients(spectrum, 2)
    assert cosine(weighted, spectrum) == pytest.approx(
        cosine(repeated, spectrum), abs=1e-5
    )
    assert cosine(fit_coefficients(s, 2), spectrum) < cosine(weighted, spectrum)


@pytest.mark.parametrize(
    "spectrum, arguments",
    [
        ([], {}),
        ([0.0, 0.0], {}),
        ([0.5, float("nan")], {}),
        ([-0.1, 0.5], {}),
        ([3.0, 4.0], {}),
        ([0.3, 0.4], {"steps": 0}),
        ([0.3, 0.4], {"floor": 1.0}),
        ([0.3, 0.4], {"floor": 0.0}),
        ([0.3, 0.4], {"blend": 1.0}),
        ([0.3, 0.4], {"weights": [1.0]}),
        ([0.3, 0.4], {"weights": [1.0, -1.0]}),
        ([0.3, 0.4], {"weights": [0.0, 0.0]}),
    ],
    ids=str,
)
def test_fit_rejects(spectrum, arguments):
    with pytest.raises(ValueError):
        fit_coefficients(spectrum, **{"steps": 2} | arguments)


# --- in use -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["minimax", "fitted"])
def test_optimizers_take_the_result(kind):
    coeffs = (
        polar_express_coefficients(1e-2, steps=2)
        if kind == "minimax"
        else fitted("muon2", 2)
    )
    triples = getattr(coeffs, "triples", coeffs)
    rng = np.random.default_rng(0)
    g = rng.standard_normal((6, 9)).astype(np.float32)
    tx = m2.muon(
        1.0, ns_steps=2, ns_coeffs=coeffs, ns_dtype="float32", shape_scale="none"
    )
    params = {"kernel": jnp.zeros((6, 9))}
    updates, _ = tx.update({"kernel": jnp.asarray(g)}, tx.init(params), params)
    u, s, vt = np.linalg.svd(g.astype(np.float64), full_matrices=False)
    want = -(u * compose(triples, s / np.linalg.norm(s))) @ vt
    np.testing.assert_allclose(updates["kernel"], want, atol=2e-5)


def test_a_fitted_table_is_never_cut():
    with pytest.raises(ValueError, match="ns_steps=2"):
        m2.newton_schulz(jnp.eye(3), ns_steps=3, ns_coeffs=fitted("muon2", 2))


def test_improves_the_polar_factor_of_a_matrix():
    x = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    s = np.linalg.svd(x, compute_uv=False)
    table = fit_coefficients(s / np.linalg.norm(s), 3)
    u, _, vt = np.linalg.svd(x)

    def similarity(coeffs):
        o = m2.newton_schulz(jnp.asarray(x), 3, coeffs, ns_dtype="float32")
        return float(np.sum(o * (u @ vt)) / np.linalg.norm(o) / 8)

    assert similarity(table) > similarity("keller") + 0.01
