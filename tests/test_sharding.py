"""On eight devices: what moves, what is computed, and that the numbers stay."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import collectives, flops, loops
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, KINDS, draw, known, mesh_of, place

import muon2_optax as m2
from muon2_optax import sharding

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


@KINDS
@pytest.mark.parametrize(
    "sizes, spec, dims",
    [
        ((1, 1), P("a", "b"), ()),
        ((2, 1), P("a", "b"), (("a",), ())),
        ((1, 2), P(("a", "b"), None), (("b",), ())),
        ((2, 2), P(None, ("b", "a")), ((), ("b", "a"))),
        ((2, 2), P(), ((), ())),
    ],
)
def test_a_leaf_is_divided_by_axes_of_several_devices_only(sizes, spec, dims, kind):
    devices = jax.devices()[: math.prod(sizes)]
    types = (kind,) * len(sizes)
    mesh = jax.make_mesh(sizes, ("a", "b"), axis_types=types, devices=devices)
    tree = place({"w": jnp.ones((4, 4))}, mesh, {"w": spec})
    place_of = sharding.locate("w", tree["w"], known(tree, kind))
    assert place_of.dims == dims
    assert place_of.undivided == (len(devices) == 1)
    assert place_of.on_mesh == (len(devices) > 1)


@pytest.mark.parametrize("count", [1, 2])
def test_without_shardings_a_leaf_is_whole_on_a_single_device_only(count, monkeypatch):
    devices = jax.devices()[:count]
    mesh = jax.make_mesh((count,), ("a",), axis_types=(AUTO,), devices=devices)
    on_mesh = place({"w": jnp.ones((4, 4))}, mesh, {"w": P("a")})["w"]
    assert sharding.locate("w", on_mesh).undivided == (count == 1)
    monkeypatch.setattr(jax, "device_count", lambda: count)
    assert sharding.locate("w", jnp.ones((4, 4))).undivided == (count == 1)
