"""Hyperball: each matrix keeps its norm, whatever the dtype, the layout and the mesh.

The oracle is ``reference.hyperball``: the printed rule in float64, matrix by matrix.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import collectives, flops
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, KINDS, draw, known, mesh_of, place
from reference import hyperball, relative_error, wide

import muon2_optax as m2

# path: (shape, axes, function from the leaf to its matrices)
LAYOUTS = {
    "kernel": ((6, 10), m2.MatrixAxes(0, 1), lambda x: [x]),
    "layers": ((3, 6, 10), m2.MatrixAxes(-2, -1), list),
    "experts": (
        (2, 3, 4, 5),
        m2.MatrixAxes(-2, -1),
        lambda x: list(x.reshape(-1, *x.shape[-2:])),
    ),
    "query": ((6, 4, 5), m2.MatrixAxes(0, (1, 2)), lambda x: [x]),
    "per_head": (
        (6, 4, 5),
        m2.MatrixAxes(-3, -1),
        lambda x: [x[:, h] for h in range(x.shape[1])],
    ),
    "qkv": (
        (6, 14),
        m2.MatrixAxes(0, 1, (8, 4, 2)),
        lambda x: np.split(x, (8, 12), axis=1),
    ),
    "layers_qkv": (
        (2, 14, 6),
        m2.MatrixAxes(-1, -2, (8, 4, 2)),
        lambda x: [b for layer in x for b in np.split(layer, (8, 12), axis=0)],
    ),
    "convolution": ((3, 2, 4, 5), m2.MatrixAxes((0, 1, 2), 3), lambda x: [x]),
    "last_axis_is_a_batch": (
        (6, 5, 3),
        m2.MatrixAxes(0, 1),
        lambda x: [x[..., i] for i in range(3)],
    ),
}
RULES = m2.MatrixRules(
    tuple((f"^{name}$", axes) for name, (_, axes, _) in LAYOUTS.items())
)


def normal(shape, seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * rng.standard_normal(shape)
    return jnp.asarray(x, dtype)


def tree(seed, dtype=np.float32):
    return {k: normal(s, 100 * seed + i, dtype) for i, (k, (s, *_)) in
            enumerate(LAYOUTS.items())}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
def test_every_matrix_of_every_layout_follows_the_rule(dtype):
    """Two steps, with a rate that changes and updates of any size."""
    rates = [0.3, 0.02]
    with jax.enable_x64(dtype == np.float64):
        params, first = tree(0, dtype), tree(0, dtype)
        directions = [tree(1, dtype), jax.tree.map(lambda x: 1e4 * x, tree(2, dtype))]
        tx = m2.hyperball(lambda count: jnp.asarray(rates)[count], rules=RULES)
        state, update = tx.init(params), jax.jit(tx.update)
        for u in directions:
            updates, state = update(u, state, params)
            params = optax.apply_updates(params, updates)
    for name, (_, _, matrices) in LAYOUTS.items():
        starts, us, ends = (
            [*map(matrices, map(np.asarray, leaves))]
            for leaves in (
                [first[name]],
                [u[name] for u in directions],
                [params[name]],
            )
        )
        assert len(starts[0]) == state.radius[name].size, name
        for i, start in enumerate(starts[0]):
            want = hyperball(start, [u[i] for u in us], rates)[-1]
            # A few roundings of the parameters' dtype.
            bound = 10 * np.finfo(dtype).eps
            assert relative_error(ends[0][i], want) < bound, name
    assert int(state.count) == 2


@pytest.mark.parametrize("rate", [0.0, 1e-6, 0.9, 1.0, 30.0])
def test_small_and_large_rates(rate):
    w, u = normal((12, 7), 0), normal((12, 7), 1)
    tx = m2.hyperball(rate)
    updates, _ = tx.update({"w": u}, tx.init({"w": w}), {"w": w})
    want = hyperball(w, [u], [rate])[0] - wide(w)
    size = np.linalg.norm(wide(w))
    # float32 sums of squares tell the norm to about 1e-7 of it.
    assert np.abs(wide(updates["w"]) - want).max() < 3e-7 * size


def test_taking_all_of_a_matrix_away_stays_finite():
    w = {"w": normal((8, 8), 0)}
    tx = m2.hyperball(1.0)
    updates, _ = tx.update(w, tx.init(w), w)
    assert np.all(np.isfinite(updates["w"]))


def test_bfloat16_parameters_keep_their_norm_and_do_not_stop():
    """10,000 steps of one direction: rounding to the nearest leaves the sphere by more,
    because steps back to it are too small for bfloat16."""
    shape, rate = (32, 48), 1e-3
    start, u = normal(shape, 0), normal(shape, 1)
    tx = m2.hyperball(rate)
    params = {"w": start.astype(jnp.bfloat16)}

    def body(carry, _):
        params, state = carry
        updates, state = tx.update({"w": u}, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), jnp.linalg.norm(params["w"].astype(jnp.float32))

    run = jax.jit(lambda p: jax.lax.scan(body, (p, tx.init(p)), length=10_000))
    (params, _), norms = run(params)
    assert params["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(norms, jnp.linalg.norm(start), rtol=1e-3)
    # Each step is smaller than half a unit in the last place of most entries. Still,
    # the parameters must end where the float64 run ends, in the direction of -u.
    want = hyperball(start, [u] * 10_000, [rate] * 10_000)[-1]
    assert relative_error(params["w"], want) < 0.01


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_parameters_take_the_step_to_one_rounding(dtype):
    w, u = normal((24, 16), 3).astype(dtype), normal((24, 16), 4)
    tx = m2.hyperball(0.1)
    state = tx.init({"w": w})
    assert state.radius["w"].dtype == jnp.float32
    for given in (u, u.astype(dtype)):
        updates, _ = tx.update({"w": given}, state, {"w": w})
        assert updates["w"].dtype == given.dtype
        got = optax.apply_updates({"w": w}, updates)["w"]
        want = hyperball(w, [given], [0.1])[0]
        # Up to one unit in the last place, and the difference is rounded as well.
        unit = 1.5 * float(jnp.finfo(dtype).eps)
        size = np.maximum(np.abs(want), np.abs(wide(w)))
        assert np.all(np.abs(wide(got) - want) <= unit * size + 1e-7)


def test_a_zero_update_leaves_its_matrix():
    params = {"layers": normal((3, 6, 10), 0)}
    tx = m2.hyperball(0.1, rules=RULES)
    u = {"layers": normal((3, 6, 10), 1).at[2].set(0)}
    updates, _ = tx.update(u, tx.init(params), params)
    assert np.all(np.any(updates["layers"][:2], axis=(1, 2)))
    assert not np.any(updates["layers"][2])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("factory", [m2.hyperball, m2.muon_h])
def test_zero_in_a_jitted_init_is_nan_in_the_first_step(factory, dtype):
    """Values are not known there, and a matrix without a norm must not stay in silence.

    A zero gradient, as of a frozen leaf, still gives a zero update.
    """
    params = {"layers": normal((4, 6, 10), 0, dtype).at[1].set(0).at[3].set(0)}
    u = {"layers": normal((4, 6, 10), 1).at[2].set(0).at[3].set(0)}
    tx = factory(0.1, rules=RULES_OF_TWO)
    state = jax.jit(tx.init)(params)
    updates, _ = tx.update(u, state, params)
    bad = np.isnan(updates["layers"]).all(axis=(1, 2))
    assert bad.tolist() == [False, True, False, False]
    assert not np.any(updates["layers"][2:])
    # The step makes NaN of the parameters, so it is seen in the next loss.
    moved = optax.apply_updates(params, updates)["layers"]
    assert np.isnan(moved).any(axis=(1, 2)).tolist() == bad.tolist()
    # What the eager error advises helps here as well.
    tx = factory(0.1, radius="init", rules=RULES_OF_TWO)
    updates, _ = tx.update(u, jax.jit(tx.init)(params), params)
    size = np.linalg.norm(wide(updates["layers"][1]))
    np.testing.assert_allclose(size, 10**0.5, rtol=3e-3)  # rounded to bfloat16


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_updates_reach_their_matrix_only(bad):
    params = {"layers": normal((3, 6, 10), 0)}
    tx = m2.hyperball(0.1, rules=RULES)
    u = {"layers": normal((3, 6, 10), 1).at[1, 0, 0].set(bad)}
    updates, _ = tx.update(u, tx.init(params), params)
    finite = np.isfinite(updates["layers"]).all(axis=(1, 2))
    assert finite.tolist() == [True, False, True]


def test_zero_at_init_is_an_error_that_names_the_leaf():
    params = {"up": jnp.ones((4, 6)), "layers": normal((3, 6, 10), 0).at[1].set(0)}
    for factory in (m2.hyperball, m2.muon2_f_h):
        with pytest.raises(ValueError, match=r"zero: layers\. .*radius="):
            factory(0.1, rules=RULES_OF_TWO).init(params)
    state = m2.hyperball(0.1, "init", rules=RULES_OF_TWO).init(params)
    np.testing.assert_allclose(state.radius["layers"][1], 10**0.5, rtol=1e-6)
    np.testing.assert_allclose(state.radius["up"], 24**0.5, rtol=1e-6)
    masked = optax.masked(m2.hyperball(0.1), {"up": True, "layers": False})
    masked.init(params)


RULES_OF_TWO = m2.MatrixRules((("layers", m2.MatrixAxes(-2, -1)),))


@pytest.mark.parametrize(
    "radius, want",
    [(3.0, [3, 3, 3]), (lambda i, o: i + o / 100, [6.08, 6.04, 6.02])],
    ids=["number", "function"],
)
def test_radius_for_all_matrices(radius, want):
    params = {"qkv": jnp.zeros((6, 14))}
    tx = m2.hyperball(0.1, radius, rules=m2.MatrixRules((("qkv", RULES_QKV),)))
    state = tx.init(params)
    np.testing.assert_allclose(state.radius["qkv"], want, rtol=1e-6)
    u = {"qkv": normal((6, 14), 0)}
    updates, _ = tx.update(u, state, params)
    sides = np.split(np.asarray(updates["qkv"]), (8, 12), axis=1)
    for got, direction, r in zip(sides, np.split(u["qkv"], (8, 12), axis=1), want):
        expected = hyperball(0 * got, [direction], [0.1], r)[0]
        assert relative_error(got, expected) < 1e-6


RULES_QKV = m2.MatrixAxes(0, 1, (8, 4, 2))


@pytest.mark.parametrize("radius", ["start", -1.0, 0.0, float("inf")])
def test_radius_that_is_none(radius):
    with pytest.raises(ValueError, match="radius"):
        m2.hyperball(0.1, radius)


@pytest.mark.parametrize(
    "radius, message",
    [
        (np.float32(-2.0), "must be positive, got -2"),
        (jnp.float32(jnp.nan), "must be positive, got nan"),
        (np.ones(2), r"one number, got shape \(2,\)"),
        (lambda fan_in, fan_out: fan_out - 7.0, r"radius\(5, 7\) must be positive"),
    ],
)
def test_radius_that_is_no_positive_number(radius, message):
    with pytest.raises(ValueError, match=message):
        m2.hyperball(0.1, radius).init({"w": jnp.ones((5, 7))})


def test_parameters_of_other_updates():
    u = {"down": jnp.ones((3, 5)), "up": jnp.ones((3, 5))}
    tx = m2.hyperball(0.1)
    state = tx.init(u)
    renamed = {"down": u["down"], "wide": u["up"]}
    with pytest.raises(ValueError, match="update of 'up' .* is 'wide' of shape"):
        tx.update(u, state, renamed)
    narrow = u | {"up": jnp.ones((3, 1))}  # it would broadcast
    for some, params in ((narrow, u), (u, narrow)):
        with pytest.raises(ValueError, match=r"update of 'up' .*\(3, [15]\)"):
            tx.update(some, state, params)
    with pytest.raises(ValueError, match="2 leaves, but the parameters 1"):
        tx.update(u, state, {"down": u["down"]})


def test_updates_too_large_to_square_do_not_shrink_the_weights_unnoticed():
    w = {"w": normal((2, 6, 10), 0)}
    tx = m2.hyperball(0.1, rules=m2.MatrixRules((("w", m2.MatrixAxes(-2, -1)),)))
    u = {"w": normal((2, 6, 10), 1).at[1].multiply(1e25)}
    updates, _ = tx.update(u, tx.init(w), w)
    assert np.isfinite(updates["w"][0]).all() and np.isnan(updates["w"][1]).all()


def test_a_tree_that_is_one_array_has_a_name_in_errors():
    for w in (jnp.ones(6), jnp.ones((6, 2), int), jnp.zeros((6, 2))):
        with pytest.raises((TypeError, ValueError), match="the array itself"):
            m2.hyperball(0.1).init(w)
    with pytest.raises(ValueError, match="the array itself of shape .2, 3, 4. has no"):
        m2.muon(0.1, rules=m2.MatrixRules(strict=True)).init(jnp.ones((2, 3, 4)))
    with pytest.raises(ValueError, match="differ are the array itself of the updates"):
        m2.scale_by_momentum().update(w, m2.scale_by_momentum().init({"a": w}))


def test_injected_rate_and_radius():
    params, u = {"w": normal((6, 10), 0)}, {"w": normal((6, 10), 1)}
    tx = optax.inject_hyperparams(m2.hyperball)(learning_rate=0.1, radius=2.0)
    state = tx.init(params)
    updates, state = tx.update(u, state, params)
    got = optax.apply_updates(params, updates)["w"]
    want = hyperball(params["w"], [u["w"]], [0.1], 2.0)[0]
    assert relative_error(got, want) < 1e-6
    # One that is not positive is refused where its value is known, and seen elsewhere.
    tx = optax.inject_hyperparams(m2.hyperball)(learning_rate=0.1, radius=-2.0)
    with pytest.raises(ValueError, match="radius must be positive, got -2"):
        tx.init(params)
    updates, _ = jax.jit(tx.update)(u, jax.jit(tx.init)(params), params)
    assert np.isnan(updates["w"]).all()
    of_shape = optax.inject_hyperparams(m2.hyperball, static_args=("radius",))
    state = of_shape(0.1, lambda fan_in, fan_out: fan_in).init(params)
    assert float(state.inner_state.radius["w"]) == 6


def test_needs_the_parameters():
    tx = m2.hyperball(0.1)
    w = {"w": jnp.ones((4, 4))}
    with pytest.raises(
        ValueError, match=r"hyperball .* update\(updates, state, params"
    ):
        tx.update(w, tx.init(w))
    with pytest.raises(ValueError, match="'b' of shape"):
        tx.init({"b": jnp.ones(4)})


def test_abstract_init():
    shapes = {k: jax.ShapeDtypeStruct(s, "bfloat16") for k, (s, *_) in LAYOUTS.items()}
    state = jax.eval_shape(m2.hyperball(0.1, rules=RULES).init, shapes)
    got = {k: (r.shape, r.dtype) for k, r in state.radius.items()}
    shape = {"kernel": (), "layers": (3,), "experts": (2, 3), "query": (),
             "per_head": (4,), "qkv": (3,), "layers_qkv": (2, 3), "convolution": (),
             "last_axis_is_a_batch": (3,)}  # fmt: skip
    assert got == {k: (s, jnp.float32) for k, s in shape.items()}


def test_adam_h_trains_the_named_tables():
    """AdamW's direction on the sphere, with the matrices' rate and no decay."""
    params = {"w": normal((8, 12), 0), "lm_head": normal((12, 6), 1),
              "embed": normal((6, 12), 2), "b": jnp.zeros(12)}  # fmt: skip
    grads = [
        {k: normal(x.shape, 10 * t + i) for i, (k, x) in enumerate(params.items())}
        for t in (1, 2)
    ]
    options = {"adam_learning_rate": 0.5, "adam_weight_decay": 0.1, "adam_b2": 0.9}
    tx, plain = m2.muon_h(0.1, adam_h="lm_head", **options), m2.muon_h(0.1, **options)
    adam = optax.scale_by_adam(0.9, 0.9, 1e-8)
    state, plain_state = tx.init(params), plain.init(params)
    adam_state, directions = adam.init(params["lm_head"]), []
    got, other = params, params
    for g in grads:
        updates, state = jax.jit(tx.update)(g, state, got)
        got = optax.apply_updates(got, updates)
        updates, plain_state = jax.jit(plain.update)(g, plain_state, other)
        other = optax.apply_updates(other, updates)
        u, adam_state = adam.update(g["lm_head"], adam_state)
        directions.append(u)
    want = hyperball(params["lm_head"], directions, [0.1, 0.1])[-1]
    assert relative_error(got["lm_head"], want) < 1e-5
    for k in ("w", "embed", "b"):
        np.testing.assert_array_equal(got[k], other[k], err_msg=k)
    with pytest.raises(ValueError, match="'b'"):
        m2.muon_h(0.1, adam_h="^b$").init(params)


MESH_LEAVES = {
    "a/kernel": ((16, 32), P("a", "b")),
    "b/kernel": ((16, 32), P(None, ("a", "b"))),
    "c/kernel": ((24, 16), P("b", None)),
    "layers": ((4, 8, 16), P("a", None, "b")),
    "layers_qkv": ((2, 16, 8), P("a", "b", None)),
    "whole/kernel": ((5, 7), P()),
    "experts": ((8, 6, 4), P(("a", "b"))),
}
MESH_RULES = m2.MatrixRules(
    (
        ("layers$|experts", m2.MatrixAxes(-2, -1)),
        ("layers_qkv", m2.MatrixAxes(-1, -2, (6, 6, 4))),
    )
)


@functools.cache
def on_mesh(kind):
    mesh = mesh_of((2, 4), ("a", "b"), kind)
    shapes = {k: s for k, (s, _) in MESH_LEAVES.items()}
    specs = {k: s for k, (_, s) in MESH_LEAVES.items()}
    plain = draw(shapes, 0), draw(shapes, 1)
    return plain, tuple(place(x, mesh, specs) for x in plain)


@KINDS
def test_one_all_reduce_for_all_leaves(kind):
    (params, u), (sharded, sharded_u) = on_mesh(kind)
    tx = m2.hyperball(0.1, rules=MESH_RULES, shardings=known(sharded, kind))
    state = tx.init(sharded)
    step = jax.jit(tx.update).lower(sharded_u, state, sharded).compile()
    moved = collectives(step)
    matrices = sum(int(np.prod(r.shape)) for r in state.radius.values())
    assert {k: n for k, (n, _) in moved.items()} == {"all-reduce": 1}
    assert moved["all-reduce"][1] <= 3 * 4 * matrices
    updates, new = step(sharded_u, state, sharded)
    plain = m2.hyperball(0.1, rules=MESH_RULES)
    want, _ = plain.update(u, plain.init(params), params)
    for k in params:
        # Sums in another order.
        np.testing.assert_allclose(updates[k], want[k], atol=1e-6)
        same = updates[k].sharding.is_equivalent_to(sharded[k].sharding, u[k].ndim)
        assert same, k
        old = state.radius[k].sharding
        assert new.radius[k].sharding.is_equivalent_to(old, new.radius[k].ndim), k


def test_two_passes_and_no_copy():
    """One for the sums, one for the step: nothing else of a leaf's size is written."""
    x = {f"w{i}": jax.ShapeDtypeStruct((512, 384), jnp.float32) for i in range(3)}
    tx = m2.hyperball(0.1)
    step = jax.jit(tx.update).lower(x, jax.eval_shape(tx.init, x), x).compile()
    text = step.as_text()
    entry = text[text.index("\nENTRY") :].splitlines()
    written = [
        line
        for line in entry
        if re.search(r"= f32\[512,384\]", line) and " parameter(" not in line
    ]
    assert len(written) == len(x), written
    # Three products and sums; two products and a difference.
    assert flops(step) <= 9.1 * 3 * 512 * 384


