"""On eight devices: states and statistics stay where their parameters are."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import collectives, count_compilations
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, KINDS, STACKS, draw, known, mesh_of, place

import muon2_optax as m2

PARAMS = {
    "embed": ((32, 16), P("x", None)),
    "up/kernel": ((16, 64), P("x", None)),
    "down/kernel": ((64, 16), P(None, "x")),
    "stack": ((8, 16, 24), P("x", None, None)),
    "bias": ((16,), P()),
}


def params_on(mesh):
    tree = draw({k: s for k, (s, _) in PARAMS.items()})
    return tree, place(tree, mesh, {k: s for k, (_, s) in PARAMS.items()})


def shardings_of(tree):
    def spec(x):
        entries = list(x.sharding.spec)
        while entries and entries[-1] is None:  # P("x", None) and P("x") are the same
            entries.pop()
        return x.shape, x.dtype, x.sharding.mesh.axis_names, tuple(entries)

    return jax.tree.map(spec, tree)


@KINDS
@pytest.mark.parametrize(
    "name", ["muon", "muon2", "muon2_f", "normuon", "adamuon", "muon2_f_h"]
)
def test_state_keeps_its_sharding_and_the_step_compiles_once(name, kind):
    mesh = mesh_of((8,), ("x",), kind)
    tree, sharded = params_on(mesh)
    tx = m2.REGISTRY[name](0.1, rules=STACKS, shardings=known(sharded, kind))
    single = m2.REGISTRY[name](0.1, rules=STACKS)
    traces = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        traces.append(None)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = jax.tree.map(jnp.copy, sharded), tx.init(sharded)
    alone, alone_state = tree, single.init(tree)
    before = shardings_of(state)
    for i in range(3):
        grads = draw({k: s for k, (s, _) in PARAMS.items()}, seed=i + 1)
        placed = place(grads, mesh, {k: s for k, (_, s) in PARAMS.items()})
        with count_compilations() as compilations:
            params, state = step(params, state, placed)
        assert len(compilations) == (1 if i == 0 else 0)
        updates, alone_state = jax.jit(single.update)(grads, alone_state, alone)
        alone = optax.apply_updates(alone, updates)
    assert len(traces) == 1
    assert shardings_of(state) == before
    assert shardings_of(params) == shardings_of(sharded)
    for k in tree:
        np.testing.assert_allclose(params[k], alone[k], atol=2e-5, rtol=0)


@KINDS
@pytest.mark.parametrize(
    "name", ["muon", "muon2", "muon2_f", "normuon", "adamuon", "muon2_f_h"]
)
def test_a_jitted_init_places_the_state_as_an_eager_one(name, kind):
    """Zeros depend on no parameter: the compiler would put them all on one device."""
    mesh = mesh_of((8,), ("x",), kind)
    _, sharded = params_on(mesh)
    tx = m2.REGISTRY[name](0.1, rules=STACKS, shardings=known(sharded, kind))
    # jit drops the parameters, which nothing reads, and with them their mesh: on
    # Explicit axes JAX then asks for an ambient one.
    with jax.set_mesh(mesh) if kind == EXPLICIT else contextlib.nullcontext():
        state = jax.jit(tx.init)(sharded)
    assert shardings_of(state) == shardings_of(tx.init(sharded))


@KINDS
def test_statistics_have_the_reduced_sharding(kind):
    mesh = mesh_of((2, 4), ("a", "b"), kind)
    params = place(draw({"w": (16, 32)}), mesh, {"w": P("a", "b")})
    state = m2.factorized_second_moment().init(params)
    assert state.nu_row["w"].sharding.spec == P("a")
    assert state.nu_col["w"].sharding.spec == P("b")
    assert state.mu["w"].sharding.spec == P("a", "b")


@KINDS
@pytest.mark.parametrize(
    "spec", [P("x", None), P(None, "x"), P("x", "y"), P()], ids=str
)
def test_statistics_of_long_sides_take_one_sum_over_devices(spec, kind):
    """Rows are averaged in groups inside each device's share, or not at all."""
    mesh = mesh_of((4, 2), ("x", "y"), kind)
    grads = draw({"w": (256, 128), "v": (192, 256)})
    sharded = place(grads, mesh, {"w": spec, "v": spec})
    tx = m2.factorized_second_moment(shardings=known(sharded, kind))
    plain = m2.factorized_second_moment()
    want, _ = plain.update(grads, plain.init(grads))
    state = tx.init(sharded)
    step = jax.jit(tx.update).lower(sharded, state).compile()
    moved = collectives(step)
    # Statistics of the sides that are summed over devices, and their means.
    assert set(moved) == ({"all-reduce"} if spec != P() else set()), moved
    assert sum(b for _, b in moved.values()) <= 4 * (256 + 192 + 128 + 256 + 4)
    got, _ = step(sharded, state)
    for k, w in want.items():
        np.testing.assert_allclose(got[k], w, rtol=1e-5)


def test_the_user_s_own_shard_map_sees_local_matrices():
    mesh = mesh_of((8,), ("x",), AUTO)
    tx = m2.newton_schulz_orthogonalize(3, rules=STACKS)
    stack = draw({"stack": (8, 16, 32)})["stack"]
    step = jax.jit(
        jax.shard_map(
            lambda g: tx.update({"stack": g}, optax.EmptyState())[0]["stack"],
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P("x"),
        )
    )
    want = tx.update({"stack": stack}, optax.EmptyState())[0]["stack"]
    np.testing.assert_allclose(step(stack), want, atol=1e-5)
    assert not collectives(step.lower(stack).compile())


@KINDS
def test_scan_and_accumulation_over_sharded_steps(kind):
    mesh = mesh_of((8,), ("x",), kind)
    tree, sharded = params_on(mesh)
    tx = optax.MultiSteps(
        m2.muon2(0.1, rules=STACKS, shardings=known(sharded, kind)), every_k_schedule=2
    )
    single = optax.MultiSteps(m2.muon2(0.1, rules=STACKS), every_k_schedule=2)
    specs = {k: s for k, (_, s) in PARAMS.items()}

    def run(tx, params, grads):
        def body(carry, _):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, tx.init(params)), length=4)[0][0]

    grads = draw({k: s for k, (s, _) in PARAMS.items()}, seed=3)
    have = jax.jit(lambda p, g: run(tx, p, g))(sharded, place(grads, mesh, specs))
    want = jax.jit(lambda p, g: run(single, p, g))(tree, grads)
    for k in tree:
        np.testing.assert_allclose(have[k], want[k], atol=2e-5, rtol=0)


def test_shardings_of_reads_shapes_and_refuses_what_it_cannot_read():
    mesh = mesh_of((8,), ("x",), AUTO)
    sharding = NamedSharding(mesh, P("x", None))
    shapes = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)}
    assert m2.Shardings.of(shapes).specs == (("w", P("x", None)),)
    assert m2.Shardings.of({"w": sharding}) == m2.Shardings.of(shapes)
    hash(m2.Shardings.of(shapes))
    assert not callable(m2.Shardings.of(shapes))
    with pytest.raises(ValueError, match="NamedShardings on one mesh; found none"):
        m2.Shardings.of({"w": np.zeros((8, 8))})
    other = NamedSharding(mesh_of((2, 4), ("a", "b"), AUTO), P("a"))
    with pytest.raises(ValueError, match="found v: .*w: "):
        m2.Shardings.of({"w": sharding, "v": other})
