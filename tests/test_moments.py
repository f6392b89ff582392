"""The moments before the orthogonalization, against the printed recurrences."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import reference
from jax.sharding import PartitionSpec
from meshes import AUTO, mesh_of, place
from reference import relative_error

import muon2_optax as m2

TRANSFORMS = {
    "full": (m2.scale_by_second_moment, reference.second_moment),
    "factored": (m2.factorized_second_moment, reference.factored_second_moment),
}
both = pytest.mark.parametrize("kind", TRANSFORMS)


def _gradients(shape, steps=10, seed=0, dtype=np.float64):
    """Noise whose rows and columns differ in size, as in layers of a network."""
    rng = np.random.default_rng(seed)
    size = rng.lognormal(size=(shape[-2], 1)) * rng.lognormal(size=shape[-1])
    noise = rng.standard_normal((steps, *shape))
    if np.issubdtype(dtype, np.complexfloating):
        noise = noise + 1j * rng.standard_normal((steps, *shape))
    return (noise * size).astype(dtype)


@functools.cache
def _scan(tx):
    """One compilation per transform, shape and dtype."""

    def body(state, g):
        updates, state = tx.update({"w": g}, state, {"w": g})
        return state, updates["w"]

    return jax.jit(functools.partial(jax.lax.scan, body))


def _run(tx, grads, params=None):
    """All updates, stacked, and the last state; grads[t] is the leaf of step t."""
    grads = jnp.asarray(grads)
    state = tx.init({"w": grads[0] if params is None else params})
    state, updates = _scan(tx)(state, grads)
    return updates, state


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
    grads = _gradients((5, 7))
    with jax.enable_x64(True):
        # eps of the gradients' order, so that its place shows.
        updates, state = _run(build(eps=0.3, **options), grads)
    want = oracle(grads, eps=0.3, **options)
    assert updates.dtype == jnp.float64
    assert state.count == 10
    for t, (got, expected) in enumerate(zip(updates, want)):
        assert relative_error(got, expected) < 1e-12, t  # double rounding, ten steps


@both
@pytest.mark.parametrize("dtype", [np.complex64, np.float32], ids=lambda d: d.__name__)
def test_single_precision_and_complex(kind, dtype):
    build, oracle = TRANSFORMS[kind]
    grads = _gradients((5, 7), dtype=dtype)
    updates, state = _run(build(eps=0.3, nesterov=True, bias_correction=True), grads)
    want = oracle(grads, eps=0.3, nesterov=True, bias_correction=True)
    assert updates.dtype == dtype == state.mu["w"].dtype
    assert not any(jnp.iscomplexobj(v) for v in jax.tree.leaves(state[2:]))
    # 1 - 0.95^t in float32 loses two digits of the seven.
    assert relative_error(updates, np.stack(want)) < 1e-5


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("b1", [0.0, 0.95])
def test_momentum(nesterov, b1):
    grads = _gradients((5, 7))
    with jax.enable_x64(True):
        updates, _ = _run(m2.scale_by_momentum(b1, nesterov=nesterov), grads)
    want = reference.momentum(grads, b1, nesterov=nesterov)
    assert relative_error(updates, np.stack(want)) < 1e-14


@pytest.mark.parametrize("nesterov", [False, True])
def test_heavy_ball_is_the_average_times_a_constant(nesterov):
    """M = b1 M + G in place of M = b1 M + (1 - b1) G: 20 times as large for .95."""
    grads = _gradients((5, 7))
    with jax.enable_x64(True):
        tx = m2.scale_by_momentum(0.95, nesterov=nesterov, dampening=0.0)
        updates, _ = _run(tx, grads)
    want = 20 * np.stack(reference.momentum(grads, 0.95, nesterov=nesterov))
    assert relative_error(updates, want) < 1e-12


def test_defaults():
    """The README's numbers: b1 = b2 = .95, eps = 1e-10, neither nesterov nor bias."""
    grads = _gradients((5, 7)) * 1e-9
    with jax.enable_x64(True):
        for build, oracle in TRANSFORMS.values():
            updates, _ = _run(build(), grads)
            want = oracle(
                grads, 0.95, 0.95, 1e-10, nesterov=False, bias_correction=False
            )
            assert relative_error(updates, np.stack(want)) < 1e-12


