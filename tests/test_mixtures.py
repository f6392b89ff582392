"""Parts of different methods in one chain keep their invariants."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import muon2_optax as m2

RULES = m2.MatrixRules((("", m2.MatrixAxes(-2, -1)),))

# name: (chain, Frobenius norm of an (m, n) update or None, transpose-equivariant)
MIXTURES = {
    "muon2 + polar express": (
        [
            m2.scale_by_second_moment(),
            m2.newton_schulz_orthogonalize(3, "polar_express"),
        ],
        None,
        True,
    ),
    "muon2_f + polar express": (
        [
            m2.factorized_second_moment(rules=RULES),
            m2.newton_schulz_orthogonalize(5, "polar_express"),
        ],
        None,
        True,
    ),
    # One-sided scaling of a square matrix acts on its outputs: not equivariant.
    "muon2 + turbo": (
        [m2.scale_by_second_moment(), m2.newton_schulz_orthogonalize(4, "turbo")],
        None,
        False,
    ),
    "muon2 + normuon": (
        [
            m2.scale_by_second_moment(),
            m2.newton_schulz_orthogonalize(3),
            m2.keep_norm(m2.scale_by_neuron_second_moment(rules=RULES), rules=RULES),
        ],
        None,
        False,
    ),
    "muon2_f + adamuon": (
        [
            m2.factorized_second_moment(rules=RULES),
            m2.newton_schulz_orthogonalize(3),
            m2.scale_by_output_second_moment(),
            m2.scale_to_rms(0.2, rules=RULES),
        ],
        lambda m, n: 0.2 * np.sqrt(m * n),
        True,
    ),
    "sign + muon2 + match rms": (
        [
            m2.scale_by_second_moment(),
            optax.scale_by_sign(),
            m2.newton_schulz_orthogonalize(5, "you5"),
            m2.scale_to_rms(1.0, rules=RULES),
        ],
        lambda m, n: np.sqrt(m * n),
        True,
    ),
    "muon2 + low rank": (
        [m2.scale_by_second_moment(), m2.scale_by_low_rank_orthonormal(rules=RULES)],
        # Full rank: orthonormal rows or columns, up to the column norms' eps.
        None,
        False,
    ),
    "muon2 in blocks": (
        [
            m2.scale_by_second_moment(),
            m2.in_blocks(
                lambda rules: m2.newton_schulz_orthogonalize(3, rules=rules),
                (2, 2),
                rules=RULES,
            ),
        ],
        None,
        True,
    ),
    "muon2 jointly": (
        [m2.scale_by_second_moment(), m2.orthogonalize_jointly("w", 2, 5)],
        None,
        False,
    ),
    "nesterov muon2_f, fitted table": (
        [
            m2.factorized_second_moment(nesterov=True, rules=RULES),
            m2.newton_schulz_orthogonalize(2, ((4.0, -6.8, 2.9), (2.8, -3.0, 1.2))),
        ],
        None,
        True,
    ),
}


def run(parts, gradients):
    tx = optax.chain(*parts)
    state = tx.init(gradients[0])
    step = jax.jit(tx.update)
    for g in gradients:
        updates, state = step(g, state)
    return updates


def draw(shape, steps=3, seed=0):
    rng = np.random.default_rng(seed)
    rows = np.exp(rng.standard_normal((shape[0], 1)))
    return [
        {"w": jnp.asarray(rng.standard_normal(shape) * rows, jnp.float32)}
        for _ in range(steps)
    ]


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixture(name, shape):
    parts, norm, equivariant = MIXTURES[name]
    gradients = draw(shape)
    u = np.asarray(run(parts, gradients)["w"])
    assert np.all(np.isfinite(u))
    # Every part is odd in the gradient, so a descent direction stays one on average;
    # the last gradient carries most of what is new.
    assert np.sum(u * np.asarray(gradients[0]["w"] + gradients[-1]["w"])) > 0
    if norm is not None:
        # float32, and eps next to a norm of this size.
        np.testing.assert_allclose(np.linalg.norm(u), norm(*shape), rtol=1e-5)
    if equivariant:
        turned = [{"w": g["w"].T} for g in gradients]
        v = np.asarray(run(parts, turned)["w"])
        np.testing.assert_allclose(v, u.T, atol=1e-4 * np.abs(u).max())


def test_what_is_not_equivariant_is_really_not():
    """The flags above tell the truth: turning a square matrix changes these updates."""
    for name in ("muon2 + turbo", "muon2 + normuon"):
        parts = MIXTURES[name][0]
        gradients = draw((16, 16))
        u = np.asarray(run(parts, gradients)["w"])
        v = np.asarray(run(parts, [{"w": g["w"].T} for g in gradients])["w"])
        assert np.abs(v - u.T).max() > 1e-3 * np.abs(u).max(), name


def test_full_rank_dion_is_orthonormal():
    parts, _, _ = MIXTURES["muon2 + low rank"]
    u = np.asarray(run(parts, draw((8, 24), steps=30))["w"])
    s = np.linalg.svd(u, compute_uv=False)
    # The columns of Q have norm 1, and come closer to orthogonal with every step.
    assert 0.3 < s.min() and s.max() < 2.0


def test_teon_joins_along_the_inputs():
    """Two layers of one kind equal one matrix of their rows; the third runs alone."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((3, 8, 12)).astype(np.float32)
    grads = {f"layers/{i}/q": jnp.asarray(w[i]) for i in (0, 1, 2)}
    tx = m2.orthogonalize_jointly(r"/q", 2, 5, "keller")
    u, _ = tx.update(grads, tx.init(grads))
    both = m2.newton_schulz(
        jnp.concatenate([grads["layers/0/q"], grads["layers/1/q"]]), 5
    )
    np.testing.assert_allclose(u["layers/0/q"], both[:8], atol=1e-5)
    np.testing.assert_allclose(u["layers/1/q"], both[8:], atol=1e-5)
    alone = m2.newton_schulz(grads["layers/2/q"], 5)
    np.testing.assert_allclose(u["layers/2/q"], alone, atol=1e-5)


