"""The default text: Python sources of the standard library and installed packages.

They are on every machine that can run this trainer, and they are real text. The
standard library comes first: a few megabytes of it are the same wherever the same
Python is. Beyond that the text depends on what is installed, so a run prints what it
read and a hash of it.
"""

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Tests hold deliberately broken files. The largest files are mostly generated tables,
# one of which could make up a good part of the validation text.
_SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "__pycache__")
    + ("test", "tests", "idle_test", "encodings")
)
_SIZES = range(1_000, 65_000)


def _sources(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for name in names:
            # _sysconfigdata describes the machine that Python was built on.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                yield path.relative_to(root).as_posix(), path


def source_files() -> list[Path]:
    """All sources; within each root the order mixes folders by a hash of the names."""
    keys = ("stdlib", "platstdlib", "purelib", "platlib")
    roots = dict.fromkeys(sysconfig.get_path(key) for key in keys)
    files: dict[Path, None] = {}
    for root in roots:
        found = dict(_sources(Path(root)))
        for name in sorted(found, key=_name_hash):
            files.setdefault(found[name])
    return list(files)


def _name_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def read_source(path: Path) -> bytes | None:
    """The file as UTF-8 bytes; None if it is unreadable, too small or too large."""
    try:
        text = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        text.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text if len(text) in _SIZES else None
