"""The report on an optimizer's state, against numpy's SVD."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from matrices import normal32, svd
from reference import KELLER, scalar_newton_schulz

import muon2_optax as m2
from muon2_optax import diagnostics
from muon2_optax.schedules.fitting import fit_coefficients

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
PARAMS = {"net": {k: jnp.asarray(normal32(v, 7)) for k, v in SIZES.items()}}
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
        y = scalar_newton_schulz(s, [KELLER] * 3)
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
    "inject": lambda: optax.inject_hyperparams(
        m2.muon2, static_args=("ns_steps", "ns_coeffs")
    )(1.0, **SMALL_PLAIN),
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
    local = {"w": jnp.asarray(normal32((8, 12)))}
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
