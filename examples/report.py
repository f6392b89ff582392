"""What a run shows and keeps: JSONL records, a progress bar, a closing table."""

import dataclasses
import json
import math
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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

from examples.config import Config
from examples.flags import UserError

METRICS_FILE = "metrics.jsonl"


@dataclasses.dataclass(frozen=True)
class Result:
    """One row of the closing table."""

    optimizer: str
    ns_steps: int | None
    nesterov: bool | None
    learning_rate: float
    adam_learning_rate: float | None
    val_loss: float
    perplexity: float
    bits_per_byte: float
    tokens_per_second: float
    seconds: float
    compile_seconds: float


def claim_folder(config: Config) -> Path:
    """Create the output folder; an earlier run's files are never overwritten."""
    if config.run.out is not None:
        folder = Path(config.run.out)
        if (folder / METRICS_FILE).exists():
            raise UserError(f"--out {folder}: already holds a run; choose another")
        _make(folder, exist_ok=True)
        return folder
    name = f"pretrain-{config.fingerprint()}"
    number = 1
    while True:
        folder = Path("runs", name if number == 1 else f"{name}-{number}")
        try:
            _make(folder, exist_ok=False)
            return folder
        except FileExistsError:
            number += 1


def _make(folder: Path, *, exist_ok: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if exist_ok:  # then it is a file that is in the way
            raise UserError(f"--out {folder}: there is a file of that name") from None
        raise
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror}") from None


def perplexity(loss: float) -> float:
    """exp(loss); a loss that has all but diverged must not overflow."""
    return math.exp(min(loss, 700.0))


def _short_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


class Report:
    """Writes `metrics.jsonl`, the source of truth, and shows progress on stdout.

    On a terminal there is a progress bar; elsewhere there are plain lines, one for
    every validation.
    """

    def __init__(self, config: Config, folder: Path, optimizers: list[str]):
        self.folder = folder
        self._steps = config.run.steps
        self._log_every = config.run.log_every
        self._total = len(optimizers) * self._steps
        self._order = {name: index for index, name in enumerate(optimizers)}
        self._console = Console(highlight=False)
        self._live = self._console.is_terminal
        self._begin = time.perf_counter()
        self._latest = (math.nan, math.nan)
        # Exclusive creation: two runs never write into one file.
        self._file = (folder / METRICS_FILE).open("x", encoding="utf-8")
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
        if kind is not None:
            self.record("stopped", reason=str(error) or kind.__name__)
        self._bar.stop()
        self._file.close()

    def say(self, *lines: str) -> None:
        """Print lines as they are, without colours or wrapping."""
        for line in lines:
            self._console.print(line, markup=False, soft_wrap=True)

    def record(self, kind: str, **fields: Any) -> None:
        """Append one record to the JSONL file; it is on disk when this returns."""
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")
        self._file.flush()

    def begin(self, name: str) -> None:
        """Announce the next optimizer: it compiles before its first step."""
        if self._live:
            self._show(name, 0, "compiling")

    def train_step(self, name: str, step: int, **metrics: float) -> None:
        """Take the numbers of a finished step; every `log_every`-th is recorded."""
        if step == 1 or step % self._log_every == 0:
            self.record("train", optimizer=name, step=step, **metrics)
        self._latest = (metrics["loss"], metrics["tokens_per_second"])
        if self._live:
            loss, speed = self._latest
            self._show(name, step, f"loss {loss:.3f}  {speed:,.0f} tok/s")

    def _show(self, name: str, step: int, numbers: str) -> None:
        done = self._order[name] * self._steps + step
        if self._task is None:
            self._task = self._bar.add_task(name, total=self._total, numbers=numbers)
            self._bar.start()
        self._bar.update(self._task, description=name, completed=done, numbers=numbers)

    def evaluation(
        self, name: str, step: int, tokens: int, loss: float, bits_per_byte: float
    ) -> None:
        """Record a validation, and show it as a line."""
        self.record(
            "eval",
            optimizer=name,
            step=step,
            tokens=tokens,
            loss=loss,
            perplexity=perplexity(loss),
            bits_per_byte=bits_per_byte,
        )
        train_loss, speed = self._latest
        line = f"{name:>8} step {step}/{self._steps}  loss {train_loss:.3f}  "
        line += f"val loss {loss:.4f}  bits/byte {bits_per_byte:.3f}"
        if not self._live:  # the bar shows these already
            done = self._order[name] * self._steps + step
            elapsed = time.perf_counter() - self._begin
            eta = elapsed * (self._total - done) / done
            line += f"  {speed:,.0f} tok/s  eta {_short_time(eta)}"
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
