"""The symmetric kernel and the iteration on it: interpreted, and lowered for CUDA."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import relative_error

import muon2_optax as m2
from muon2_optax import (
    coefficients,
    fused,
    hopper,
    iteration,
    parcels,
    polar,
    symmetric,
)
from muon2_optax.symmetric import Tiles

PLAN = coefficients.resolve("keller", 3)
KELLER3 = PLAN.rows

needs_kernel = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the kernel needs jax 0.11"
)


@pytest.fixture
def interpret(monkeypatch):
    from jax.experimental.pallas import mosaic_gpu

    # As few simulated multiprocessors as make more than one take part.
    monkeypatch.setattr(symmetric, "_processors", lambda: 2)
    return mosaic_gpu.InterpretGPUParams()


def _stack(shape, seed=0, dtype=np.float16):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _orthogonal(n, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))[0]


SMALL = Tiles(side=128, stages=2)


# --- the kernel ---------------------------------------------------------------------


@needs_kernel
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("addends", [0, 2])
def test_product(addends, dtype, interpret):
    x = jnp.asarray(_stack((2, 256, 128)), dtype)
    cs = [_stack((2, 256, 256), 1 + i, np.float64) for i in range(addends)]
    cs = [jnp.asarray(c + c.swapaxes(1, 2), dtype) for c in cs]
    pairs = [(0.5 + i, c) for i, c in enumerate(cs)]
    got = symmetric.product(x, x, *pairs, alpha=0.25, tiles=SMALL, interpret=interpret)
    reference.assert_symmetric_product(got, x, pairs, 0.25, jnp.finfo(dtype).eps)


@needs_kernel
@pytest.mark.parametrize("addends", [0, 1, 2])
def test_product_of_some_members(addends, interpret):
    """Neither members behind the count nor addends that are not given are read."""
    x = _stack((3, 128, 128))
    c = jnp.asarray(x + x.swapaxes(1, 2))
    x[2] = np.nan
    pairs = [(0.5 + i, c) for i in range(addends)]
    got = symmetric.product(
        jnp.asarray(x), jnp.asarray(x), *pairs, members=2, tiles=SMALL,
        interpret=interpret,
    )  # fmt: skip
    pairs = [(beta, c[:2]) for beta, c in pairs]
    eps = jnp.finfo(jnp.float16).eps
    reference.assert_symmetric_product(got[:2], x[:2], pairs, 1.0, eps)


ONE_KERNEL = """
import jax, jax.numpy as jnp
from muon2_optax import symmetric

def products(x):
    y = symmetric.product(x, x)
    y = symmetric.product(y, x, (0.5, y), members=2)
    return symmetric.product(y, x, (2.0, x), (0.5, y), alpha=3.0, members=3)

x = jax.ShapeDtypeStruct((4, 1024, 1024), jnp.float16)
text = jax.jit(products).trace(x).lower(lowering_platforms=("cuda",)).as_text()
print(text.count("custom_call @mosaic_gpu"))
"""


@needs_kernel
def test_one_kernel_for_all_addends_and_counts():
    """Each takes a GPU's compiler a second. Also the first one of a process."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_KERNEL], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1"]


@needs_kernel
def test_product_in_clusters(interpret):
    x = jnp.asarray(_stack((1, 512, 64)))
    got = symmetric.product(x, x, alpha=0.5, interpret=interpret)
    wide = np.asarray(x, np.float64)
    assert relative_error(got, 0.5 * wide @ wide.swapaxes(1, 2)) < 1e-3


@needs_kernel
def test_product_of_commuting_matrices(interpret):
    q = _orthogonal(256)
    a, b = ((q * np.random.default_rng(i).uniform(-1, 1, 256)) @ q.T for i in range(2))
    a16, b16 = (jnp.asarray(v[None], jnp.float16) for v in (a, b))
    got = symmetric.product(a16, b16, tiles=SMALL, interpret=interpret)
    # Rounding the operands: 256 terms of 2^-11 of about 0.04 each.
    assert np.abs(np.asarray(got[0], np.float64) - a @ b).max() < 1e-3


