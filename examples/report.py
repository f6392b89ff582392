"""What a run shows and keeps: JSONL records, progress, a closing table."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
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
# Of a step's line and of the table: what is shown of which number, and how.
_STEP = {"tokens_per_second": "  {:,.0f} tok/s", "mfu": "  MFU {:.1%}"}
_STEP |= {"memory_gib": "  {:.1f} GiB", "skipped": "  skipped {:.0f}"}
_TABLE = {"optimizer": ("optimizer", "s"), "ns_steps": ("K", "d")}
_TABLE |= {"ns_coeffs": ("coeffs", "s"), "learning_rate": ("rate", "g")}
_TABLE |= {"val_loss": ("val loss", ".4f"), "bits_per_byte": ("bits/byte", ".4f")}
_TABLE |= {"skipped": ("skipped", "d"), "tokens_per_second": ("tok/s", ",.0f")}
_TABLE |= {"seconds": ("s", ".0f")}


def perplexity(loss: float) -> float:
    """exp(loss); a loss that has all but diverged must not overflow."""
    return math.exp(min(loss, 700.0))


def _describe(numbers: Mapping[str, float | None]) -> str:
    """What a step looks like on the screen; unknown numbers are left out."""
    loss = numbers["loss"]
    if loss is None or not math.isfinite(loss):
        return "loss not finite"
    more = (text.format(numbers[k]) for k, text in _STEP.items() if numbers[k])
    return f"loss {loss:.3f}  ppl {perplexity(loss):,.1f}{''.join(more)}"


class Report:
    """Writes `metrics.jsonl`, the source of truth, and shows progress on stdout.

    A terminal has a line that changes with every step; elsewhere there is a line every
    ten seconds. Only the first of several processes writes and shows anything.
    """

    def __init__(self, config: Config, folder: Path, optimizers: list[str]):
        self.folder, self._steps = folder, config.run.steps
        self._log_every, self._optimizers = config.run.log_every, optimizers
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

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
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
        later = len(self._optimizers) - self._optimizers.index(name)
        left = later * self._steps - step
        seconds = round((time.perf_counter() - begin) * left / (step - first))
        return f"  eta {seconds // 60}:{seconds % 60:02d}"

    def _show(self, name: str, step: int, text: str) -> None:
        line = f"{name:>9} step {step}/{self._steps}  {text}"
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
        self.say(f"{name:>9} step {step}/{self._steps}  {line}")

    def table(self, results: list[Record], figure: Path, seconds: float) -> None:
        """The closing table, and where the files are."""
        self._status.stop()
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for key, (head, _) in _TABLE.items():
            justify = "left" if key == "optimizer" else "right"
            table.add_column(head, justify=justify, no_wrap=True)
        best = min(result["val_loss"] for result in results)
        for result in results:
            values = ((result[key], form) for key, (_, form) in _TABLE.items())
            cells = ("-" if value is None else format(value, f) for value, f in values)
            table.add_row(*cells, style="bold" if result["val_loss"] == best else "")
        self._console.print(table)
        metrics = self.folder / METRICS_FILE
        self.say(f"plot: {figure}", f"metrics: {metrics}", f"total: {seconds:.1f} s")
