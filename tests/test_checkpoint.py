"""A run restored by Orbax goes on as if it had never stopped."""

import jax
import optax
import pytest
from flax import nnx
from helpers import (
    SMALL,
    abstract,
    accepts,
    assert_close,
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

import muon2_optax as m2


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


def on(mesh, tree, specs):
    return {
        k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in tree.items()
    }


@every
def test_a_run_moves_to_fewer_devices(name, tmp_path):
    """Saved on 8 devices, restored on 4, then on one: the same numbers all the way."""
    specs = {"w": P("x"), "b": P()}
    shapes = {"w": (8, 16), "b": (16,)}
    params, grads = sample(0, shapes), gradients(6, shapes)
    alone = compiled(name)
    want, _, _ = run(alone, params, grads)
    state = None
    for stage, devices in enumerate((8, 4, 1)):
        mesh = jax.make_mesh(
            (devices,),
            ("x",),
            axis_types=(AxisType.Auto,),
            devices=jax.devices()[:devices],
        )
        if state is None:
            params = on(mesh, params, specs)
        shardings = m2.Shardings.of(on(mesh, sample(0, shapes), specs))
        keywords = {"shardings": shardings} if accepts(name, "shardings") else {}
        tx = make(name, **keywords)
        if state is None:
            state = tx.init(params)
        else:
            start = on(mesh, sample(0, shapes), specs)
            fresh = {"params": start, "state": tx.init(start)}
            abstract_tree = target(fresh, lambda x: x.sharding)
            restored = ocp.load(tmp_path / str(stage - 1), abstract_tree)
            params, state = restored["params"], restored["state"]
            assert params["w"].sharding.mesh.size == devices
        update = jax.jit(tx.update)
        for g in grads[2 * stage : 2 * stage + 2]:
            updates, state = update(on(mesh, g, specs), state, params)
            params = optax.apply_updates(params, updates)
        ocp.save(tmp_path / str(stage), {"params": params, "state": state})
    # The same float32 arithmetic in another order on every mesh.
    assert_close(params, want, 2e-5)


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
