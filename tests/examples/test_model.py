"""The model: causal, of the right size, in the right dtypes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.models import ModelConfig, build, parameter_count
from examples.models.layers import rotate, rotation
from examples.step import make_model, token_losses

CONFIG = ModelConfig(dim=32, layers=2, heads=2, hidden=48, seq_len=16)
VOCAB = 50


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_later_tokens_do_not_reach_earlier_logits(dtype: str) -> None:
    config = ModelConfig(dim=32, layers=2, heads=2, hidden=48, seq_len=16, dtype=dtype)
    model = jax.jit(build(config, VOCAB, rngs=nnx.Rngs(0)).__call__)
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, VOCAB)
    changed = tokens.at[:, 9].set((tokens[:, 9] + 1) % VOCAB)
    before, after = model(tokens), model(changed)
    assert before.dtype == jnp.float32
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (jnp.abs(before[:, 9:] - after[:, 9:]).max(axis=(0, 2)) > 0).all()


def test_positions_matter() -> None:
    model = jax.jit(build(CONFIG, VOCAB, rngs=nnx.Rngs(0)).__call__)
    one = model(jnp.asarray([[1, 2, 3, 4]]))[0, -1]
    two = model(jnp.asarray([[2, 1, 3, 4]]))[0, -1]
    assert jnp.abs(one - two).max() > 0


def test_rotary_scores_depend_on_distance_alone() -> None:
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    length = 12
    angles = rotation(length, 8, 100.0)
    q_rotated = rotate(jnp.tile(q, (1, length, 1, 1)), angles)[0, :, 0]
    k_rotated = rotate(jnp.tile(k, (1, length, 1, 1)), angles)[0, :, 0]
    scores = q_rotated @ k_rotated.T
    for distance in (0, 3):
        diagonal = jnp.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal.mean(), atol=1e-5)
    assert jnp.abs(scores[0, 0] - scores[0, 5]) > 1e-3


@pytest.mark.parametrize("layers", [1, 3])
def test_parameter_count(layers: int) -> None:
    config = ModelConfig(dim=32, layers=layers, heads=2, hidden=48)
    _, init = make_model(config, VOCAB)
    shapes = jax.tree.leaves(jax.eval_shape(init, jax.random.key(0)))
    assert sum(leaf.size for leaf in shapes) == parameter_count(config, VOCAB)
    assert {leaf.dtype for leaf in shapes} == {jnp.dtype(jnp.float32)}


def test_a_known_parameter_count() -> None:
    # LLaMA-7B: 6,738,415,616 parameters.
    config = ModelConfig(dim=4096, layers=32, heads=32, hidden=11008)
    assert parameter_count(config, 32_000) == 6_738_415_616


def test_a_new_model_knows_nothing() -> None:
    graphdef, init = make_model(CONFIG, VOCAB)
    tokens = jax.random.randint(jax.random.key(1), (4, 17), 0, VOCAB)
    loss_fn = jax.jit(partial(token_losses, graphdef))
    losses = loss_fn(init(jax.random.key(0)), tokens)
    assert losses.shape == (4, 16)
    assert abs(losses.mean() - np.log(VOCAB)) < 0.1
