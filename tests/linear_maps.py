"""What a layer's weight does, found by differentiating the layer rather than by name.

An output that sums over n inputs depends on n entries of the weight. So the Jacobian of
the outputs in the weight shows the fan-in, and which entries form one column; all
entries that the outputs of one matrix depend on, divided by the fan-in, are its fan-out.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from muon2_optax.axes import shape_factors


def check_orientation(rules, path, weight, outputs, *, blocks=1):
    """Compares the rules with what ``outputs(weight)`` depends on.

    ``outputs`` are those of one matrix, or of ``blocks`` fused ones, of a layer with
    inputs that are not zero; of a stack, those of one layer.
    """
    axes = rules.resolve(path, weight.shape)
    assert axes is not None, f"{path} goes to AdamW"
    jac = jax.jacobian(lambda w: outputs(w).ravel())(weight)
    depends = np.asarray(jac) != 0  # (output, *weight)
    counts = depends.reshape(len(depends), -1).sum(1)
    fan_in = counts.max() / blocks  # at its edges, a convolution sums over fewer
    fan_out = depends.any(0).sum() / blocks / fan_in
    want = [math.sqrt(fan_out / fan_in)] * blocks
    np.testing.assert_allclose(shape_factors(axes, "spectral"), want, err_msg=path)
    column = depends[counts.argmax()].astype(np.float32)
    parts = [np.asarray(b) for b in axes.to_blocks(jnp.asarray(column))]
    assert len(parts) == blocks
    for part in parts:  # (*batch, fan_in, fan_out): one column of one matrix, whole
        assert part.sum() == fan_in, path
        assert (part.sum(-2) == fan_in).sum() == 1, path


def check_step(outputs, x, path):
    """The map ``x -> outputs(x)`` of a step has RMS-to-RMS norm of about 1.

    Five Newton-Schulz steps leave the largest singular value between 0.68 and 1.21.
    """
    y, (jac, zero) = outputs(x), (jax.jacobian(outputs)(x), outputs(jnp.zeros_like(x)))
    np.testing.assert_allclose(zero, 0, err_msg="not linear")
    matrix = np.asarray(jac, np.float64).reshape(y.size, x.size)
    norm = np.linalg.norm(matrix, 2) / math.sqrt(y.size / x.size)
    assert 0.65 < norm < 1.25, (path, norm)
