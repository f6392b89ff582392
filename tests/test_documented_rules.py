"""Every documented rule against the same matrices one by one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from matrices import normal32
from reference import relative_error

import muon2_optax as m2
from muon2_optax import MatrixAxes, MatrixRules


class Rule(NamedTuple):
    """A parameter, its axes, and how to cut the (fan_in, fan_out) matrices out."""

    shape: tuple
    axes: MatrixAxes
    cuts: list  # of (index, order of the remaining axes, 2-D shape)


RULES = {
    "flax kernel": Rule((6, 10), MatrixAxes(0, 1), [(np.s_[:], (0, 1), (6, 10))]),
    "torch weight": Rule((10, 6), MatrixAxes(1, 0), [(np.s_[:], (1, 0), (6, 10))]),
    "stacked layers": Rule(
        (3, 6, 10),
        MatrixAxes(-2, -1),
        [(np.s_[i], (0, 1), (6, 10)) for i in range(3)],
    ),
    "layers of experts": Rule(
        (2, 3, 10, 6),
        MatrixAxes(-2, -1),
        [(np.s_[i, j], (0, 1), (10, 6)) for i in range(2) for j in range(3)],
    ),
    "DenseGeneral qkv": Rule(
        (6, 2, 5), MatrixAxes(0, (1, 2)), [(np.s_[:], (0, 1, 2), (6, 10))]
    ),
    "DenseGeneral out": Rule(
        (2, 5, 6), MatrixAxes((0, 1), 2), [(np.s_[:], (0, 1, 2), (10, 6))]
    ),
    "scanned DenseGeneral out": Rule(
        (2, 3, 5, 6),
        MatrixAxes((0, -2), -1),
        [(np.s_[:, i], (0, 1, 2), (10, 6)) for i in range(3)],
    ),
    "stacked on axis 1": Rule(
        (6, 3, 10),
        MatrixAxes(0, -1),
        [(np.s_[:, i], (0, 1), (6, 10)) for i in range(3)],
    ),
    "per head": Rule(
        (6, 3, 5),
        MatrixAxes(0, 2),
        [(np.s_[:, i], (0, 1), (6, 5)) for i in range(3)],
    ),
    "HWIO": Rule(
        (3, 2, 4, 7),
        MatrixAxes((0, 1, 2), 3),
        [(np.s_[:], (0, 1, 2, 3), (24, 7))],
    ),
    "OIHW": Rule(
        (7, 4, 3, 2),
        MatrixAxes((1, 2, 3), 0),
        [(np.s_[:], (1, 2, 3, 0), (24, 7))],
    ),
    "fused qkv, axis of 3": Rule(
        (6, 3, 10),
        MatrixAxes(0, 2),
        [(np.s_[:, i], (0, 1), (6, 10)) for i in range(3)],
    ),
    "fused qkv, flat, grouped queries": Rule(
        (6, 16),
        MatrixAxes(0, 1, (8, 4, 4)),
        [
            (np.s_[:, 0:8], (0, 1), (6, 8)),
            (np.s_[:, 8:12], (0, 1), (6, 4)),
            (np.s_[:, 12:16], (0, 1), (6, 4)),
        ],
    ),
    "fused qkv, flat, torch, scanned": Rule(
        (2, 16, 6),
        MatrixAxes(-1, -2, (8, 4, 4)),
        [
            (np.s_[i, part], (1, 0), (6, part.stop - part.start))
            for i in range(2)
            for part in (slice(0, 8), slice(8, 12), slice(12, 16))
        ],
    ),
}


@pytest.mark.parametrize("optimizer", ["muon2", "muon2_f"])
@pytest.mark.parametrize("name", RULES)
def test_documented_rule(name, optimizer):
    shape, axes, cuts = RULES[name]
    tx = m2.REGISTRY[optimizer](1.0, rules=MatrixRules((("w", axes),)))
    oracle = getattr(reference, optimizer)
    grads = [normal32(shape, i) for i in range(2)]

    def run(grads):
        state, updates = tx.init({"w": grads[0]}), []
        for g in grads:
            update, state = tx.update({"w": g}, state, {"w": g})
            updates.append(update["w"])
        return updates

    updates = jax.jit(run)(grads)
    seen = np.zeros(shape, int)
    for index, order, matrix in cuts:
        seen[index] += 1
        cut = lambda x: np.transpose(x[index], order).reshape(matrix)  # noqa: B023, E731
        want = oracle([cut(g) for g in grads], 1.0)
        for got, expected in zip(updates, want):
            # float32 of three steps; the factor is that of the cut-out matrix.
            assert relative_error(cut(np.asarray(got)), expected) < 1e-4, index
    assert np.all(seen == 1)  # the cuts above are the whole parameter


@pytest.mark.parametrize(
    "kind, want",
    [
        ("spectral", lambda n, m: (m / n) ** 0.5),
        ("keller", lambda n, m: max(1.0, m / n) ** 0.5),
        ("match_rms", lambda n, m: 0.2 * max(n, m) ** 0.5),
        ("none", lambda n, m: 1.0),
    ],
)
@pytest.mark.parametrize("name", RULES)
def test_shape_factor_of_each_matrix(name, kind, want):
    shape, axes, cuts = RULES[name]
    tx = m2.scale_by_shape(kind, rules=MatrixRules((("w", axes),)))
    ones = {"w": jnp.ones(shape, jnp.bfloat16)}
    got = tx.update(ones, tx.init(ones))[0]["w"]
    assert got.dtype == jnp.bfloat16 and got.shape == shape
    for index, _, (n, m) in cuts:
        # bfloat16 rounds by at most 4e-3.
        np.testing.assert_allclose(np.float32(got[index]), want(n, m), rtol=4e-3)


def test_unknown_shape_scale():
    with pytest.raises(ValueError, match="unknown shape scale 'sqrt'.*spectral"):
        m2.scale_by_shape("sqrt")