@needs_kernel
def test_added(interpret):
    p, x = _stack((2, 128, 128)) / 16, _stack((2, 128, 256), 1)
    got = symmetric.added(
        jnp.asarray(p), jnp.asarray(x), tiles=SMALL, interpret=interpret
    )
    p, x = p.astype(np.float64), x.astype(np.float64)
    assert relative_error(got, x + p @ x) < 1e-3


@needs_kernel
@pytest.mark.parametrize("tiles", [SMALL, Tiles()], ids=["small", "clusters"])
@pytest.mark.parametrize("pieces", [(1, 2), (2, 1), (2, 3)], ids=str)
def test_added_in_pieces(pieces, tiles, interpret):
    """Tiles reach beyond the columns of a piece, which are no multiple of theirs."""
    down, right = pieces
    m, n = down * tiles.side, right * 192
    p, x = _stack((2, m, m)) / 32, _stack((2, m, n), 1)
    got = symmetric.added(
        jnp.asarray(p), jnp.asarray(x), pieces=pieces, tiles=tiles, interpret=interpret
    )
    p, x = p.astype(np.float64), x.astype(np.float64)
    assert relative_error(got, reference.in_pieces(x + p @ x, *pieces)) < 1e-3


def test_pieces_without_tiles_are_refused():
    p, x = jnp.ones((1, 256, 256), jnp.float16), jnp.ones((1, 256, 128), jnp.float16)
    with pytest.raises(ValueError, match="in 2 x 1 pieces"):
        symmetric.added(p, x, pieces=(2, 1))


