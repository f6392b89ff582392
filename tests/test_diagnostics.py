"""Diagnostics against numpy's SVD, closed forms and the paper's numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import muon2_optax as m2
from muon2_optax import diagnostics
from muon2_optax.fitting import fit_coefficients

KELLER = (3.4445, -4.7750, 2.0315)
SHAPES = [(5, 8), (8, 5), (2, 3, 4, 6)]


def normal(shape, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * rng.standard_normal(shape)
    return x.astype(dtype)


def svd(x):
    wide = np.complex128 if np.iscomplexobj(x) else np.float64
    return np.linalg.svd(np.asarray(x).astype(wide), full_matrices=False)


def compose(triples, s):
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return s


# --- spectra ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "complex64", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values(shape, dtype):
    x = normal(shape, dtype=np.dtype(dtype))
    got = jax.jit(diagnostics.singular_values)(jnp.asarray(x))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, svd(x)[1], rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_size_of_the_matrix_is_no_limit(size):
    x = normal((4, 6))
    s = svd(x)[1]
    scaled = jnp.asarray(x) * size
    got = diagnostics.singular_values(scaled)
    np.testing.assert_allclose(np.asarray(got, np.float64) / size, s, rtol=1e-5)
    rank = diagnostics.effective_rank(scaled)
    assert rank == pytest.approx(float(diagnostics.effective_rank(x)), rel=1e-5)
    assert diagnostics.stable_rank(scaled) == pytest.approx(
        np.sum(s**2) / s[0] ** 2, rel=1e-5
    )
    polar = svd(x)[0] @ svd(x)[2]
    assert diagnostics.cosine_to_polar(scaled, scaled) == pytest.approx(
        np.sum(polar * x) / np.linalg.norm(x) / 2, rel=1e-5
    )


def test_ranks_in_closed_form():
    x = jnp.stack(
        [
            jnp.eye(4, 6),
            jnp.zeros((4, 6)).at[1, 2].set(-7.0),
            jnp.zeros((4, 6)),
            jnp.diag(jnp.array([0.5, 0.25, 0.125, 0.125])) @ jnp.eye(4, 6),
        ]
    )
    # The entropy of (1/2, 1/4, 1/8, 1/8) is 1.75 bits.
    np.testing.assert_allclose(
        diagnostics.effective_rank(x), [4, 1, 0, 2**1.75], rtol=1e-5
    )
    np.testing.assert_allclose(diagnostics.stable_rank(x), [4, 1, 0, 1.375], rtol=1e-5)


def test_a_vector_is_refused():
    with pytest.raises(ValueError, match="matrices"):
        diagnostics.singular_values(jnp.ones(3))


# --- polar quality ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cosine_of_a_mapped_spectrum(shape, dtype):
    u, s, vh = svd(normal(shape, 1, np.dtype(dtype)))
    y = np.cos(3 * s)  # any values, of both signs
    x = (u * s[..., None, :]) @ vh
    o = (u * y[..., None, :]) @ vh
    got = jax.jit(diagnostics.cosine_to_polar)(
        jnp.asarray(o, dtype), jnp.asarray(x, dtype)
    )
    want = y.sum(-1) / np.sqrt(s.shape[-1] * (y**2).sum(-1))
    np.testing.assert_allclose(got, want, atol=3e-6)


def test_cosine_of_matrices_without_full_rank():
    u, _, vh = svd(normal((3, 20, 30), 2))
    s = np.r_[np.ones(4), np.full(3, 1e-3), np.zeros(13)]
    x = jnp.asarray((u * s) @ vh, jnp.float32)
    # Its polar factor has rank 7: itself, and what plain rescaling makes of it.
    exact = jnp.asarray(u[..., :7] @ vh[:, :7], jnp.float32)
    np.testing.assert_allclose(diagnostics.cosine_to_polar(exact, x), 1, atol=1e-5)
    np.testing.assert_allclose(
        diagnostics.cosine_to_polar(x, x),
        s.sum() / np.sqrt(7 * (s**2).sum()),
        atol=1e-5,
    )
    # With the small ones out of account, rank 4.
    np.testing.assert_allclose(diagnostics.cosine_to_polar(x, x, 1e-2), 1, atol=1e-5)
    assert np.all(diagnostics.cosine_to_polar(x, 0 * x) == 0)
    assert np.all(diagnostics.cosine_to_polar(0 * x, x) == 0)


def test_only_the_broken_matrix_of_a_stack_is_nan():
    x = jnp.asarray(normal((3, 4, 5))).at[1, 0, 0].set(jnp.nan)
    cosine = diagnostics.cosine_to_polar(x, x)
    assert np.isnan(cosine).tolist() == [False, True, False]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_orthogonality_error(shape, dtype):
    q = 0.4 * normal(shape, 3, np.dtype(dtype))
    deviation = np.abs(svd(q)[1] ** 2 - 1)
    for norm, want in {
        "mean": deviation.mean(-1),
        "frobenius": np.sqrt((deviation**2).sum(-1)),
        "spectral": deviation.max(-1),
    }.items():
        got = diagnostics.orthogonality_error(jnp.asarray(q), norm)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_orthogonality_error_is_the_norm_of_the_paper():
    q = normal((7, 4), 4)
    want = np.linalg.norm(q.T @ q - np.eye(4))
    assert diagnostics.orthogonality_error(q, "frobenius") == pytest.approx(
        want, rel=1e-5
    )
    with pytest.raises(ValueError, match="unknown norm"):
        diagnostics.orthogonality_error(q, "nuclear")


@pytest.mark.parametrize(
    "triple, error, paper", [(KELLER, 0.305, 0.31), ((2.0, -1.5, 0.5), 0.027, 0.03)]
)
def test_errors_of_the_appendix(triple, error, paper):
    # A uniform grid of singular values, five steps.
    s = jnp.asarray((np.arange(400) + 0.5) / 400)
    y = diagnostics.scalar_map(triple, 5, s)
    got = float(diagnostics.orthogonality_error(jnp.diag(y)))
    assert got == pytest.approx(error, abs=1e-3)
    assert got == pytest.approx(paper, abs=0.006)


def test_cosine_of_the_appendix():
    s = jnp.asarray((np.arange(400) + 0.5) / 400)
    o = jnp.diag(diagnostics.scalar_map(KELLER, 5, s))
    got = float(diagnostics.cosine_to_polar(o, jnp.diag(s)))
    assert got == pytest.approx(0.9819, abs=2e-4)  # the paper: 0.98


# --- scalar maps and zones --------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("name", ["keller", "polar_express", "you5"])
def test_scalar_map_composes_the_steps(name, steps):
    s = np.linspace(0, 1, 12).reshape(3, 4)
    want = compose(m2.SCHEDULES[name].rows(steps), s)
    np.testing.assert_allclose(
        diagnostics.scalar_map(name, steps, jnp.asarray(s)), want, atol=1e-5
    )
    traced = jax.jit(lambda k: diagnostics.scalar_map(name, k, jnp.asarray(s)))(steps)
    np.testing.assert_allclose(traced, want, atol=1e-5)


def test_scalar_map_is_what_newton_schulz_does():
    x = normal((6, 9), 5)
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
        s[np.argmax(compose(part, s) >= 1 - tolerance)] for part in (rows, rows[:1])
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


# --- the report -------------------------------------------------------------------

SIZES = {
    "a": (6, 4),
    "stack": (2, 4, 6),
    "fused": (4, 8),
    "embed": (7, 6),
    "bias": (9,),
}
RULES = m2.MatrixRules(
    (
        (r"stack", m2.MatrixAxes(-2, -1)),
        (r"fused", m2.MatrixAxes(0, 1, (2, 6))),
    )
)
PARAMS = {"net": {k: jnp.asarray(normal(v, 7)) for k, v in SIZES.items()}}
REPORTED = ["net/a", "net/stack", "net/fused[0]", "net/fused[1]"]
# Of the settings that a state reveals all of.
PLAIN = {"rules": RULES, "ns_dtype": "float32", "ns_steps": 3, "nesterov": False}


def gradients(steps=3):
    rng = np.random.default_rng(11)
    return [
        jax.tree.map(lambda p: rng.standard_normal(p.shape).astype(np.float32), PARAMS)
        for _ in range(steps)
    ]


def trained(tx, params=PARAMS, grads=None):
    """State and last updates after three steps."""
    state, updates = tx.init(params), None
    update = jax.jit(tx.update)
    for g in gradients() if grads is None else grads:
        updates, state = update(g, state, params)
    return state, updates


report = functools.partial(
    diagnostics.orthogonalization_report, rules=RULES, ns_steps=3, ns_dtype="float32"
)
jitted = jax.jit(report)


def blocks(tree):
    """The matrices that the report names, by hand."""
    net = tree["net"]
    parts = [net["a"], net["stack"], net["fused"][:, :2], net["fused"][:, 2:]]
    return dict(zip(REPORTED, (np.asarray(p, np.float64) for p in parts)))


def entering(name, b=0.95):
    """M over the root of V by numpy, from the gradients."""
    momentum = {}
    for g in gradients():
        for key, x in blocks(g).items():
            zero = np.zeros_like(x)
            m, v = momentum.get(key, (zero, zero))
            momentum[key] = b * m + (1 - b) * x, b * v + (1 - b) * x * x
    if name == "muon":
        return {k: m for k, (m, v) in momentum.items()}
    if name == "muon2":
        return {k: m / np.sqrt(v) for k, (m, v) in momentum.items()}
    out = {}
    for k, (m, v) in momentum.items():
        row, col = v.sum(-1, keepdims=True), v.sum(-2, keepdims=True)
        out[k] = m / np.sqrt(row * col / v.sum((-2, -1), keepdims=True))
    return out


@pytest.mark.parametrize("name", ["muon", "muon2", "muon2_f"])
def test_report_against_numpy(name):
    state, _ = trained(m2.REGISTRY[name](1.0, **PLAIN))
    got = jitted(state)
    assert sorted(got) == sorted(REPORTED)
    for key, x in entering(name).items():
        s = svd(x)[1]
        s = s / np.sqrt((s**2).sum(-1, keepdims=True))
        y = compose([KELLER] * 3, s)
        shares = s / s.sum(-1, keepdims=True)
        want = diagnostics.MatrixReport(
            singular_values=s,
            effective_rank=np.exp(-(shares * np.log(shares)).sum(-1)),
            zones=diagnostics.ZoneFractions(
                (s < 0.01842).mean(-1),
                ((s >= 0.01842) & (s < 0.2171)).mean(-1),
                (s >= 0.2171).mean(-1),
            ),
            output_singular_values=-np.sort(-y, axis=-1),
            cosine=y.sum(-1) / np.sqrt(s.shape[-1] * (y**2).sum(-1)),
        )
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, err_msg=key),
            tuple(got[key]),
            tuple(want),
        )


@pytest.mark.parametrize("name", ["muon", "muon2", "muon2_f"])
def test_report_shows_what_the_optimizer_applied(name):
    tx = m2.REGISTRY[name](1.0, shape_scale="none", **PLAIN)
    state, updates = trained(tx)
    got = jitted(state)
    for key, update in blocks(updates).items():
        np.testing.assert_allclose(
            got[key].output_singular_values, svd(update)[1], rtol=1e-4, err_msg=key
        )


def assert_same(got, want):
    assert sorted(got) == sorted(want)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), got, want)


# One matrix and one step, since every kind of state compiles anew.
SMALL = {"net": {k: PARAMS["net"][k] for k in ("a", "bias")}}
SMALL_PLAIN = {"ns_dtype": "float32", "nesterov": False, "ns_steps": 3}


def _small(factory=m2.muon2, **kw):
    return factory(1.0, **SMALL_PLAIN, **kw)


@functools.partial(jax.jit, static_argnums=0)
def _step(tx, params):
    """The state after a step on gradients that are the parameters."""
    return tx.update(params, tx.init(params), params)[1]


def _small_report(tx, params=SMALL, **kw):
    return jax.jit(functools.partial(report, rules=None, **kw))(_step(tx, params))


@functools.cache
def _plain_small_report():
    return _small_report(_small())


def test_before_is_applied_first():
    got = _small_report(_small(m2.adamuon), before=jnp.sign)["net/a"]
    s = svd(np.sign(SMALL["net"]["a"]))[1]
    np.testing.assert_allclose(
        got.singular_values, s / np.sqrt((s**2).sum()), atol=1e-5
    )


WRAPPERS = {
    "multi_steps": lambda: optax.MultiSteps(_small(), 1),
    "inject": lambda: optax.inject_hyperparams(m2.muon2)(1.0, **SMALL_PLAIN),
    "if_finite": lambda: optax.apply_if_finite(_small(), 3),
    "chain": lambda: optax.chain(optax.clip(1e9), _small(), optax.trace(0.9)),
    # No optimizer of the library, but its states. Here the bias has a momentum too, and
    # the rules choose the matrices.
    "of its own": lambda: optax.chain(m2.scale_by_second_moment(), optax.scale(-1.0)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_state_is_found_within(wrapper):
    got = _small_report(WRAPPERS[wrapper]())
    assert list(got) == ["net/a"]
    assert_same(got, _plain_small_report())


def test_boxed_parameters():
    nnx = pytest.importorskip("flax.nnx")
    linen = pytest.importorskip("flax.linen")

    class Net(nnx.Module):
        def __init__(self):
            for key, value in SMALL["net"].items():
                setattr(self, key, nnx.Param(value))

    class Model(nnx.Module):
        def __init__(self):
            self.net = Net()

    model = Model()
    optimizer = nnx.Optimizer(model, _small(), wrt=nnx.Param)
    optimizer.update(model, nnx.state(model, nnx.Param))
    got = jax.jit(functools.partial(report, rules=None))(optimizer.opt_state)
    assert_same(got, _plain_small_report())

    boxed = jax.tree.map(lambda x: linen.Partitioned(x, (None,) * x.ndim), SMALL)
    want = _small_report(_small(m2.muon2_f))
    assert_same(_small_report(_small(m2.muon2_f), boxed), want)


def test_schedule_with_another_normalization():
    got = _small_report(_small(m2.muon), ns_coeffs="turbo")["net/a"]
    # Almost-orthogonal scaling of the shorter side.
    wide = np.asarray(SMALL["net"]["a"], np.float64).T
    s = svd(wide / np.sqrt(np.abs(wide @ wide.T).sum(-1, keepdims=True)))[1]
    np.testing.assert_allclose(got.singular_values, s, atol=1e-5)
    assert 0.8 < got.cosine < 1 - 1e-4


def test_more_steps_come_closer_to_the_polar_factor():
    got = _small_report(_small(), ns_steps=12, ns_coeffs="quintic")["net/a"]
    assert _plain_small_report()["net/a"].cosine < 0.999
    assert got.cosine == pytest.approx(1, abs=1e-5)
    assert got.zones.dead == 0
    np.testing.assert_allclose(got.output_singular_values, 1, atol=1e-4)


def test_before_the_first_step_everything_is_zero():
    got = jax.jit(functools.partial(report, rules=None))(_small().init(SMALL))["net/a"]
    assert got.zones.dead == 1
    for leaf in (*got[:2], *got[3:]):
        assert np.all(leaf == 0)


def test_eager_and_traced_steps_agree():
    state = _step(_small(), SMALL)
    assert_same(report(state, rules=None), _plain_small_report())
    traced = jax.jit(lambda s, k: report(s, rules=None, ns_steps=k))(state, 3)
    assert_same(traced, _plain_small_report())


def test_sharded_state():
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec("x", "y"))
    local = {"w": jnp.asarray(normal((8, 12)))}
    params = {"w": jax.device_put(local["w"], sharding)}
    got = _small_report(_small(m2.muon2_f), params)
    want = _small_report(_small(m2.muon2_f), local)
    assert_same(jax.tree.map(np.asarray, got), want)


def test_report_refuses():
    state = _step(_small(), SMALL)
    with pytest.raises(ValueError, match="two momenta"):
        report((state, state), rules=None)
    with pytest.raises(ValueError, match="no momentum"):
        report(optax.sgd(0.1).init(SMALL))
    with pytest.raises(ValueError, match="no momentum"):
        report(state, rules=m2.MatrixRules(((r"", None),)))
    with pytest.raises(TypeError, match="ns_steps"):
        diagnostics.orthogonalization_report(state)


def test_fit_takes_the_report():
    spectra = [r.singular_values for r in _plain_small_report().values()]
    table = fit_coefficients(spectra, 3)
    fitted = _small_report(_small(), ns_coeffs=table)["net/a"]
    assert fitted.cosine > _plain_small_report()["net/a"].cosine
