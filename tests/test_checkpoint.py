"""A run restored by Orbax goes on as if it had never stopped."""

import jax
import optax
import pytest
from flax import nnx
from helpers import (
    SMALL,
    abstract,
    assert_equal,
    compiled,
    every,
    gradients,
    leaves,
    make,
    run,
    sample,
)
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp


def target(tree, sharding):
    """What Orbax restores into."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x)), tree
    )


def resume(tx, params, state, grads):
    for g in grads:
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@every
def test_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    """Bit by bit, restored into what a new process knows: shapes, from eval_shape."""
    tx = compiled(name, mu_dtype="bfloat16")
    params, grads = sample(0, SMALL), gradients(3, SMALL)
    params, state, _ = run(tx, params, grads[:2])
    saved = {"params": params, "state": state}
    ocp.save(tmp_path / "step", saved)
    start = abstract(params)
    shapes = {"params": start, "state": jax.eval_shape(tx.init, start)}
    where = SingleDeviceSharding(jax.devices()[0])
    restored = ocp.load(tmp_path / "step", target(shapes, lambda x: where))
    assert_equal(restored, saved)
    assert_equal(
        resume(tx, restored["params"], restored["state"], grads[2:]),
        resume(tx, params, state, grads[2:]),
    )


def filled(tree):
    """Every leaf with values of its own."""
    flat, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(x + i for i, x in enumerate(flat, 1))


@every
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_shardings_come_back(name, kind, tmp_path):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
    tx = make(name)
    with jax.set_mesh(mesh):
        placed = {"w": P("x", "y"), "b": P("y")}
        params = {
            k: jax.device_put(x, NamedSharding(mesh, placed[k]))
            for k, x in sample(0, {"w": (8, 16), "b": (16,)}).items()
        }
        state = filled(tx.init(params))
        ocp.save(tmp_path / "step", state)
        shapes = target(state, lambda x: x.sharding)
        restored = ocp.load(tmp_path / "step", shapes)
        assert_equal(restored, state)
    for (path, x), want in zip(leaves(restored), jax.tree.leaves(state)):
        assert jax.typeof(x) == jax.typeof(want), path
        assert x.sharding.is_equivalent_to(want.sharding, x.ndim), path


class Net(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(8, 12, rngs=nnx.Rngs(0))


@every
def test_nnx_state_comes_back(name, tmp_path):
    def build():
        model = Net()
        return model, nnx.Optimizer(model, make(name), wrt=nnx.Param)

    state = filled(nnx.state(build()))
    ocp.save(tmp_path / "step", nnx.to_pure_dict(state))
    fresh = build()
    values = nnx.state(fresh)
    shapes = target(nnx.to_pure_dict(values), lambda x: x.sharding)
    nnx.replace_by_pure_dict(values, ocp.load(tmp_path / "step", shapes))
    nnx.update(fresh, values)
    assert_equal(nnx.state(fresh), state)
