"""The iteration on the pieces of matrices that a mesh divides."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernels import PLAN, emulated_products, stack  # noqa: F401
from reference import relative_error

import muon2_optax as m2
from muon2_optax.execution import on_mesh
from muon2_optax.kernels import hopper, newton_schulz


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
    run_shards = newton_schulz.run_shards

    def counted(values, *rest):
        taken.append(values.shape[:2])
        return run_shards(values, *rest)

    monkeypatch.setattr(newton_schulz, "run_shards", counted)
    monkeypatch.setattr(hopper, "stack_size", lambda count, *_: count)

    def run_on_cuda(fn, xs, ns_dtype, kernels):
        return fn(*xs, dtype=jnp.dtype(ns_dtype), kernels=True)

    monkeypatch.setattr(on_mesh, "run_per_platform", run_on_cuda)
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
    xs = [stack(matrix, i, np.float32) * 10.0 ** (5 * i - 8) for i in range(5)]
    xs[3][:] = 0
    done = _divided(xs, mesh, spec, steps)
    assert set(on_pieces) == {grid}
    for x, got in zip(xs, done):
        # Five steps of the Gram form multiply float16's 5e-4 by up to 3.4^2.
        error = relative_error(got, reference.keller(x, steps))
        assert error < (3e-3, 2e-2)[steps > 3]


def test_a_bad_entry_spoils_its_own_matrix_only(on_pieces):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    xs = [stack((256, 320), i, np.float32) for i in range(4)]
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
def test_which_pieces_are_taken(piece, grid, takes):
    half = jnp.dtype(jnp.float16)
    assert hopper.takes_shards(8, piece, grid, PLAN, half) is takes