@KINDS
def test_sixteen_bit_parameters_are_rounded_the_same_on_a_mesh(kind):
    mesh = mesh_of((2, 4), ("a", "b"), kind)
    specs = {"w": P("a", "b"), "layers": P(None, "b", "a")}
    shapes = {"w": (16, 32), "layers": (3, 8, 6)}
    params, u = draw(shapes, 0), draw(shapes, 1)
    params = {k: x.astype(jnp.bfloat16) for k, x in params.items()}
    rules = m2.MatrixRules((("layers", m2.MatrixAxes(-2, -1)),))
    plain = m2.hyperball(0.01, rules=rules)
    want, _ = jax.jit(plain.update)(u, plain.init(params), params)
    sharded, placed = place(params, mesh, specs), place(u, mesh, specs)
    tx = m2.hyperball(0.01, rules=rules, shardings=known(sharded, kind))
    got, _ = jax.jit(tx.update)(placed, tx.init(sharded), sharded)
    for k in shapes:
        # Sums in another order: an entry at its threshold may go the other way.
        assert np.mean(np.asarray(got[k]) != np.asarray(want[k])) < 0.01
        assert jax.typeof(got[k]).sharding == jax.typeof(placed[k]).sharding


@KINDS
def test_nothing_moves_for_matrices_that_are_whole(kind):
    _, (sharded, u) = on_mesh(kind)
    keys = ("whole/kernel", "experts")
    sharded, u = ({k: x[k] for k in keys} for x in (sharded, u))
    rules = m2.MatrixRules((("experts", m2.MatrixAxes(-2, -1)),))
    tx = m2.hyperball(0.1, rules=rules, shardings=known(sharded, kind))
    step = jax.jit(tx.update).lower(u, tx.init(sharded), sharded).compile()
    assert not collectives(step)