@pytest.mark.parametrize("b1", [0.0, 0.9])
def test_bias_corrected_second_moment_is_adam(b1):
    grads = _gradients((5, 7), dtype=np.float32)
    ours, _ = _run(
        m2.scale_by_second_moment(b1, 0.999, 1e-3, bias_correction=True), grads
    )
    adam, _ = _run(optax.scale_by_adam(b1, 0.999, 1e-3), grads)
    assert relative_error(ours, adam) < 1e-6  # float32 in another order


@pytest.mark.parametrize("shape", [(), (6,), (2, 3, 4, 5)], ids=str)
def test_full_second_moment_takes_any_rank(shape):
    grads = np.random.default_rng(0).standard_normal((3, *shape))
    with jax.enable_x64(True):
        updates, _ = _run(m2.scale_by_second_moment(), grads)
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
    g = jnp.asarray(_gradients((5, 7), 3), grads)
    updates, state = _run(build(), g, jnp.zeros((5, 7), params))
    assert updates.dtype == grads
    assert state.mu["w"].dtype == params
    assert {v.dtype for v in jax.tree.leaves(state[2:])} == {jnp.dtype("float32")}
    assert state.count.dtype == jnp.int32


@both
def test_sixteen_bit_momentum_rounds_once_per_step(kind):
    """M is stored in mu_dtype, but each step is computed from it in float32."""
    build, _ = TRANSFORMS[kind]
    grads = _gradients((5, 7), 4, dtype=np.float32)
    updates, state = _run(build(0.9, 0.0, 0.0, mu_dtype=jnp.bfloat16), grads)
    assert state.mu["w"].dtype == jnp.bfloat16
    plain, _ = _run(build(0.0, 0.0, 0.0), grads)
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
    _, state = _run(m2.scale_by_second_moment(b2=0.999), g)
    want = 4 * (1 - 0.999**1500)
    np.testing.assert_allclose(state.nu["w"], want, rtol=1e-3)  # float32 sums
    _, state = _run(m2.factorized_second_moment(b2=0.999), g)
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
    jaxpr = str(jax.make_jaxpr(lambda g: _run(tx, g[None])[1].nu_col)(g))
    assert ("reshape" in jaxpr) == (shape != (36, 40))
    _, state = _run(tx, [g])
    square = np.square(g.astype(np.float64)) / 4
    # Float32 sums of up to 96 numbers.
    np.testing.assert_allclose(state.nu_col["w"], square.mean(-2), rtol=1e-5)
    np.testing.assert_allclose(state.nu_row["w"], square.mean(-1), rtol=1e-5)
    # Squares whose sum would leave the range.
    _, state = _run(tx, [np.full(shape, 5e18, np.float32)])
    np.testing.assert_allclose(state.nu_col["w"], 2.5e37 / 4, rtol=1e-5)


def test_nu_dtype():
    grads = _gradients((5, 7), dtype=np.float32)
    low, state = _run(m2.scale_by_second_moment(nu_dtype="bfloat16"), grads)
    full, _ = _run(m2.scale_by_second_moment(), grads)
    assert state.nu["w"].dtype == jnp.bfloat16
    # Half a unit of 8 bits per step on V, half of that on its root, ten steps.
    assert 1e-5 < relative_error(low, full) < 2e-2


@both
def test_complex_gradients_and_real_momentum_dtype(kind):
    """Right or refused, never half of each number dropped."""
    build, _ = TRANSFORMS[kind]
    grads = _gradients((5, 7), 3, dtype=np.complex64)
    try:
        updates, _ = _run(build(mu_dtype="bfloat16"), grads)
    except (TypeError, ValueError):
        return
    want, _ = _run(build(), grads)
    assert relative_error(updates, want) < 2e-2  # bfloat16 storage


# --- size of the gradients --------------------------------------------------------


