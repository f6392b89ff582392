"""Edges where something once went wrong: each test is a fault that must not return."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muon2_optax as m2


def draw(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def run(tx, grads, steps=1):
    state = tx.init(grads)
    for _ in range(steps):
        updates, state = tx.update(grads, state, grads)
    return updates, state


def finite(tree):
    return all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("x", None), P(None, "x")])
def test_one_sided_scaling_of_a_square_matrix_does_not_depend_on_the_sharding(
    spec, kind
):
    """Turning a square matrix for the exchange would scale its other side."""
    g = {"w": draw(16, 16) * jnp.geomspace(1, 30, 16)[:, None]}
    want = m2.newton_schulz(g["w"], 4, "turbo")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    placed = jax.device_put(g, NamedSharding(mesh, spec))
    tx = m2.newton_schulz_orthogonalize(
        4, "turbo", shardings=m2.Shardings.of(placed) if kind == AxisType.Auto else None
    )
    have = jax.jit(lambda g: tx.update(g, optax.EmptyState())[0])(placed)
    np.testing.assert_allclose(have["w"], want, atol=1e-5)


@pytest.mark.parametrize("size", [1e20, 1e25, 1e30, 3e37])
@pytest.mark.parametrize("name", ["muon", "muon2", "muon2_f", "normuon", "dion"])
def test_large_finite_gradients_stay_finite_on_tall_matrices(name, size):
    """Sums over many rows overflow where each of their terms does not."""
    if name == "dion":  # its momentum is a sum, which leaves float32 by itself
        size = min(size, 1e36)
    g = {"w": draw(300, 9) * jnp.float32(size)}
    updates, state = run(m2.REGISTRY[name](1.0), g, steps=3)
    assert finite(updates) and finite(state)
    assert float(jnp.linalg.norm(updates["w"])) > 0.1


def test_leaves_whose_paths_print_alike_are_told_apart():
    tree = {"a/k": draw(4, 8), "a": {"k": draw(8)}}
    assert m2.MatrixRules().labels(tree) == {"a/k": "matrix", "a": {"k": "adam"}}
    tree = {"a/k": draw(8), "a": {"k": draw(4, 8)}}
    assert m2.MatrixRules().labels(tree) == {"a/k": "adam", "a": {"k": "matrix"}}
    run(m2.muon2_f(0.1), tree)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    specs = {
        "a/k": NamedSharding(mesh, P()),
        "a": {"k": NamedSharding(mesh, P(None, "x"))},
    }
    with pytest.raises(ValueError, match="two leaves share the path 'a/k'"):
        m2.Shardings.of(specs)


def test_hidden_projections_called_output_are_matrices():
    tree = {
        "layer": {"attention": {"output": {"dense": {"kernel": draw(8, 8)}}}},
        "output": {"kernel": draw(8, 20)},
    }
    labels = m2.MatrixRules().labels(tree)
    assert labels["layer"]["attention"]["output"]["dense"]["kernel"] == "matrix"
    assert labels["output"]["kernel"] == "adam"


def test_periodic_branches_agree_in_mixed_precision():
    g = {"b": draw(8), "w": draw(8, 8, dtype=jnp.bfloat16)}
    for tx in (
        m2.muon_bp(1.0, block_scale=jnp.float32(0.5)),
        optax.inject_hyperparams(m2.muon_bp)(1.0),
    ):
        updates, _ = run(tx, g, steps=2)
        assert updates["w"].dtype == jnp.bfloat16 and finite(updates)


def test_partly_manual_shard_map_on_explicit_axes():
    mesh = jax.make_mesh((2, 4), ("d", "t"))
    tx = m2.muon2(1.0)

    def step(p):
        return tx.update(p, tx.init(p), p)[0]

    g = {"w": draw(16, 24), "b": draw(16)}
    placed = jax.device_put(g, NamedSharding(mesh, P(None)))
    with jax.set_mesh(mesh):
        run_step = jax.shard_map(
            step, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"d"}
        )
        have = jax.jit(run_step)(placed)
    want = step(g)
    np.testing.assert_allclose(have["w"], want["w"], atol=1e-5)


@pytest.mark.parametrize("mu_dtype", [None, "float32"])
@pytest.mark.parametrize("name", ["muon", "dion"])
def test_sums_of_float16_gradients_saturate(name, mu_dtype):
    """Heavy-ball sums of 20 gradients leave float16 where the gradients do not."""
    g = {"w": (jnp.sign(draw(8, 8)) * 3e4).astype(jnp.float16)}
    extra = {"dampening": 0.0} if name == "muon" else {}
    updates, state = run(m2.REGISTRY[name](1.0, mu_dtype=mu_dtype, **extra), g, steps=6)
    assert finite(updates) and finite(state)
    bad = {"w": g["w"].at[0, 0].set(jnp.inf)}
    updates, _ = run(m2.REGISTRY[name](1.0, mu_dtype=mu_dtype, **extra), bad)
    assert not finite(updates), "saturation must not hide an infinite gradient"


@pytest.mark.parametrize("argument", ["mu_dtype", "nu_dtype", "ns_dtype"])
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "no such", "int8"])
def test_only_floating_dtypes(argument, dtype):
    with pytest.raises(TypeError, match=argument):
        tx = m2.muon2(0.1, **{argument: dtype})
        run(tx, {"w": draw(4, 4)})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: m2.dion(1.0, rank_fraction=0.0), "rank_fraction"),
        (lambda: m2.dion(1.0, rank_fraction=-0.5), "rank_fraction"),
        (lambda: m2.muon_bp(1.0, period=0), "period"),
        (lambda: m2.muon_bp(1.0, period=2.5), "period"),
        (lambda: m2.muon(1.0, ns_coeffs=(np.nan, 1.0, 1.0)), "finite"),
        (lambda: m2.teon(1.0, joint="("), "joint"),
        (lambda: m2.teon(1.0, group_size=0), "group_size"),
        (lambda: m2.MatrixAxes(0, 1, (-4, 12)), "out_splits"),
        (lambda: m2.scale_by_shape(["spectral"]), "shape scale"),
    ],
)
def test_values_without_a_meaning_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: m2.muon2(0.1, rules=(("w", m2.MatrixAxes(0, 1)),)), "rules must be"),
        (lambda: m2.MatrixRules(((b"w", None),)), "a pattern is a str"),
        (lambda: run(m2.dion(0.1), {"w": jnp.ones((4, 4), jnp.int32)}), "'w' is int32"),
        (lambda: run(m2.muon2(0.1), {"w": jnp.ones((4, 4), int)}), "'w' is int"),
    ],
)
def test_types_without_a_meaning_are_refused(build, message):
    with pytest.raises(TypeError, match=message):
        build()


def test_numpy_integers_are_axes():
    assert m2.MatrixAxes(np.int64(0), np.int64(1), [np.int32(4)]) == m2.MatrixAxes(
        0, 1, (4,)
    )


def test_stale_shardings_name_the_leaf():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    placed = jax.device_put({"w": draw(16, 24)}, NamedSharding(mesh, P("x")))
    tx = m2.newton_schulz_orthogonalize(shardings=m2.Shardings.of(placed))
    for other in (draw(6, 8), draw(8)):
        with pytest.raises(ValueError, match="'w'"):
            tx.update({"w": other}, optax.EmptyState())
    with pytest.raises(TypeError, match="Shardings.of"):
        m2.newton_schulz_orthogonalize(shardings=placed).update(
            placed, optax.EmptyState()
        )


def test_complex_leaves_keep_their_width_under_mu_dtype():
    z = draw(6, 4) + 1j * draw(6, 4, seed=1)
    _, state = run(m2.muon2(0.1, mu_dtype="bfloat16"), {"w": z.astype(jnp.complex64)})
    assert (
        optax.tree.get(state.inner_states["matrix"], "mu")["w"].dtype == jnp.complex64
    )
