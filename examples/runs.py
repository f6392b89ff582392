"""A whole run: read, train with every optimizer, print the table, plot."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path

import jax

import muon2_optax as m2
from examples import hardware, optim, plot
from examples.checkpoint import Store
from examples.config import CHECKPOINT_FOLDER, METRICS_FILE, Config
from examples.data import loader
from examples.files import WriteFailed
from examples.flags import UserError
from examples.folder import (
    accepted_changes,
    claim_folder,
    locked,
    store_settings,
)
from examples.loop import Training
from examples.models import active_parameter_count, matrix_rules, parameter_count
from examples.records import read_metrics
from examples.report import Report, Result
from examples.setup import Setup, prepare
from examples.signals import Signals


def _describe(setup: Setup, report: Report, changes: Sequence[str]) -> None:
    """Say what is about to be trained on what, on the screen and in the JSONL.

    `changes`: what is not as it was when the run was begun.
    """
    config, data = setup.config, setup.data
    text, run, model = data.about, config.run, config.model
    vocab_size = data.tokenizer.vocab_size
    parameters = parameter_count(model, vocab_size)
    active = active_parameter_count(model, vocab_size)
    some = "" if active == parameters else f" ({active:,} active)"
    tokens = run.steps * run.batch_size * model.seq_len
    epochs = tokens / (data.train.windows * model.seq_len)
    machine = hardware.environment()
    report.say(
        f"text: {text.source}; hash {text.digest}",
        f"  train {text.train.documents:,} documents, {text.train.bytes:,} bytes, "
        f"{text.train.tokens:,} tokens ({data.tokenizer.name})",
        f"  validation {text.val.documents:,} documents, {text.val.bytes:,} bytes; "
        f"{data.val.tokens:,} tokens of it are used",
        *(f"  {note}" for note in text.notes),
        f"model: {model.model}, {parameters:,} parameters{some}, {model.dtype}, "
        f"vocabulary {vocab_size:,}",
        f"run: {run.steps} steps of {run.batch_size} x {model.seq_len} = "
        f"{tokens:,} tokens ({epochs:.2f} epochs) for each optimizer, seed {run.seed}",
        "machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()),
        f"mesh: {run.mesh or 'none'}, on {setup.mesh.size} of {jax.device_count()}",
        *changes,
    )
    if config.optim.warmup_steps >= run.steps:
        report.say(
            f"note: the warm-up, {config.optim.warmup_steps} steps, is no shorter than "
            "the run: the peak learning rate is never reached"
        )
    report.record(
        "run",
        config=config.as_dict(),
        environment=machine,
        parameters=parameters,
        text=dataclasses.asdict(text),
        changes=list(changes),
    )


def _write_notes(setup: Setup, rules: m2.MatrixRules, folder: Path) -> None:
    """What else a reader of the run needs: its tokenizer, and the routing."""
    if jax.process_index() == 0:
        routing = rules.describe(setup.params)
        try:
            setup.data.tokenizer.save(folder / "tokenizer.json")
            (folder / "parameters.txt").write_text(routing + "\n", encoding="utf-8")
        except OSError as error:
            raise WriteFailed(folder / "parameters.txt", error) from None


def _earlier_results(config: Config, folder: Path) -> dict[str, Result]:
    """Of the optimizers that had finished before this run went on."""
    path = folder / METRICS_FILE
    if not path.exists():
        return {}
    fields = {field.name for field in dataclasses.fields(Result)}
    records = [r for r in read_metrics(path) if r["kind"] == "result"]
    found = [Result(**{k: r[k] for k in fields}) for r in records if fields <= r.keys()]
    return {r.optimizer: r for r in found if r.steps == config.run.steps}


def _repeatable(config: Config) -> Config:
    """Bit-identical continuation on GPUs: their fastest operations add in any order."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true"
    # cuDNN's backward pass of attention is one of them.
    model = dataclasses.replace(config.model, attention="xla")
    return dataclasses.replace(config, model=model)


def _join(config: Config) -> None:
    """What must be settled before JAX looks for its devices."""
    if config.run.compile_cache is not None:
        jax.config.update("jax_compilation_cache_dir", config.run.compile_cache)
    if config.run.distributed and not jax.distributed.is_initialized():
        try:
            jax.distributed.initialize()
        except (RuntimeError, ValueError) as error:
            raise UserError(f"--distributed: {error}") from None


def _train(
    setup: Setup,
    folder: Path,
    begin: float,
    done: dict[str, Result],
    changes: Sequence[str],
) -> list[Result]:
    """Train with every optimizer that has not finished yet, and compare them all."""
    config = setup.config
    rules = matrix_rules(config.model)
    shardings = m2.Shardings.of(setup.params) if setup.mesh.size > 1 else None
    plans = optim.plans(
        config.optim, config.run.steps, rules=rules, shardings=shardings
    )
    results = []
    with (
        Report(config, folder, [plan.name for plan in plans]) as report,
        Signals() as signals,
        jax.set_mesh(setup.mesh),
    ):
        _describe(setup, report, changes)
        _write_notes(setup, rules, folder)
        for plan in plans:
            if plan.name in done:
                results.append(done[plan.name])
                continue
            place = folder / CHECKPOINT_FOLDER / plan.name
            with contextlib.closing(Store(place, config.save.keep)) as store:
                training = Training(setup, plan, report, store, signals)
                results.append(report.result(training.result()))
    if jax.process_index() == 0:
        figure = plot.plot_runs([folder], folder / "loss.png")
        report.table(results, figure, time.perf_counter() - begin)
    return results


def run(config: Config) -> list[Result]:
    """A run from the text to the figure; it alone writes into its folder."""
    begin = time.perf_counter()
    optim.plans(config.optim, config.run.steps)  # bad names are refused at once
    if config.run.deterministic:
        config = _repeatable(config)
    _join(config)
    data = loader.load(config)
    folder = claim_folder(config)
    first = jax.process_index() == 0
    with locked(folder) if first else contextlib.nullcontext():
        setup = prepare(config, data)
        # Before anything is written.
        done, changes = (
            _earlier_results(config, folder),
            accepted_changes(folder, config),
        )
        store_settings(
            folder,
            config,
            data.tokenizer.vocab_size,
            data.about.digest,
            data.about.tokens_digest,
            write=first,
        )
        return _train(setup, folder, begin, done, changes)