@both
def test_scale_invariance(kind):
    """With eps=0 from 1e-15 to 1e15, where all squares are in range."""
    build, _ = TRANSFORMS[kind]
    signs = np.sign(_gradients((6, 10), 5))
    grads = signs * np.random.default_rng(1).uniform(0.03, 3.0, signs.shape)
    grads = grads.astype(np.float32)
    tx = build(eps=0.0)
    base, _ = _run(tx, grads)
    for size in (1e-15, 1e-9, 1e9, 1e15):
        got, _ = _run(tx, grads * np.float32(size))
        assert relative_error(got, base) < 1e-6, size  # the rounding of the product
    for exponent in (-49, 49):  # 1.8e-15 and 5.6e14: not one bit
        got, _ = _run(tx, np.ldexp(grads, exponent))
        np.testing.assert_array_equal(got, base)


OPTIMIZERS = {"full": m2.muon2, "factored": m2.muon2_f}


@both
def test_optimizer_is_scale_invariant(kind):
    grads = _gradients((16, 24), 5, dtype=np.float32)
    tx = OPTIMIZERS[kind](1.0, eps=0.0)
    base, _ = _run(tx, grads)
    for size in (1e-15, 1e-7, 1e7, 1e15):
        got, _ = _run(tx, grads * np.float32(size))
        # At 1e-15 the smallest of the squares are under 1e-38.
        assert relative_error(got, base) < 1e-3, size


@both
@pytest.mark.parametrize("shape", [(6, 10), (200, 3), (3, 200)], ids=str)
def test_beyond_the_range_of_squares_it_is_muon(kind, shape):
    """All V equal, at the floor or at the ceiling: what remains is the momentum."""
    grads = np.float32(np.random.default_rng(2).standard_normal((3, *shape)))
    tx = OPTIMIZERS[kind](1.0, eps=0.0)
    directions = [reference.keller(m, 3) for m in reference.momentum(grads, 0.95)]
    want = -reference.spectral(*shape) * np.stack(directions)
    for size in (1e-30, 1e-25, 1e25, 1e30):
        got, _ = _run(tx, grads * np.float32(size))
        # Entries within a thousandth of zero may have squares in range.
        assert relative_error(got, want) < 1e-2, size


@both
@pytest.mark.parametrize("eps", [0.0, 1e-10])
@pytest.mark.parametrize("shape", [(6, 10), (200, 3), (3, 200)], ids=str)
def test_always_finite(kind, eps, shape):
    signs = np.sign(np.random.default_rng(2).standard_normal((4, *shape)))
    tx = TRANSFORMS[kind][0](eps=eps)
    for size in (1e-45, 1e-38, 1e-25, 1e25, 1e38, 3e38):
        updates, state = _run(tx, np.float32(signs * size))
        finite = [np.all(np.isfinite(x)) for x in (updates, *jax.tree.leaves(state))]
        assert all(finite), size


@both
def test_eps_takes_over(kind):
    """Gradients far under eps: plain momentum divided by eps, and nothing else."""
    build, oracle = TRANSFORMS[kind]
    grads = _gradients((6, 10), 4, dtype=np.float32) * np.float32(1e-12)
    updates, _ = _run(build(eps=1e-2), grads)
    want = np.stack(reference.momentum(grads, 0.95)) / 1e-2
    assert relative_error(updates, want) < 1e-6  # float32


@both
def test_eps_is_added_outside_the_root(kind):
    """sqrt(V) + eps, not sqrt(V + eps^2): on the first step 0.05 / (0.05^.5 + eps)."""
    updates, _ = _run(TRANSFORMS[kind][0](eps=0.5), np.ones((1, 2, 3), np.float32))
    np.testing.assert_allclose(updates, 0.05 / (0.05**0.5 + 0.5), rtol=1e-6)


@both
@pytest.mark.parametrize("b1, b2", [(0.95, 0.0), (0.99, 0.9)])
def test_float16_updates_stay_finite(kind, b1, b2):
    """The momentum outlives a faster V once the gradients stop."""
    grads = jnp.zeros((400, 4, 4), jnp.float16).at[0].set(1.0)
    updates, _ = _run(TRANSFORMS[kind][0](b1, b2), grads)
    assert np.all(np.isfinite(updates))


