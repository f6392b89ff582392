"""Train one optimizer: steps, validations and checkpoints in their order."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from examples import checkpoint, hardware, optim, step
from examples import state as states
from examples.clock import Clock
from examples.data.prefetch import Prefetch
from examples.files import WriteFailed
from examples.flags import UserError
from examples.models import flops_per_token
from examples.report import Report, Result, perplexity
from examples.setup import Setup, evaluate, place
from examples.signals import Interrupted, Signals

# Steps that may be under way while their losses are still unread. Reading the loss of
# the newest step instead would leave the device idle between steps.
_STEPS_AHEAD = 2


class TrainingStopped(RuntimeError):
    """Training cannot go on; shown as one line, exit code 1."""


class Training:
    """One optimizer from its newest checkpoint, or from the start, to the last step."""

    def __init__(
        self,
        setup: Setup,
        plan: optim.Plan,
        report: Report,
        store: checkpoint.Store,
        signals: Signals,
    ):
        self._setup, self._plan, self._report = setup, plan, report
        self._store, self._signals = store, signals
        self._run, self._save_options = setup.config.run, setup.config.save
        self._tokens = self._run.batch_size * setup.config.model.seq_len
        model, vocabulary = setup.config.model, setup.data.tokenizer.vocab_size
        self._flops = flops_per_token(model, vocabulary)
        self._peak = hardware.peak_flops(setup.mesh.size)
        self._unread: deque[tuple[int, step.Metrics]] = deque()
        self._val_loss = self._bits = math.nan
        self._doubtful = self._due = False  # the newest state; a checkpoint of it
        self._begin = self._saved_at = time.perf_counter()

    def _compile(self) -> tuple[states.TrainState, Callable[..., Any]]:
        """The abstract state, and the step compiled for it."""
        setup, transform = self._setup, self._plan.transform
        ema = self._run.ema is not None
        abstract = states.abstract_state(transform, setup.params, setup.mesh, ema=ema)
        train_step = step.make_train_step(
            setup.graphdef, transform, setup.config, abstract, setup.chunks
        )
        shape = self._run.batch_size, setup.config.model.seq_len + 1
        tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=setup.batch_sharding)
        return abstract, train_step.lower(abstract, tokens).compile()

    def _start(self, abstract: states.TrainState) -> states.TrainState:
        """The state to go on from; records of steps after it are dropped."""
        state, notes = self._store.restore(abstract)
        if state is None:
            key = jax.random.key(self._run.seed)
            transform = self._plan.transform
            state = states.initial_state(self._setup.init, transform, abstract, key)
        name, first = self._plan.name, int(state.step)

        # A run killed between its last step and its result evaluates once more.
        again = "eval" if first == self._run.steps else ""

        def keep(record: dict[str, Any]) -> bool:
            if record.get("optimizer") != name or record["kind"] == "result":
                return record.get("optimizer") != name
            step = record["step"]
            return step < first or (step == first and record["kind"] != again)

        records = self._report.rewind(keep)
        mine = [r for r in records if r.get("optimizer") == name]
        times = [r["seconds"] for r in mine if r["kind"] == "train"]
        self._clock = Clock(max(times, default=0.0))
        self._trained = self._clock.seconds()
        self._mark = (first, self._trained)
        self._skipped = int(state.skipped)
        self._doubtful = int(state.skipped_in_a_row) > 0
        if self._save_options.resume != "no":
            self._report.record("resumed", optimizer=name, step=first, notes=notes)
            self._report.say(f"{name}: from step {first}", *notes)
        return state

    def _read(self, keep: int) -> None:
        """Report finished steps, but let the last `keep` run on."""
        while len(self._unread) > keep:
            number, metrics = self._unread.popleft()
            values = {k: float(v) for k, v in metrics._asdict().items()}
            in_a_row = int(values.pop("skipped_in_a_row"))
            skipped = int(values.pop("skipped"))
            self._doubtful = in_a_row > 0 or not math.isfinite(values["update_norm"])
            (before, since), now = self._mark, self._clock.seconds()
            speed = (number - before) * self._tokens / max(now - since, 1e-9)
            if number == 1 or number % self._run.log_every == 0:
                self._mark = (number, now)
            numbers: dict[str, Any] = values | {
                # Steps that were skipped did not move the optimizer's schedule.
                "learning_rate": float(self._rates[max(0, number - 1 - self._skipped)]),
                "tokens": number * self._tokens,
                "seconds": now,
                "tokens_per_second": speed,
                "mfu": self._peak and speed * self._flops / self._peak,
                "memory_gib": hardware.peak_memory(),
                "skipped": skipped,
            }
            self._report.train_step(self._plan.name, number, numbers)
            if skipped > self._skipped:
                self._skipped = skipped
                self._tell_skipped(number, values, in_a_row)

    def _tell_skipped(self, number: int, values: dict[str, float], n: int) -> None:
        name = self._plan.name
        parts = ("loss", "grad_norm", "update_norm")
        said = ", ".join(f"{part.replace('_', ' ')} {values[part]:g}" for part in parts)
        self._report.say(f"{name}: step {number} skipped, it is not finite ({said})")
        self._report.record(
            "skipped", optimizer=name, step=number, in_a_row=n, reason=said
        )
        if n >= self._run.max_bad_steps:
            raise TrainingStopped(
                f"{name}: {n} steps in a row were not finite, the last at step "
                f"{number} ({said}); try a lower --learning-rate"
            )

    def _evaluate(self, number: int, state: states.TrainState) -> None:
        self._read(keep=0)
        self._clock.pause()
        params = state.params if state.ema is None else state.ema
        self._val_loss, self._bits = evaluate(self._setup, params)
        numbers = {
            "tokens": number * self._tokens,
            "seconds": self._clock.seconds(),
            "loss": self._val_loss,
            "perplexity": perplexity(self._val_loss),
            "bits_per_byte": self._bits,
        }
        self._report.evaluation(self._plan.name, number, numbers)
        self._clock.resume()
        if not math.isfinite(self._val_loss):
            raise TrainingStopped(
                f"{self._plan.name}: the validation loss became {self._val_loss} at "
                f"step {number}; try a lower --learning-rate"
            )

    def _sound(self, state: states.TrainState) -> bool:
        """Whether the model can be used: after skipped steps it may be ruined."""
        return math.isfinite(evaluate(self._setup, state.params)[0])

    def _save(self, state: states.TrainState, *, last: bool) -> None:
        """Begin a checkpoint, after all records up to its step are on disk.

        After skipped steps it waits for a good one: no ruined state may replace others.
        """
        self._read(keep=0)
        self._trained = self._clock.pause()
        self._due = self._doubtful and not (last and self._sound(state))
        if not self._due:
            self._report.sync()
            self._store.save(state)
            self._saved_at = time.perf_counter()
        self._clock.resume()

    def _asked(self, number: int) -> tuple[int, bool]:
        """A signal that came, and whether it is time to save: for all processes."""
        minutes = self._save_options.save_minutes
        late = time.perf_counter() - self._saved_at > 60 * minutes
        asked = self._signals.received, bool(minutes) and late
        if jax.process_count() == 1:
            return asked
        if number % self._run.log_every:  # agreeing takes a moment
            return 0, False
        both = multihost_utils.process_allgather(np.asarray(asked, np.int32))
        signal, late = both.max(axis=0)
        return int(signal), bool(late)

    def _steps(self, state: states.TrainState, compiled: Any) -> states.TrainState:
        run, first = self._run, int(state.step)
        every = self._save_options.save_every
        sharding = self._setup.batch_sharding
        try:
            with Prefetch(self._setup.batches(first)) as ready:
                for number, batch in enumerate(ready, first + 1):
                    tokens_BxM = place(batch, sharding, run.batch_size)
                    state, metrics = compiled(state, tokens_BxM)
                    self._unread.append((number, metrics))
                    self._read(keep=_STEPS_AHEAD)
                    if number % run.eval_every == 0 or number == run.steps:
                        self._evaluate(number, state)
                    signal, late = self._asked(number)
                    regular = every and number % every == 0
                    last = bool(signal) or number == run.steps
                    if last or late or regular or self._due:
                        self._save(state, last=last)
                    if signal and number < run.steps:
                        self._store.wait()
                        saved = (self._store.steps() or [0])[-1]
                        raise Interrupted(signal, f"step {saved} of {self._plan.name}")
        except WriteFailed:  # a checkpoint must not be newer than the records
            raise
        except (TrainingStopped, UserError):  # the latter of damaged data
            if self._sound(state):  # skipped steps have left it as it was
                self._store.save(state)
            raise
        self._store.wait()
        return state

    def result(self) -> Result:
        """Train; the result is that of the last step."""
        self._report.begin(self._plan.name, (self._store.steps() or [0])[-1])
        abstract, compiled = self._compile()
        state = self._start(abstract)
        # At once: computing a rate between steps would wait for the steps under way.
        self._rates = self._plan.rates(self._run.steps)
        compile_seconds = time.perf_counter() - self._begin
        self._clock.resume()
        first = int(state.step)
        state = self._steps(state, compiled)
        if first == self._run.steps:
            self._evaluate(first, state)
        return Result(
            optimizer=self._plan.name,
            ns_steps=self._plan.ns_steps,
            nesterov=self._plan.nesterov,
            learning_rate=self._plan.learning_rate,
            adam_learning_rate=self._plan.adam_learning_rate,
            steps=self._run.steps,
            skipped=int(state.skipped),
            val_loss=self._val_loss,
            perplexity=perplexity(self._val_loss),
            bits_per_byte=self._bits,
            tokens_per_second=self._run.steps * self._tokens / max(self._trained, 1e-9),
            seconds=time.perf_counter() - self._begin,
            compile_seconds=compile_seconds,
            digest=f"{int(checkpoint.digest(state)):08x}",
        )
