"""`metrics.jsonl`: one record a line, whole lines only, whatever ends the run."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.files import WriteFailed, write_atomically
from examples.flags import UserError

Record = dict[str, Any]
_CURVE = ("optimizer", "step", "tokens", "seconds", "loss")
# What the trainer and the plots read out of a record, by its kind.
_NEEDED = {"train": _CURVE, "eval": _CURVE, "skipped": ("optimizer", "step")}
_NEEDED |= {"resumed": ("optimizer", "step"), "result": ("optimizer", "steps")}


def _parse(line: bytes) -> Record:
    """One record; `ValueError` if the line is none."""
    record = json.loads(line.decode())
    if not isinstance(record, dict):
        raise ValueError("no record")
    for key in ("kind", *_NEEDED.get(record.get("kind", ""), ())):
        if key not in record:
            raise ValueError(f"no {key!r} in it")
    return record


def read_metrics(path: Path) -> list[Record]:
    """All records of one JSONL file; a last line cut off by a kill is left out."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_parse(line))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{path}: line {number} is damaged ({error}); put back a copy of the "
                "file, or remove the line"
            ) from None
    return records


class RecordFile:
    """Appends records, each at once and whole, so that a kill cannot take it back."""

    def __init__(self, path: Path, *, new: bool):
        self._path = path
        try:
            if new:
                path.touch(exist_ok=False)
            self._file = path.open("ab", buffering=0)
            self._cut_tail()
        except OSError as error:
            raise WriteFailed(path, error) from None

    def _cut_tail(self) -> None:
        """Remove a last line that a kill cut off: the next would be joined to it."""
        content = self._path.read_bytes()
        self._file.truncate(content.rfind(b"\n") + 1)

    def write(self, record: Record) -> None:
        """Append one record; if that fails, the file is as it was before."""
        if self._file.closed:
            return
        before = os.fstat(self._file.fileno()).st_size
        rest = memoryview((json.dumps(record) + "\n").encode())
        try:
            while rest:  # a disk that is nearly full takes a part
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(before)
            raise WriteFailed(self._path, error) from None

    def rewind(self, keep: Callable[[Record], bool]) -> list[Record]:
        """Drop the records that `keep` refuses; returns those that stay.

        A run that goes on from a checkpoint will write them once more.
        """
        found = read_metrics(self._path)
        records = [record for record in found if keep(record)]
        if len(records) < len(found):
            text = "".join(json.dumps(record) + "\n" for record in records)
            write_atomically(self._path, [text.encode()])
            self._file.close()
            self._file = self._path.open("ab", buffering=0)
        return records

    def sync(self) -> None:
        """Return when the records so far would survive a power failure."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise WriteFailed(self._path, error) from None

    def close(self) -> None:
        """Let go of the file; nothing is left to be written."""
        with contextlib.suppress(OSError):
            self._file.close()
