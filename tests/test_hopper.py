"""When programs use the kernels: lowered for CUDA, and the size of stacks."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernels import PLAN, needs_kernel  # noqa: F401

import muon2_optax as m2
from muon2_optax.arrays import limits
from muon2_optax.execution import on_device
from muon2_optax.kernels import hopper
from muon2_optax.schedules import plans


def _lowered(on, shapes, **options):
    def fn(*xs):
        with hopper.kernels(on):
            return on_device.orthogonalize(xs, PLAN, **options)

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


@pytest.mark.parametrize(
    "shape, dtype, axes, taken",
    [
        ((4096, 4096), "float32", m2.MatrixAxes(0, 1), True),
        ((4096, 4096), "bfloat16", m2.MatrixAxes(1, 0), True),
        ((3, 4096, 4096), "float16", m2.MatrixAxes(-2, -1), True),
        ((128, 128), "float32", m2.MatrixAxes(0, 1), False),  # too small
        ((4096, 4096), "float64", m2.MatrixAxes(0, 1), False),
        ((4096, 4096), "complex64", m2.MatrixAxes(0, 1), False),
        ((4096, 4096), "float32", m2.MatrixAxes(0, 1, (2048, 2048)), False),
        ((4096, 4096, 3), "float32", m2.MatrixAxes(0, 1), False),
        ((4092, 4096), "float32", m2.MatrixAxes(0, 1), False),  # 8 rows are copied
        ((4096, 4128), "float32", m2.MatrixAxes(0, 1), True),  # and 128 bytes
        ((4096, 4128), "float16", m2.MatrixAxes(0, 1), False),
    ],
    ids=str,
)
def test_leaves_whose_sums_the_kernel_takes(shape, dtype, axes, taken, monkeypatch):
    monkeypatch.setattr(hopper, "available", lambda: True)
    resolved = axes.resolve(shape)
    assert hopper.takes_sums(shape, jnp.dtype(dtype), resolved) == taken


def test_stacks_are_bounded_and_alike():
    half = jnp.dtype(jnp.float16)
    size = functools.partial(hopper.stack_size, plan=PLAN, dtype=half)
    # Matrices of the same m share their kernels.
    assert size(72, (2048, 5472)) == size(96, (2048, 2048)) == (33, 33)
    few = [size(n, (2048, 2048)).panels for n in (4, 5, 7, 9, 13, 17)]
    assert few == [4, 8, 8, 16, 16, 33]
    aol = plans.resolve("turbo", 3)
    assert hopper.stack_size(72, (2048, 5472), aol, half) is None


@pytest.mark.parametrize(
    "most, m, size", [(20, 2048, 20), (23, 2048, 22), (32, 768, 31), (1, 4096, 1)]
)
def test_stacks_leave_few_multiprocessors_idle(most, m, size):
    """20 x 36 squares of 256 take the 66 clusters of two 11 rounds, 22 take 12; 31 x 21
    squares of 128 take the 132 multiprocessors 5, 32 would take 6."""
    assert hopper.cheapest(most, m) == size


@pytest.mark.parametrize(
    "count, m, n, size",
    [
        (96, 2048, 2048, (33, 33)),
        (72, 2048, 5472, (33, 33)),  # 11 matrices of 3 panels
        (24, 2560, 6912, (18, 18)),
        (24, 2048, 8192, (80, 20)),  # 8 in 33 panels would leave much idle
        (5, 2048, 5472, (24, 8)),
        (99, 768, 768, (31, 31)),  # no more than are joined at once
        (99, 768, 3072, (124, 31)),
        (96, 1024, 1024, (32, 32)),
        (64, 1024, 4096, (128, 32)),
        (64, 4096, 4096, (5, 5)),
        (64, 4096, 11008, (15, 5)),
        (84, 3072, 8192, (27, 9)),
        (80, 5120, 13824, (9, 3)),
        (1, 8192, 8192, (1, 1)),
        (3, 8192, 28672, (4, 1)),  # one matrix, whatever its width
        (8, 1024, 70000, (414, 6)),
        (24, 16384, 65536, (4, 1)),
    ],
)
def test_stacks_hold_whole_matrices(count, m, n, size):
    assert hopper.stack_size(count, (m, n), PLAN, jnp.dtype(jnp.float16)) == size


@pytest.mark.parametrize("m", range(768, 8193, 128))
@pytest.mark.parametrize("ratio", [1, 1.25, 2, 8 / 3, 3.5, 4, 7.5])
def test_stacks_are_filled_and_bounded(m, ratio):
    n, room = int(m * ratio), 1.4e9 / (2 * m * m)
    each = -(-n // m)
    stack = hopper.stack_size(200, (m, n), PLAN, jnp.dtype(jnp.float16))
    members = stack.panels // each
    assert members == 1 or stack.panels + 4 * stack.grams <= room
    assert members * each >= 0.9 * stack.panels and stack.grams >= members
    # No cheaper with as many at once as find room beside four panels.
    most = max(1, min(limits.MATRICES_IN_STACK, int(room / (4 + max(4, each)))))
    best = min(hopper.cost(k, m) for k in range(most, most // 2, -1))
    assert hopper.cost(members, m) <= 1.05 * best


KERNELS = """
import sys
import jax, jax.numpy as jnp
from muon2_optax.schedules import plans
from muon2_optax.arrays import limits
from muon2_optax.kernels import hopper
from muon2_optax.execution import on_device

def all_widths(*xs):
    square, wide = xs[:40], xs[40:]
    plan = plans.resolve("keller", 3)
    return [on_device.orthogonalize(part, plan) for part in (square, wide)]

m, n = map(int, sys.argv[1:])
shapes = [(m, m)] * 40 + [(m, n)] * 9 + [(n, m)] * 8
xs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
with hopper.kernels(True):
    text = jax.jit(all_widths).trace(*xs).lower(lowering_platforms=("cuda",)).as_text()
print(text.count("custom_call @mosaic_gpu"))
"""


@needs_kernel
@pytest.mark.parametrize("m, n, count", [(2048, 5472, 1), (1024, 4096, 3)])
def test_kernels_for_all_matrices_of_a_height(m, n, count):
    """Each takes a GPU's compiler a second."""
    done = subprocess.run(
        [sys.executable, "-c", KERNELS, str(m), str(n)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(count)]


def test_importing_the_package_does_not_import_pallas():
    code = (
        "import sys, muon2_optax; "
        "sys.exit(any(m.startswith('jax.experimental.pallas') for m in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("version", [(0, 9, 1), (0, 10, 7)])
def test_the_version_of_jax_that_is_needed_is_said(version, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert not hopper.available()
    with pytest.raises(RuntimeError, match=r"need JAX 0\.11 or later.*kernels\(True\)"):
        _lowered(True, [(9, 896, 1056)])
    # What stays on stock products needs no kernel.
    assert "dot_general" in _lowered(True, [(9, 640, 1056)])
