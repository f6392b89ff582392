"""Files that survive a kill and a full disk: whole or not at all, line by line."""

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from examples.options import Failed, UserError, check

Record = dict[str, Any]
# What the trainer and the plots read out of a record, by its kind.
_STEP: dict[str, Any] = {"optimizer": str, "step": int}
_CURVE = _STEP | {"tokens": int | float, "seconds": int | float}
_CURVE |= {"loss": int | float | None}
_NEEDED = {"train": _CURVE, "eval": _CURVE, "skipped": _STEP, "resumed": _STEP}
_NEEDED |= {"result": {"optimizer": str, "steps": int}}


class WriteFailed(Failed):
    """A file could not be written, the disk being full, say."""

    def __init__(self, path: Path, error: OSError):
        super().__init__(f"{path} could not be written: {error.strerror or error}")


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """Keep other processes from writing into an output folder, which is made if needed.

    The system lets go of the lock when a process is killed. Some network file systems
    know no locks: there the work goes on without one.
    """
    path, busy, held = folder / "lock", False, True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.open("ab")
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            busy = (
                os.fstat(lock.fileno()).st_nlink == 0
            )  # the process that held it has removed it
        except BlockingIOError:
            busy = True
        except OSError:
            held = False
        said = "another process is writing there; wait until it ends, or choose another"
        check(not busy, f"--out {folder}: {said}")
        try:
            yield
        finally:
            # The file is removed even if a process that was killed had made it. It is
            # kept if the folder has been removed and made anew, since then the file
            # under this name is the lock of another process.
            mine = os.fstat(lock.fileno())
            if held and path.exists() and os.path.samestat(path.stat(), mine):
                path.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file.

    Whoever reads the file finds the old content or the new one, also after a loss of
    power: it appears under its name when all of it is on the disk.

    Raises:
      WriteFailed: the old content, if any, is still there.
    """
    beside = path.with_name(path.name + ".tmp")
    try:
        with beside.open("wb") as file:
            file.write(content)
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


def _checksum(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as JSON, atomically, with a checksum."""
    text = json.dumps(content | {"checksum": _checksum(content)}, indent=1) + "\n"
    write_atomically(path, text.encode())


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote, to the last digit; anything else is a `UserError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        same = content.pop("checksum", "") == _checksum(content)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({error}); put back a copy of it") from None
    said = "altered or damaged (its checksum is another); put back a copy of it"
    check(same, f"{path}: {said}")
    return content


def read_metrics(path: Path) -> list[Record]:
    """All records of one JSONL file; a last line cut off by a kill is left out."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line.decode())
            for key, kind in _NEEDED.get(record["kind"], {}).items():
                if key not in record or not isinstance(record[key], kind):
                    raise ValueError(f"{key!r} is {record.get(key)!r}")
        except (ValueError, TypeError, KeyError) as error:
            said = f"{path}: line {number} is damaged ({error}); put back a copy"
            raise UserError(f"{said} of the file, or remove the line") from None
        records.append(record)
    return records


class RecordFile:
    """Appends records, each at once and whole, so that a kill cannot take it back."""

    def __init__(self, path: Path):
        self._path = path
        try:
            with path.open("ab") as file:
                # If a kill cut off the last line, that line is removed. Otherwise the
                # next record would be appended to it.
                file.truncate(path.read_bytes().rfind(b"\n") + 1)
        except OSError as error:
            raise WriteFailed(path, error) from None

    def write(self, record: Record) -> None:
        """Append one record; if that fails, the file is as it was before."""
        rest = memoryview((json.dumps(record) + "\n").encode())
        try:
            with self._path.open("ab", buffering=0) as file:
                before = os.fstat(file.fileno()).st_size
                try:
                    while rest:  # a disk that is nearly full takes a part
                        rest = rest[file.write(rest) :]
                except OSError:
                    with contextlib.suppress(OSError):
                        file.truncate(before)
                    raise
        except OSError as error:
            raise WriteFailed(self._path, error) from None

    def rewind(self, keep: Callable[[Record], bool]) -> list[Record]:
        """Drop the records that `keep` refuses; returns those that stay.

        A run that goes on from a checkpoint will write them once more.
        """
        found = read_metrics(self._path)
        records = [record for record in found if keep(record)]
        if len(records) < len(found):
            lines = "".join(json.dumps(record) + "\n" for record in records)
            write_atomically(self._path, lines.encode())
        return records

    def sync(self) -> None:
        """Return when the records so far would survive a power failure."""
        try:
            with self._path.open("rb") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise WriteFailed(self._path, error) from None
