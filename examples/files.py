"""Files that survive a kill and a full disk: whole or not at all, line by line."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from examples.options import UserError

Record = dict[str, Any]
_CURVE = ("optimizer", "step", "tokens", "seconds", "loss")
# What the trainer and the plots read out of a record, by its kind.
_NEEDED = {"train": _CURVE, "eval": _CURVE, "skipped": ("optimizer", "step")}
_NEEDED |= {"resumed": ("optimizer", "step"), "result": ("optimizer", "steps")}


class WriteFailed(UserError):
    """A file could not be written, the disk being full, say."""

    code = 1

    def __init__(self, path: Path, error: OSError):
        super().__init__(f"{path} could not be written: {error.strerror or error}")


def write_atomically(path: Path, pieces: Iterable[Any]) -> str:
    """Write buffers one after the other; returns their SHA-256.

    Whoever reads the file finds the old content or the new one, also after a loss of
    power: it appears under its name when all of it is on the disk.

    Raises:
      WriteFailed: the old content, if any, is still there.
    """
    sha = hashlib.sha256()
    beside = path.with_name(path.name + ".tmp")
    try:
        with beside.open("wb") as file:
            for piece in pieces:
                sha.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name itself
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise WriteFailed(path, error) from None
    return sha.hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write an object as JSON, atomically."""
    write_atomically(path, [(json.dumps(content, indent=1) + "\n").encode()])


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
            mend = "put back a copy of the file, or remove the line"
            said = f"{path}: line {number} is damaged ({error}); {mend}"
            raise UserError(said) from None
    return records


class RecordFile:
    """Appends records, each at once and whole, so that a kill cannot take it back."""

    def __init__(self, path: Path, *, new: bool = False):
        self._path = path
        try:
            if new:
                path.touch(exist_ok=False)
            self._file = path.open("ab", buffering=0)
            # A last line that a kill cut off goes: the next would be joined to it.
            self._file.truncate(path.read_bytes().rfind(b"\n") + 1)
        except OSError as error:
            raise WriteFailed(path, error) from None

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
            lines = [(json.dumps(record) + "\n").encode() for record in records]
            write_atomically(self._path, lines)
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
