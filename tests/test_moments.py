"""The moments before the orthogonalization, against the printed recurrences."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import reference
from histories import TRANSFORMS, both, gradients, run
from jax.sharding import PartitionSpec
from meshes import AUTO, mesh_of, place
from reference import relative_error

import muon2_optax as m2

# --- against the oracle -----------------------------------------------------------

SETTINGS = [
    dict(),
    dict(nesterov=True),
    dict(bias_correction=True),
    dict(nesterov=True, bias_correction=True, b1=0.9, b2=0.999),
    dict(b1=0.0, b2=0.9),
    dict(b1=0.0, b2=0.0, nesterov=True, bias_correction=True),
    dict(b1=0.9, b2=0.0),
    dict(b1=0.999, b2=0.5, bias_correction=True),
]


@both
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_ten_steps(kind, options):
    build, oracle = TRANSFORMS[kind]
    grads = gradients((5, 7))
    with jax.enable_x64(True):
        # eps of the gradients' order, so that its place shows.
        updates, state = run(build(eps=0.3, **options), grads)
    want = oracle(grads, eps=0.3, **options)
    assert updates.dtype == jnp.float64
    assert state.count == 10
    for t, (got, expected) in enumerate(zip(updates, want)):
        assert relative_error(got, expected) < 1e-12, t  # double rounding, ten steps


@both
@pytest.mark.parametrize("dtype", [np.complex64, np.float32], ids=lambda d: d.__name__)
def test_single_precision_and_complex(kind, dtype):
    build, oracle = TRANSFORMS[kind]
    grads = gradients((5, 7), dtype=dtype)
    updates, state = run(build(eps=0.3, nesterov=True, bias_correction=True), grads)
    want = oracle(grads, eps=0.3, nesterov=True, bias_correction=True)
    assert updates.dtype == dtype == state.mu["w"].dtype
    assert not any(jnp.iscomplexobj(v) for v in jax.tree.leaves(state[2:]))
    # 1 - 0.95^t in float32 loses two digits of the seven.
    assert relative_error(updates, np.stack(want)) < 1e-5


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("b1", [0.0, 0.95])
def test_momentum(nesterov, b1):
    grads = gradients((5, 7))
    with jax.enable_x64(True):
        updates, _ = run(m2.scale_by_momentum(b1, nesterov=nesterov), grads)
    want = reference.momentum(grads, b1, nesterov=nesterov)
    assert relative_error(updates, np.stack(want)) < 1e-14


@pytest.mark.parametrize("nesterov", [False, True])
def test_heavy_ball_is_the_average_times_a_constant(nesterov):
    """M = b1 M + G in place of M = b1 M + (1 - b1) G: 20 times as large for .95."""
    grads = gradients((5, 7))
    with jax.enable_x64(True):
        tx = m2.scale_by_momentum(0.95, nesterov=nesterov, dampening=0.0)
        updates, _ = run(tx, grads)
    want = 20 * np.stack(reference.momentum(grads, 0.95, nesterov=nesterov))
    assert relative_error(updates, want) < 1e-12


def test_defaults():
    """The README's numbers: b1 = b2 = .95, eps = 1e-10, neither nesterov nor bias."""
    grads = gradients((5, 7)) * 1e-9
    with jax.enable_x64(True):
        for build, oracle in TRANSFORMS.values():
            updates, _ = run(build(), grads)
            want = oracle(
                grads, 0.95, 0.95, 1e-10, nesterov=False, bias_correction=False
            )
            assert relative_error(updates, np.stack(want)) < 1e-12


@pytest.mark.parametrize("b1", [0.0, 0.9])
def test_bias_corrected_second_moment_is_adam(b1):
    grads = gradients((5, 7), dtype=np.float32)
    ours, _ = run(
        m2.scale_by_second_moment(b1, 0.999, 1e-3, bias_correction=True), grads
    )
    adam, _ = run(optax.scale_by_adam(b1, 0.999, 1e-3), grads)
    assert relative_error(ours, adam) < 1e-6  # float32 in another order


@pytest.mark.parametrize("shape", [(), (6,), (2, 3, 4, 5)], ids=str)
def test_full_second_moment_takes_any_rank(shape):
    grads = np.random.default_rng(0).standard_normal((3, *shape))
    with jax.enable_x64(True):
        updates, _ = run(m2.scale_by_second_moment(), grads)
    assert relative_error(updates, np.stack(reference.second_moment(grads))) < 1e-12


# --- dtypes of the state ----------------------------------------------------------


