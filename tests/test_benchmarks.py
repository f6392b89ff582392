"""What the benchmarks compute from what they measure."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import overlap


@pytest.mark.parametrize(
    "moving, working, want",
    [
        ([(0, 4)], [], 4),
        ([(0, 4)], [(1, 2), (3, 9)], 2),  # (0, 1) and (2, 3)
        ([(0, 4), (2, 6)], [(5, 6)], 5),  # two at once count once
        ([(2, 3)], [(0, 9)], 0),
        ([], [(0, 9)], 0),
    ],
)
def test_exposed_is_where_nothing_works(moving, working, want):
    assert overlap.exposed(moving, working) == want


def test_a_trace_without_a_gpu_says_nothing(tmp_path):
    step = jax.jit(lambda p, s, g: (p - g, s + 1))
    x = jnp.ones(3)
    assert overlap.of_step(step, x, x, [x], 2, tmp_path) == {}
