"""On eight devices: what moves, what is computed, and that the numbers stay."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import collectives, flops, loops
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, KINDS, draw, known, mesh_of, place
from reference import keller, relative_error

import muon2_optax as m2
from muon2_optax import exchange

RULES = m2.MatrixRules(
    (
        ("stack|expert", m2.MatrixAxes(-2, -1)),
        ("qkv", m2.MatrixAxes(0, (1, 2))),
        ("out", m2.MatrixAxes((0, 1), 2)),
        ("fused", m2.MatrixAxes(0, 1, (16, 16, 32))),
    )
)


def many(n, name, shape, spec):
    return {f"{name}{i}": (shape, spec) for i in range(n)}


# name: (leaves, mesh shape, mesh axes, collectives expected as {kind: count})
TWO = {"all-to-all": 2}
CASES = {
    "rows": (many(8, "w", (64, 64), P("x", None)), (8,), "x", TWO),
    "columns": (many(8, "w", (64, 128), P(None, "x")), (8,), "x", TWO),
    "square rows and columns travel together": (
        many(8, "q", (64, 64), P("x", None)) | many(8, "o", (64, 64), P(None, "x")),
        (8,),
        "x",
        TWO,
    ),
    "up and down travel together": (
        many(4, "u", (64, 128), P("x", None)) | many(4, "d", (128, 64), P(None, "x")),
        (8,),
        "x",
        TWO,
    ),
    "fsdp x tensor": (many(8, "w", (64, 128), P("a", "b")), (2, 4), "ab", TWO),
    "both axes on one side": (
        many(8, "w", (64, 128), P(("a", "b"), None)),
        (2, 4),
        "ab",
        TWO,
    ),
    "axis of size 1": (many(8, "w", (64, 128), P("a", "b")), (1, 8), "ab", TWO),
    "stack on its layer axis": (
        {"stack": ((8, 16, 32), P("x", None, None))},
        (8,),
        "x",
        {},
    ),
    "two stacks on their layer axes": (
        many(2, "stack", (8, 16, 32), P("x", None, None)),
        (8,),
        "x",
        {},
    ),
    "experts on the expert axis": (
        {
            "expert": ((8, 16, 32), P("x")),
            "expert_layers": ((2, 8, 16, 24), P(None, "x")),
        },
        (8,),
        "x",
        {},
    ),
    "experts also divided inside": (
        {"expert": ((4, 8, 16, 32), P("a", None, None, "b"))},
        (2, 4),
        "ab",
        TWO,
    ),
    "stack divided inside": ({"stack": ((8, 16, 32), P(None, "x"))}, (8,), "x", TWO),
    "dense general": (
        many(8, "qkv", (64, 8, 16), P(None, "b", None)),
        (2, 4),
        "ab",
        TWO,
    ),
    "head dimension divided": (
        many(8, "qkv", (64, 8, 16), P(None, None, "b")),
        (2, 4),
        "ab",
        TWO,
    ),
    "fused, blocks across devices": (
        many(8, "fused", (32, 64), P("a", "b")),
        (2, 4),
        "ab",
        TWO,
    ),
    "count that does not divide": (
        many(11, "w", (64, 128), P("x", None)),
        (8,),
        "x",
        TWO,
    ),
    "one matrix alone": (
        {"w": ((64, 128), P("x", None))},
        (8,),
        "x",
        {"all-gather": 1},
    ),
    "replicated": (many(16, "w", (64, 128), P()), (8,), "x", {"all-gather": 1}),
    "fewer replicated than devices": (
        many(3, "w", (64, 128), P()),
        (8,),
        "x",
        {"all-to-all": 1, "all-gather": 1},
    ),
    "dimension that does not divide": ({"w": ((10, 12), P())}, (8,), "x", {}),
    "two shapes": (
        many(8, "a", (64, 64), P("x", None)) | many(8, "b", (64, 128), P("x", None)),
        (8,),
        "x",
        {"all-to-all": 4},
    ),
}


@functools.cache
def compiled_case(name, kind, ns_dtype=None):
    leaves, shape, axes, expected = CASES[name]
    tree = draw({k: s for k, (s, _) in leaves.items()})
    mesh = mesh_of(shape, tuple(axes), kind)
    sharded = place(tree, mesh, {k: spec for k, (_, spec) in leaves.items()})
    tx = m2.newton_schulz_orthogonalize(
        3, ns_dtype=ns_dtype, rules=RULES, shardings=known(sharded, kind)
    )
    step = jax.jit(lambda g: tx.update(g, optax.EmptyState())[0])
    return step.lower(sharded).compile(), tree, sharded, expected


@KINDS
@pytest.mark.parametrize("name", CASES)
def test_collectives_and_values(name, kind):
    compiled, tree, sharded, expected = compiled_case(name, kind)
    got = {k: count for k, (count, _) in collectives(compiled).items()}
    assert got == expected
    assert not loops(compiled)
    single = m2.newton_schulz_orthogonalize(3, rules=RULES)
    want = single.update(tree, optax.EmptyState())[0]
    have = compiled(sharded)
    for k in tree:
        # Same float32 arithmetic in another order; three steps amplify it 40 times.
        scale = float(jnp.abs(want[k]).max())
        np.testing.assert_allclose(have[k], want[k], atol=1e-5 * scale, rtol=0)
        assert have[k].sharding.is_equivalent_to(sharded[k].sharding, have[k].ndim)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize(
    "name", ["rows", "fsdp x tensor", "up and down travel together"]
)
def test_bytes_are_two_passes_over_the_share(name, dtype):
    compiled, tree, _, _ = compiled_case(name, AUTO, dtype)
    devices, elements = 8, sum(x.size for x in tree.values())
    _, moved = collectives(compiled)["all-to-all"]
    # Results of the two all-to-alls: each the device's share, of which f = 7/8 comes
    # from others. float16 adds two numbers a piece for its range.
    ideal = 2 * elements * dtype(0).dtype.itemsize / devices
    assert ideal <= moved <= 1.1 * ideal


@pytest.mark.parametrize("spec", [P("a", None), P("a", "b"), P(("a", "b"), None)])
def test_every_device_computes_its_share_only(spec):
    # Large enough for the products to outweigh what is elementwise.
    shapes = {f"w{i}": (192, 256) for i in range(8)}
    mesh = mesh_of((8, 1) if spec == P("a", None) else (2, 4), ("a", "b"), EXPLICIT)
    tree = {
        k: jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, spec))
        for k, s in shapes.items()
    }
    tx = m2.newton_schulz_orthogonalize(3)
    step = jax.jit(lambda g: tx.update(g, optax.EmptyState())[0])
    alone = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    whole = flops(step.lower(alone).compile())
    assert flops(step.lower(tree).compile()) <= 1.05 * whole / 8


@KINDS
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bit_travel_keeps_the_range(kind, dtype):
    """Values far outside float16 arrive: each piece carries its own scale."""
    shapes = {f"w{i}": (16, 32) for i in range(8)}
    tree = draw(shapes)
    scales = dict(zip(tree, (1e-30, 1e-12, 1e-5, 1.0, 1e5, 1e12, 1e30, 0.0)))
    tree = {k: x * scales[k] for k, x in tree.items()}
    mesh = mesh_of((8,), ("x",), kind)
    sharded = place(tree, mesh, dict.fromkeys(tree, P("x", None)))
    tx = m2.newton_schulz_orthogonalize(
        3, ns_dtype=dtype, shardings=known(sharded, kind)
    )
    have = jax.jit(lambda g: tx.update(g, optax.EmptyState())[0])(sharded)
    want = m2.newton_schulz_orthogonalize(3).update(tree, optax.EmptyState())[0]
    assert float(jnp.abs(have["w7"]).max()) == 0.0
    for k in list(tree)[:7]:
        error = np.linalg.norm(have[k] - want[k]) / np.linalg.norm(want[k])
        # Three steps at 8 (11) bits, relative to the whole matrix.
        assert error < (0.06 if dtype == jnp.bfloat16 else 0.01), k


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bit_travel_costs_no_precision(dtype):
    """Pieces of very different size, stacks, tall and lone matrices, against float64.

    On its way a value is rounded once more, by half a unit: a small part of what three
    iterations in that precision lose anyhow.
    """
    shapes = {f"w{i}": (64, 128) for i in range(9)} | {"t": (128, 64), "one": (64, 256)}
    shapes["stack"] = (5, 64, 128)
    tree = draw(shapes)
    tree["w0"] = tree["w0"].at[:8].mul(1e6)  # one device holds nearly all of it
    tree["w1"] = tree["w1"].at[:40].set(0)  # and half of them nothing of this one
    mesh = mesh_of((2, 4), ("a", "b"), AUTO)
    specs = dict.fromkeys(tree, P("a", "b")) | {"stack": P(None, "a", "b")}
    sharded = place(tree, mesh, specs)
    errors = []
    for grads, known_shardings in ((tree, None), (sharded, m2.Shardings.of(sharded))):
        tx = m2.newton_schulz_orthogonalize(
            3, ns_dtype=dtype, rules=STACKS, shardings=known_shardings
        )
        done = jax.jit(lambda g, tx=tx: tx.update(g, optax.EmptyState())[0])(grads)
        errors.append({k: relative_error(done[k], keller(tree[k], 3)) for k in tree})
    for k in tree:
        assert errors[1][k] < 1.25 * errors[0][k], (k, errors)


@KINDS
def test_lots_that_bound_the_memory_move_two_by_two(kind, monkeypatch):
    """Three matrices at a time on each of eight devices, of seven: 24, 24, 8."""
    tree = draw({f"w{i}": (64, 128) for i in range(56)})
    mesh = mesh_of((8,), ("x",), kind)
    sharded = place(tree, mesh, dict.fromkeys(tree, P("x")))
    monkeypatch.setattr(exchange, "LOT", 3 * 64 * 128 * 4)
    tx = m2.newton_schulz_orthogonalize(3, shardings=known(sharded, kind))
    step = jax.jit(lambda g: tx.update(g, optax.EmptyState())[0])
    compiled = step.lower(sharded).compile()
    assert {k: n for k, (n, _) in collectives(compiled).items()} == {"all-to-all": 6}
    want = m2.newton_schulz_orthogonalize(3).update(tree, optax.EmptyState())[0]
    have = compiled(sharded)
    for k in tree:
        scale = float(jnp.abs(want[k]).max())
        np.testing.assert_allclose(have[k], want[k], atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize(
    "count, stacked, dtype, lots",
    [
        (40, False, "float16", 1),
        (96, False, "float16", 3),
        (96, True, "float16", 1),
        (8, False, "float16", 1),
        (96, False, "bfloat16", 1),
    ],
)
def test_lots_of_as_many_leaves_as_one_pass_joins(count, stacked, dtype, lots):
    """Cut for GPUs only, and where every device keeps matrices in every lot."""
    mesh = mesh_of((8,), ("x",), AxisType.Explicit)
    sharding = NamedSharding(mesh, P("x"))
    leaf = jax.ShapeDtypeStruct((32, 48), jnp.float32, sharding=sharding)
    tree = {f"w{i}": leaf for i in range(count)}
    if stacked:
        sharding = NamedSharding(mesh, P(None, "x"))
        shape = (count, 32, 48)
        tree = {"stack": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)}
    tx = m2.newton_schulz_orthogonalize(1, rules=STACKS, ns_dtype=dtype)
    compiled = jax.jit(lambda g: tx.update(g, optax.EmptyState())[0]).lower(tree)
    found = {k: n for k, (n, _) in collectives(compiled.compile()).items()}
    assert found == {"all-to-all": 2 * lots}


STACKS = m2.MatrixRules((("stack", m2.MatrixAxes(-2, -1)),))

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


@contextlib.contextmanager
def count_compilations():
    """Collects the durations of XLA's compilations while it is open."""
    taken = []

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            taken.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield taken
    finally:
        jax.monitoring.clear_event_listeners()