@both
@pytest.mark.parametrize(
    "params, grads",
    [
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float32"),
    ],
)
def test_dtypes(kind, params, grads):
    build, _ = TRANSFORMS[kind]
    g = jnp.asarray(gradients((5, 7), 3), grads)
    updates, state = run(build(), g, jnp.zeros((5, 7), params))
    assert updates.dtype == grads
    assert state.mu["w"].dtype == params
    assert {v.dtype for v in jax.tree.leaves(state[2:])} == {jnp.dtype("float32")}
    assert state.count.dtype == jnp.int32


@both
def test_sixteen_bit_momentum_rounds_once_per_step(kind):
    """M is stored in mu_dtype, but each step is computed from it in float32."""
    build, _ = TRANSFORMS[kind]
    grads = gradients((5, 7), 4, dtype=np.float32)
    updates, state = run(build(0.9, 0.0, 0.0, mu_dtype=jnp.bfloat16), grads)
    assert state.mu["w"].dtype == jnp.bfloat16
    plain, _ = run(build(0.0, 0.0, 0.0), grads)
    stored = np.zeros((5, 7), ml_dtypes.bfloat16)
    for t, g in enumerate(grads):
        m = np.float32(0.9) * stored.astype(np.float32) + np.float32(0.1) * g
        stored = m.astype(ml_dtypes.bfloat16)
        root = g / np.asarray(plain[t])
        # float32 order of operations; one rounding to bfloat16 would be 4e-3.
        assert relative_error(updates[t], m / root) < 1e-5
    np.testing.assert_allclose(np.float32(state.mu["w"]), np.float32(stored), rtol=8e-3)


def test_second_moment_of_bfloat16_gradients_keeps_moving():
    """A 16-bit V would stop at half of its target: its steps round to nothing."""
    g = jnp.full((1500, 2, 3), 2.0, jnp.bfloat16)
    _, state = run(m2.scale_by_second_moment(b2=0.999), g)
    want = 4 * (1 - 0.999**1500)
    np.testing.assert_allclose(state.nu["w"], want, rtol=1e-3)  # float32 sums
    _, state = run(m2.factorized_second_moment(b2=0.999), g)
    np.testing.assert_allclose(state.nu_row["w"], want, rtol=1e-3)
    np.testing.assert_allclose(state.nu_col["w"], want, rtol=1e-3)


@pytest.mark.parametrize("shape", [(64, 24), (80, 33), (3, 96, 40), (36, 40)])
def test_statistics_in_two_stages_are_the_same_means(shape):
    """Groups of 16 rows; 36 rows are not cut into groups of 4."""
    rules = m2.MatrixRules((("w", m2.MatrixAxes(-2, -1)),))
    g = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    # Known to be whole: only then are rows reshaped.
    mesh = mesh_of((1,), ("x",), AUTO)
    known = m2.Shardings.of(place({"w": g}, mesh, {"w": PartitionSpec()}))
    tx = m2.factorized_second_moment(b2=0.75, rules=rules, shardings=known)
    jaxpr = str(jax.make_jaxpr(lambda g: run(tx, g[None])[1].nu_col)(g))
    assert ("reshape" in jaxpr) == (shape != (36, 40))
    _, state = run(tx, [g])
    square = np.square(g.astype(np.float64)) / 4
    # Float32 sums of up to 96 numbers.
    np.testing.assert_allclose(state.nu_col["w"], square.mean(-2), rtol=1e-5)
    np.testing.assert_allclose(state.nu_row["w"], square.mean(-1), rtol=1e-5)
    # Squares whose sum would leave the range.
    _, state = run(tx, [np.full(shape, 5e18, np.float32)])
    np.testing.assert_allclose(state.nu_col["w"], 2.5e37 / 4, rtol=1e-5)


def test_nu_dtype():
    grads = gradients((5, 7), dtype=np.float32)
    low, state = run(m2.scale_by_second_moment(nu_dtype="bfloat16"), grads)
    full, _ = run(m2.scale_by_second_moment(), grads)
    assert state.nu["w"].dtype == jnp.bfloat16
    # Half a unit of 8 bits per step on V, half of that on its root, ten steps.
    assert 1e-5 < relative_error(low, full) < 2e-2


@both
def test_complex_gradients_and_real_momentum_dtype(kind):
    """Right or refused, never half of each number dropped."""
    build, _ = TRANSFORMS[kind]
    grads = gradients((5, 7), 3, dtype=np.complex64)
    try:
        updates, _ = run(build(mu_dtype="bfloat16"), grads)
    except (TypeError, ValueError):
        return
    want, _ = run(build(), grads)
    assert relative_error(updates, want) < 2e-2  # bfloat16 storage
