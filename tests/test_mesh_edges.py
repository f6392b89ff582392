"""What once went wrong on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import collectives
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, KINDS, draw, known, mesh_of, place
from reference import keller, relative_error

import muon2_optax as m2

WITH_NORMS = ["muon2", "muon2_f", "normuon", "adamuon"]


def fused(splits):
    return m2.MatrixRules((("qkv", m2.MatrixAxes(0, 1, splits)),))


@KINDS
@pytest.mark.parametrize("name", WITH_NORMS)
def test_blocks_that_the_mesh_does_not_divide(name, kind):
    """Only the leaf is a multiple of the devices; its blocks are not."""
    rules = fused((6, 5, 5))
    grads = draw({"qkv": (8, 16)})
    sharded = place(grads, mesh_of((8,), ("x",), kind), {"qkv": P(None, "x")})
    plain = m2.REGISTRY[name](0.1, rules=rules)
    tx = m2.REGISTRY[name](0.1, rules=rules, shardings=known(sharded, kind))
    want, _ = plain.update(grads, plain.init(grads), grads)
    with jax.set_mesh(sharded["qkv"].sharding.mesh):
        state = jax.jit(tx.init)(sharded)
    got, _ = jax.jit(tx.update)(sharded, state, sharded)
    np.testing.assert_allclose(got["qkv"], want["qkv"], atol=1e-5)


@KINDS
@pytest.mark.parametrize("name", WITH_NORMS)
def test_norms_of_blocks_move_no_matrices(name, kind):
    """Blocks that are cut out of a divided leaf would move, each leaf for itself."""
    rules = fused((256, 128, 128))
    grads = draw({f"qkv{i}": (64, 512) for i in range(4)})
    sharded = place(
        grads, mesh_of((8,), ("x",), kind), dict.fromkeys(grads, P(None, "x"))
    )
    tx = m2.REGISTRY[name](0.1, rules=rules, shardings=known(sharded, kind))
    step = jax.jit(tx.update).lower(sharded, tx.init(sharded), sharded).compile()
    moved = collectives(step)
    assert set(moved) <= {"all-to-all", "all-reduce"} and moved["all-to-all"][0] == 2
    # Statistics of rows and norms, 4 bytes for each of three blocks.
    assert moved.get("all-reduce", (0, 0))[1] <= 4 * 4 * (3 * 64 + 6)


@pytest.mark.parametrize("wrapped", [lambda p: {"params": p}, lambda p: [p]])
def test_shardings_of_another_tree_are_refused(wrapped):
    """Once, leaves that they did not know were silently replicated."""
    params = draw({f"w{i}": (16, 32) for i in range(4)})
    specs = dict.fromkeys(params, P("x"))
    sharded = place(params, mesh_of((8,), ("x",), AUTO), specs)
    tx = m2.muon2(0.1, shardings=m2.Shardings.of(sharded))
    state = m2.muon2(0.1).init(wrapped(sharded))
    message = r"do not know '.*w0', only 'w0', 'w1', 'w2', \.\.\.; read them from"
    with pytest.raises(ValueError, match=message):
        jax.jit(tx.init)(wrapped(sharded))
    with pytest.raises(ValueError, match=message):
        tx.update(wrapped(sharded), state, wrapped(sharded))


def test_leaves_on_no_mesh_are_known_to_be_replicated():
    params = draw({"w": (16, 32), "v": (8, 8)})
    sharded = place({"w": params["w"]}, mesh_of((8,), ("x",), AUTO), {"w": P("x")})
    known = m2.Shardings.of(sharded | {"v": params["v"]})
    assert known.spec("w") == P("x") and known.spec("v") == P()


@pytest.mark.parametrize(
    "build",
    [
        lambda s: m2.muon2(0.1, shardings=s),
        lambda s: m2.newton_schulz_orthogonalize(shardings=s),
        lambda s: m2.factorized_second_moment(shardings=s),
    ],
)
def test_shardings_of_a_wrong_type_are_refused_at_once(build):
    with pytest.raises(TypeError, match=r"must be Shardings\.of\(params\)"):
        build({"w": P("x")})


@KINDS
@pytest.mark.parametrize("ns_dtype", ["float32", "float16"])
@pytest.mark.parametrize("scale", [1e-50, 1e50])
def test_float64_leaves_are_normalized_before_they_are_narrowed(scale, ns_dtype, kind):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        grads = {f"w{i}": jnp.asarray(rng.standard_normal((16, 32))) for i in range(3)}
        sharded = place(
            grads, mesh_of((8,), ("x",), kind), dict.fromkeys(grads, P("x"))
        )
        tx = m2.newton_schulz_orthogonalize(ns_dtype=ns_dtype)
        want, _ = tx.update(grads, tx.init(grads))
        tx = m2.newton_schulz_orthogonalize(
            ns_dtype=ns_dtype, shardings=known(sharded, kind)
        )
        grads = jax.tree.map(lambda x: x * scale, sharded)
        got, _ = jax.jit(tx.update)(grads, tx.init(grads))
        # Three steps in that dtype.
        atol = {"float32": 1e-5, "float16": 2e-2}[ns_dtype]
        for k in want:
            np.testing.assert_allclose(got[k], want[k], atol=atol)


@pytest.mark.parametrize("name", sorted(m2.REGISTRY))
def test_scan_inside_the_user_s_own_shard_map(name):
    """What starts a state must differ between devices as its updates do."""
    tx = m2.REGISTRY[name](0.1)

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(params, state, params)
        return (optax.apply_updates(params, updates), state), None

    def two(w):
        start = ({"w": w}, tx.init({"w": w}))
        return jax.lax.scan(body, start, length=2)[0][0]["w"]

    x = draw({"w": (32, 8)})["w"]
    mesh = mesh_of((8,), ("x",), AUTO)
    rows = P("x")
    local = jax.shard_map(two, mesh=mesh, in_specs=rows, out_specs=rows)
    got = jax.jit(local)(x)
    np.testing.assert_allclose(got[:4], jax.jit(two)(x[:4]), atol=1e-5)


def test_statistics_in_a_partial_shard_map():
    """What is local along some axes may still be divided along others."""
    mesh = mesh_of((2, 4), ("data", "model"), EXPLICIT)
    grads = draw({"w": (64, 128)})
    sharded = place(grads, mesh, {"w": P("model")})
    tx = m2.factorized_second_moment()

    def step(g):
        return tx.update(g, tx.init(g))[0]

    with jax.set_mesh(mesh):
        part = jax.shard_map(step, in_specs=(P(),), out_specs=P(), axis_names={"data"})
        got = jax.jit(part)(sharded)
    np.testing.assert_allclose(got["w"], step(grads)["w"], rtol=1e-5)


def test_shardings_of_an_explicit_mesh_serve_auto_axes():
    """In ``auto_axes``, and where the same devices form a mesh of Auto axes."""
    explicit = mesh_of((8,), ("x",), EXPLICIT)
    grads = draw({"w": (16, 32), "v": (16, 32)})
    sharded = place(grads, explicit, dict.fromkeys(grads, P("x")))
    tx = m2.muon(0.1, ns_steps=1, shardings=m2.Shardings.of(sharded))
    state = tx.init(sharded)
    plain = m2.muon(0.1, ns_steps=1)
    want, _ = jax.jit(plain.update)(grads, plain.init(grads), grads)
    out = jax.tree.map(lambda x: x.sharding, (sharded, state))
    with jax.set_mesh(explicit):
        step = jax.jit(jax.sharding.auto_axes(tx.update, out_sharding=out))
        got, _ = step(sharded, state, sharded)
    np.testing.assert_allclose(got["w"], want["w"], atol=1e-5)
    auto = NamedSharding(mesh_of((8,), ("x",), AxisType.Auto), P("x"))
    moved = jax.device_put(grads, auto)
    got, _ = jax.jit(tx.update)(moved, jax.jit(tx.init)(moved), moved)
    np.testing.assert_allclose(got["w"], want["w"], atol=1e-5)


LEAVES = {"w": (16, 32), "t": (32, 16), "v": (16, 32), "s": (2, 16, 32), "r": (16, 16)}
SPECS = {"w": P("x"), "t": P("x"), "v": P(None, "x"), "s": P(None, "x"), "r": P()}


@pytest.mark.parametrize(
    "dtype, kind",
    [
        ("float16", EXPLICIT),
        *(
            pytest.param(dtype, kind, marks=pytest.mark.slow)
            for dtype, kind in (("float16", AUTO), ("bfloat16", AUTO), ("f4", EXPLICIT))
        ),
    ],
)
def test_gradients_through_an_update(dtype, kind):
    """They were zero, without a word, where pieces travel in 16 bits."""
    grads, weights = draw(LEAVES), draw(LEAVES, 1)
    mesh = mesh_of((8,), ("x",), kind)
    sharded, ways = place(grads, mesh, SPECS), place(weights, mesh, SPECS)
    rules = m2.MatrixRules(((r"", m2.MatrixAxes(-2, -1)),))

    def derivatives(shardings, g, way):
        tx = m2.newton_schulz_orthogonalize(
            3, rules=rules, ns_dtype=dtype, shardings=shardings
        )
        run = lambda g: tx.update(g, optax.EmptyState())[0]  # noqa: E731
        forward = jax.jvp(run, (g,), (way,))[1]
        return forward, jax.vjp(run, g)[1](way)[0]

    want = jax.jit(lambda g, w: derivatives(None, g, w))(grads, weights)
    with jax.set_mesh(mesh):
        got = jax.jit(lambda g, w: derivatives(known(sharded, kind), g, w))(
            sharded, ways
        )
    # Both are the plain path's, from 16-bit products in another order.
    eps = float(jnp.finfo(dtype).eps)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        scale = float(jnp.abs(y).max())
        assert scale > 0
        np.testing.assert_allclose(x, y, atol=64 * eps * scale)


@KINDS
@pytest.mark.parametrize(
    "spec", [P("x"), P(None, "y"), P(None, None, "x"), P("y", "x")]
)
def test_the_function_alone(spec, kind):
    """Once, it raised where Explicit axes divide a matrix's own axes."""
    xs = draw({"w": (8, 16, 24)})
    x = place(xs, mesh_of((4, 2), ("x", "y"), kind), {"w": spec})["w"]
    run = jax.jit(functools.partial(m2.newton_schulz, ns_steps=5))
    got = run(x)
    assert got.sharding.is_equivalent_to(x.sharding, x.ndim)
    # Rounding to float32 (6e-8) times the slope 3.4^5 = 485 of five steps at 0.
    assert relative_error(got, keller(xs["w"], 5)) < 4e-5
    if kind == EXPLICIT and any(spec[1:]):
        assert collectives(run.lower(x).compile())["all-to-all"][0] == 2


@pytest.mark.parametrize("read_from", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@KINDS
def test_shardings_of_an_abstract_mesh(kind, read_from):
    """Its type says less of the devices than that of the mesh which runs."""
    grads = draw({"w": (16, 24)})
    sharded = place(grads, mesh_of((4, 2), ("x", "y"), kind), {"w": P("x", "y")})
    abstract = AbstractMesh((4, 2), ("x", "y"), axis_types=(read_from,) * 2)
    shardings = m2.Shardings.of({"w": NamedSharding(abstract, P("x", "y"))})
    tx = m2.muon2(0.1, shardings=shardings)
    with jax.set_mesh(sharded["w"].sharding.mesh):
        got, _ = jax.jit(tx.update)(sharded, jax.jit(tx.init)(sharded), sharded)
    plain = m2.muon2(0.1)
    want, _ = plain.update(grads, plain.init(grads), grads)
    assert got["w"].sharding.is_equivalent_to(sharded["w"].sharding, 2)
    np.testing.assert_allclose(got["w"], want["w"], atol=1e-5)
