"""What tells, after one step, that each leaf went to its own optimizer."""

import numpy as np

RATE, ADAM_RATE = 0.02, 3e-3


def data():
    """Inputs (64, 16) and the outputs (64, 8) of a linear map."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 16), np.float32)
    return x, x @ rng.standard_normal((16, 8), np.float32)


def assert_moved(before, after, matrices, vectors):
    """From flat dicts of arrays; ``matrices`` is {name: fan_out / fan_in}.

    AdamW's first step is the rate, whatever the gradient; Muon²'s has singular values
    of the rate times the shape factor times what three of Keller's steps make of values
    in [0.01, 1], which is between 0.400 and 1.202 (computed in float64).
    """
    for name in vectors:
        moved = np.abs(np.float64(after[name]) - before[name])
        np.testing.assert_allclose(moved, ADAM_RATE, rtol=1e-3, err_msg=name)
    for name, ratio in matrices.items():
        moved = np.float64(after[name]) - before[name]
        largest = np.linalg.svd(moved, compute_uv=False)[..., 0]
        unit = RATE * ratio**0.5
        assert np.all((0.39 * unit < largest) & (largest < 1.21 * unit)), name
