"""What a run shows and keeps: JSONL records, progress, a closing table."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from examples.config import Config
from examples.files import Record, RecordFile
from examples.options import UserError
from examples.runs import METRICS_FILE

# Without a terminal a line of training is printed so often, at most.
_LINE_SECONDS = 10.0


def perplexity(loss: float) -> float:
    """exp(loss); a loss that has all but diverged must not overflow."""
    return math.exp(min(loss, 700.0))


def _describe(numbers: Mapping[str, float | None]) -> str:
    """What a step looks like on the screen; unknown numbers are left out."""
    loss = numbers["loss"]
    if loss is None or not math.isfinite(loss):
        return "loss not finite"
    text = f"loss {loss:.3f}  ppl {perplexity(loss):,.1f}"
    forms = {"tokens_per_second": "  {:,.0f} tok/s", "mfu": "  MFU {:.1%}"}
    forms |= {"memory_gib": "  {:.1f} GiB", "skipped": "  skipped {:.0f}"}
    return text + "".join(f.format(numbers[k]) for k, f in forms.items() if numbers[k])


class Report:
    """Writes `metrics.jsonl`, the source of truth, and shows progress on stdout.

    A terminal has a line that changes with every step; elsewhere there is a line every
    ten seconds. Only the first of several processes writes and shows anything.
    """

    def __init__(self, config: Config, folder: Path, optimizers: list[str]):
        self.folder, self._steps = folder, config.run.steps
        self._log_every = config.run.log_every
        self._total = len(optimizers) * self._steps
        self._order = {name: index for index, name in enumerate(optimizers)}
        active = jax.process_index() == 0
        self._console = Console(highlight=False, quiet=not active)
        self._status = self._console.status("")
        self._live = self._console.is_terminal and active
        # A new run never writes into the file of another.
        new, path = config.save.resume == "no", folder / METRICS_FILE
        self._file = RecordFile(path, new=new) if active else None
        self._mark, self._shown_at = (0, 0.0), 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._status.stop()
        with contextlib.suppress(UserError):  # what stopped the run matters more
            if kind is not None:
                self.record("stopped", reason=str(error) or kind.__name__)
        if self._file is not None:
            self._file.close()

    def say(self, *lines: str) -> None:
        """Print lines as they are, without colours or wrapping."""
        for line in lines:
            self._console.print(line, markup=False, soft_wrap=True)

    def record(self, kind: str, **fields: Any) -> None:
        """Append one record to the JSONL file; a kill cannot take it back."""
        for key, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                fields[key] = None
        if self._file is not None:
            self._file.write({"kind": kind, **fields})

    def rewind(self, keep: Callable[[Record], bool]) -> list[Record]:
        """Drop the records that `keep` refuses; returns those that stay."""
        return [] if self._file is None else self._file.rewind(keep)

    def sync(self) -> None:
        """Return when the records so far would survive a power failure."""
        if self._file is not None:
            self._file.sync()

    def begin(self, name: str, step: int) -> None:
        """Announce the next optimizer: it compiles before its first step."""
        self._mark = (0, 0.0)
        self._show(name, step, "compiling")

    def train_step(self, name: str, step: int, numbers: dict[str, Any]) -> None:
        """Take the numbers of a finished step; every `log_every`-th is recorded."""
        if not self._mark[0]:  # the time that is left is told by the steps after
            self._mark = (step, time.perf_counter())
        logged = step == 1 or step % self._log_every == 0
        if logged:
            self.record("train", optimizer=name, step=step, **numbers)
        late = time.perf_counter() - self._shown_at >= _LINE_SECONDS
        if self._live or (logged and late):
            self._show(name, step, _describe(numbers) + self._time_left(name, step))

    def _time_left(self, name: str, step: int) -> str:
        first, begin = self._mark
        if step <= first:
            return ""
        left = self._total - self._order[name] * self._steps - step
        seconds = (time.perf_counter() - begin) * left / (step - first)
        return f"  eta {round(seconds) // 60}:{round(seconds) % 60:02d}"

    def _show(self, name: str, step: int, text: str) -> None:
        line = f"{name:>8} step {step}/{self._steps}  {text}"
        self._shown_at = time.perf_counter()
        if self._live:
            self._status.update(line)
            self._status.start()
        else:
            self.say(line)

    def evaluation(self, name: str, step: int, numbers: dict[str, float]) -> None:
        """Record a validation, and show it as a line."""
        self.record("eval", optimizer=name, step=step, **numbers)
        loss, bits = numbers["loss"], numbers["bits_per_byte"]
        line = f"val loss {loss:.4f}  bits/byte {bits:.3f}{self._time_left(name, step)}"
        self.say(f"{name:>8} step {step}/{self._steps}  {line}")

    def table(self, results: list[Record], figure: Path, seconds: float) -> None:
        """The closing table, and where the files are."""
        self._status.stop()
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        heads = ("K", "Nesterov", "rate", "val loss", "bits/byte", "skipped", "tok/s")
        table.add_column("optimizer", no_wrap=True)
        for head in (*heads, "s"):
            table.add_column(head, justify="right", no_wrap=True)
        best = min(result["val_loss"] for result in results)
        forms = {"learning_rate": "g", "val_loss": ".4f", "bits_per_byte": ".4f"}
        forms |= {"skipped": "d", "tokens_per_second": ",.0f", "seconds": ".0f"}
        for r in results:
            steps = "-" if r["ns_steps"] is None else str(r["ns_steps"])
            nesterov = {None: "-", True: "yes", False: "no"}[r["nesterov"]]
            cells = (format(r[key], form) for key, form in forms.items())
            style = "bold" if r["val_loss"] == best else ""
            table.add_row(r["optimizer"], steps, nesterov, *cells, style=style)
        self._console.print(table)
        metrics = self.folder / METRICS_FILE
        self.say(f"plot: {figure}", f"metrics: {metrics}", f"total: {seconds:.1f} s")
