"""Equalized rows and columns, against the formulas in ``reference``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives
from jax.sharding import PartitionSpec as P
from meshes import KINDS, draw, mesh_of, place
from reference import equalize_by_roots, equalize_by_sweeps, relative_error

import muon2_optax as m2

FORMULAS = {"roots": equalize_by_roots, "sweeps": equalize_by_sweeps}
forms = pytest.mark.parametrize("form", FORMULAS)
RULES = m2.MatrixRules(
    (
        ("layers", m2.MatrixAxes(-1, -2)),
        ("qkv", m2.MatrixAxes(0, 1, (8, 4, 2))),
        ("query", m2.MatrixAxes(0, (1, 2))),
    )
)


def uneven(shape, seed=0, dtype=np.float32):
    """Rows and columns of sizes from 0.01 to 100, some of them zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * rng.standard_normal(shape)
    for axis, n in enumerate(shape):
        size = 10.0 ** rng.uniform(-1, 1, n)
        x = x * size.reshape([n if a == axis else 1 for a in range(len(shape))])
    x[..., 1, :] = 0
    return jnp.asarray(x, dtype)


def apply(form, tree):
    tx = m2.equilibrate(form, rules=RULES)
    return jax.jit(tx.update)(tree, tx.init(tree))[0]


@forms
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_every_matrix_for_itself(form, dtype):
    shapes = {"w": (6, 10), "layers": (3, 6, 10), "qkv": (6, 14), "query": (6, 4, 5)}
    tree = {k: uneven(s, i, dtype) for i, (k, s) in enumerate(shapes.items())}
    got, formula = apply(form, tree), FORMULAS[form]
    stored = {k: np.asarray(x) for k, x in tree.items()}
    want = {
        "w": formula(stored["w"]),
        "layers": np.stack([formula(x.T).T for x in stored["layers"]]),
        "qkv": np.concatenate(
            [formula(x) for x in np.split(stored["qkv"], (8, 12), axis=1)], axis=1
        ),
        "query": formula(stored["query"].reshape(6, 20)).reshape(6, 4, 5),
    }
    for k in tree:
        assert relative_error(got[k], want[k]) < 3e-6, k
        assert got[k].dtype == tree[k].dtype


@forms
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_size_drops_out_and_zero_stays(form, size):
    x = uneven((6, 10))
    got = apply(form, {"w": x * np.float32(size), "v": jnp.zeros((4, 4))})
    assert relative_error(got["w"], FORMULAS[form](x)) < 3e-6
    assert not np.any(got["v"])


@forms
@KINDS
def test_on_a_mesh_only_sums_travel(form, kind):
    mesh = mesh_of((2, 4), ("a", "b"), kind)
    tree = draw({"w": (32, 64), "qkv": (16, 14), "layers": (2, 8, 16)})
    specs = {"w": P("a", "b"), "qkv": P("b", "a"), "layers": P("a", "b")}
    tx = m2.equilibrate(form, rules=RULES)
    sharded = place(tree, mesh, specs)
    step = jax.jit(lambda g: tx.update(g, tx.init(g))[0]).lower(sharded).compile()
    assert set(collectives(step)) == {"all-reduce"}
    got, want = step(sharded), apply(form, tree)
    for k in tree:
        np.testing.assert_allclose(got[k], want[k], rtol=1e-5)
        assert got[k].sharding.is_equivalent_to(sharded[k].sharding, tree[k].ndim)


def test_unknown_form():
    with pytest.raises(ValueError, match="unknown form 'rows'"):
        m2.equilibrate("rows")
    with pytest.raises(ValueError, match="'b' of shape"):
        tx = m2.equilibrate()
        tx.update({"b": jnp.ones(3)}, tx.init({}))
