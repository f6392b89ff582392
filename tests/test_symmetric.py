"""The symmetric kernel, interpreted."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from kernels import needs_kernel, orthogonal, stack
from reference import relative_error

from muon2_optax.kernels import symmetric
from muon2_optax.kernels.symmetric import Tiles


@pytest.fixture
def interpret(monkeypatch):
    from jax.experimental.pallas import mosaic_gpu

    # As few simulated multiprocessors as make more than one take part.
    monkeypatch.setattr(symmetric, "_processors", lambda: 2)
    # Values alone do not tell of a wait that is missing.
    return mosaic_gpu.InterpretGPUParams(detect_races=True)


SIDE = 128
SMALL = Tiles(side=SIDE, stages=2)


@needs_kernel
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("addends", [0, 2])
def test_product(addends, dtype, interpret):
    x = jnp.asarray(stack((2, 256, 128)), dtype)
    cs = [stack((2, 256, 256), 1 + i, np.float64) for i in range(addends)]
    cs = [jnp.asarray(c + c.swapaxes(1, 2), dtype) for c in cs]
    pairs = [(0.5 + i, c) for i, c in enumerate(cs)]
    got = symmetric.product(x, x, *pairs, alpha=0.25, tiles=SMALL, interpret=interpret)
    reference.assert_symmetric_product(got, x, pairs, 0.25, jnp.finfo(dtype).eps, SIDE)


@needs_kernel
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("k", [64, 128, 320])
def test_products_that_still_run_while_tiles_are_asked_for(k, stages, interpret):
    """With fewer steps than stages, as many and more, for several squares each."""
    tiles = Tiles(side=128, stages=stages, delay=1)
    options = {"tiles": tiles, "interpret": interpret}
    x = stack((3, 256, k))
    got = symmetric.product(jnp.asarray(x), jnp.asarray(x), alpha=0.25, **options)
    reference.assert_symmetric_product(
        got, x, [], 0.25, jnp.finfo(jnp.float16).eps, SIDE
    )
    p = stack((3, 256, 256), 2) / 16
    got = symmetric.add_product(jnp.asarray(p), jnp.asarray(x), **options)
    p, x = p.astype(np.float64), x.astype(np.float64)
    assert relative_error(got, x + p @ x) < 1e-3


@needs_kernel
@pytest.mark.parametrize("addends", [0, 1, 2])
def test_product_of_some_members(addends, interpret):
    """Neither members behind the count nor addends that are not given are read."""
    x = stack((3, 128, 128))
    c = jnp.asarray(x + x.swapaxes(1, 2))
    x[2] = np.nan
    pairs = [(0.5 + i, c) for i in range(addends)]
    got = symmetric.product(
        jnp.asarray(x), jnp.asarray(x), *pairs, members=2, tiles=SMALL,
        interpret=interpret,
    )  # fmt: skip
    pairs = [(beta, c[:2]) for beta, c in pairs]
    eps = jnp.finfo(jnp.float16).eps
    reference.assert_symmetric_product(got[:2], x[:2], pairs, 1.0, eps, SIDE)


def _panels(x, k):
    """(L, m, n) as (L * panels, m, k), zeros behind the columns, and one of NaN."""
    x = np.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % k)])
    parts = np.stack(np.split(x, x.shape[2] // k, axis=2), axis=1)
    parts = parts.reshape(-1, *parts.shape[2:])
    return np.concatenate([parts, np.full_like(parts[:1], np.nan)])


@needs_kernel
@pytest.mark.parametrize("columns", [200, 256, 330])
def test_product_of_panels(columns, interpret):
    x = stack((2, 128, columns))
    panels = jnp.asarray(_panels(x, 128))
    for members, results in ((None, None), (1, 1)):
        got = symmetric.product(
            panels, panels, alpha=0.5, columns=columns, members=members,
            results=results, tiles=SMALL, interpret=interpret,
        )  # fmt: skip
        assert len(got) == (results or len(panels))
        got, some = got[: members or 2], x[: members or 2]
        eps = jnp.finfo(jnp.float16).eps
        reference.assert_symmetric_product(got, some, [], 0.5, eps, SIDE)


@needs_kernel
def test_panels_wider_than_tiles(interpret):
    """The last tiles of a panel are neither written nor read."""
    x = stack((1, 256, 330))
    panels = _panels(x, 256)[:2]
    panels[1, :, 128:] = np.nan
    half, options = jnp.asarray(panels), {"tiles": SMALL, "interpret": interpret}
    got = symmetric.product(half, half, alpha=0.5, columns=330, **options)
    eps = jnp.finfo(jnp.float16).eps
    reference.assert_symmetric_product(got[:1], x, [], 0.5, eps, SIDE)
    p = stack((1, 256, 256), 1) / 32
    got = symmetric.add_product(jnp.asarray(p), half, columns=330, **options)
    want = x + p.astype(np.float64) @ x.astype(np.float64)
    got = np.concatenate(np.asarray(got), axis=1)
    assert relative_error(got[None, :, :330], want) < 1e-3
    assert not got[:, 330:384].any()


def test_stacks_that_are_too_short_are_refused():
    x, p = jnp.ones((6, 128, 128), jnp.float16), jnp.ones((1, 128, 128), jnp.float16)
    for call in (
        lambda: symmetric.product(x, x, columns=300, members=3, tiles=SMALL),
        lambda: symmetric.product(x, x, columns=300, results=1, members=2, tiles=SMALL),
        lambda: symmetric.product(x, x, columns=900, tiles=SMALL),
        lambda: symmetric.add_product(p, x, columns=300, members=2, tiles=SMALL),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            call()


@needs_kernel
@pytest.mark.parametrize("columns", [200, 256, 330])
def test_added_to_panels(columns, interpret):
    p, x = stack((5, 128, 128)) / 16, stack((2, 128, columns), 1)
    panels = _panels(x, 128)
    got = symmetric.add_product(
        jnp.asarray(p), jnp.asarray(panels), columns=columns, tiles=SMALL,
        interpret=interpret,
    )  # fmt: skip
    p, x = p[:2].astype(np.float64), x.astype(np.float64)
    want = _panels(x + p @ x, 128)[:-1]
    assert got.shape == panels.shape
    assert relative_error(got[: len(want)], want) < 1e-3


ONE_KERNEL = """
import jax, jax.numpy as jnp
from muon2_optax.kernels import symmetric

