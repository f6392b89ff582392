"""Pure functions that are compiled: parameters, training step, evaluation step."""

from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx

from examples.models.config import ModelConfig
from examples.models.llama import Llama


class TrainState(NamedTuple):
    """What a training step reads and replaces."""

    params: Any
    opt_state: optax.OptState


class Metrics(NamedTuple):
    """Scalars of one step; they stay on the device until someone asks."""

    loss: jax.Array
    grad_norm: jax.Array


def make_model(config: ModelConfig, vocab_size: int) -> tuple[Any, jax.stages.Wrapped]:
    """The model's structure, and a jitted function from a key to its parameters.

    The parameters are plain nested dictionaries: what Optax, jit and checkpoints take
    without further ado.
    """

    def build(key: jax.Array) -> Llama:
        return Llama(config, vocab_size, rngs=nnx.Rngs(key))

    abstract = nnx.eval_shape(build, jax.random.key(0))
    graphdef, _ = nnx.split(abstract, nnx.Param)

    @jax.jit
    def init(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(build(key), nnx.Param))

    return graphdef, init


def token_losses(graphdef: Any, params: Any, tokens_BxM: jax.Array) -> jax.Array:
    """Negative log-likelihood (B, L) of each next token; M is L + 1."""
    model = nnx.merge(graphdef, params)
    logits_BxLxV = model(tokens_BxM[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits_BxLxV, tokens_BxM[:, 1:]
    )


def make_train_step(
    graphdef: Any, transform: optax.GradientTransformation
) -> jax.stages.Wrapped:
    """(state, tokens) to (state, metrics); the old state's memory is reused."""

    def loss_fn(params: Any, tokens_BxM: jax.Array) -> jax.Array:
        return token_losses(graphdef, params, tokens_BxM).mean()

    @partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, tokens_BxM: Any) -> tuple[TrainState, Metrics]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens_BxM)
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = Metrics(loss, optax.tree.norm(grads))
        return TrainState(params, opt_state), metrics

    return train_step


def make_eval_step(graphdef: Any) -> jax.stages.Wrapped:
    """(params, tokens, weights of rows) to the summed negative log-likelihood."""

    @jax.jit
    def eval_step(params: Any, tokens_BxM: Any, weight_B: Any) -> jax.Array:
        loss_BxL = token_losses(graphdef, params, tokens_BxM)
        return (loss_BxL.sum(axis=1) * weight_B).sum()

    return eval_step
