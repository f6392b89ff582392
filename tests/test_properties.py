"""Properties that hold for any shape, setting and gradient: seeded random draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from histories import run
from reference import relative_error

import muon2_optax as m2
from muon2_optax import MatrixAxes, MatrixRules

CORE = {"muon": m2.muon, "muon2": m2.muon2, "muon2_f": m2.muon2_f}
every_core = pytest.mark.parametrize("name", CORE)
draws = pytest.mark.parametrize("seed", range(3))

STACK = MatrixRules((("w", MatrixAxes(-2, -1)),))


@functools.cache
def _build(name, **kw):
    """An optimizer without eps, where it has one; cached, as its compilations are."""
    return CORE[name](1.0, **({} if name == "muon" else {"eps": 0.0}), **kw)


def _run(tx, grads):
    """The updates of one leaf "w", stacked over the steps."""
    return np.asarray(run(tx, grads)[0])


def _shape(rng):
    m, n = (int(2 ** rng.uniform(0, 5)) for _ in range(2))
    return max(m, 2), max(n, 2)


def _gradients(rng, shape, steps=5, dtype=np.float32):
    """Rows and columns of very different sizes, as in layers of a network."""
    size = rng.lognormal(size=(shape[-2], 1)) * rng.lognormal(size=shape[-1])
    return (rng.standard_normal((steps, *shape)) * size).astype(dtype)


# --- whole optimizers against the algorithms --------------------------------------


@draws
@every_core
def test_follows_its_algorithm(name, seed):
    """Random shape, decay rates, eps, number of steps and options; ten updates."""
    rng = np.random.default_rng(100 + seed)
    grads = _gradients(rng, _shape(rng), 10, np.float64)
    rate = float(rng.uniform(1e-3, 0.1))
    options = dict(
        b1=float(rng.uniform(0, 0.99)), nesterov=bool(seed % 2), steps=3 + seed
    )
    if name != "muon":
        options |= dict(
            b2=float(rng.uniform(0.3, 0.999)),
            eps=float(10 ** rng.uniform(-10, -1)),
            bias_correction=bool(seed),
        )
    want = getattr(reference, name)(grads, rate, **options)
    options["ns_steps"] = options.pop("steps")
    with jax.enable_x64(True):
        got = _run(CORE[name](rate, **options), grads)
    for t, (u, expected) in enumerate(zip(got, want)):
        # Double rounding times the slope 3.4^5 of the iteration at 0.
        assert relative_error(u, expected) < 1e-11, (t, grads.shape, options)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)], ids=str)
def test_first_step_of_muon2_sees_the_signs_only(shape):
    grads = _gradients(np.random.default_rng(0), shape, 1)
    got = _run(_build("muon2"), grads)[0]
    want = reference.spectral(*shape) * reference.keller(np.sign(grads[0]), 3)
    assert relative_error(got, -want) < 1e-5  # float32


@every_core
def test_size_of_the_step(name):
    """Spectral norm of about the rate times the factor, whatever the gradients."""
    for seed, shape in enumerate([(6, 10), (10, 6), (8, 8)]):
        grads = _gradients(np.random.default_rng(seed), shape)
        factor = reference.spectral(*shape)
        if name == "muon":
            factor = max(1.0, factor)
        norms = np.linalg.norm(_run(_build(name), grads), 2, axis=(1, 2)) / factor
        # Keller's triple sends the largest values into [0.68, 1.21].
        assert np.all((0.65 < norms) & (norms < 1.25)), (shape, norms)


@every_core
def test_descends(name):
    """<update, gradient> < 0 on the first step, where momentum has no say."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        grads = _gradients(rng, (6, 10), 1)
        assert np.sum(_run(_build(name), grads)[0] * grads[0]) < 0


# --- symmetries -------------------------------------------------------------------


@draws
@every_core
def test_transposed_storage_changes_nothing(name, seed):
    """A torch-style (out, in) weight steps as the (in, out) kernel does."""
    rng = np.random.default_rng(200 + seed)
    grads = _gradients(rng, _shape(rng))
    plain = _run(_build(name), grads)
    torch = MatrixRules((("w", MatrixAxes(1, 0)),))
    turned = _run(_build(name, rules=torch), np.swapaxes(grads, 1, 2))
    assert relative_error(np.swapaxes(turned, 1, 2), plain) < 1e-4  # float32


@draws
@every_core
def test_transposed_problem_has_the_transposed_direction(name, seed):
    rng = np.random.default_rng(300 + seed)
    grads = _gradients(rng, _shape(rng))
    tx = _build(name, shape_scale="none")
    turned = _run(tx, np.swapaxes(grads, 1, 2))
    assert relative_error(np.swapaxes(turned, 1, 2), _run(tx, grads)) < 1e-4  # float32


@every_core
def test_permutations_and_signs_pass_through(name):
    """Renaming neurons, or flipping their signs, renames and flips their updates."""
    rng = np.random.default_rng(4)
    grads = _gradients(rng, (6, 10))
    rows, columns = rng.permutation(6), rng.permutation(10)
    left, right = rng.choice([-1, 1], (6, 1)), rng.choice([-1, 1], 10)

    def act(x):
        return (x * left * right)[:, rows][:, :, columns].astype(np.float32)

    tx = _build(name)
    assert relative_error(_run(tx, act(grads)), act(_run(tx, grads))) < 1e-4  # float32


def test_rotations_pass_through_muon_but_not_muon2():
    """Muon depends on singular vectors only; a second moment sees the axes."""
    rng = np.random.default_rng(5)
    grads = _gradients(rng, (6, 10))
    q, _ = np.linalg.qr(rng.standard_normal((6, 6)))

    def error(name):
        tx = _build(name)
        turned = _run(tx, np.float32(q @ grads))
        return relative_error(turned, q @ _run(tx, grads))

    assert error("muon") < 1e-4  # float32
    assert error("muon2") > 0.1 and error("muon2_f") > 0.1