@needs_kernel
@pytest.mark.parametrize("count", range(1, 10))
def test_the_triangle_has_every_element_once(count):
    from muon2_optax import mosaic

    t = jnp.arange(count * (count + 1) // 2)
    i, j = jax.vmap(lambda t: mosaic.triangle(t, count))(t)
    assert sorted(zip(i.tolist(), j.tolist())) == [
        (r, c) for r in range(count) for c in range(r + 1)
    ]


def test_shapes_without_tiles_are_refused():
    x = jnp.ones((1, 100, 64), jnp.float16)
    with pytest.raises(ValueError, match="no tiles"):
        symmetric.product(x, x)


# --- the iteration ------------------------------------------------------------------


def _computed(out, members):
    """What is behind the members that are asked for must not be used."""
    return out if members is None else out.at[members:].set(jnp.nan)


def _product(a, b, *addends, alpha=1.0, members=None, tiles=None, interpret=None):
    """The kernel's arithmetic: 16-bit operands, float32 inside, one rounding."""
    wide = [v.astype(jnp.float32) for v in (a, b)]
    out = alpha * jnp.matmul(wide[0], wide[1].mT, precision="highest")
    out = out + sum(beta * c.astype(jnp.float32) for beta, c in addends)
    return _computed(out.astype(a.dtype), members)


def _added(p, x, *, pieces=None, members=None, tiles=None, interpret=None):
    wide = jnp.matmul(p.astype(jnp.float32), x.astype(jnp.float32), precision="highest")
    out = _computed((x.astype(jnp.float32) + wide).astype(x.dtype), members)
    return out if pieces is None else reference.in_pieces(out, *pieces)


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(symmetric, "product", _product)
    monkeypatch.setattr(symmetric, "added", _added)


@pytest.fixture
def on_hopper():
    """As in the branch of a program that Hopper GPUs run."""
    token = hopper._cuda.set(True)
    try:
        with hopper.kernels(True):
            yield
    finally:
        hopper._cuda.reset(token)


def _with_spectrum(m, n, s, seed=0):
    return (_orthogonal(m, seed) * s) @ np.eye(m, n) @ _orthogonal(n, seed + 1).T


def _spectra(m, n):
    return {
        "normal": _stack((m, n), 5, np.float64),
        "flat": _with_spectrum(m, n, np.ones(m)),
        "decaying": _with_spectrum(m, n, np.logspace(0, -6, m)),
        "deficient": _with_spectrum(m, n, np.r_[np.ones(m // 2), np.zeros(m - m // 2)]),
        "spike": _with_spectrum(m, n, np.r_[1.0, np.full(m - 1, 1e-3)]),
    }


def _run(matrices, plan=PLAN, size=2, dtype=jnp.float16):
    m, n = sorted(matrices[0].shape[-2:])
    chunks = iteration.runs(plan, m, n, jnp.dtype(dtype))
    run = functools.partial(
        fused.run, plan=plan, chunks=chunks, size=size, dtype=jnp.dtype(dtype)
    )
    return run([jnp.asarray(x, jnp.float32) for x in matrices])


@functools.partial(jax.jit, static_argnames="rows")
def _plain_bfloat16(x, rows):
    y = (x / jnp.linalg.norm(x)).astype(jnp.bfloat16)
    for a, b, c in rows:
        gram = y @ y.T
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y


@pytest.mark.parametrize("shape", [(128, 128), (128, 320)], ids=str)
@pytest.mark.parametrize("name", list(_spectra(2, 2)))
def test_at_least_as_accurate_as_plain_bfloat16(name, shape, emulated):
    x = _spectra(*shape)[name]
    want = reference.keller(x, 3)
    got = np.asarray(_run([x])[0], np.float64)
    plain = np.asarray(
        _plain_bfloat16(jnp.asarray(x, jnp.float32), KELLER3), np.float64
    )
    assert np.isfinite(got).all()
    assert relative_error(got, want) <= relative_error(plain, want)
    assert np.vdot(got, x) > 0


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(96, 96), (64, 192)], ids=str)
def test_every_number_of_steps(shape, steps, emulated):
    x = _stack(shape, 3, np.float64)
    got = _run([x], coefficients.resolve("keller", steps))[0]
    # Five steps of the Gram form multiply float16's 5e-4 by up to 3.4^2.
    assert relative_error(got, reference.keller(x, steps)) < (3e-3, 2e-2)[steps > 3]


@pytest.mark.slow
def test_chunks_stacks_and_tall_members(emulated):
    shapes = [(64, 160), (3, 64, 160), (160, 64), (2, 2, 160, 64), (64, 160)]
    xs = [_stack(s, i, np.float64) for i, s in enumerate(shapes)]
    for size in (1, 2, 4, 100):
        for x, got in zip(xs, _run(xs, size=size)):
            want = np.empty(x.shape)
            for index in np.ndindex(x.shape[:-2]):
                want[index] = reference.keller(x[index], 3)
            assert got.shape == x.shape and relative_error(got, want) < 3e-3


@pytest.mark.parametrize(
    "most, m, size", [(20, 2048, 20), (23, 2048, 22), (32, 768, 31), (1, 4096, 1)]
)
def test_stacks_leave_few_multiprocessors_idle(most, m, size):
    """20 x 36 squares of 256 take the 66 clusters of two 11 rounds, 22 take 12; 31 x 21
    squares of 128 take the 132 multiprocessors 5, 32 would take 6."""
    assert fused.fullest(most, m) == size


def test_a_stack_without_members(emulated):
    xs = [_stack(s, i, np.float64) for i, s in enumerate([(3, 64, 160), (0, 64, 160)])]
    for size in (1, 100):
        got = _run([xs[1], xs[0], xs[1]], size=size)
        assert [g.shape for g in got] == [xs[1].shape, xs[0].shape, xs[1].shape]
        for x, y in zip(xs[0], got[1]):
            assert relative_error(y, reference.keller(x, 3)) < 3e-3


@pytest.mark.parametrize("scale", [1e-34, 1e-20, 1.0, 1e20, 7e37])
def test_any_magnitude(scale, emulated):
    x = _stack((64, 96), 4, np.float64)
    assert relative_error(_run([x * scale])[0], reference.keller(x, 3)) < 3e-3


def test_zero_members_stay_zero_and_bad_ones_stay_alone(emulated):
    x = _stack((4, 64, 96), 2, np.float32)
    x[1] = 0
    x[2, 3, 4] = np.inf
    got = np.asarray(_run([x], size=4)[0])
    assert not got[1].any() and np.isnan(got[2]).all()
    assert np.isfinite(got[[0, 3]]).all()


def _equations(jaxpr):
    """All of them, inside all calls too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in eqn.params.values():
            if hasattr(inner, "jaxpr"):
                yield from _equations(inner.jaxpr)


def _joints(fn, *args):
    """Of every concatenation: how many operands, and their lengths."""
    for eqn in _equations(jax.make_jaxpr(fn)(*args).jaxpr):
        if eqn.primitive.name == "concatenate":
            dim = eqn.params["dimension"]
            yield len(eqn.invars), [v.aval.shape[dim] for v in eqn.invars]


def test_no_more_than_ten_arrays_are_joined_at_once(emulated):
    """XLA for GPUs writes one element per thread from eleven on: the widest pass of a
    step would take three times as long. (One joint, of row sums, is small.)"""
    xs = [jnp.ones((128, 192))] * 29
    counts = [count for count, _ in _joints(lambda *xs: _run(xs, size=100), *xs)]
    assert sorted(counts)[-2:] == [8, 29]
    pieces = [jnp.ones((1, 64, 96), jnp.float16)] * 29
    packed = _joints(lambda *xs: parcels.packed(xs, jnp.ones(29), 8, 4), *pieces)
    assert max(count for count, _ in packed) <= 10


@pytest.mark.parametrize("count", [5, 7, 9, 18, 23])
def test_what_is_joined_last_is_a_multiple_of_four_long(count, emulated):
    """XLA for GPUs writes as many elements per thread, up to four, as divide the
    lengths of what is joined after it has been narrowed."""
    xs = [jnp.ones((128, 192))] * count + [jnp.ones((192, 128))] * 3
    joints = list(_joints(lambda *xs: _run(xs, size=26), *xs))
    inner, stack = [j for j in joints if j[1][0] > 1 and j[0] > 1], 26 * 128
    assert [sum(lengths) for _, lengths in inner] == [stack]
    assert not any(n % 4 for _, lengths in inner for n in lengths)


def test_members_and_lots_are_one_program(emulated):
    """A slice that begins at a constant would make XLA compile a pass for each."""
    xs = [jnp.ones((128, 192))] * 9
    jaxpr = jax.make_jaxpr(lambda *xs: _run(xs, size=4))(*xs)
    slices = [
        eqn.params["start_indices"]
        for eqn in _equations(jaxpr.jaxpr)
        if eqn.primitive.name == "slice" and eqn.invars[0].aval.dtype == jnp.float16
    ]
    assert not any(map(any, slices))


def test_the_kernels_have_the_derivative_of_the_plain_path(on_hopper, monkeypatch):
    def without_derivative(xs, plan, chunks, size, dtype):
        kinds = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs]
        return tuple(jax.pure_callback(lambda *xs: xs, kinds, *xs))

    monkeypatch.setattr(fused, "run", without_derivative)
    x = jnp.asarray(_stack((8, 768, 768), 1, np.float32))

    def inner(run, x):
        return jnp.vdot(run(x, plan=PLAN, dtype=jnp.dtype(jnp.float16))[0], x + 1)

    got = jax.grad(functools.partial(inner, polar.run_batch))(x)
    want = jax.grad(functools.partial(inner, polar._run_stock))(x)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


# --- pieces, on a mesh --------------------------------------------------------------


def _divided(xs, mesh, spec, steps):
    """Orthogonalized in float16, divided over the mesh."""
    sharding = NamedSharding(mesh, spec)
    tx = m2.newton_schulz_orthogonalize(steps, ns_dtype=jnp.float16)
    with jax.set_mesh(mesh):
        tree = [jax.device_put(x, sharding) for x in xs]
        return jax.jit(lambda g: tx.update(g, optax.EmptyState())[0])(tree)


@pytest.fixture
def on_pieces(emulated, monkeypatch):
    """Small matrices on fake devices take the kernels' way; counts how often."""
    taken = []
    run_pieces = fused.run_pieces

    def counted(values, *rest):
        taken.append(values.shape[:2])
        return run_pieces(values, *rest)

    monkeypatch.setattr(fused, "run_pieces", counted)
    monkeypatch.setattr(hopper, "chunk_size", lambda count, *_: count)
    return taken


LAYOUTS = {
    "rows": ((2,), P("x"), (256, 320), (2, 1)),
    "columns": ((2,), P(None, "x"), (128, 4080), (1, 2)),
    "tall": ((2,), P("x"), (4080, 128), (1, 2)),
    "both": ((2, 2), P("x", "y"), (256, 384), (2, 2)),
    "two axes": ((2, 2), P(("x", "y")), (512, 512), (4, 1)),
}


@pytest.mark.parametrize("steps", [3, 5])
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_pieces_are_iterated_as_they_came(name, steps, on_pieces):
    shape, spec, matrix, grid = LAYOUTS[name]
    names = ("x", "y")[: len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(shape))
    xs = [_stack(matrix, i, np.float32) * 10.0 ** (5 * i - 8) for i in range(5)]
    xs[3][:] = 0
    done = _divided(xs, mesh, spec, steps)
    assert set(on_pieces) == {grid}
    for x, got in zip(xs, done):
        # As above: five steps multiply the rounding.
        error = relative_error(got, reference.keller(x, steps))
        assert error < (3e-3, 2e-2)[steps > 3]


def test_a_bad_entry_spoils_its_own_matrix_only(on_pieces):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    xs = [_stack((256, 320), i, np.float32) for i in range(4)]
    xs[1][3, 4] = np.inf
    xs[2][200, 1] = np.nan
    done = _divided(xs, mesh, P("x"), 3)
    assert on_pieces
    for bad, y in zip([False, True, True, False], map(np.asarray, done)):
        assert np.isnan(y).all() if bad else np.isfinite(y).all()


@pytest.mark.parametrize(
    "piece, grid, takes",
    [
        ((1024, 2048), (2, 1), True),
        ((2048, 2736), (1, 2), True),
        ((192, 4096), (8, 1), False),  # no whole tiles
        ((2048, 1030), (1, 2), False),  # much padding
    ],
)
def test_which_pieces_are_taken(piece, grid, takes, on_hopper):
    half = jnp.dtype(jnp.float16)
    assert hopper.takes_pieces(8, piece, grid, PLAN, half) is takes


# --- when it is used ----------------------------------------------------------------


def _lowered(on, shapes, **options):
    def fn(*xs):
        with hopper.kernels(on):
            return polar.orthogonalize(xs, PLAN, **options)

    xs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return jax.jit(fn).trace(*xs).lower(lowering_platforms=("cuda",)).as_text()


@needs_kernel
def test_lowers_for_cuda():
    text = _lowered(True, [(8, 1024, 1312), (1312, 1024)])
    # The Gram form of three steps: ten products that are symmetric, one that is not.
    assert "mosaic_gpu" in text and "dot_general" not in text


@needs_kernel
@pytest.mark.parametrize("shape", [(8, 1024, 1312), (16, 1024, 1024)], ids=str)
def test_lowers_for_cuda_under_x64(shape):
    with jax.enable_x64(True):
        assert "mosaic_gpu" in _lowered(True, [shape])


@needs_kernel
@pytest.mark.parametrize(
    "on, shapes, options",
    [
        (False, [(8, 1024, 1312)], {}),
        (True, [(8, 1000, 1312)], {}),
        (True, [(768, 768)], {}),
        (True, [(8, 1024, 1312)], {"ns_dtype": jnp.float32}),
    ],
    ids=["off", "odd", "few", "float32"],
)
def test_stock_products_elsewhere(on, shapes, options):
    assert "mosaic_gpu" not in _lowered(on, shapes, **options)


def _lowered_on(mesh, spec, shardings, monkeypatch):
    """The program of eight matrices (1024, 1312), as Hopper GPUs would get it."""
    monkeypatch.setattr(hopper, "available", lambda: True)
    sharding = NamedSharding(mesh, spec)
    tree = {
        f"w{i}": jax.ShapeDtypeStruct((1024, 1312), jnp.float32, sharding=sharding)
        for i in range(16)
    }
    tx = m2.newton_schulz_orthogonalize(
        3, shardings=m2.Shardings.of(tree) if shardings else None
    )
    step = jax.jit(lambda g: tx.update(g, optax.EmptyState())[0])
    return step.trace(tree).lower(lowering_platforms=("cuda",)).as_text()


@needs_kernel
@pytest.mark.parametrize("devices, spec", [(1, P()), (2, P("x")), (2, P())])
def test_runs_on_every_device_of_a_mesh(devices, spec, monkeypatch):
    """Also on one device of a machine that has more, and inside the exchange."""
    mesh = jax.make_mesh(
        (devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )
    assert "mosaic_gpu" in _lowered_on(mesh, spec, True, monkeypatch)


@needs_kernel
@pytest.mark.parametrize("name", ["muon2", "muon2_f"])
def test_in_a_shard_map_that_checks(name):
    """Kernels do not tell JAX that their results vary over the mesh."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    rules = m2.MatrixRules(((r"", m2.MatrixAxes(-2, -1)),))
    tx = m2.REGISTRY[name](0.1, rules=rules)
    run = jax.shard_map(
        lambda g: tx.update(g, tx.init(g), g)[0],
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
    )
    g = {"w": jax.ShapeDtypeStruct((16, 1024, 1312), jnp.float32)}
    with hopper.kernels(True):
        text = jax.jit(run).trace(g).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@needs_kernel
def test_stays_off_where_the_compiler_would_divide_it(monkeypatch):
    """On Auto axes without shardings nobody knows: XLA would gather its operands."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    assert "mosaic_gpu" not in _lowered_on(mesh, P("x"), False, monkeypatch)


def test_is_off_without_a_hopper_gpu():
    if jax.default_backend() != "gpu":
        assert not hopper.available()


def test_stacks_are_bounded_and_alike(on_hopper):
    half = jnp.dtype(jnp.float16)
    size = functools.partial(hopper.chunk_size, plan=PLAN, dtype=half)
    # Matrices of the same m share their kernels.
    assert size(72, (2048, 5472)) == size(96, (2048, 2048)) == 20
    assert size(24, (768, 3072)) == size(48, (768, 768)) == 31
    few = [size(n, (2048, 2048)) for n in (4, 5, 7, 9, 13, 17)]
    assert few == [4, 8, 8, 16, 16, 20]
    assert size(1, (8192, 8192)) == 1
    assert size(40, (5120, 13824)) == 3
    assert size(24, (16384, 65536)) == 1
    for count, m, n in [(72, 2048, 5472), (99, 768, 768), (3, 4096, 4096)]:
        stack = size(count, (m, n))
        assert stack == 1 or stack * 2 * m * (n + 4 * m) <= 1.4e9
        assert stack < 2 * count
    aol = coefficients.resolve("turbo", 3)
    assert hopper.chunk_size(72, (2048, 5472), aol, half) is None


def test_importing_the_package_does_not_import_pallas():
    code = (
        "import sys, muon2_optax; "
        "sys.exit(any(m.startswith('jax.experimental.pallas') for m in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
