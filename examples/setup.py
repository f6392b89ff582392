"""What all optimizers of a run share: data, devices, model and compiled functions."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import muon2_optax as m2
from examples import optim
from examples import step as steps
from examples.config import Config
from examples.data import loader
from examples.mesh import batch_sharding, make_mesh
from examples.models import make_model, matrix_rules
from examples.options import check


@dataclasses.dataclass(frozen=True)
class Setup:
    """Made once by `prepare`."""

    config: Config
    data: loader.Dataset
    mesh: Mesh
    rows: NamedSharding  # of a batch
    graphdef: Any
    init: Callable[[jax.Array], Any]
    params: Any  # shapes and shardings
    chunks: int
    eval_step: Callable[[Any, Any, Any], jax.Array]
    val: list[tuple[jax.Array, jax.Array]]

    def plans(self) -> list[optim.Plan]:
        """The optimizers to compare, for this model on this mesh."""
        config, mesh = self.config, self.mesh
        return optim.plans(
            config.optim,
            config.run.steps,
            rules=matrix_rules(config.model),
            shardings=m2.Shardings.of(self.params) if mesh.size > 1 else None,
        )

    def batches(self, first: int) -> Iterator[np.ndarray]:
        """The rows that this process feeds to step `first` and those after it."""
        run = self.config.run
        rows = local_rows(self.rows, (run.batch_size, 1))
        return (self.data.train.at(number, rows) for number in range(first, run.steps))

    def place(self, rows: np.ndarray) -> jax.Array:
        """A global batch, of which this process has `rows`."""
        shape = (self.config.run.batch_size, *rows.shape[1:])
        return jax.make_array_from_process_local_data(self.rows, rows, shape)

    def evaluate(self, params: Any) -> tuple[float, float]:
        """Mean loss per validation token (nats), bits per byte of validation text."""
        val = self.data.val
        sums = [self.eval_step(params, tokens, weight) for tokens, weight in self.val]
        total = math.fsum(float(value) for value in sums)
        return total / val.tokens, total / math.log(2) / max(1, val.bytes)


def local_rows(sharding: NamedSharding, shape: tuple[int, ...]) -> slice:
    """The rows of a global batch that this process feeds."""
    places = sharding.addressable_devices_indices_map(shape).values()
    spans = [index[0].indices(shape[0]) for index in places if index is not None]
    return slice(min(span[0] for span in spans), max(span[1] for span in spans))


def prepare(config: Config, data: loader.Dataset) -> Setup:
    """Build and compile what all optimizers share, so that none is charged for it."""
    mesh, run, length = make_mesh(config.run.mesh), config.run, config.model.seq_len
    rows, vocab_size = batch_sharding(mesh), data.tokenizer.vocab_size
    size, groups = run.batch_size // run.accumulate, mesh.size
    groups //= rows.shard_shape((mesh.size, 1))[0]
    divides = not run.loss_chunks or length % run.loss_chunks == 0
    check(divides, f"--loss-chunks {run.loss_chunks} does not divide {length} tokens")
    check(
        size % groups == 0,
        f"--batch-size {run.batch_size} / --accumulate {run.accumulate} = {size} rows "
        f"cannot be divided over the {groups} parts of --mesh {run.mesh or 'data=-1'}",
    )
    with jax.set_mesh(mesh):
        graphdef, init = make_model(config.model, vocab_size)
        params = steps.abstract_params(init, mesh)
        whole = steps.loss_chunks(config, vocab_size, mesh, parts=1)
        shape = jax.ShapeDtypeStruct(
            (run.batch_size, length + 1), np.int32, sharding=rows
        )
        weight = jax.ShapeDtypeStruct((run.batch_size,), np.float32, sharding=rows)
        eval_step = steps.make_eval_step(graphdef, whole).lower(params, shape, weight)
        setup = Setup(
            config=config,
            data=data,
            mesh=mesh,
            rows=rows,
            graphdef=graphdef,
            init=init,
            params=params,
            chunks=steps.loss_chunks(config, vocab_size, mesh, run.accumulate),
            eval_step=eval_step.compile(),
            val=[],
        )
        mine = local_rows(rows, (run.batch_size, 1))
        for tokens, in_use in data.val.batches:
            setup.val.append((setup.place(tokens[mine]), setup.place(in_use[mine])))
    return setup
