"""What is compiled: the loss, the training step, the evaluation step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from examples.config import Config
from examples.mesh import batch_sharding
from examples.state import TrainState

# Float32 logits that one device may hold at a time; beyond, the loss goes in chunks.
_MAX_LOGITS = 2**29


class Metrics(NamedTuple):
    """Scalars of one step; they stay on the device until someone asks."""

    loss: jax.Array  # cross entropy, nats per token
    balance_loss: jax.Array  # of the experts, with its weight; 0 without experts
    grad_norm: jax.Array  # before clipping
    update_norm: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array


def loss_chunks(config: Config, vocab_size: int, mesh: Mesh, parts: int) -> int:
    """Parts of the sequence that logits are computed in: few, but each fits.

    The rows of a step, in `parts` micro-batches, are divided over the mesh.
    """
    length, run = config.model.seq_len, config.run
    if run.loss_chunks:
        return run.loss_chunks
    shape = (run.batch_size, length)
    rows = batch_sharding(mesh).shard_shape(shape)[0] / parts
    fitting = (
        n
        for n in range(1, length + 1)
        if length % n == 0 and rows * length * vocab_size <= n * _MAX_LOGITS
    )
    return next(fitting, length)


def token_losses(
    graphdef: Any, params: Any, tokens_BxM: jax.Array, chunks: int = 1
) -> jax.Array:
    """Negative log-likelihood (B, L) of each next token; M is L + 1.

    With `chunks` above 1 only the logits of one chunk of positions exist at a time. For
    gradients there is `model.loss`.
    """
    model = nnx.merge(graphdef, params)
    x_BxLxD, _ = model.features(tokens_BxM[:, :-1])
    targets_BxL = tokens_BxM[:, 1:]

    def losses(x_BxCxD: jax.Array, targets_BxC: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(
            model.logits(x_BxCxD), targets_BxC
        )

    if chunks == 1:
        return losses(x_BxLxD, targets_BxL)

    def cut(y_BxLx: jax.Array) -> jax.Array:
        batch, length, *rest = y_BxLx.shape
        return y_BxLx.reshape(batch, chunks, length // chunks, *rest).swapaxes(0, 1)

    parts = cut(x_BxLxD), cut(targets_BxL)
    nll_NxBxC = jax.lax.map(lambda part: losses(*part), parts)
    return nll_NxBxC.swapaxes(0, 1).reshape(targets_BxL.shape)


def _averaged_gradients(
    loss_fn: Callable[..., Any], params: Any, tokens_BxM: jax.Array, parts: int
) -> tuple[Any, Any]:
    """Losses and gradients, each the mean over micro-batches."""
    grad_fn = jax.grad(loss_fn, has_aux=True)
    if parts == 1:
        grads, losses = grad_fn(params, tokens_BxM)
        return losses, grads
    # Micro-batches take every parts-th row, so that rows stay on their devices.
    micro_NxBxM = tokens_BxM.reshape(-1, parts, tokens_BxM.shape[1]).swapaxes(0, 1)

    def add(total: Any, micro_BxM: jax.Array) -> tuple[Any, None]:
        part = grad_fn(params, micro_BxM)
        return jax.tree.map(lambda t, x: t + x / parts, total, part), None

    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        jax.eval_shape(grad_fn, params, micro_NxBxM[0]),
    )
    (grads, losses), _ = jax.lax.scan(add, zeros, micro_NxBxM)
    return losses, grads


def make_train_step(
    graphdef: Any,
    transform: optax.GradientTransformation,
    config: Config,
    abstract: TrainState,
    chunks: int = 1,
) -> jax.stages.Wrapped:
    """(state, tokens) to (state, metrics); the old state's memory is reused.

    A step whose losses or gradients are not finite changes nothing but the counters.
    """
    shardings = jax.tree.map(lambda x: x.sharding, abstract)

    def loss_fn(params: Any, tokens_BxM: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(graphdef, params)
        x_BxLxD, balance = model.features(tokens_BxM[:, :-1])
        total, loss = model.loss(
            x_BxLxD, tokens_BxM[:, 1:], z_weight=config.run.z_loss, chunks=chunks
        )
        return total + balance, (loss, balance)

    def averaged(ema: Any, params: Any, step: jax.Array) -> Any:
        # The decay grows to its value: early parameters are not worth remembering.
        decay = jnp.minimum(config.run.ema or 0.0, (1 + step) / (10 + step))
        return jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, ema, params)

    def train_step(state: TrainState, tokens_BxM: Any) -> tuple[TrainState, Metrics]:
        (loss, balance), grads = _averaged_gradients(
            loss_fn, state.params, tokens_BxM, config.run.accumulate
        )
        grads = jax.lax.with_sharding_constraint(grads, shardings.params)
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        norms = optax.tree.norm(grads), optax.tree.norm(updates)
        # Known before the update: otherwise all old states, and all updates, would be
        # kept until the last update is there.
        good = jnp.isfinite(loss + balance + norms[0])

        def choose(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)

        ema = state.ema
        if ema is not None:
            ema = choose(averaged(ema, params, state.step), ema)
        state = TrainState(
            params=choose(params, state.params),
            opt_state=choose(opt_state, state.opt_state),
            step=state.step + 1,
            skipped=state.skipped + ~good,
            skipped_in_a_row=jnp.where(good, 0, state.skipped_in_a_row + 1),
            ema=ema,
        )
        counts = state.skipped, state.skipped_in_a_row
        return state, Metrics(loss, balance, *norms, *counts)

    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))


def make_eval_step(graphdef: Any, chunks: int = 1) -> jax.stages.Wrapped:
    """(params, tokens, weights of rows) to the summed negative log-likelihood."""

    @jax.jit
    def eval_step(params: Any, tokens_BxM: Any, weight_B: Any) -> jax.Array:
        loss_BxL = token_losses(graphdef, params, tokens_BxM, chunks)
        return (loss_BxL.sum(axis=1) * weight_B).sum()

    return eval_step
