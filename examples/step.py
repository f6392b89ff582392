"""What is compiled: the train state, the training step, the evaluation step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from examples.config import Config
from examples.mesh import batch_sharding, param_shardings
from examples.models import head
from muon2_optax import state_sharding

# Float32 logits that one device may hold at a time; beyond, the loss goes in chunks.
_MAX_LOGITS = 2**29


class TrainState(NamedTuple):
    """What a training step reads and replaces; also what a checkpoint holds."""

    params: Any
    opt_state: optax.OptState
    step: jax.Array  # steps taken, which is also the position in the data
    skipped: jax.Array  # how many of them changed nothing, not being finite
    skipped_in_a_row: jax.Array


class Metrics(NamedTuple):
    """Scalars of one step; they stay on the device until someone asks."""

    loss: jax.Array  # cross entropy, nats per token
    balance_loss: jax.Array  # of the experts, with its weight; 0 without experts
    grad_norm: jax.Array  # before clipping
    update_norm: jax.Array
    learning_rate: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array


def abstract_params(init: Callable[[jax.Array], Any], mesh: Mesh) -> Any:
    """The shapes of the parameters, and where on the mesh they live."""
    shapes = jax.eval_shape(init, jax.random.key(0))
    places = param_shardings(shapes, mesh)
    return jax.tree.map(lambda x, where: x.update(sharding=where), shapes, places)


def abstract_state(
    transform: optax.GradientTransformation, params: Any, mesh: Mesh
) -> TrainState:
    """The shapes and shardings of a train state; nothing is allocated."""
    whole = NamedSharding(mesh, PartitionSpec())
    count: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    opt_state = state_sharding.abstract_state(transform.init, params, mesh)
    return TrainState(params, opt_state, count, count, count)


def initial_state(
    make_params: Callable[[Any], Any],
    transform: optax.GradientTransformation,
    abstract: TrainState,
    source: Any,
) -> TrainState:
    """The state before the first step, made where it will live.

    `make_params` takes `source`: a key, or parameters that are there already.
    """

    def create(source: Any) -> TrainState:
        params, zero = make_params(source), jnp.zeros((), jnp.int32)
        return TrainState(params, transform.init(params), zero, zero, zero)

    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(create, out_shardings=shardings)(source)


def loss_chunks(config: Config, vocab_size: int, mesh: Mesh, parts: int) -> int:
    """Parts of the sequence that logits are computed in: few, but each fits.

    The rows of a step, in `parts` micro-batches, are divided over the mesh.
    """
    length, run = config.model.seq_len, config.run
    if run.loss_chunks:
        return run.loss_chunks
    rows = batch_sharding(mesh).shard_shape((run.batch_size, length))[0] / parts
    most = _MAX_LOGITS / (rows * length * vocab_size)
    divisors = (n for n in range(1, length + 1) if length % n == 0)
    return next((n for n in divisors if 1 <= n * most), length)


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

    shapes = jax.eval_shape(grad_fn, params, micro_NxBxM[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (grads, losses), _ = jax.lax.scan(add, zeros, micro_NxBxM)
    return losses, grads


def make_train_step(
    graphdef: Any,
    transform: optax.GradientTransformation,
    config: Config,
    abstract: TrainState,
    chunks: int = 1,
    schedule: optax.Schedule | None = None,
) -> jax.stages.Wrapped:
    """(state, tokens) to (state, metrics); the old state's memory is reused.

    A step whose losses, gradients or updates are not finite changes nothing but the
    counters.
    """
    shardings = jax.tree.map(lambda x: x.sharding, abstract)

    def loss_fn(params: Any, tokens_BxM: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(graphdef, params)
        x_BxLxD, balance, _ = model.features(tokens_BxM[:, :-1])
        loss = head.head_loss(x_BxLxD, model.head(), tokens_BxM[:, 1:], chunks)
        return loss + balance, (loss, balance)

    def train_step(state: TrainState, tokens_BxM: Any) -> tuple[TrainState, Metrics]:
        (loss, balance), grads = _averaged_gradients(
            loss_fn, state.params, tokens_BxM, config.run.accumulate
        )
        grads = jax.lax.with_sharding_constraint(grads, shardings.params)
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        norms = optax.tree.norm(grads), optax.tree.norm(updates)
        good = jnp.isfinite(loss + balance + norms[0] + norms[1])
        # Steps that were skipped did not move the optimizer's schedule.
        rate: Any = schedule(state.step - state.skipped) if schedule else 0.0

        def choose(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)

        state = TrainState(
            params=choose(params, state.params),
            opt_state=choose(opt_state, state.opt_state),
            step=state.step + 1,
            skipped=state.skipped + ~good,
            skipped_in_a_row=jnp.where(good, 0, state.skipped_in_a_row + 1),
        )
        counts = state.skipped, state.skipped_in_a_row
        return state, Metrics(loss, balance, *norms, jnp.asarray(rate), *counts)

    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))


def make_eval_step(graphdef: Any, chunks: int = 1) -> jax.stages.Wrapped:
    """(params, tokens, weights of rows) to the summed negative log-likelihood."""

    @jax.jit
    def eval_step(params: Any, tokens_BxM: Any, weight_B: Any) -> jax.Array:
        model = nnx.merge(graphdef, params)
        x_BxLxD = model.features(tokens_BxM[:, :-1]).x_BxLxD
        targets_BxL = tokens_BxM[:, 1:]
        loss_BxL = head.token_losses(x_BxLxD, model.head(), targets_BxL, chunks)
        return (loss_BxL.sum(axis=1) * weight_B).sum()

    return eval_step
