"""On a CUDA GPU, with the kernels that the programs really run: values against float64.

``JAX_PLATFORMS=cuda python -m pytest -m gpu``
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from matrices import normal32
from reference import relative_error

import muon2_optax as m2
from muon2_optax.kernels import hopper, newton_schulz, symmetric

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU"),
]

# float16 rounds by 2^-11 = 4.9e-4, and three of Keller's steps on iid normal entries
# pass rounding of the Gram matrix on with a factor of a few.
HALF = 3e-3


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "shape",
    [(8, 768, 768), (8, 768, 1100), (6, 1280, 1024), (3, 1024, 3000), (3, 3000, 1024)],
    ids=str,
)
def test_newton_schulz(shape, steps):
    x = normal32(shape)
    got = jax.jit(lambda x: m2.newton_schulz(x, steps))(x)
    want = reference.keller(x, steps)
    # Each further step multiplies the errors of small singular values by up to 3.4.
    assert relative_error(got, want) < (HALF, 7 * HALF)[steps > 3]


def test_kernels_run_where_the_card_has_them():
    x = jnp.asarray(normal32((8, 768, 1100)))
    text = jax.jit(lambda x: m2.newton_schulz(x, 3)).lower(x).as_text()
    assert ("mosaic_gpu" in text) == hopper.available()


@pytest.mark.parametrize("addends", [0, 1, 2])
@pytest.mark.parametrize("side, k", [(768, 64), (1024, 1344), (1152, 704)])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda d: d.__name__)
def test_symmetric_product(dtype, side, k, addends):
    if not hopper.available():
        pytest.skip("the kernel is for Hopper GPUs")
    x = jnp.asarray(normal32((3, side, k)), dtype)
    cs = [normal32((3, side, side), 1 + i) for i in range(addends)]
    pairs = [(0.5 + i, jnp.asarray(c + c.mT, dtype)) for i, c in enumerate(cs)]
    tiles = newton_schulz.tiles_for(side)
    got = symmetric.product(x, x, *pairs, alpha=0.25, tiles=tiles)
    reference.assert_symmetric_product(got, x, pairs, 0.25, jnp.finfo(dtype).eps)


@pytest.mark.parametrize("addends", [0, 1, 2])
@pytest.mark.parametrize("side", [768, 2048])
def test_symmetric_product_of_some_members(side, addends):
    """Those that are left out, and addends that are not there, are not read."""
    if not hopper.available():
        pytest.skip("the kernel is for Hopper GPUs")
    x = normal32((5, side, side))
    x = (x + x.mT) / side
    x[3:] = np.nan
    half = jnp.asarray(x, jnp.float16)
    pairs = [(0.5 + i, half) for i in range(addends)]
    tiles = newton_schulz.tiles_for(side)
    got = symmetric.product(half, half, *pairs, members=3, tiles=tiles)[:3]
    pairs = [(beta, c[:3]) for beta, c in pairs]
    eps = jnp.finfo(jnp.float16).eps
    reference.assert_symmetric_product(got, half[:3], pairs, 1.0, eps)


@pytest.mark.parametrize("pieces", [None, (1, 2), (2, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("side", [128, 256])
def test_added(side, pieces):
    if not hopper.available():
        pytest.skip("the kernel is for Hopper GPUs")
    tiles = symmetric.Tiles() if side == 256 else newton_schulz.SMALL
    down, right = pieces or (1, 1)
    m, n = 4 * side * down, 704 * right
    p, x = normal32((5, m, m)) / m, normal32((5, m, n), 1)
    half = [jnp.asarray(v, jnp.float16) for v in (p, x)]
    got = symmetric.add_product(*half, shards=pieces, tiles=tiles)
    p, x = (np.asarray(v, np.float64) for v in half)
    want = x + p @ x
    if pieces:
        want = reference.in_pieces(want, *pieces)
    assert relative_error(got, want) < 1e-3


def test_zero_and_bad_members():
    x = normal32((8, 768, 1024))
    x[1] = 0
    x[2, 3, 4] = np.nan
    got = np.asarray(jax.jit(lambda x: m2.newton_schulz(x, 3))(x))
    assert not got[1].any() and np.isnan(got[2]).all()
    assert np.isfinite(got[[0, 3, 4, 5, 6, 7]]).all()


@pytest.mark.parametrize("name", ["muon", "muon2", "muon2_f"])
def test_steps_equal_those_in_float32(name):
    """Three steps on both paths; updates differ by the rounding of float16."""
    params = {f"w{i}": jnp.asarray(normal32((768, 1024), i)) for i in range(10)}
    params |= {"head": jnp.asarray(normal32((64, 768))), "bias": jnp.ones(768)}

    def run(**options):
        tx = m2.REGISTRY[name](0.02, **options)
        step = jax.jit(tx.update)
        state, total = tx.init(params), jax.tree.map(jnp.zeros_like, params)
        for seed in range(3):
            grads = {k: jnp.asarray(normal32(p.shape, seed)) for k, p in params.items()}
            updates, state = step(grads, state, params)
            total = optax.apply_updates(total, updates)
        return total

    half, full = run(), run(ns_dtype=jnp.float32)
    for key in params:
        assert relative_error(half[key], full[key]) < HALF, key


@pytest.mark.parametrize(
    "shape", [(2048, 5472), (5472, 2048), (3, 1048, 1088), (2, 1000, 1056)], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_and_column_means(dtype, shape):
    """Matrices that end inside a tile, too."""
    rules = m2.MatrixRules((("w", m2.MatrixAxes(-2, -1)),))
    tx = m2.factorized_second_moment(b2=0.0, rules=rules)
    g = {"w": jnp.asarray(normal32(shape), dtype)}
    state = jax.jit(lambda g: tx.update(g, tx.init(g))[1])(g)
    square = np.square(np.asarray(g["w"], np.float64))
    for got, axis in ((state.nu_row, -1), (state.nu_col, -2)):
        # The terms are positive, so each level of the float32 sum adds one rounding.
        np.testing.assert_allclose(got["w"], square.mean(axis), rtol=1e-6)


def test_row_and_column_means_of_equal_leaves():
    """They run together: each leaf must get its own, and the update made of them.

    The shapes are those of GPT-124M's MLP, one leaf for each layer.
    """
    shapes = {"up": (768, 3072), "down": (3072, 768)}
    rules = m2.MatrixRules(((r"up|down", m2.MatrixAxes(-2, -1)),))
    tx = m2.factorized_second_moment(b1=0.0, b2=0.0, rules=rules)
    g = {
        f"{name}{layer}": jnp.asarray((1 + layer) * normal32(shape, layer))
        for layer in range(12)
        for name, shape in shapes.items()
    }
    updates, state = jax.jit(lambda g: tx.update(g, tx.init(g)))(g)
    for key, x in g.items():
        square = np.square(np.asarray(x, np.float64))
        row, col = square.mean(-1), square.mean(-2)
        # The terms are positive, so each level of the float32 sum adds one rounding.
        np.testing.assert_allclose(state.nu_row[key], row, rtol=1e-6, err_msg=key)
        np.testing.assert_allclose(state.nu_col[key], col, rtol=1e-6, err_msg=key)
        want = np.asarray(x, np.float64) / np.sqrt(np.outer(row, col) / row.mean())
        np.testing.assert_allclose(updates[key], want, rtol=1e-5, err_msg=key)
