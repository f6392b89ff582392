"""Every optimizer on a mesh of eight devices: the same numbers, stable types.

Explicit meshes carry shardings in the types (``jax.typeof``), which jit, scan and cond
compare. On Auto meshes the compiler chooses; what is asked of it is to leave a lone
matrix, and its momentum, where they were.
"""

import jax
import optax
import pytest
from helpers import (
    RULES,
    SMALL,
    assert_close,
    compile,
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

LAYOUTS = {
    "rows": {"w": P("x", None), "b": P("y")},
    "columns": {"w": P(None, "y"), "b": P()},
    "grid": {"w": P("x", "y"), "b": P("x")},
}
# Matrices that run as one batch and are sharded differently.
TOGETHER = {
    "block": {"up": P("x", "y")},
    "stack": P("x", "y", None),
    "embed": P("x", None),
    "bias": P("y"),
}


def mesh(kind):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))


def place(tree, where, specs):
    return jax.device_put(tree, jax.tree.map(lambda p: NamedSharding(where, p), specs))


def typeof(tree):
    return [(path, jax.typeof(x)) for path, x in leaves(tree)]


@every
@pytest.mark.parametrize(
    "kind, layout",
    [(AxisType.Auto, "grid"), *((AxisType.Explicit, layout) for layout in LAYOUTS)],
    ids=lambda x: str(x),
)
def test_values_and_types(name, kind, layout):
    where, specs, tx = mesh(kind), LAYOUTS[layout], make(name)
    update = compile(tx.update)
    with jax.set_mesh(where):
        params = place(sample(0, SMALL), where, specs)
        state = tx.init(params)
        start = typeof((params, params, state))
        for g in gradients(2, SMALL):
            updates, state = update(place(g, where, specs), state, params)
            params = optax.apply_updates(params, updates)
            assert typeof((params, updates, state)) == start
    for path, x in leaves((params, updates, state)):
        if ".mu[" in path or path.startswith(("[0]", "[1]")):
            want = NamedSharding(where, specs[path[-3]])
            assert x.sharding.is_equivalent_to(want, x.ndim), path
    plain = sample(0, SMALL), gradients(2, SMALL)
    want, want_state, want_updates = run(compiled(name), *plain)
    assert_close((params, updates), (want, want_updates))
    assert_close(state, want_state)


@every
def test_differently_sharded_matrices_in_one_batch(name):
    """Under cond, which refuses branches of unequal types."""
    where, tx = mesh(AxisType.Explicit), make(name, rules=RULES)
    guarded = optax.apply_if_finite(tx, 3)
    plain, one = sample(0), compiled(name, rules=RULES)
    with jax.set_mesh(where):
        params = place(plain, where, TOGETHER)
        start = guarded.init(params)
        got, state = compile(guarded.update)(params, start, params)
        assert typeof((got, state)) == typeof((params, start))
        assert typeof(jax.jit(tx.init)(params)) == typeof(tx.init(params))
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
    want, _ = compile(tx.update)(plain, tx.init(plain), plain)
    assert_close(updates, want)
