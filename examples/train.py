"""Train one optimizer: steps, validations and checkpoints in their order."""

import contextlib
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import examples.step as steps
from examples import checkpoint, optim, sample
from examples.data.loader import prefetch
from examples.files import WriteFailed
from examples.mesh import peak_memory
from examples.options import Failed, Interrupted, UserError
from examples.report import Report, perplexity
from examples.runs import CHECKPOINT_FOLDER
from examples.setup import Setup

# Steps that may be under way while their losses are still unread. Reading the loss of
# the newest step instead would leave the device idle between steps.
_STEPS_AHEAD = 2


@contextlib.contextmanager
def signals() -> Generator[Callable[[], int]]:
    """Remembers a signal that asks the run to end; a second one ends it at once.

    A signal that is ignored when the run begins, as `nohup` does with SIGHUP, stays so.
    """
    received: list[int] = []

    def take(number: int, _: Any) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    heard = [n for n in numbers if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, take) for number in heard}
    try:
        yield lambda: received[0] if received else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Training:
    """One optimizer, from its newest checkpoint or the start to the last step.

    `received` gives the number of a signal that asks to end, or 0.
    """

    def __init__(
        self,
        setup: Setup,
        plan: optim.Plan,
        report: Report,
        folder: Path,
        received: Callable[[], int],
    ):
        self._setup, self._plan, self._name = setup, plan, plan.name
        self._report, self._folder, self._received = report, folder, received
        self._run, self._save_options = setup.config.run, setup.config.save
        place = folder / CHECKPOINT_FOLDER / plan.name
        self._store = checkpoint.Store(place, self._save_options.keep)
        self._tokens = self._run.batch_size * setup.config.model.seq_len
        self._unread: deque[tuple[int, steps.Metrics]] = deque()
        self._val_loss, self._bits, self._best_loss = math.nan, math.nan, math.inf
        # Of training alone: validating and saving end by starting the clock anew.
        self._seconds, self._since = 0.0, math.nan
        self._first_bad = 0  # of the bad steps in a row that end with the newest
        self._due = False  # a checkpoint, when a step is good again
        self._begin = self._saved_at = time.perf_counter()

    def result(self) -> dict[str, Any]:
        """Train; the record of the result."""
        run, plan = self._run, self._plan
        self._report.step(self._name, (self._store.steps() or [0])[-1], "compiling")
        abstract, compiled = self._setup.compile_step(plan)
        self._state = self._start(abstract)
        compile_seconds, first = time.perf_counter() - self._begin, self._mark[0]
        self._since = time.perf_counter()
        try:
            self._steps(compiled, first)
        except (WriteFailed, checkpoint.CheckpointFailed):
            raise  # a checkpoint must not be newer than the records
        except UserError as error:  # steps that are not finite, or damaged data
            raise type(error)(f"{error}; {self._keep_good()}") from None
        if first == run.steps:
            self._evaluate(first)
        self._store.wait()
        tokens_per_second = run.steps * self._tokens / max(self._seconds, 1e-9)
        result = {
            "optimizer": self._name,
            **plan.settings,
            "steps": run.steps,
            "skipped": int(self._state.skipped),
            "val_loss": self._val_loss,
            "perplexity": perplexity(self._val_loss),
            "bits_per_byte": self._bits,
            "tokens_per_second": tokens_per_second,
            "seconds": time.perf_counter() - self._begin,
            "compile_seconds": compile_seconds,
            "digest": f"{int(checkpoint.digest(self._state)):08x}",
        }
        self._report.record("result", **result)
        return result

    def close(self) -> None:
        """Wait for the checkpoint under way."""
        self._store.close()

    def _start(self, abstract: steps.TrainState) -> steps.TrainState:
        """The state to go on from; records of steps after it are dropped."""
        state, notes = self._store.restore(abstract)
        state = state or self._setup.first_state(self._plan, abstract)
        name, first, every = self._name, int(state.step), self._run.log_every
        # A run killed between its last step and its result evaluates once more.
        last = first - (first == self._run.steps)

        def keep(record: dict[str, Any]) -> bool:
            until = last if record["kind"] == "eval" else first
            mine = record.get("optimizer") == name
            return not mine or record.get("step", math.inf) <= until

        records = [r for r in self._report.rewind(keep) if r.get("optimizer") == name]
        if self._save_options.keep_best:
            best = checkpoint.best_step(self._folder, name, self._store.steps())
            self._best_loss, self._store.best_step = best
        times = {r["step"]: r["seconds"] for r in records if r["kind"] == "train"}
        due = {min(1, first), *range(every, first + 1, every)} - {0}
        if lost := len(due - times.keys()):
            notes.append(f"{lost} of {len(due)} records up to step {first} are missing")
        self._seconds = max(times.values(), default=0.0)
        self._mark = (first, self._seconds)
        self._skipped = int(state.skipped)
        self._first_bad = first if int(state.skipped_in_a_row) else 0
        if self._save_options.resume != "no":
            self._report.record("resumed", optimizer=name, step=first, notes=notes)
            self._report.say(f"{name}: from step {first}", *notes)
        return state

    def _steps(self, compiled: Any, first: int) -> None:
        run, every = self._run, self._save_options.save_every
        with contextlib.closing(prefetch(self._setup.batches(first))) as ready:
            for number, batch in enumerate(ready, first + 1):
                placed = self._setup.place(batch)
                self._state, metrics = compiled(self._state, placed)
                self._unread.append((number, metrics))
                self._read(keep=_STEPS_AHEAD)
                if number % run.eval_every == 0 or number == run.steps:
                    self._evaluate(number)
                asked, late = self._asked(number)
                last = bool(asked) or number == run.steps
                regular = every and number % every == 0
                if last or late or regular or self._due:
                    self._save(now=last)
                if asked and number < run.steps:
                    self._store.wait()
                    saved = (self._store.steps() or [0])[-1]
                    said = f"saved at step {saved} of {self._name}; go on from there"
                    said += f" with --out {self._folder} --resume"
                    signal_name = signal.Signals(asked).name
                    raise Interrupted(asked, f"{signal_name}: {said}")

    def _read(self, keep: int) -> None:
        """Report finished steps, but let the last `keep` run on."""
        while len(self._unread) > keep:
            number, metrics = self._unread.popleft()
            values = {k: float(v) for k, v in metrics._asdict().items()}
            in_a_row = int(values.pop("skipped_in_a_row"))
            self._first_bad = number - in_a_row + 1 if in_a_row else 0
            now = time.perf_counter()
            self._seconds, self._since = self._seconds + now - self._since, now
            before, since = self._mark
            speed = (number - before) * self._tokens / max(self._seconds - since, 1e-9)
            if number == 1 or number % self._run.log_every == 0:
                self._mark = (number, self._seconds)
            numbers: dict[str, Any] = values | {
                "tokens": number * self._tokens,
                "seconds": self._seconds,
                "tokens_per_second": speed,
                "memory_gib": peak_memory(),
                "skipped": int(values["skipped"]),
            }
            self._report.train_step(self._name, number, numbers)
            if numbers["skipped"] > self._skipped:
                self._skipped = numbers["skipped"]
                self._tell_skipped(number, values, in_a_row)

    def _tell_skipped(self, number: int, values: dict[str, float], n: int) -> None:
        name, parts = self._name, ("loss", "grad_norm", "update_norm")
        said = ", ".join(f"{part.replace('_', ' ')} {values[part]:g}" for part in parts)
        self._report.say(f"{name}: step {number} skipped, it is not finite ({said})")
        fields = {"optimizer": name, "step": number, "in_a_row": n, "reason": said}
        self._report.record("skipped", **fields)
        if n >= self._run.max_bad_steps:
            raise Failed(
                f"{name}: {n} steps in a row were not finite, the first of them step "
                f"{self._first_bad} ({said}); try a lower --learning-rate"
            )

    def _evaluate(self, number: int) -> None:
        self._read(keep=0)
        name, prompt = self._name, self._run.sample_prompt
        self._val_loss, self._bits = self._setup.evaluate(self._state.params)
        numbers = {
            "tokens": number * self._tokens,
            "seconds": self._seconds,
            "loss": self._val_loss,
            "perplexity": perplexity(self._val_loss),
            "bits_per_byte": self._bits,
        }
        self._report.evaluation(name, number, numbers)
        if not math.isfinite(self._val_loss):
            said = f"the validation loss became {self._val_loss} at step {number}"
            raise Failed(f"{name}: {said}; try a lower --learning-rate")
        if prompt is not None:
            config, tokenizer = self._setup.config.model, self._setup.data.tokenizer
            model = sample.Model.of(config, tokenizer, self._state.params)
            text = sample.continue_text(model, prompt, max_tokens=60)
            self._report.record("sample", optimizer=name, step=number, text=text)
            self._report.say(f"{name}: {text!r}")
        if self._save_options.keep_best and self._val_loss < self._best_loss:
            self._save(now=True)
            if not self._due:  # the best so far stays until there is a better one
                self._best_loss, self._store.best_step = self._val_loss, number
        self._since = time.perf_counter()

    def _sound(self) -> bool:
        """Whether training can go on from here: after bad steps it may not."""
        finite = checkpoint.all_finite((self._state.params, self._state.opt_state))
        loss, _ = self._setup.evaluate(self._state.params)
        return bool(finite) and math.isfinite(loss)

    def _keep_good(self) -> str:
        """Save the newest state if it is good; says which checkpoint is the last."""
        if self._sound():  # steps that were skipped have left it as it was
            self._report.sync()
            self._store.save(self._state)
            self._store.wait()
        kept = self._store.steps()
        return (
            f"the last checkpoint is {kept[-1]}" if kept else "there is no checkpoint"
        )

    def _save(self, *, now: bool) -> None:
        """Begin a checkpoint, after all records up to its step are on disk.

        After bad steps it waits for a good one: the state may be what makes them bad,
        and must not replace others. With `now` it is saved if it is good nevertheless.
        """
        self._read(keep=0)
        self._due = bool(self._first_bad) and not (now and self._sound())
        if not self._due:
            self._report.sync()
            self._store.save(self._state)
            self._saved_at = time.perf_counter()
        self._since = time.perf_counter()

    def _asked(self, number: int) -> tuple[int, bool]:
        """A signal that came, and whether it is time to save: for all processes."""
        minutes = self._save_options.save_minutes
        late = time.perf_counter() - self._saved_at > 60 * minutes
        asked = self._received(), bool(minutes) and late
        if jax.process_count() == 1:
            return asked
        if number % self._run.log_every:  # agreeing takes a moment
            return 0, False
        both = multihost_utils.process_allgather(np.asarray(asked, np.int32))
        return int(both[:, 0].max()), bool(both[:, 1].max())
