"""What all optimizers of a run share: data, devices, model and compiled functions."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from examples import state as states
from examples import step
from examples.config import Config
from examples.data import loader
from examples.flags import UserError
from examples.mesh import batch_sharding, make_mesh


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all optimizers share: data, devices, model and compiled functions."""

    config: Config
    data: loader.Dataset
    mesh: Mesh
    batch_sharding: NamedSharding
    graphdef: Any
    init: Callable[[jax.Array], Any]
    params: Any  # shapes and shardings
    chunks: int
    eval_step: Callable[[Any, Any, Any], jax.Array]
    val: list[tuple[jax.Array, jax.Array]]

    def batches(self, first: int) -> Iterator[np.ndarray]:
        """The rows that this process feeds to step `first` and those after it."""
        run = self.config.run
        rows = local_rows(self.batch_sharding, (run.batch_size, 1))
        return (self.data.train.at(number, rows) for number in range(first, run.steps))


def place(rows: np.ndarray, sharding: NamedSharding, count: int) -> jax.Array:
    """A global array of `count` rows, of which this process has `rows`."""
    shape = (count, *rows.shape[1:])
    return jax.make_array_from_process_local_data(sharding, rows, shape)


def local_rows(sharding: NamedSharding, shape: tuple[int, ...]) -> slice:
    """The rows of a global batch that this process feeds."""
    places = sharding.addressable_devices_indices_map(shape).values()
    spans = [index[0].indices(shape[0]) for index in places if index is not None]
    return slice(min(span[0] for span in spans), max(span[1] for span in spans))


def evaluate(setup: Setup, params: Any) -> tuple[float, float]:
    """Mean loss per validation token (nats) and bits per byte of validation text."""
    val = setup.data.val
    sums = [setup.eval_step(params, tokens, weight) for tokens, weight in setup.val]
    total = math.fsum(float(value) for value in sums)
    return total / val.tokens, total / math.log(2) / max(1, val.bytes)


def _check_divisions(config: Config, mesh: jax.sharding.Mesh) -> None:
    sharding, run = batch_sharding(mesh), config.run
    size = run.batch_size // run.accumulate
    groups = mesh.size // sharding.shard_shape((mesh.size, 1))[0]
    if run.loss_chunks and config.model.seq_len % run.loss_chunks:
        raise UserError(
            f"--loss-chunks {run.loss_chunks} does not divide "
            f"--seq-len {config.model.seq_len}"
        )
    if size % groups:
        raise UserError(
            f"--batch-size {run.batch_size} / --accumulate {run.accumulate} = {size} "
            f"rows cannot be divided over the {groups} parts of --mesh {run.mesh}"
        )


def prepare(config: Config, data: loader.Dataset) -> Setup:
    """Build and compile what all optimizers share, so that none is charged for it."""
    mesh = make_mesh(config.run.mesh)
    _check_divisions(config, mesh)
    sharding, count = batch_sharding(mesh), config.run.batch_size
    rows = local_rows(sharding, (count, 1))
    val = [
        (place(tokens[rows], sharding, count), place(weight[rows], sharding, count))
        for tokens, weight in data.val.batches
    ]
    with jax.set_mesh(mesh):
        vocab_size = data.tokenizer.vocab_size
        graphdef, init = states.make_model(config.model, vocab_size)
        params = states.abstract_params(init, mesh)
        whole = step.loss_chunks(config, vocab_size, mesh, parts=1)
        eval_step = step.make_eval_step(graphdef, whole).lower(params, *val[0])
        return Setup(
            config=config,
            data=data,
            mesh=mesh,
            batch_sharding=sharding,
            graphdef=graphdef,
            init=init,
            params=params,
            chunks=step.loss_chunks(config, vocab_size, mesh, config.run.accumulate),
            eval_step=eval_step.compile(),
            val=val,
        )
