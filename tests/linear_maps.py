"""What a layer's weight does, found by differentiating the layer rather than by name.

An output that sums over n inputs depends on n entries of the weight. So the Jacobian of
the outputs in the weight shows the fan-in, and which entries form one column. All
entries that the outputs of one matrix depend on, over the fan-in, are its fan-out.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from muon2_optax.shape_scales import shape_factors


def check_orientation(rules, path, weight, outputs, *, blocks=1):
    """Compares the rules with what ``outputs(weight)`` depends on.

    ``outputs`` are those of one matrix, or of ``blocks`` fused ones, of a layer with
    inputs that are not zero; of a stack, those of one layer.
    """
    axes = rules.resolve(path, weight.shape)
    assert axes is not None, f"{path} goes to AdamW"
    jac = jax.jit(jax.jacobian(lambda w: outputs(w).ravel()))(weight)
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


def filled(tree):
    """Numbers in place of shapes; takes no compilation, as an initializer does."""

    def numbers(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        sines = np.sin(1.0 + np.arange(math.prod(x.shape)))  # none of them is zero
        return jnp.asarray(sines.reshape(x.shape).astype(x.dtype))

    return jax.tree.map(numbers, tree)


def check_norm(step, fan_in, fan_out):
    """A step of a matrix, (fan_in, fan_out) or turned, has RMS-to-RMS norm of about 1.

    Five Newton-Schulz steps leave the largest singular value between 0.68 and 1.21.
    """
    assert step.size == fan_in * fan_out
    norm = np.linalg.norm(np.asarray(step, np.float64), 2)
    assert 0.65 < norm / math.sqrt(fan_out / fan_in) < 1.25