@KINDS
@pytest.mark.parametrize("name", ["muon", "muon2", "muon2_f", "normuon", "adamuon"])
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
@pytest.mark.parametrize("name", ["muon", "muon2", "muon2_f", "normuon", "adamuon"])
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


def test_optax_contrib_muon_needs_many_more():
    """The rival, on the case of the first row of our table: what we are compared to."""
    leaves, shape, axes, _ = CASES["rows"]
    mesh = mesh_of(shape, tuple(axes), AUTO)
    tree = draw({k: s for k, (s, _) in leaves.items()})
    sharded = place(tree, mesh, {k: s for k, (_, s) in leaves.items()})
    tx = optax.contrib.scale_by_muon(
        weight_dimension_numbers=jax.tree.map(
            lambda _: optax.contrib.MuonDimensionNumbers(), sharded
        )
    )
    state = tx.init(sharded)
    compiled = jax.jit(lambda g, s: tx.update(g, s)[0]).lower(sharded, state).compile()
    count = sum(n for n, _ in collectives(compiled).values())
    moved = sum(b for _, b in collectives(compiled).values())
    ours = collectives(compiled_case("rows", AUTO)[0])
    assert count > 20 * sum(n for n, _ in ours.values())
    assert moved > 5 * sum(b for _, b in ours.values())
    assert math.isfinite(moved)