def products(x):
    y = symmetric.product(x, x)
    y = symmetric.product(y, x, (0.5, y), members=2)
    y = symmetric.add_product(y, x)
    return symmetric.product(y, x, (2.0, x), (0.5, y), alpha=3.0, members=3)

x = jax.ShapeDtypeStruct((4, 1024, 1024), jnp.float16)
text = jax.jit(products).trace(x).lower(lowering_platforms=("cuda",)).as_text()
print(text.count("custom_call @mosaic_gpu"))
"""


@needs_kernel
def test_one_kernel_for_all_products_addends_and_counts():
    """Each takes a GPU's compiler a second. Also the first one of a process."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_KERNEL], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1"]


@needs_kernel
@pytest.mark.parametrize("addends", [0, 2])
def test_product_in_clusters(addends, interpret):
    x = stack((1, 512, 64))
    c = stack((1, 512, 512), 1)
    pairs = [(0.5 + i, jnp.asarray(c + c.swapaxes(1, 2))) for i in range(addends)]
    x16 = jnp.asarray(x)
    got = symmetric.product(x16, x16, *pairs, alpha=0.5, interpret=interpret)
    reference.assert_symmetric_product(
        got, x, pairs, 0.5, jnp.finfo(jnp.float16).eps, 256
    )


@needs_kernel
def test_product_of_commuting_matrices(interpret):
    q = orthogonal(256)
    a, b = ((q * np.random.default_rng(i).uniform(-1, 1, 256)) @ q.T for i in range(2))
    a16, b16 = (jnp.asarray(v[None], jnp.float16) for v in (a, b))
    got = symmetric.product(a16, b16, tiles=SMALL, interpret=interpret)
    # Rounding the operands: 256 terms of 2^-11 of about 0.04 each.
    assert np.abs(np.asarray(got[0], np.float64) - a @ b).max() < 1e-3


@needs_kernel
@pytest.mark.parametrize("n, columns", [(256, None), (192, 192)])
def test_added(n, columns, interpret):
    p, x = stack((2, 128, 128)) / 16, stack((2, 128, n), 1)
    got = symmetric.add_product(
        jnp.asarray(p), jnp.asarray(x), columns=columns, tiles=SMALL,
        interpret=interpret,
    )  # fmt: skip
    p, x = p.astype(np.float64), x.astype(np.float64)
    assert relative_error(got, x + p @ x) < 1e-3


@needs_kernel
@pytest.mark.parametrize("tiles", [SMALL, Tiles()], ids=["small", "clusters"])
@pytest.mark.parametrize("pieces", [(1, 2), (2, 1), (2, 3)], ids=str)
def test_added_in_pieces(pieces, tiles, interpret):
    """Tiles reach beyond the columns of a piece, which are no multiple of theirs."""
    down, right = pieces
    m, n = down * tiles.side, right * 192
    p, x = stack((2, m, m)) / 32, stack((2, m, n), 1)
    got = symmetric.add_product(
        jnp.asarray(p), jnp.asarray(x), shards=pieces, tiles=tiles, interpret=interpret
    )
    p, x = p.astype(np.float64), x.astype(np.float64)
    assert relative_error(got, reference.in_pieces(x + p @ x, *pieces)) < 1e-3


def test_pieces_without_tiles_are_refused():
    p, x = jnp.ones((1, 256, 256), jnp.float16), jnp.ones((1, 256, 128), jnp.float16)
    with pytest.raises(ValueError, match="in 2 x 1 shards"):
        symmetric.add_product(p, x, shards=(2, 1))
    with pytest.raises(ValueError, match="panels"):
        symmetric.add_product(p, x, columns=200)
    with pytest.raises(ValueError, match="panels"):
        symmetric.add_product(p, x, shards=(1, 2), columns=100)


@needs_kernel
@pytest.mark.parametrize("count", range(1, 10))
def test_the_triangle_has_every_element_once(count):
    from muon2_optax.kernels import tile_scheduler

    t = jnp.arange(count * (count + 1) // 2)
    i, j = jax.vmap(lambda t: tile_scheduler.triangle(t, count))(t)
    assert sorted(zip(i.tolist(), j.tolist())) == [
        (r, c) for r in range(count) for c in range(r + 1)
    ]


def test_shapes_without_tiles_are_refused():
    x = jnp.ones((1, 100, 64), jnp.float16)
    with pytest.raises(ValueError, match="no tiles"):
        symmetric.product(x, x)