def test_auto_axes_without_shardings_give_the_same_numbers():
    (params, u), (sharded, sharded_u) = on_mesh(AUTO)
    tx = m2.hyperball(0.1, rules=MESH_RULES)
    got, _ = jax.jit(tx.update)(sharded_u, tx.init(sharded), sharded)
    want, _ = tx.update(u, tx.init(params), params)
    for k in params:
        np.testing.assert_allclose(got[k], want[k], atol=1e-6)


def test_leaves_alike_on_one_device_are_what_each_is_alone():
    """There they share programs: 11 of one kind, in groups of 8 (24 blocks)."""
    layouts = {"qkv": RULES_QKV, "layers": m2.MatrixAxes(-2, -1)}
    rules = m2.MatrixRules(tuple(layouts.items()))
    shapes = {f"qkv{i}": (6, 14) for i in range(11)}
    shapes |= {f"layers{i}": (3, 6, 10) for i in range(2)} | {"w": (6, 14)}
    params, u = draw(shapes, 0), draw(shapes, 1)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AUTO,))
    one = m2.Shardings(mesh, tuple((k, P()) for k in shapes))
    tx, plain = (m2.hyperball(0.1, rules=rules, shardings=s) for s in (one, None))
    state = tx.init(params)
    got, _ = jax.jit(tx.update)(u, state, params)
    want, _ = jax.jit(plain.update)(u, state, params)
    for k in params:
        np.testing.assert_allclose(got[k], want[k], atol=1e-6, err_msg=k)


def test_inside_shard_map_stacks_are_local():
    mesh = mesh_of((8,), ("x",), AUTO)
    params, u = draw({"layers": (8, 6, 10)}, 0), draw({"layers": (8, 6, 10)}, 1)
    tx = m2.hyperball(0.1, rules=RULES)

    def step(u, params):
        return tx.update(u, tx.init(params), params)[0]

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    assert not collectives(run.lower(u, params).compile())
    want = step(u, params)["layers"]
    np.testing.assert_allclose(run(u, params)["layers"], want, atol=1e-6)


def test_a_jitted_init_on_explicit_axes_divides_the_radii_as_the_layers():
    _, (sharded, _) = on_mesh(EXPLICIT)
    tx = m2.hyperball(0.1, rules=MESH_RULES)
    state = jax.jit(tx.init)(sharded)
    assert state.radius["layers"].sharding.spec == P("a")
    eager = tx.init(sharded)
    for k, r in eager.radius.items():
        assert jax.typeof(state.radius[k]) == jax.typeof(r)
        np.testing.assert_allclose(state.radius[k], r, rtol=1e-6)
