"""Train one optimizer after the other on the same batches and compare them."""

import dataclasses
import math
import platform
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import flax
import jax
import numpy as np
import optax

import muon2_optax as m2
from examples import optim, plots, step
from examples.config import Config
from examples.data import loader
from examples.data.tokens import SubwordTokenizer
from examples.models.llama import parameter_count
from examples.report import Report, Result, claim_folder, perplexity

# Steps that may be under way while their losses are still unread. Reading the loss of
# the newest step instead would leave the device idle between steps.
_STEPS_AHEAD = 2


class TrainingStopped(RuntimeError):
    """Training cannot go on; shown as one line, exit code 1."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all optimizers share: data, model and compiled functions."""

    config: Config
    data: loader.Dataset
    graphdef: Any
    init: Callable[[jax.Array], Any]
    eval_step: Callable[[Any, Any, Any], jax.Array]
    shapes: Any


class _Clock:
    """Seconds spent training, compilation and validation left out."""

    def __init__(self) -> None:
        self._total, self._since = 0.0, time.perf_counter()

    def pause(self) -> None:
        self._total += time.perf_counter() - self._since

    def resume(self) -> None:
        self._since = time.perf_counter()

    def seconds(self) -> float:
        return self._total + time.perf_counter() - self._since


def _check_finite(loss: float, what: str, number: int, name: str) -> None:
    if not math.isfinite(loss):
        raise TrainingStopped(
            f"{name}: the {what} loss became {loss} at step {number}; try a lower "
            "--learning-rate"
        )


def evaluate(setup: Setup, params: Any) -> tuple[float, float]:
    """Mean loss per validation token (nats) and bits per byte of validation text."""
    val = setup.data.val
    sums = [setup.eval_step(params, tokens, weight) for tokens, weight in val.batches]
    total = math.fsum(float(value) for value in sums)
    return total / val.tokens, total / math.log(2) / max(1, val.bytes)


def train(setup: Setup, plan: optim.Plan, report: Report) -> Result:
    """Train a fresh model with one optimizer and evaluate it along the way."""
    run, batches = setup.config.run, setup.data.train
    begin = time.perf_counter()
    report.begin(plan.name)
    params = setup.init(jax.random.key(run.seed))
    state = step.TrainState(params, jax.jit(plan.transform.init)(params))
    train_step = step.make_train_step(setup.graphdef, plan.transform)
    compiled = train_step.lower(state, batches.at(0)).compile()
    # All at once: computing a rate between steps would wait for the steps under way.
    rates = np.asarray(jax.vmap(plan.schedule)(np.arange(run.steps)))
    compile_seconds = time.perf_counter() - begin

    tokens_per_step = run.batch_size * setup.config.model.seq_len
    unread: deque[tuple[int, step.Metrics]] = deque()
    clock = _Clock()

    def read(keep: int) -> None:
        """Report finished steps, but let the last `keep` run on."""
        while len(unread) > keep:
            number, metrics = unread.popleft()
            loss = float(metrics.loss)
            _check_finite(loss, "training", number, plan.name)
            tokens = number * tokens_per_step
            report.train_step(
                plan.name,
                number,
                loss=loss,
                grad_norm=float(metrics.grad_norm),
                learning_rate=float(rates[number - 1]),
                tokens=tokens,
                tokens_per_second=tokens / clock.seconds(),
            )

    val_loss = bits_per_byte = math.nan
    for number in range(1, run.steps + 1):
        state, metrics = compiled(state, batches.at(number - 1))
        unread.append((number, metrics))
        read(keep=_STEPS_AHEAD)
        if number % run.eval_every == 0 or number == run.steps:
            read(keep=0)
            clock.pause()
            val_loss, bits_per_byte = evaluate(setup, state.params)
            _check_finite(val_loss, "validation", number, plan.name)
            tokens = number * tokens_per_step
            report.evaluation(plan.name, number, tokens, val_loss, bits_per_byte)
            clock.resume()
    return Result(
        optimizer=plan.name,
        ns_steps=plan.ns_steps,
        nesterov=plan.nesterov,
        learning_rate=plan.learning_rate,
        adam_learning_rate=plan.adam_learning_rate,
        val_loss=val_loss,
        perplexity=perplexity(val_loss),
        bits_per_byte=bits_per_byte,
        tokens_per_second=run.steps * tokens_per_step / clock.seconds(),
        seconds=time.perf_counter() - begin,
        compile_seconds=compile_seconds,
    )


def prepare(config: Config, data: loader.Dataset) -> Setup:
    """Build and compile what all optimizers share, so that none is charged for it."""
    graphdef, init = step.make_model(config.model, data.tokenizer.vocab_size)
    key = jax.random.key(config.run.seed)
    shapes = jax.eval_shape(init, key)
    eval_step = step.make_eval_step(graphdef).lower(shapes, *data.val.batches[0])
    return Setup(
        config, data, graphdef, init.lower(key).compile(), eval_step.compile(), shapes
    )


def _environment() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": f"{device.device_kind} ({device.platform})",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
    }


def _describe(setup: Setup, report: Report) -> None:
    """Say what is about to be trained on what, on the screen and in the JSONL."""
    config, data = setup.config, setup.data
    text, run = data.corpus, config.run
    vocab_size = data.tokenizer.vocab_size
    parameters = parameter_count(config.model, vocab_size)
    tokens = run.steps * run.batch_size * config.model.seq_len
    epochs = tokens / (data.train.windows * config.model.seq_len)
    environment = _environment()
    report.say(
        f"text: {text.source}; hash {text.digest()}",
        f"  train {len(text.train):,} documents, {text.train_bytes:,} bytes, "
        f"{len(data.train.stream):,} tokens ({data.tokenizer.name})",
        f"  validation {len(text.val):,} documents, {text.val_bytes:,} bytes; "
        f"{data.val.tokens:,} tokens of it are used",
        *(f"  {note}" for note in text.notes),
        f"model: llama, {parameters:,} parameters, {config.model.dtype}, "
        f"vocabulary {vocab_size:,}",
        f"run: {run.steps} steps of {run.batch_size} x {config.model.seq_len} = "
        f"{tokens:,} tokens ({epochs:.2f} epochs) for each optimizer, seed {run.seed}",
        "machine: " + ", ".join(f"{key} {value}" for key, value in environment.items()),
    )
    report.record(
        "run",
        config=config.as_dict(),
        environment=environment,
        parameters=parameters,
        text={
            "source": text.source,
            "hash": text.digest(),
            "train_documents": len(text.train),
            "train_bytes": text.train_bytes,
            "val_documents": len(text.val),
            "val_bytes": text.val_bytes,
            "notes": text.notes,
        },
    )


def run(config: Config) -> list[Result]:
    """The whole program: read, train with every optimizer, print the table, plot."""
    begin = time.perf_counter()
    plans = optim.plans(config.optim, config.run.steps)
    data = loader.load(config)
    folder = claim_folder(config)
    setup = prepare(config, data)
    with Report(config, folder, [plan.name for plan in plans]) as report:
        _describe(setup, report)
        if isinstance(data.tokenizer, SubwordTokenizer):
            data.tokenizer.save(folder / "tokenizer.json")
        routing = m2.MatrixRules().describe(setup.shapes)
        (folder / "parameters.txt").write_text(routing + "\n", encoding="utf-8")
        results = [report.result(train(setup, plan, report)) for plan in plans]
    figure = plots.plot_folder(folder, folder / "loss.png")
    report.table(results, figure, time.perf_counter() - begin)
    return results
