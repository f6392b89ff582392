"""Stacks that are kept in parts: sums of all of them, work in lots."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from muon2_optax.arrays import grouping, stacks


@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 4), (1, 4)],
        [(1, 4), (3, 2), (1, 3), (2, 4)],
        [(2, 4), (0, 2), (1, 3)],
        [(0, 0), (1, 4), (0, 4)],
        [(2, 0), (1, 0)],
    ],
    ids=str,
)
def test_totals(shapes):
    """Of parts that are shorter than others, or empty."""
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal(s) for s in shapes]
    got = stacks.sum_rows([jnp.asarray(p, jnp.float32) for p in parts])
    want = np.concatenate([p.sum(axis=1) for p in parts])
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 0, 1, 4), (7,), (2, 2)], ids=str)
def test_lots_give_parts_back(counts, size):
    first = np.cumsum([0, *counts])
    parts = [jnp.arange(k, k + n) for k, n in zip(first, counts)]
    seen = []

    def double(start, members):
        seen.append((start, sum(map(len, members))))
        return [2 * jnp.concatenate(members)]

    done = stacks.run_in_chunks(double, parts, size)
    for part, twice, n in zip(parts, done, counts):
        # A part without members comes back as it is.
        np.testing.assert_array_equal(twice, 2 * part if n else part)
    total = sum(counts)
    assert seen == [(k, min(size, total - k)) for k in range(0, total, size)]


def test_matrices_become_parts_and_come_back():
    shapes = [(2, 3), (4, 2, 3), (2, 2, 2, 3), (0, 2, 3), (3, 2)]
    dtypes = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float32, jnp.bfloat16]
    xs = [jnp.arange(np.prod(s), dtype=d).reshape(s) for s, d in zip(shapes, dtypes)]
    parts = stacks.to_stacks(xs)
    assert [p.shape for p in parts] == [
        (1, 2, 3), (4, 2, 3), (4, 2, 3), (0, 2, 3), (1, 3, 2)
    ]  # fmt: skip
    back = stacks.reshape_like([p.astype(jnp.float32) for p in parts], xs)
    for x, y in zip(xs, back, strict=True):
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("most", [1, 3, 8])
def test_groups_are_even_and_no_larger_than_allowed(most):
    for count in range(1, 30):
        size = grouping.even_size(count, most)
        fewest = math.ceil(count / most)
        # With one less in each, the fewest groups would not hold all of them.
        assert size <= most and (size - 1) * fewest < count <= size * fewest
