"""Files that are there whole or not at all."""

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from examples.flags import UserError


class WriteFailed(UserError):
    """A file could not be written, the disk being full, say."""

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
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise WriteFailed(path, error) from None
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name itself
    finally:
        os.close(folder)
    return sha.hexdigest()
