"""On eight devices: values that travel in 16 bits, in lots, in blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AUTO, KINDS, STACKS, draw, known, mesh_of, place
from reference import keller, relative_error

import muon2_optax as m2
from muon2_optax.arrays import limits


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
    monkeypatch.setattr(limits, "BYTES_ON_MESH", 3 * 64 * 128 * 4)
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