# --- zeros ------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "dtype, eps, bias_correction",
    [
        ("float32", 0.0, False),
        ("float16", 0.0, True),
        ("float16", 1e-10, False),  # eps is under the smallest float16
        ("bfloat16", 1e-10, True),
    ],
)
def test_zero_gradients_from_the_start(kind, dtype, eps, bias_correction):
    build, _ = TRANSFORMS[kind]
    grads = jnp.asarray(_gradients((5, 7), 6), dtype).at[:3].set(0)
    tx = build(eps=eps, bias_correction=bias_correction)
    updates, _ = _run(tx, grads)
    assert not np.any(updates[:3])  # exactly, from 0/0 as well
    assert np.all(np.isfinite(updates)) and np.all(updates[3] != 0)


@both
def test_zero_gradients_later(kind):
    build, oracle = TRANSFORMS[kind]
    grads = _gradients((5, 7), 9)
    grads[3:6] = 0
    with jax.enable_x64(True):
        updates, _ = _run(build(eps=0.0), grads)
    assert relative_error(updates, np.stack(oracle(grads, eps=0.0))) < 1e-12


@both
def test_zero_gradients_for_ever(kind):
    """Both moments decay through the subnormal numbers to zero."""
    grads = np.zeros((4000, 2, 3), np.float32)
    grads[0] = 1.0
    updates, state = _run(TRANSFORMS[kind][0](eps=0.0), grads)
    assert np.all(np.isfinite(updates)) and np.max(np.abs(updates)) < 1.0
    assert not np.any(updates[-1])


@both
@pytest.mark.parametrize("eps", [0.0, 1e-10])
def test_zero_rows_and_columns(kind, eps):
    """Padding stays exactly zero and does not reach the rest."""
    build, _ = TRANSFORMS[kind]
    core = _gradients((4, 5), 4, dtype=np.float32)
    padded = np.zeros((4, 6, 8), np.float32)
    padded[:, 1:5, 2:7] = core
    want, _ = _run(build(eps=eps), core)
    got = np.array(_run(build(eps=eps), padded)[0])
    assert relative_error(got[:, 1:5, 2:7], want) < 1e-6  # float32 means
    got[:, 1:5, 2:7] = 0
    assert not np.any(got)


@both
def test_a_single_entry(kind):
    grads = np.zeros((2, 4, 5), np.float32)
    grads[:, 1, 2] = 3.0
    updates = np.array(_run(TRANSFORMS[kind][0](eps=0.0), grads)[0])
    np.testing.assert_allclose(updates[0, 1, 2], 0.05**0.5, rtol=1e-6)
    updates[:, 1, 2] = 0
    assert not np.any(updates)


# --- the factored form ------------------------------------------------------------


@pytest.mark.parametrize("low, high", [(-1, 1), (-7, 7), (-8, 0), (0, 8)])
def test_factored_is_exact_on_rank_one_squares(low, high):
    """Also where the product of a row's and a column's mean is out of range."""
    rng = np.random.default_rng(0)
    rows, columns = 10 ** rng.uniform(low, high, 6), 10 ** rng.uniform(low, high, 9)
    size = np.outer(rows, columns) * rng.uniform(0.5, 2, (5, 1, 1))
    grads = np.float32(size * rng.choice([-1, 1], size.shape))
    factored, _ = _run(m2.factorized_second_moment(eps=0.0), grads)
    want = reference.second_moment(grads, eps=0.0)
    np.testing.assert_allclose(factored, np.stack(want), rtol=1e-4)  # float32


def test_factored_is_not_the_full_form():
    """Off rank one they differ: the tests above tell one from the other."""
    grads = _gradients((5, 7))
    full, factored = (np.stack(oracle(grads)) for _, oracle in TRANSFORMS.values())
    assert relative_error(factored, full) > 0.1


