"""SOAP's preconditioner, against the formulas in ``reference``, and its eigenbases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_equal
from reference import relative_error, second_moment, soap

import muon2_optax as m2
from muon2_optax import eigenbases

RULES = m2.MatrixRules(
    (("layers", m2.MatrixAxes(-1, -2)), ("heads", m2.MatrixAxes(0, (1, 2))))
)
KW = {"b1": 0.8, "b2": 0.9, "eps": 1e-7, "shampoo_beta": 0.7}


def history(shape, steps, seed=0, dtype=np.float64):
    """Gradients with rows of unequal sizes."""
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((steps, *shape))
    if np.issubdtype(dtype, np.complexfloating):
        g = g + 1j * rng.standard_normal(g.shape)
    sizes = np.exp(rng.standard_normal(shape[-2]))
    return (g * sizes[:, None]).astype(dtype)


def run(tx, grads):
    """The updates of every step, as lists by leaf."""
    update, state = jax.jit(tx.update), None
    taken = {name: [] for name in grads}
    for step in zip(*grads.values()):
        tree = {name: jnp.asarray(g) for name, g in zip(grads, step)}
        state = tx.init(tree) if state is None else state
        updates, state = update(tree, state)
        for name, u in updates.items():
            taken[name].append(np.asarray(u))
    return taken, state


def test_every_matrix_for_itself():
    """Two refreshes after the first: stacks, outputs first, heads, complex numbers."""
    steps, kw = 9, KW | {"nesterov": True}
    grads = {
        "w": history((6, 9), steps, 1),
        "same": history((6, 9), steps, 2),
        "layers": history((2, 5, 7), steps, 3),
        "heads": history((8, 3, 2), steps, 4),
        "narrow": history((5, 2), steps, 6),
        "phase": history((4, 6), steps, 5, np.complex128),
    }
    with jax.enable_x64(True):
        tx = m2.scale_by_soap(precondition_frequency=3, rules=RULES, **kw)
        got, _ = run(tx, grads)

    def formula(g):
        return np.stack(soap(g, frequency=3, **kw))

    layers = [formula(x) for x in grads["layers"].swapaxes(-1, -2).swapaxes(0, 1)]
    heads = formula(grads["heads"].reshape(steps, 8, 6)).reshape(steps, 8, 3, 2)
    want = {name: formula(grads[name]) for name in ("w", "same", "narrow", "phase")} | {
        "layers": np.stack(layers, axis=1).swapaxes(-1, -2),
        "heads": heads,
    }
    for name in grads:
        # float64's rounding times the eigenvalues' ratios, as in the golden files.
        assert relative_error(np.stack(got[name]), want[name]) < 1e-10, name


@pytest.mark.parametrize("longest", [1, 5])
def test_long_sides_keep_their_axes(longest):
    """The other one of the matrix is rotated still; with none it is Muon^2's."""
    grads = history((9, 5), 7)
    with jax.enable_x64(True):
        tx = m2.scale_by_soap(precondition_frequency=2, max_precond_dim=longest, **KW)
        got, state = run(tx, {"w": grads})
    want = soap(grads, frequency=2, longest=longest, **KW)
    if longest == 1:
        want = second_moment(grads, KW["b1"], KW["b2"], KW["eps"])
    assert relative_error(np.stack(got["w"]), np.stack(want)) < 1e-10
    assert state.gram_in["w"].shape == (1, 1)
    side = 5 if longest == 5 else 1
    assert state.basis_out["w"].shape == (side, side)


def test_bases_change_when_they_are_due_only():
    tx = m2.scale_by_soap(precondition_frequency=3)
    grads, update = history((4, 4), 8, dtype=np.float32), jax.jit(tx.update)
    state = tx.init({"w": grads[0]})
    changed = []
    for t, g in enumerate(grads, 1):
        _, new = update({"w": g}, state)
        if np.any(new.basis_in["w"] != state.basis_in["w"]):
            changed.append(t)
        state = new
    assert changed == [3, 6]
    # The eigenvectors are nobody's zeros.
    np.testing.assert_allclose(
        state.basis_in["w"].T @ state.basis_in["w"], np.eye(4), atol=1e-6
    )


