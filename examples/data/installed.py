"""The default text: Python sources of the standard library and installed packages.

They are on every machine that can run this trainer, and they are real text. They are
not the same on every machine, so a run prints what it read and a hash of it.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Tests hold deliberately broken files; folders of generated tables teach nothing.
_SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "encodings")
)
_SIZES = range(1_000, 100_000)


def _sources(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                yield path.relative_to(root).as_posix(), path


def source_files() -> list[Path]:
    """All sources in an order that mixes packages and depends on names alone."""
    roots = {sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")}
    found: dict[str, Path] = {}
    for root in sorted(roots):
        for name, path in _sources(Path(root)):
            found.setdefault(name, path)
    order = sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [found[name] for name in order]


def read_source(path: Path) -> bytes | None:
    """The file as UTF-8 bytes; None if it is unreadable, too small or too large."""
    try:
        text = path.read_bytes()
        text.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text if len(text) in _SIZES else None
