"""Sums of squares along both axes in one pass: interpreted, and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from matrices import normal32
from meshes import AUTO, EXPLICIT, mesh_of, place

import muon2_optax as m2
from muon2_optax.arrays import limits
from muon2_optax.execution import factored_moment, mean_squares
from muon2_optax.kernels import hopper

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the kernel needs jax 0.11"
)


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel where a program for CUDA has it, interpreted."""
    from jax.experimental.pallas import mosaic_gpu

    from muon2_optax.kernels import sum_squares

    how = mosaic_gpu.InterpretGPUParams()
    kernel = functools.partial(sum_squares.of_squares, interpret=how)
    monkeypatch.setattr(sum_squares, "of_squares", kernel)
    monkeypatch.setattr(limits, "ENTRIES_FOR_SUMS_KERNEL", 0)
    return kernel


def _moments(axes, names=("w",), **options):
    """Known to be on one device, of which the tests have several."""
    mesh = mesh_of((1,), ("x",), AUTO)
    return m2.factorized_second_moment(
        rules=m2.MatrixRules((("w.?", axes),)),
        shardings=m2.Shardings(mesh, tuple((n, PartitionSpec()) for n in names)),
        **options,
    )


def _close(got, want):
    # The terms are positive, so each level of the float32 sum adds one rounding.
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape", [(1, 256, 64), (2, 264, 192), (1, 8, 64), (1, 504, 320)], ids=str
)
def test_sums_of_squares(shape, dtype, interpreted):
    """Whole tiles, and matrices that end inside one."""
    x = jnp.asarray(normal32(shape), dtype)
    rows, columns = interpreted(x)
    want = np.square(np.asarray(x, np.float64)) / max(shape[1:])
    _close(rows.sum(1), want.sum(2))
    _close(columns.sum(1), want.sum(1))


@pytest.fixture
def as_for_cuda(monkeypatch):
    """The branch for CUDA, where tests run."""

    def on_cuda(*args, cuda, default):
        taken.append(cuda)
        return cuda(*args)

    taken: list = []

    monkeypatch.setattr(jax.lax, "platform_dependent", on_cuda)
    with hopper.kernels(True):
        yield
    assert taken
    mean_squares._of_leaf.clear_cache()
    mean_squares._partial_sums.clear_cache()


CASES = {
    "rows are inputs": ((72, 64), m2.MatrixAxes(0, 1)),
    "rows are outputs": ((64, 96), m2.MatrixAxes(1, 0)),
    "stacked": ((2, 2, 64, 96), m2.MatrixAxes(-2, -1)),
}


