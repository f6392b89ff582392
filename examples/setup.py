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
    eval_step: Callable[[Any, Any, Any], jax.Array]

    def plans(self) -> list[optim.Plan]:
        """The optimizers to compare, for this model on this mesh."""
        shardings = m2.Shardings.of(self.params) if self.mesh.size > 1 else None
        config, rules = self.config, matrix_rules(self.config.model)
        places = {"rules": rules, "shardings": shardings}
        tiny, steps = config.model.is_tiny, config.run.steps
        return optim.plans(config.optim, steps, tiny=tiny, **places)

    def tokens(self) -> jax.ShapeDtypeStruct:
        """The shape of a batch."""
        shape = self.config.run.batch_size, self.config.model.seq_len + 1
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=self.rows)

    def _mine(self) -> slice:
        """The rows of a global batch that this process feeds."""
        shape = self.config.run.batch_size, 1
        places = self.rows.addressable_devices_indices_map(shape).values()
        spans = [index[0].indices(shape[0]) for index in places if index is not None]
        return slice(min(span[0] for span in spans), max(span[1] for span in spans))

    def batches(self, first: int) -> Iterator[np.ndarray]:
        """The rows that this process feeds to step `first` and those after it."""
        mine, steps = self._mine(), range(first, self.config.run.steps)
        return (self.data.train.at(number, mine) for number in steps)

    def place(self, rows: np.ndarray) -> jax.Array:
        """A global batch, of which this process has `rows`."""
        shape = (self.config.run.batch_size, *rows.shape[1:])
        return jax.make_array_from_process_local_data(self.rows, rows, shape)

    def evaluate(self, params: Any) -> tuple[float, float]:
        """Mean loss per validation token (nats), bits per byte of validation text."""
        val, mine = self.data.val, self._mine()
        sums = [
            self.eval_step(params, self.place(tokens[mine]), self.place(weight[mine]))
            for tokens, weight in val.batches
        ]
        total = math.fsum(float(value) for value in sums)
        return total / val.tokens, total / math.log(2) / max(1, val.bytes)


def prepare(config: Config, data: loader.Dataset) -> Setup:
    """Build and compile what all optimizers share, so that none is charged for it."""
    mesh, run, length = make_mesh(config.run.mesh), config.run, config.model.seq_len
    rows = batch_sharding(mesh)
    divides = not run.loss_chunks or length % run.loss_chunks == 0
    check(divides, f"--loss-chunks {run.loss_chunks} does not divide {length} tokens")
    groups = mesh.size // rows.shard_shape((mesh.size, 1))[0]
    size = run.batch_size // run.accumulate
    parts = f"--batch-size {run.batch_size} / --accumulate {run.accumulate} = {size}"
    said = f"rows cannot be divided over the {groups} parts of --mesh"
    check(size % groups == 0, f"{parts} {said} {run.mesh or 'data=-1'}")
    vocab_size = data.tokenizer.vocab_size
    with jax.set_mesh(mesh):
        graphdef, init = make_model(config.model, vocab_size)
        params = steps.abstract_params(init, mesh)
        chunks = steps.loss_chunks(config, vocab_size, mesh, parts=1)
        eval_step: Any = steps.make_eval_step(graphdef, chunks)
        setup = Setup(config, data, mesh, rows, graphdef, init, params, eval_step)
        weight = jax.ShapeDtypeStruct((run.batch_size,), np.float32, sharding=rows)
        compiled = eval_step.lower(params, setup.tokens(), weight).compile()
        return dataclasses.replace(setup, eval_step=compiled)
