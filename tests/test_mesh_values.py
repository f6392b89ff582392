"""Every optimizer on a mesh of eight devices: the same numbers, stable types.

Explicit meshes carry shardings in the types (``jax.typeof``), which jit, scan and cond
compare. On Auto meshes the compiler chooses, and is asked to move nothing all the same.
"""

import contextlib

import jax
import optax
import pytest
from helpers import (
    RULES,
    SMALL,
    accepts,
    assert_close,
    compiled,
    every,
    gradients,
    leaves,
    make,
    run,
    sample,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, place

import muon2_optax as m2

LAYOUTS = {
    "rows": {"w": P("x", None), "b": P("y")},
    "columns": {"w": P(None, "y"), "b": P()},
    "grid": {"w": P("x", "y"), "b": P("x")},
}
CASES = [
    (AxisType.Auto, "grid"),
    (AxisType.Explicit, "rows"),
    (AxisType.Explicit, "columns"),
]
# Matrices that run as one batch and are sharded differently.
TOGETHER = {
    "block": {"up": P("x", "y")},
    "stack": P("x", "y", None),
    "embed": P("x", None),
    "bias": P("y"),
}
# Fields of Dion's state and of SOAP's.
SQUARE = (".q[", ".gram_in[", ".gram_out[", ".basis_in[", ".basis_out[")


def mesh(kind):
    return mesh_of((2, 4), ("x", "y"), kind)


def typeof(tree):
    return [(path, jax.typeof(x)) for path, x in leaves(tree)]


def on(where, kind):
    # Explicit axes need their mesh in context; for Auto axes, placed arrays are enough.
    return (
        jax.set_mesh(where) if kind == AxisType.Explicit else contextlib.nullcontext()
    )


@every
@pytest.mark.parametrize("kind, layout", CASES, ids=str)
def test_values_and_types(name, kind, layout):
    where, specs, tx = mesh(kind), LAYOUTS[layout], make(name)
    update = jax.jit(tx.update)
    with on(where, kind):
        params = place(sample(0, SMALL), where, specs)
        state = tx.init(params)
        start = params, params, state
        for g in gradients(2, SMALL):
            updates, state = update(place(g, where, specs), state, params)
            params = optax.apply_updates(params, updates)
            end = params, updates, state
            assert typeof(end) == typeof(start)
    # Every array stays where it was, counters too: a move compiles the next step anew.
    for (path, x), old in zip(leaves(end), jax.tree.leaves(start)):
        if kind == AxisType.Auto and any(field in path for field in SQUARE):
            continue  # what comes of whole matrices is left to the compiler
        assert x.sharding.is_equivalent_to(old.sharding, x.ndim), path
        if ".mu[" in path:
            want = NamedSharding(where, specs[path[-3]])
            assert x.sharding.is_equivalent_to(want, x.ndim), path
    plain = sample(0, SMALL), gradients(2, SMALL)
    want, want_state, want_updates = run(compiled(name), *plain)
    assert_close(end, (want, want_updates, want_state))


@every
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_differently_sharded_matrices_in_one_batch(name, kind):
    """Under cond, which refuses branches of unequal types."""
    where = mesh(kind)
    plain, one = sample(0), compiled(name, rules=RULES)
    with on(where, kind):
        params = place(plain, where, TOGETHER)
        # The types of Auto axes do not tell; without this the compiler would choose.
        auto = {"shardings": m2.Shardings.of(params)} if kind == AxisType.Auto else {}
        if auto and not accepts(name, "shardings"):
            pytest.skip("leaves the shardings of Auto axes to the compiler")
        tx = make(name, rules=RULES, **auto)
        guarded = optax.apply_if_finite(tx, 3)
        start = guarded.init(params)
        got, state = jax.jit(guarded.update)(params, start, params)
        # Optax's own counters start off the mesh.
        assert typeof(got) == typeof(params)
        assert typeof(state.inner_state) == typeof(start.inner_state)
        if kind == AxisType.Explicit:
            assert typeof(jax.jit(tx.init)(params)) == typeof(tx.init(params))
    for (path, x), old in zip(leaves(got), jax.tree.leaves(params)):
        assert x.sharding.is_equivalent_to(old.sharding, x.ndim), path
    want, want_state = one.update(plain, one.init(plain), plain)
    assert_close((got, state.inner_state), (want, want_state))


def test_without_jit():
    """On Explicit axes, by the optimizer that has every kind of stage."""
    where, specs = mesh(AxisType.Explicit), LAYOUTS["grid"]
    tx = make("muon2_f", ns_steps=1)  # operation by operation takes long
    plain = sample(0, SMALL)
    with jax.set_mesh(where):
        params = place(plain, where, specs)
        updates, state = tx.update(params, tx.init(params), params)
        assert typeof(updates) == typeof(params)
        assert typeof(state) == typeof(tx.init(params))
    want, _ = jax.jit(tx.update)(plain, tx.init(plain), plain)
    assert_close(updates, want)