def graded(n, orders, seed=0):
    """A Gram matrix whose eigenvalues span so many orders of magnitude."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((n, n)))[0]
    values = np.logspace(0, -orders, n)
    return (basis * values) @ basis.T, basis, values


@pytest.mark.parametrize("orders", [1, 4, 12])
@pytest.mark.parametrize("start", ["identity", "stale", "own"])
def test_iteration_keeps_columns_orthonormal(start, orders):
    """In float32, for Gram matrices whose rounding has the size of most eigenvalues."""
    n = 48
    gram, basis, _ = graded(n, orders)
    noise = np.random.default_rng(1).standard_normal((n, n)) / n
    starts = {
        "identity": np.eye(n),
        "stale": np.linalg.qr(basis + 0.2 * noise)[0],
        "own": basis,
    }
    got, order = eigenbases.next_basis(
        jnp.asarray(gram, jnp.float32), jnp.asarray(starts[start], jnp.float32)
    )
    assert sorted(np.asarray(order)) == list(range(n))
    error = np.float64(got).T @ np.float64(got) - np.eye(n)
    assert np.abs(error).max() < 5e-6  # a few dozen roundings


def test_iteration_finds_the_eigenvectors():
    """From the identity, by a factor of the eigenvalues' ratio, 3, in each step."""
    gram, basis, values = graded(8, 7 * np.log10(3))
    q = jnp.eye(8)
    for _ in range(25):
        q, _ = eigenbases.next_basis(jnp.asarray(gram, jnp.float32), q)
    overlap = np.abs(np.float64(q).T @ basis)
    np.testing.assert_allclose(overlap, np.eye(8), atol=2e-3)
    first, shares = eigenbases.first_basis(jnp.asarray(gram, jnp.float32))
    np.testing.assert_allclose(np.abs(first.T @ basis), np.eye(8), atol=2e-3)
    np.testing.assert_allclose(shares, values / values.sum(), rtol=1e-3)


def test_what_no_gradient_has_reached_stays():
    """A zero Gram matrix changes nothing, one of rank 1 only what it has seen."""
    rng = np.random.default_rng(2)
    q = np.linalg.qr(rng.standard_normal((6, 6)))[0].astype(np.float32)
    got, order = eigenbases.next_basis(jnp.zeros((6, 6)), jnp.asarray(q))
    np.testing.assert_allclose(got, q[:, order], atol=1e-6)
    seen = np.outer(q[:, 2], q[:, 2])
    got, order = eigenbases.next_basis(jnp.asarray(seen), jnp.asarray(q))
    assert order[0] == 2
    # Rounding of the Gram matrix, 6e-8 for each entry, beside eigenbases.NOISE.
    np.testing.assert_allclose(np.abs(q.T @ got), np.eye(6)[:, order], atol=0.1)


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_the_size_of_the_gradients_drops_out(size):
    grads = history((4, 6), 5, dtype=np.float32)
    kw = KW | {"eps": 0.0, "precondition_frequency": 2}
    want, _ = run(m2.scale_by_soap(**kw), {"w": grads})
    got, _ = run(m2.scale_by_soap(**kw), {"w": grads * np.float32(size)})
    # Rounding of the scaled gradients times the eigenvalues' ratios.
    assert relative_error(np.stack(got["w"]), np.stack(want["w"])) < 1e-3


def test_a_restored_state_goes_on_bit_by_bit():
    """Eigenvectors have no sign of their own: they must not be computed again."""
    tx = m2.scale_by_soap(precondition_frequency=2)
    grads, update = history((5, 5), 7, dtype=np.float32), jax.jit(tx.update)
    state = tx.init({"w": grads[0]})
    for g in grads[:5]:
        _, state = update({"w": g}, state)
    restored = jax.tree.map(lambda x: jnp.asarray(np.array(x)), state)
    for g in grads[5:]:
        want, state = update({"w": g}, state)
        got, restored = update({"w": g}, restored)
        assert_equal((got, restored), (want, state))


def test_errors_name_what_to_change():
    fused = m2.MatrixRules((("qkv", m2.MatrixAxes(0, 1, (4, 4))),))
    with pytest.raises(ValueError, match="'qkv': eigenbases take whole matrices"):
        m2.soap_muon(0.1, rules=fused).init({"qkv": jnp.ones((4, 8))})
    with pytest.raises(ValueError, match="precondition_frequency must be 1 or more"):
        m2.soap_muon(0.1, precondition_frequency=0)
    with pytest.raises(ValueError, match="max_precond_dim must be 1 or more"):
        m2.scale_by_soap(max_precond_dim=-3)
    with pytest.raises(ValueError, match=r"shampoo_beta must lie in \[0, 1\)"):
        m2.scale_by_soap(shampoo_beta=1.0)