LAYOUTS = {
    # name: (shape, axes, list of index or slices that cut out the matrices, 2-D shape)
    "stack": ((3, 4, 5), m2.MatrixAxes(-2, -1), [np.s_[i] for i in range(3)]),
    "stack in the middle": (
        (4, 3, 5),
        m2.MatrixAxes(0, 2),
        [np.s_[:, i] for i in range(3)],
    ),
    "transposed": ((5, 4), m2.MatrixAxes(1, 0), [np.s_[:]]),
    "two stack axes": (
        (2, 3, 4, 5),
        m2.MatrixAxes(-2, -1),
        [np.s_[i, j] for i in range(2) for j in range(3)],
    ),
    "splits": (
        (4, 12),
        m2.MatrixAxes(0, 1, (6, 3, 3)),
        [np.s_[:, :6], np.s_[:, 6:9], np.s_[:, 9:]],
    ),
    "stacked splits": (
        (2, 4, 9),
        m2.MatrixAxes(-2, -1, (6, 3)),
        [np.s_[i, :, s] for i in range(2) for s in (slice(0, 6), slice(6, 9))],
    ),
    "splits of torch weights": (
        (9, 4),
        m2.MatrixAxes(1, 0, (6, 3)),
        [np.s_[:6], np.s_[6:]],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_factored_treats_each_matrix_for_itself(name):
    shape, axes, cuts = LAYOUTS[name]
    grads = _gradients(shape, 4)
    rules = m2.MatrixRules((("w", axes),))
    with jax.enable_x64(True):
        updates, state = _run(m2.factorized_second_moment(rules=rules), grads)
    covered = np.zeros(shape, bool)
    for cut in cuts:
        covered[cut] = True
        want = reference.factored_second_moment([g[cut] for g in grads])
        for u, expected in zip(updates, want):
            assert relative_error(np.asarray(u)[cut], expected) < 1e-12, cut
    assert covered.all()
    numbers = sum(sum(np.zeros(shape)[cut].shape) for cut in cuts)
    stored = state.nu_row["w"].size + state.nu_col["w"].size
    assert stored == numbers  # fan_in + fan_out per matrix, and no more


@pytest.mark.parametrize(
    "shape, axes, order, matrix",
    [
        ((6, 2, 5), m2.MatrixAxes(0, (1, 2)), (0, 1, 2), (6, 10)),
        ((2, 5, 6), m2.MatrixAxes((0, 1), 2), (0, 1, 2), (10, 6)),
        ((3, 3, 2, 7), m2.MatrixAxes((0, 1, 2), 3), (0, 1, 2, 3), (18, 7)),
        ((7, 2, 3, 3), m2.MatrixAxes((1, 2, 3), 0), (1, 2, 3, 0), (18, 7)),
    ],
    ids=["qkv", "out", "HWIO", "OIHW"],
)
def test_factored_over_several_axes(shape, axes, order, matrix):
    grads = _gradients(shape, 4)
    rules = m2.MatrixRules((("w", axes),))
    with jax.enable_x64(True):
        updates, state = _run(m2.factorized_second_moment(rules=rules), grads)
    flat = [np.transpose(g, order).reshape(matrix) for g in grads]
    want = reference.factored_second_moment(flat)
    for u, expected in zip(updates, want):
        got = np.transpose(u, order).reshape(matrix)
        assert relative_error(got, expected) < 1e-12
    assert state.nu_row["w"].size == matrix[0]
    assert state.nu_col["w"].size == matrix[1]


def test_factored_refuses_what_is_no_matrix():
    tx = m2.factorized_second_moment()
    with pytest.raises(ValueError, match=r"'b' of shape \(4,\) is not a matrix"):
        tx.init({"b": jnp.zeros(4)})


@both
def test_non_finite_gradient_stays_in_its_place(kind):
    """One NaN reaches its entry (full) or its row and column, not other leaves."""
    tx = TRANSFORMS[kind][0]()
    g = {"a": jnp.ones((3, 4)).at[0, 0].set(jnp.nan), "b": jnp.ones((3, 4))}
    updates, state = tx.update(g, tx.init(g))
    assert np.isnan(updates["a"][0, 0])
    assert np.all(np.isfinite(updates["b"])) and np.all(np.isfinite(state.mu["b"]))


@both
def test_infinite_gradient_is_not_hidden(kind):
    tx = TRANSFORMS[kind][0]()
    g = {"w": jnp.ones((3, 4)).at[1, 1].set(jnp.inf)}
    updates, _ = tx.update(g, tx.init(g))
    assert not np.isfinite(updates["w"][1, 1])


@both
def test_missing_gradients_are_named(kind):
    tx = TRANSFORMS[kind][0]()
    params = {"a": jnp.ones((3, 4)), "b": jnp.ones((3, 4))}
    with pytest.raises(ValueError, match="needs the tree that init"):
        tx.update({"a": params["a"], "b": None}, tx.init(params))