def test_teon_takes_layers_in_the_order_of_their_numbers():
    """Layer 10 follows layer 9 although its name sorts before layer 2."""
    rng = np.random.default_rng(1)
    grads = {
        f"layers/{i}/q": jnp.asarray(rng.standard_normal((4, 6)), jnp.float32)
        for i in (8, 9, 10, 11)
    }
    tx = m2.orthogonalize_jointly(r"/q", 2, 3, "keller")
    u, _ = tx.update(grads, tx.init(grads))
    both = m2.newton_schulz(
        jnp.concatenate([grads["layers/10/q"], grads["layers/11/q"]]), 3
    )
    np.testing.assert_allclose(u["layers/11/q"], both[4:], atol=1e-5)


def test_teon_joins_along_a_stack():
    rng = np.random.default_rng(2)
    stack = jnp.asarray(rng.standard_normal((3, 4, 6)), jnp.float32)
    tx = m2.orthogonalize_jointly("q", 2, 3, "keller", rules=RULES)
    u = tx.update({"q": stack}, tx.init({"q": stack}))[0]["q"]
    both = m2.newton_schulz(stack[:2].reshape(8, 6), 3)
    np.testing.assert_allclose(u[:2].reshape(8, 6), both, atol=1e-5)
    np.testing.assert_allclose(u[2], m2.newton_schulz(stack[2], 3), atol=1e-5)


def test_muon_bp_alternates_blocks_and_whole():
    rng = np.random.default_rng(3)
    g = {"w": jnp.asarray(rng.standard_normal((8, 12)), jnp.float32)}
    params = jax.tree.map(jnp.zeros_like, g)
    tx = m2.muon_bp(1.0, period=3, block_grid=(2, 3), block_scale=0.5, b1=0.0)
    state = tx.init(params)
    updates = []
    for _ in range(4):
        u, state = tx.update(g, state, params)
        updates.append(-np.asarray(u["w"]))
    whole = 0.2 * np.sqrt(12) * np.asarray(m2.newton_schulz(g["w"], 5))
    np.testing.assert_allclose(updates[0], whole, atol=1e-5)
    np.testing.assert_allclose(updates[3], whole, atol=1e-5)
    for i in range(2):
        for j in range(3):
            rows, cols = slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4)
            block = 0.5 * 0.2 * np.sqrt(4) * m2.newton_schulz(g["w"][rows, cols], 5)
            np.testing.assert_allclose(updates[1][rows, cols], block, atol=1e-5)


def test_blocks_that_do_not_divide_are_padded():
    rng = np.random.default_rng(4)
    g = {"w": jnp.asarray(rng.standard_normal((7, 10)), jnp.float32)}
    tx = m2.in_blocks(
        lambda rules: m2.newton_schulz_orthogonalize(5, rules=rules),
        (2, 3),
        rules=RULES,
    )
    u = tx.update(g, tx.init(g))[0]["w"]
    assert u.shape == (7, 10)
    # The last blocks are 3 x 2: padding with zeros does not change their results.
    np.testing.assert_allclose(
        u[4:, 8:], m2.newton_schulz(g["w"][4:, 8:], 5), atol=1e-5
    )


def test_a_step_of_muon_bp_costs_no_more_than_muon():
    """Its program holds both kinds of step: the compiler counts twice what runs."""
    g = {"w": jax.ShapeDtypeStruct((20, 1024), jnp.float32)}

    def flops(tx):
        state = jax.eval_shape(tx.init, g)
        return jax.jit(tx.update).lower(g, state, g).compile().cost_analysis()["flops"]

    # Two branches; the rest is for choosing between them.
    assert flops(m2.muon_bp(1.0)) < 2.1 * flops(m2.muon(1.0))