def _on_eight(tree, spec, tx):
    mesh = mesh_of((8,), ("x",), AxisType.Explicit)
    sharded = place(tree, mesh, dict.fromkeys(tree, spec))
    return jax.jit(lambda g: tx.update(g, optax.EmptyState())[0])(sharded)


@pytest.mark.parametrize("count", [6, 7])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_layers_in_the_middle_of_a_leaf(dtype, count):
    """Transposed stacks, the last of them zeros: XLA for CPUs once refused them."""
    tree = draw({f"w{i}": (64, 3, 64) for i in range(count)})
    rules = m2.MatrixRules((("w", m2.MatrixAxes(-3, -1)),))
    tx = m2.newton_schulz_orthogonalize(3, rules=rules, ns_dtype=dtype)
    done = _on_eight(tree, P("x"), tx)
    for k in tree:
        for i in range(3):
            want = keller(np.asarray(tree[k])[:, i], 3)
            # bfloat16 rounds by 4e-3, which three steps multiply.
            tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
            assert relative_error(done[k][:, i], want) < tolerance


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=str)
def test_blocks_of_a_fused_leaf_are_matrices_of_their_own(spec):
    """In float16: one far smaller than the others, and one that is not finite."""
    rules = m2.MatrixRules((("w", m2.MatrixAxes(0, 1, out_splits=(64, 64, 64))),))
    tree = draw({"w0": (64, 192), "w1": (64, 192)})
    tree["w0"] = tree["w0"].at[:, :64].multiply(1e-9)
    tree["w1"] = tree["w1"].at[3, 70].set(jnp.nan)
    tx = m2.newton_schulz_orthogonalize(3, rules=rules, ns_dtype=jnp.float16)
    done = _on_eight(tree, spec, tx)
    for k, x in tree.items():
        for block in range(3):
            part = slice(64 * block, 64 * block + 64)
            got = np.asarray(done[k])[:, part]
            if np.isfinite(x[:, part]).all():
                # float16 rounds by 5e-4; small singular values multiply that.
                assert relative_error(got, keller(x[:, part], 3)) < 1e-2
            else:
                assert np.isnan(got).all()
