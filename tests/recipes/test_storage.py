"""State on disk and in the host's memory; ``docs/recipes.md`` shows these functions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import muon2_optax as m2


def trained(steps):
    tx = m2.muon2_f(0.02, adam_learning_rate=3e-3)
    rng = np.random.default_rng(0)
    params = {
        "kernel": jnp.asarray(rng.standard_normal((16, 8)), "f4"),
        "bias": jnp.zeros(8),
    }
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(steps):
        updates, state = update(jax.tree.map(jnp.sin, params), state, params)
        params = optax.apply_updates(params, updates)
    return tx, params, state


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)


def save_and_load(folder, tx, params, state):
    """Orbax's v1 API."""
    from orbax.checkpoint import v1 as ocp

    ocp.save(folder / "10", {"params": params, "state": state})

    # In a new process: the shapes of a fresh start, and where each array belongs.
    like = {"params": params, "state": tx.init(params)}
    return ocp.load(folder / "10", jax.tree.map(ocp_shape, like))


def ocp_shape(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def test_orbax(tmp_path):
    tx, params, state = trained(3)
    got = save_and_load(tmp_path, tx, params, state)
    assert_same(got, {"params": params, "state": state})


def save_and_load_nnx(folder, optimizer, fresh):
    """An ``nnx.Optimizer``, as the pure dictionary of its state; the model likewise."""
    from orbax.checkpoint import v1 as ocp

    ocp.save(folder / "10", nnx.to_pure_dict(nnx.state(optimizer)))

    # In a new process: a fresh optimizer says what there is and where it belongs.
    state = nnx.state(fresh)
    like = jax.tree.map(ocp_shape, nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, ocp.load(folder / "10", like))
    nnx.update(fresh, state)


def test_orbax_with_nnx(tmp_path):
    def begin():
        model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        tx = m2.muon2_f(0.02, adam_learning_rate=3e-3)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    (model, optimizer), (_, fresh) = begin(), begin()
    for _ in range(2):
        optimizer.update(model, jax.tree.map(jnp.sin, nnx.state(model, nnx.Param)))
    save_and_load_nnx(tmp_path, optimizer, fresh)
    assert int(fresh.step[...]) == 2
    assert_same(nnx.state(fresh), nnx.state(optimizer))


def save_and_load_with_manager(folder, tx, params, state):
    """Orbax's CheckpointManager, which older training code uses."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(
        folder, options=ocp.CheckpointManagerOptions(max_to_keep=3)
    ) as manager:
        saved = {"params": params, "state": state}
        manager.save(10, args=ocp.args.StandardSave(saved))
        manager.wait_until_finished()

        fresh = {"params": params, "state": tx.init(params)}
        like = jax.tree.map(ocp_shape, fresh)
        step = manager.latest_step()
        return manager.restore(step, args=ocp.args.StandardRestore(like))


def test_checkpoint_manager(tmp_path):
    tx, params, state = trained(3)
    got = save_and_load_with_manager(tmp_path, tx, params, state)
    assert_same(got, {"params": params, "state": state})


def step_with_state_on_the_host(tx, params, gradient, steps):
    """The state waits in pinned host memory and visits the device for the update."""
    device = jax.devices()[0]
    here = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    state = jax.device_put(tx.init(params), host)

    @jax.jit
    def step(params, state):
        state = jax.device_put(state, here)
        updates, state = tx.update(gradient(params), state, params)
        return optax.apply_updates(params, updates), jax.device_put(state, host)

    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def test_state_in_pinned_host_memory():
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if not {"pinned_host", "device"} <= kinds:
        pytest.skip(f"this backend has {sorted(kinds)} only")
    tx, want, want_state = trained(3)
    _, start, _ = trained(0)
    params, state = step_with_state_on_the_host(
        tx, start, lambda params: jax.tree.map(jnp.sin, params), 3
    )
    for x in jax.tree.leaves(state):
        assert x.sharding.memory_kind == "pinned_host"
    for got, expected in ((params, want), (state, want_state)):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            # The same arithmetic in another program.
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