@draws
def test_muon2_ignores_the_size_of_each_entry(seed):
    """M / sqrt(V) is the same whatever constant each entry is multiplied by."""
    rng = np.random.default_rng(400 + seed)
    grads = _gradients(rng, (6, 10))
    size = np.float32(10 ** rng.uniform(-6, 6, (6, 10)))
    tx = _build("muon2")
    assert relative_error(_run(tx, grads * size), _run(tx, grads)) < 1e-4  # float32


@pytest.mark.parametrize("name, reach", [("muon", 90), ("muon2", 40), ("muon2_f", 40)])
def test_powers_of_two_change_no_bit(name, reach):
    """1e-27 to 1e27 without a second moment, 1e-12 to 1e12 with its squares."""
    grads = _gradients(np.random.default_rng(6), (6, 10))
    tx = _build(name)
    base = _run(tx, grads)
    for exponent in (-reach, -7, 7, reach):
        np.testing.assert_array_equal(_run(tx, np.ldexp(grads, exponent)), base)


# --- many leaves ------------------------------------------------------------------


@every_core
def test_leaves_do_not_see_one_another(name):
    """A tree of equal, transposed, stacked and 16-bit shapes, and each leaf alone."""
    rng = np.random.default_rng(7)
    shapes = {
        "a": (6, 10),
        "b": (10, 6),
        "c": (3, 6, 10),
        "d": (2, 2, 10, 6),
        "e": (6, 10),
        "f": (4, 4),
        "g": (1, 6),
        "h": (6, 1),
    }
    half = {"e": jnp.bfloat16, "f": jnp.float16}
    tree = {
        k: jnp.asarray(_gradients(rng, s, 1)[0], half.get(k, jnp.float32))
        for k, s in shapes.items()
    }
    rules = MatrixRules((("", MatrixAxes(-2, -1)),))
    tx = CORE[name](1.0, rules=rules)
    updates = jax.jit(lambda g: tx.update(g, tx.init(g), g)[0])(tree)
    oracle = getattr(reference, name)
    for k, got in updates.items():
        assert got.dtype == tree[k].dtype
        got, grads = np.float32(got), np.float32(tree[k])
        for index in np.ndindex(grads.shape[:-2]):
            want = oracle([grads[index]], 1.0)[0]
            # float32; half a unit of 8 bits in the 16-bit leaves, on the way in
            # (M / sqrt(V) is rounded to the gradient's dtype) and on the way out.
            bound = 2e-2 if k in half else 1e-4
            assert relative_error(got[index], want) < bound, (k, index)


@every_core
def test_stack_equals_single_matrices(name):
    rng = np.random.default_rng(8)
    grads = _gradients(rng, (3, 6, 10))
    together = _run(_build(name, rules=STACK), grads)
    alone = _build(name)
    for i in range(3):
        assert relative_error(together[:, i], _run(alone, grads[:, i])) < 1e-5


@every_core
def test_stack_members_do_not_reach_the_others(name):
    """Not one bit, whatever happens to a member."""
    rng = np.random.default_rng(9)
    grads = _gradients(rng, (3, 6, 10))
    tx = _build(name, rules=STACK)
    base = _run(tx, grads)
    for change in (0.0, 1e8, np.nan, np.inf):
        changed = grads.copy()
        changed[:, 1] *= np.float32(change)
        got = _run(tx, changed)
        np.testing.assert_array_equal(got[:, [0, 2]], base[:, [0, 2]])
        if change == 0:
            assert not np.any(got[:, 1])


# --- axes -------------------------------------------------------------------------


def _random_axes(rng):
    """A shape and axes on it, in any order, some of them split, some negative."""
    rank = int(rng.integers(2, 6))
    shape = tuple(int(n) for n in rng.integers(1, 5, rank))
    order = rng.permutation(rank)
    ins = 1 + int(rng.integers(0, rank - 1))
    outs = 1 + int(rng.integers(0, rank - ins))
    in_axis, out_axis = order[:ins], order[ins : ins + outs]
    splits = ()
    if outs == 1 and shape[out_axis[0]] > 1 and rng.random() < 0.5:
        first = int(rng.integers(1, shape[out_axis[0]]))
        splits = (first, shape[out_axis[0]] - first)
    sign = [int(a - rank * rng.integers(0, 2)) for a in order]
    axes = MatrixAxes(tuple(sign[:ins]), tuple(sign[ins : ins + outs]), splits)
    return shape, axes, (tuple(in_axis), tuple(out_axis))


@pytest.mark.parametrize("seed", range(25))
def test_blocks_hold_every_entry_once_and_in_place(seed):
    shape, axes, (in_axis, out_axis) = _random_axes(np.random.default_rng(seed))
    resolved = axes.resolve(shape)
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    blocks = resolved.to_blocks(x)
    assert len(blocks) == max(1, len(axes.out_splits))
    np.testing.assert_array_equal(resolved.from_blocks(blocks), x)
    whole = np.concatenate(blocks, axis=-1)
    # Spelled out index by index: entry [batch, row, column] of the matrices.
    for index in np.ndindex(shape):
        batch = tuple(index[a] for a in resolved.batch)
        row = np.ravel_multi_index(
            [index[a] for a in in_axis], [shape[a] for a in in_axis]
        )
        column = np.ravel_multi_index(
            [index[a] for a in out_axis], [shape[a] for a in out_axis]
        )
        assert whole[(*batch, row, column)] == x[index]
    assert resolved.fan_in == np.prod([shape[a] for a in in_axis])
    assert sum(resolved.splits) == np.prod([shape[a] for a in out_axis])