@pytest.mark.parametrize("shape, axes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("scale", [1.0, 1e-15, 1e15, 3e20])
def test_statistics(scale, shape, axes, interpreted, as_for_cuda):
    tx = _moments(axes, b2=0.0)
    g = normal32(shape) * np.float32(scale)
    state = tx.update({"w": g}, tx.init({"w": g}))[1]
    square = np.minimum(np.square(g, dtype=np.float64), 1e38)
    resolved = axes.resolve(shape)
    for got, over in ((state.nu_row, resolved.outs), (state.nu_col, resolved.ins)):
        if scale > 1e19:
            # Too large to square: held below overflow.
            assert np.isfinite(got["w"]).all() and (got["w"] > 1e36).all()
        else:
            _close(got["w"], square.mean(axis=over))


def test_bad_values_stay_in_their_matrix(interpreted, as_for_cuda):
    tx = _moments(m2.MatrixAxes(-2, -1))
    g = normal32((3, 64, 96))
    g[1, 5, 7] = np.nan
    row = np.asarray(tx.update({"w": g}, tx.init({"w": g}))[1].nu_row["w"])
    assert np.isnan(row[1, 5]) and np.isfinite(row[[0, 2]]).all()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape, axes", CASES.values(), ids=CASES)
def test_leaves_alike_run_together(
    shape, axes, nesterov, interpreted, as_for_cuda, monkeypatch
):
    """In stacks of two and one; what one of them holds does not reach the others."""
    monkeypatch.setattr(limits, "LEAVES_IN_STATISTICS", 2)
    stacked, sizes = factored_moment._update_equal, []

    def counted(leaves, b2):
        sizes.append(len(leaves))
        return stacked(leaves, b2)

    monkeypatch.setattr(factored_moment, "_update_equal", counted)
    other = (*shape[:-2], 64, 32 * shape[-1])
    shapes = {f"w{i}": shape for i in range(5)} | {"w5": other, "w6": other}
    tx = _moments(axes, shapes, nesterov=nesterov)
    state = tx.init({k: jnp.zeros(s) for k, s in shapes.items()})
    r, c, m = ({k: 0.0 for k in shapes} for _ in range(3))
    for step in range(2):
        grads = {
            k: normal32(s, 10 * step + i) for i, (k, s) in enumerate(shapes.items())
        }
        grads["w1"] *= 1e-10
        grads["w4"][..., 3, 5] = np.nan
        updates, state = tx.update(grads, state)
        for k, g in grads.items():
            g = g.astype(np.float64)
            ins, outs = (d[0] % g.ndim for d in (axes.in_axis, axes.out_axis))
            r[k] = 0.95 * r[k] + 0.05 * np.square(g).mean(outs, keepdims=True)
            c[k] = 0.95 * c[k] + 0.05 * np.square(g).mean(ins, keepdims=True)
            m[k] = 0.95 * m[k] + 0.05 * g
            top = 0.95 * m[k] + 0.05 * g if nesterov else m[k]
            root = np.sqrt(r[k] * c[k] / r[k].mean(ins, keepdims=True))
            want = top / (root + 1e-10)
            np.testing.assert_allclose(updates[k], want, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(state.nu_row[k], r[k].squeeze(outs), rtol=1e-5)
            np.testing.assert_allclose(state.nu_col[k], c[k].squeeze(ins), rtol=1e-5)
    assert sizes == [2, 2, 1, 2] * 2
    assert np.isfinite(updates["w3"]).all() and not np.isfinite(updates["w4"]).all()


def test_leaves_that_vary_and_those_that_do_not(interpreted, as_for_cuda):
    """In a user's shard_map, which checks what is replicated."""
    mesh = mesh_of((2,), ("x",), AUTO)
    tx = m2.factorized_second_moment(
        rules=m2.MatrixRules(((".", m2.MatrixAxes(0, 1)),))
    )
    specs = {"a": PartitionSpec("x"), "b": PartitionSpec()}
    g = {"a": normal32((128, 64)), "b": normal32((64, 64))}
    run = jax.shard_map(
        lambda g: tx.update(g, tx.init(g))[0],
        mesh=mesh,
        in_specs=(specs,),
        out_specs=specs,
    )
    got = jax.eval_shape(run, g)
    assert {k: v.shape for k, v in got.items()} == {k: v.shape for k, v in g.items()}


def test_on_an_explicit_mesh_of_one_device(monkeypatch):
    monkeypatch.setattr(limits, "ENTRIES_FOR_SUMS_KERNEL", 0)
    mesh = mesh_of((1, 1), ("x", "y"), EXPLICIT)
    g = place({"w": normal32((64, 96))}, mesh, {"w": PartitionSpec("x", None)})
    tx = m2.factorized_second_moment(b2=0.0)
    with jax.set_mesh(mesh), hopper.kernels(True):
        state = jax.jit(lambda g: tx.update(g, tx.init(g))[1])(g)
    square = np.square(np.asarray(g["w"], np.float64))
    _close(state.nu_row["w"], square.mean(1))


@pytest.mark.parametrize("types", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "spec", [(None, "x"), ("x", None), ("x", "y"), (("y", "x"), None), ()], ids=str
)
def test_on_a_mesh(spec, name, types, as_for_cuda, monkeypatch):
    """Each device sums its part, and the sums of all are added."""
    from muon2_optax.kernels import sum_squares

    def of_squares(x):
        square = jnp.square(x) / max(x.shape[1:])
        return jnp.sum(square, 2)[:, None], jnp.sum(square, 1)[:, None]

    monkeypatch.setattr(sum_squares, "of_squares", of_squares)
    monkeypatch.setattr(limits, "ENTRIES_FOR_SUMS_KERNEL", 0)
    shape, axes = CASES[name]
    # Parts of 32 columns and of 8 rows are the smallest that the kernel takes.
    shape = (*shape[:-2], 64, 256)
    spec = PartitionSpec(*(None,) * (len(shape) - 2), *spec)
    mesh = mesh_of((4, 2), ("x", "y"), types)
    g = place({"w": normal32(shape)}, mesh, {"w": spec})
    known = m2.Shardings.of(g) if types == AUTO else None
    tx = m2.factorized_second_moment(
        b2=0.0, rules=m2.MatrixRules((("w", axes),)), shardings=known
    )
    with jax.set_mesh(mesh):
        state = jax.jit(lambda g: tx.update(g, tx.init(g))[1])(g)
    square = np.square(np.asarray(g["w"], np.float64))
    resolved = axes.resolve(shape)
    for got, over in ((state.nu_row, resolved.outs), (state.nu_col, resolved.ins)):
        _close(got["w"], square.mean(axis=over))
        (gone,) = over
        kept = [e for i, e in enumerate((*spec, *(None,) * len(shape))) if i != gone]
        want = NamedSharding(mesh, PartitionSpec(*kept[: len(shape) - 1]))
        assert got["w"].sharding.is_equivalent_to(want, len(shape) - 1)


def test_the_kernel_has_the_derivative_of_the_plain_path(as_for_cuda, monkeypatch):
    from muon2_optax.kernels import sum_squares

    def without_derivative(x):
        kinds = [jax.ShapeDtypeStruct((len(x), 1, n), x.dtype) for n in x.shape[1:]]
        return jax.pure_callback(lambda x: [x[:, None, :, 0], x[:, :1]], kinds, x)

    monkeypatch.setattr(sum_squares, "of_squares", without_derivative)
    monkeypatch.setattr(limits, "ENTRIES_FOR_SUMS_KERNEL", 0)
    axes = m2.MatrixAxes(0, 1)
    tx = _moments(axes, b2=0.0)

    def total(g):
        state = tx.update({"w": g}, tx.init({"w": g}))[1]
        return jnp.sum(state.nu_row["w"]) + jnp.sum(state.nu_col["w"])

    g = jnp.asarray(normal32((64, 96)))
    got = jax.grad(total)(g)
    np.testing.assert_allclose(got, 2 * g * (1 / 96 + 1 / 64), rtol=1e-5)


SERVED = {
    "float32": ((1024, 1024), "float32", m2.MatrixAxes(0, 1), True),
    "bfloat16": ((1024, 1088), "bfloat16", m2.MatrixAxes(1, 0), True),
    "stacked": ((4, 1024, 1024), "float32", m2.MatrixAxes(-2, -1), True),
    "small": ((512, 512), "float32", m2.MatrixAxes(0, 1), False),
    "rows of 4 bytes too many": ((1024, 1025), "float32", m2.MatrixAxes(0, 1), False),
    "heads": ((1024, 8, 128), "float32", m2.MatrixAxes(0, (1, 2)), False),
    "fused": ((1024, 1536), "float32", m2.MatrixAxes(0, 1, (1024, 512)), False),
}


@pytest.mark.parametrize("shape, dtype, axes, served", SERVED.values(), ids=SERVED)
def test_where_the_kernel_runs(shape, dtype, axes, served):
    tx = _moments(axes)
    params = {"w": jax.ShapeDtypeStruct(shape, dtype)}
    state = jax.eval_shape(tx.init, params)
    with hopper.kernels(True):
        step = jax.jit(lambda g, s: tx.update(g, s)[1])
        text = step.trace(params, state).lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in text) == served
