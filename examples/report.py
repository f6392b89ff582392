"""What a run shows and keeps: JSONL records, progress, a closing table."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax

from examples.config import Config
from examples.files import Record, RecordFile
from examples.options import UserError
from examples.runs import METRICS_FILE

# A line of training is printed so often, at most.
_LINE_SECONDS = 10.0
# The columns of the closing table: for each number its heading and its format.
_TABLE = {"optimizer": ("optimizer", "s"), "ns_steps": ("K", "d")}
_TABLE |= {"ns_coeffs": ("coeffs", "s"), "learning_rate": ("rate", "g")}
_TABLE |= {"val_loss": ("val loss", ".4f"), "bits_per_byte": ("bits/byte", ".4f")}
_TABLE |= {"skipped": ("skipped", "d"), "tokens_per_second": ("tok/s", ",.0f")}
_TABLE |= {"seconds": ("s", ".0f")}


def perplexity(loss: float) -> float:
    """exp(loss); a loss that has all but diverged must not overflow."""
    return math.exp(min(loss, 700.0))


class Report:
    """Writes `metrics.jsonl`, the source of truth, and shows progress on stdout.

    Only the first of several processes writes and shows anything.
    """

    def __init__(self, config: Config, folder: Path):
        self._folder, self._run, self._shown_at = folder, config.run, 0.0
        active = jax.process_index() == 0
        self._file = RecordFile(folder / METRICS_FILE) if active else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        with contextlib.suppress(UserError):  # what stopped the run matters more
            if kind is not None:
                self.record("stopped", reason=str(error) or kind.__name__)

    def say(self, *lines: str) -> None:
        """Print lines at once, also where stdout is a file.

        A full disk or a closed pipe must not end the training: nothing more is shown
        then, and the records go on.
        """
        if self._file is None:
            return
        try:
            print(*lines, sep="\n", flush=True)
        except OSError:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())

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

    def step(self, name: str, step: int, text: str) -> None:
        """Show where an optimizer is."""
        self.say(f"{name:>9} step {step}/{self._run.steps}  {text}")

    def train_step(self, name: str, step: int, numbers: dict[str, Any]) -> None:
        """Take the numbers of a finished step; every `log_every`-th is recorded."""
        if step != 1 and step % self._run.log_every:
            return
        self.record("train", optimizer=name, step=step, **numbers)
        if (now := time.perf_counter()) - self._shown_at < _LINE_SECONDS:
            return
        self._shown_at = now
        loss, speed = numbers["loss"], numbers["tokens_per_second"]
        left = round((self._run.steps / step - 1) * numbers["tokens"] / speed)
        text = f"loss {loss:.3f}  ppl {perplexity(loss):,.1f}  {speed:,.0f} tok/s"
        text += f"  {numbers['memory_gib']:.1f} GiB" if numbers["memory_gib"] else ""
        text += f"  skipped {numbers['skipped']}" if numbers["skipped"] else ""
        self.step(name, step, f"{text}  eta {left // 60}:{left % 60:02d}")

    def evaluation(self, name: str, step: int, numbers: dict[str, float]) -> None:
        """Record a validation, and show it as a line."""
        self.record("eval", optimizer=name, step=step, **numbers)
        loss, bits = numbers["loss"], numbers["bits_per_byte"]
        self.step(name, step, f"val loss {loss:.4f}  bits/byte {bits:.3f}")

    def table(self, results: list[Record], seconds: float) -> None:
        """The closing table, where the records are, and what draws them."""
        rows = [[head for head, _ in _TABLE.values()]]
        for result in results:
            values = ((result[key], form) for key, (_, form) in _TABLE.items())
            row = ("-" if value is None else format(value, f) for value, f in values)
            rows.append(list(row))
        widths = [max(map(len, column)) for column in zip(*rows)]
        for row in rows:
            self.say("  ".join(map(str.rjust, row, widths)))
        metrics = self._folder / METRICS_FILE
        draw = f"python -m benchmarks.plot {self._folder}"
        self.say(f"metrics: {metrics}", f"figure: {draw}", f"total: {seconds:.1f} s")
