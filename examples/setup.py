"""What all optimizers of a run share: data, devices, model and compiled functions."""

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import muon2_optax as m2
from examples import checkpoint, export, optim, runs
from examples import step as steps
from examples.config import Config
from examples.data import loader
from examples.data import tokens as tok
from examples.files import write_atomically
from examples.mesh import batch_sharding, environment, make_mesh
from examples.models import count_parameters, make_model, matrix_rules
from examples.options import check, flag
from examples.report import Report

# Options on which the meaning of parameters depends, but not their shapes.
_UNSEEN = ("heads", "rope_theta", "active_experts")


class Setup:
    """Made once for a run, compiled where it can be, so that no optimizer pays for it.

    `rows` is the sharding of a batch; of `params` and a batch of `tokens` there are
    shapes and shardings. `init` makes parameters of a key.
    """

    def __init__(self, config: Config, data: loader.Dataset):
        mesh, run, length = make_mesh(config.run.mesh), config.run, config.model.seq_len
        rows = batch_sharding(mesh)
        said = f"--loss-chunks {run.loss_chunks} does not divide {length} tokens"
        check(not run.loss_chunks or length % run.loss_chunks == 0, said)
        groups = mesh.size // rows.shard_shape((mesh.size, 1))[0]
        size = run.batch_size // run.accumulate
        said = f"--batch-size {run.batch_size} / --accumulate {run.accumulate} = {size}"
        said += f" rows cannot be divided over the {groups} parts of --mesh"
        check(size % groups == 0, f"{said} {run.mesh or 'data=-1'}")
        self.config, self.data, self.mesh, self.rows = config, data, mesh, rows
        vocab_size, array = data.tokenizer.vocab_size, jax.ShapeDtypeStruct
        self.tokens = array((run.batch_size, length + 1), np.int32, sharding=rows)
        weight = array((run.batch_size,), np.float32, sharding=rows)
        chunks = steps.loss_chunks(config, vocab_size, mesh, parts=1)
        with jax.set_mesh(mesh):
            self.graphdef, self.init = make_model(config.model, vocab_size)
            self.params = steps.abstract_params(self.init, mesh)
            eval_step = steps.make_eval_step(self.graphdef, chunks)
            lowered = eval_step.lower(self.params, self.tokens, weight)
            self._eval_step = lowered.compile()

    def plans(self) -> list[optim.Plan]:
        """The optimizers to compare, for this model on this mesh."""
        shardings = m2.Shardings.of(self.params) if self.mesh.size > 1 else None
        config, rules = self.config, matrix_rules(self.config.model)
        places = {"rules": rules, "shardings": shardings}
        tiny, steps = config.model.is_tiny, config.run.steps
        return optim.plans(config.optim, steps, tiny=tiny, **places)

    def compile_step(self, plan: optim.Plan) -> tuple[steps.TrainState, Any]:
        """The abstract state of an optimizer, and the step compiled for it."""
        config, transform = self.config, plan.transform
        abstract = steps.abstract_state(transform, self.params, self.mesh)
        vocab_size, parts = self.data.tokenizer.vocab_size, config.run.accumulate
        chunks = steps.loss_chunks(config, vocab_size, self.mesh, parts)
        model = self.graphdef, transform, config, abstract
        train_step = steps.make_train_step(*model, chunks, plan.schedule)
        return abstract, train_step.lower(abstract, self.tokens).compile()

    def first_state(self, plan: optim.Plan, abstract: steps.TrainState) -> Any:
        """The state before the first step: new, or with what --init-from names."""
        if self.config.run.init_from is None:
            key = jax.random.key(self.config.run.seed)
            return steps.initial_state(self.init, plan.transform, abstract, key)
        params, old = self.load_source(plan)
        state = steps.initial_state(lambda p: p, plan.transform, abstract, params)
        if old is None:
            return state
        return state._replace(opt_state=optim.at_schedule_start(old))

    def load_source(self, plan: optim.Plan) -> tuple[Any, Any]:
        """The parameters of --init-from and, if it is wanted, the optimizer's state.

        Raises:
          UserError: they cannot be read, or would mean something else in this run.
        """
        run, params = self.config.run, self.params
        source = Path(str(run.init_from))
        if source.suffix == export.SUFFIX:
            return export.load(source, self.config.model, params), None
        config, known = runs.stored_config(source), runs.stored_settings(source)
        theirs = tok.load_tokenizer(source / tok.FILE, known.get("tokenizer"))
        tokenizers = theirs, self.data.tokenizer
        texts = [hashlib.sha256(t.content()).hexdigest()[:12] for t in tokenizers]
        pairs = {"the tokenizer's hash": texts}
        models = config.model, self.config.model
        pairs |= {flag(key): [getattr(m, key) for m in models] for key in _UNSEEN}
        if run.init_optimizer:
            states = (c.optim.mu_dtype or "float32" for c in (config, self.config))
            pairs["--init-optimizer: --mu-dtype"] = [*states]
        for name, (there, here) in pairs.items():
            said = f"{name} is {there} there, {here} here; give what that run had"
            check(there == here, f"--init-from {source}: {said}")
        transform = plan.transform if run.init_optimizer else None
        several = len(optim.plans(config.optim, steps=1)) > 1
        name = plan.name if several or run.init_optimizer else None
        places = {"mesh": self.mesh, "transform": transform}
        found, _, opt_state = checkpoint.load_params(source, name, **places)
        shapes = [jax.tree.map(lambda x: x.shape, tree) for tree in (params, found)]
        said = "its parameters are not of the shapes of this run's model and vocabulary"
        check(shapes[0] == shapes[1], f"--init-from {source}: {said}")
        return found, opt_state

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
        """Mean loss per validation token (nats), and in bits per byte of text."""
        mine, text = self._mine(), self.data.about["val"]
        sums = [
            self._eval_step(params, self.place(tokens[mine]), self.place(weight[mine]))
            for tokens, weight in self.data.val
        ]
        loss = math.fsum(float(value) for value in sums) / self.data.val_tokens
        return loss, loss / math.log(2) * text["tokens"] / max(1, text["bytes"])

    def write_down(self, folder: Path) -> None:
        """What a continuation or a reader needs: options, tokenizer, routing."""
        config, tokenizer = self.config, self.data.tokenizer
        saved = tok.save(tokenizer, folder / tok.FILE)
        digest, size = self.data.about["digest"], tokenizer.vocab_size
        runs.store_settings(folder, config, size, digest, saved)
        routing = matrix_rules(config.model).describe(self.params) + "\n"
        write_atomically(folder / "parameters.txt", routing.encode())

    def describe(self, report: Report, folder: Path, changes: Sequence[str]) -> None:
        """Say and record what is about to be trained on what.

        `changes`: what is not as it was when the run was begun.
        """
        config, data, text = self.config, self.data, self.data.about
        run, model, machine = config.run, config.model, environment()
        count, active = count_parameters(model, self.params)
        tokens = run.steps * run.batch_size * model.seq_len
        epochs = tokens / (data.train.windows * model.seq_len)

        def listed(parts: dict[str, int]) -> str:
            return ", ".join(f"{number:,} {name}" for name, number in parts.items())

        report.say(
            f"folder: {folder}",
            f"text: {text['source']}; hash {text['digest']}; {data.tokenizer.name}",
            *(f"  {split} {listed(text[split])}" for split in ("train", "val")),
            *(f"  {note}" for note in text["notes"]),
            f"model: {model.model}, {count:,} parameters ({active:,} active), "
            f"{model.dtype}, vocabulary {data.tokenizer.vocab_size:,}",
            f"run: {run.steps} steps of {run.batch_size} x {model.seq_len} = "
            f"{tokens:,} tokens ({epochs:.2f} epochs) for each optimizer, seed "
            f"{run.seed}; validation on {data.val_tokens:,} tokens",
            "machine: " + ", ".join(f"{k} {v}" for k, v in machine.items()),
            "mesh: " + ", ".join(f"{k}={v}" for k, v in self.mesh.shape.items()),
            *changes,
        )
        if config.optim.warmup_steps >= run.steps:
            report.say("note: the warm-up is no shorter than the run (--warmup-steps)")
        about = {"config": dataclasses.asdict(config), "environment": machine}
        about |= {"parameters": count, "text": text, "changes": list(changes)}
        report.record("run", **about)
