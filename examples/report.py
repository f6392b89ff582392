"""What a run shows and keeps: JSONL records, a progress bar, a closing table."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from examples.config import METRICS_FILE, Config
from examples.flags import UserError
from examples.records import RecordFile
from examples.sinks import open_sinks


@dataclasses.dataclass(frozen=True)
class Result:
    """One row of the closing table."""

    optimizer: str
    ns_steps: int | None
    nesterov: bool | None
    learning_rate: float
    adam_learning_rate: float | None
    steps: int
    skipped: int
    val_loss: float
    perplexity: float
    bits_per_byte: float
    tokens_per_second: float
    seconds: float
    compile_seconds: float
    digest: str


def perplexity(loss: float) -> float:
    """exp(loss); a loss that has all but diverged must not overflow."""
    return math.exp(min(loss, 700.0))


def _numbers(numbers: Mapping[str, float | None]) -> str:
    """What a step looks like on the screen; unknown numbers are left out."""
    loss = numbers["loss"]
    if loss is None:
        return "loss not finite"
    text = f"loss {loss:.3f}  ppl {perplexity(loss):,.1f}"
    shown = (
        ("tokens_per_second", "  {:,.0f} tok/s"),
        ("mfu", "  MFU {:.1%}"),
        ("memory_gib", "  {:.1f} GiB"),
        ("skipped", "  skipped {:.0f}"),
    )
    for key, form in shown:
        if value := numbers.get(key):
            text += form.format(value)
    return text


def _short_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


class Report:
    """Writes `metrics.jsonl`, the source of truth, and shows progress on stdout.

    On a terminal there is a progress bar; elsewhere there are plain lines, one for
    every validation. Only the first of several processes writes and shows anything.
    """

    def __init__(self, config: Config, folder: Path, optimizers: list[str]):
        self.folder = folder
        self._steps = config.run.steps
        self._log_every = config.run.log_every
        self._total = len(optimizers) * self._steps
        self._order = {name: index for index, name in enumerate(optimizers)}
        self._active = jax.process_index() == 0
        self._console = Console(highlight=False, quiet=not self._active)
        self._live = self._console.is_terminal and self._active
        self._begin = time.perf_counter()
        self._begun_at: int | None = None
        self._latest: dict[str, float | None] = {"loss": math.nan}
        self._sinks = open_sinks(config, folder) if self._active else []
        # A new run never writes into the file of another.
        new, path = config.save.resume == "no", folder / METRICS_FILE
        self._file = RecordFile(path, new=new) if self._active else None
        self._bar = Progress(
            TextColumn("{task.description:>8}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self._console,
        )
        self._task = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(UserError):  # what stopped the run matters more
            if kind is not None:
                self.record("stopped", reason=str(error) or kind.__name__)
        self._bar.stop()
        if self._file is not None:
            self._file.close()

    def say(self, *lines: str) -> None:
        """Print lines as they are, without colours or wrapping."""
        for line in lines:
            self._console.print(line, markup=False, soft_wrap=True)

    def record(self, kind: str, **fields: Any) -> None:
        """Append one record to the JSONL file; a kill cannot take it back."""
        known = {
            key: None
            if isinstance(value, float) and not math.isfinite(value)
            else value
            for key, value in fields.items()
        }
        if self._file is not None:
            self._file.write({"kind": kind, **known})

    def rewind(self, keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Drop the records that `keep` refuses; returns those that stay."""
        return [] if self._file is None else self._file.rewind(keep)

    def sync(self) -> None:
        """Return when the records so far would survive a power failure."""
        if self._file is not None:
            self._file.sync()

    def begin(self, name: str, step: int) -> None:
        """Announce the next optimizer: it compiles before its first step."""
        if self._begun_at is None:  # a continued run has done its first steps before
            self._begun_at = self._done(name, step)
        if self._live:
            self._show(name, step, "compiling")

    def train_step(self, name: str, step: int, numbers: dict[str, Any]) -> None:
        """Take the numbers of a finished step; every `log_every`-th is recorded."""
        if step == 1 or step % self._log_every == 0:
            self.record("train", optimizer=name, step=step, **numbers)
            floats = {k: v for k, v in numbers.items() if v is not None}
            for sink in self._sinks:
                sink(name, "train", step, floats)
        self._latest = numbers
        if self._live:
            self._show(name, step, _numbers(numbers))

    def _done(self, name: str, step: int) -> int:
        return self._order[name] * self._steps + step

    def _show(self, name: str, step: int, numbers: str) -> None:
        done = self._done(name, step)
        if self._task is None:
            self._task = self._bar.add_task(name, total=self._total, numbers=numbers)
            self._bar.start()
        self._bar.update(self._task, description=name, completed=done, numbers=numbers)

    def evaluation(self, name: str, step: int, numbers: dict[str, float]) -> None:
        """Record a validation, and show it as a line."""
        self.record("eval", optimizer=name, step=step, **numbers)
        for sink in self._sinks:
            sink(name, "eval", step, numbers)
        line = f"{name:>8} step {step}/{self._steps}  "
        if not self._live:  # the bar shows these already
            line += f"{_numbers(self._latest)}  "
        line += f"val loss {numbers['loss']:.4f}  "
        line += f"bits/byte {numbers['bits_per_byte']:.3f}"
        if not self._live:
            done = self._done(name, step)
            elapsed = time.perf_counter() - self._begin
            eta = elapsed * (self._total - done) / max(1, done - (self._begun_at or 0))
            line += f"  eta {_short_time(eta)}"
        self.say(line)

    def result(self, result: Result) -> Result:
        """Record the final numbers of one optimizer."""
        self.record("result", **dataclasses.asdict(result))
        return result

    def table(self, results: list[Result], figure: Path, seconds: float) -> None:
        """The closing table, and where the files are."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("optimizer", no_wrap=True)
        heads = (
            "K",
            "nesterov",
            "rate",
            "val loss",
            "ppl",
            "bits/byte",
            "tok/s",
            "s",
        )
        for head in heads:
            table.add_column(head, justify="right", no_wrap=True)
        best = min(result.val_loss for result in results)
        for r in results:
            table.add_row(
                r.optimizer,
                "-" if r.ns_steps is None else str(r.ns_steps),
                {None: "-", True: "yes", False: "no"}[r.nesterov],
                f"{r.learning_rate:g}",
                f"{r.val_loss:.4f}",
                f"{r.perplexity:.3f}",
                f"{r.bits_per_byte:.4f}",
                f"{r.tokens_per_second:,.0f}",
                f"{r.seconds:.0f}",
                style="bold" if r.val_loss == best else "",
            )
        self._console.print(table)
        self.say(
            f"plot: {figure}",
            f"metrics: {self.folder / METRICS_FILE}",
            f"total: {seconds:.1f} s",
        )
