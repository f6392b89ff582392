"""What a run shows and keeps: JSONL records, progress, a closing table."""

import contextlib
import dataclasses
import importlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from examples.config import Config
from examples.files import Record, RecordFile
from examples.options import UserError
from examples.runs import METRICS_FILE

# Without a terminal a line is printed so often, at most.
_LINE_SECONDS = 10.0


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


# (name of the optimizer, training or validation, step, numbers) -> None
Sink = Callable[[str, str, int, Mapping[str, float]], None]


def _sinks(config: Config, folder: Path) -> list[Sink]:
    """Copies of the records in TensorBoard and Weights & Biases, as options ask."""

    def library(name: str, flag: str) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError:
            said = f"--{flag}: the package {name!r} is not installed"
            raise UserError(said) from None

    sinks: list[Sink] = []
    if config.run.tensorboard:
        board, writers = library("tensorboardX", "tensorboard"), {}

        def write(name: str, kind: str, step: int, numbers: Any) -> None:
            if name not in writers:  # one curve per optimizer in the same charts
                place = str(folder / "tensorboard" / name)
                writers[name] = board.SummaryWriter(place)
            for key, value in numbers.items():
                writers[name].add_scalar(f"{kind}/{key}", value, step)
            writers[name].flush()

        sinks.append(write)
    if config.run.wandb:
        settings = {"project": "muon2_optax", "dir": str(folder), "resume": "allow"}
        run = library("wandb", "wandb").init(config=config.as_dict(), **settings)

        def log(name: str, kind: str, step: int, numbers: Any) -> None:
            # Every optimizer counts its own steps, and W&B's counter cannot go back.
            values = {f"{name}/{kind}/{k}": v for k, v in numbers.items()}
            run.log({f"{name}/step": step} | values)

        sinks.append(log)
    return sinks


def _numbers(numbers: Mapping[str, float | None]) -> str:
    """What a step looks like on the screen; unknown numbers are left out."""
    loss = numbers["loss"]
    if loss is None or not math.isfinite(loss):
        return "loss not finite"
    text = f"loss {loss:.3f}  ppl {perplexity(loss):,.1f}"
    shown = (
        ("tokens_per_second", "  {:,.0f} tok/s"),
        ("mfu", "  MFU {:.1%}"),
        ("memory_gib", "  {:.1f} GiB"),
        ("skipped", "  skipped {:.0f}"),
    )
    return text + "".join(
        form.format(value) for key, form in shown if (value := numbers.get(key))
    )


class Report:
    """Writes `metrics.jsonl`, the source of truth, and shows progress on stdout.

    On a terminal there is a progress bar; elsewhere there are plain lines, one for
    every validation and one every ten seconds. Only the first of several processes
    writes and shows anything.
    """

    def __init__(self, config: Config, folder: Path, optimizers: list[str]):
        self.folder = folder
        self._steps, self._log_every = config.run.steps, config.run.log_every
        self._total = len(optimizers) * self._steps
        self._order = {name: index for index, name in enumerate(optimizers)}
        active = jax.process_index() == 0
        self._console = Console(highlight=False, quiet=not active)
        self._live = self._console.is_terminal and active
        self._sinks = _sinks(config, folder) if active else []
        # A new run never writes into the file of another.
        new, path = config.save.resume == "no", folder / METRICS_FILE
        self._file = RecordFile(path, new=new) if active else None
        self._mark = self._line_at = 0.0
        self._marked_step = 0
        self._bar = Progress(
            TextColumn("{task.description:>8}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
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
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in fields.items()
        }
        if self._file is not None:
            self._file.write({"kind": kind, **known})

    def rewind(self, keep: Callable[[Record], bool]) -> list[Record]:
        """Drop the records that `keep` refuses; returns those that stay."""
        return [] if self._file is None else self._file.rewind(keep)

    def sync(self) -> None:
        """Return when the records so far would survive a power failure."""
        if self._file is not None:
            self._file.sync()

    def begin(self, name: str, step: int) -> None:
        """Announce the next optimizer: it compiles before its first step."""
        self._marked_step = 0
        self._show(name, step, "compiling")

    def train_step(self, name: str, step: int, numbers: dict[str, Any]) -> None:
        """Take the numbers of a finished step; every `log_every`-th is recorded."""
        if not self._marked_step:  # the time that is left is told by the steps after
            self._mark, self._marked_step = time.perf_counter(), step
        logged = step == 1 or step % self._log_every == 0
        if logged:
            self.record("train", optimizer=name, step=step, **numbers)
            self._copy(name, "train", step, numbers)
        if self._live or (logged and self._is_time()):
            self._show(name, step, _numbers(numbers) + self._time_left(name, step))

    def _is_time(self) -> bool:
        return time.perf_counter() - self._line_at >= _LINE_SECONDS

    def _copy(self, name: str, kind: str, step: int, numbers: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink(name, kind, step, {k: v for k, v in numbers.items() if v is not None})

    def _time_left(self, name: str, step: int) -> str:
        done, since = step - self._marked_step, time.perf_counter() - self._mark
        if done < 1:
            return ""
        left = self._total - self._order[name] * self._steps - step
        minutes, seconds = divmod(round(since * left / done), 60)
        return f"  eta {minutes}:{seconds:02d}"

    def _show(self, name: str, step: int, text: str) -> None:
        if not self._live:
            self.say(f"{name:>8} step {step}/{self._steps}  {text}")
            self._line_at = time.perf_counter()
            return
        done = self._order[name] * self._steps + step
        if self._task is None:
            self._task = self._bar.add_task(name, total=self._total, numbers=text)
            self._bar.start()
        self._bar.update(self._task, description=name, completed=done, numbers=text)

    def evaluation(self, name: str, step: int, numbers: dict[str, float]) -> None:
        """Record a validation, and show it as a line."""
        self.record("eval", optimizer=name, step=step, **numbers)
        self._copy(name, "eval", step, numbers)
        line = f"val loss {numbers['loss']:.4f}  bits/byte "
        line += f"{numbers['bits_per_byte']:.3f}{self._time_left(name, step)}"
        self.say(f"{name:>8} step {step}/{self._steps}  {line}")

    def table(self, results: list[Result], figure: Path, seconds: float) -> None:
        """Record nothing more; show the closing table, and where the files are."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        heads = ("K", "Nesterov", "rate", "val loss", "bits/byte", "skipped", "tok/s")
        table.add_column("optimizer", no_wrap=True)
        for head in (*heads, "s"):
            table.add_column(head, justify="right", no_wrap=True)
        best = min(result.val_loss for result in results)
        for r in results:
            table.add_row(
                r.optimizer,
                "-" if r.ns_steps is None else str(r.ns_steps),
                {None: "-", True: "yes", False: "no"}[r.nesterov],
                f"{r.learning_rate:g}",
                f"{r.val_loss:.4f}",
                f"{r.bits_per_byte:.4f}",
                str(r.skipped),
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
