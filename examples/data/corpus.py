"""The documents of a run or of a preparation, and which of them are held out."""

import codecs
import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.data import text
from examples.options import check

# Tests hold deliberately broken files. The largest files are mostly generated tables,
# one of which could make up a good part of the validation text, and _sysconfigdata
# describes the machine that Python was built on.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "encodings"}
_SKIPPED_FOLDERS |= {"test", "tests", "idle_test"}
_SKIPPED_FILE = "_sysconfigdata"
_SIZES = range(1_000, 65_000)

Group = tuple[list[bytes], list[bytes]]  # documents to train on, and held out


class Corpus:
    """Documents as UTF-8 bytes, each text once, in a fixed order.

    Without paths they are the sources of Python's standard library: real text that is
    on every machine, and the same wherever the same Python is.

    Args:
      val_fraction: part of the bytes that is held out, if no file is named val*.
      limit: bytes to take (0: all), and `val_fraction` of it from files named val*.
      field: of JSON records, that which holds the text.
      skip_bad: leave out lines that cannot be read, and count them.
    """

    def __init__(
        self,
        paths: Sequence[str],
        val_fraction: float,
        limit: int = 0,
        field: str = "text",
        skip_bad: bool = False,
    ):
        self._fraction, self._limit, self._field = val_fraction, limit, field
        self._skip_bad, self.skipped = skip_bad, 0
        self._train_files, self._val_files, others = text.find_texts(paths)
        self.name = f"text files in {' '.join(paths)}"
        if not paths:
            self._train_files, self.name = python_sources(), "Python's standard library"
            self._skip_bad = True  # some old sources are not UTF-8
        self.files = [*self._val_files, *self._train_files]
        how = f"the last {100 * val_fraction:g} %"
        if self._val_files:
            how = f"files named val* ({len(self._val_files)})"
        self.notes = [f"held out: {how}"]
        if others:
            self.notes.append(f"other files not read: {', '.join(others[:5])}")

    def _bad(self, message: str) -> None:
        self.skipped += 1
        check(self._skip_bad, message)

    def groups(self, size: float = math.inf) -> Iterator[Group]:
        """All documents, once, about `size` bytes at a time.

        The end of each group is held out. Files named val* are a group of their own
        instead: the first, so that what is found in both parts is left out of training.
        """
        seen, fraction, beside = set[int](), self._fraction, ""
        if self._val_files:
            most = max(1, int(self._limit * fraction)) if self._limit else 0
            val = list(self._take(self._val_files, most, seen))
            said = "no text in it; files named val* are the validation text: fill or"
            check(bool(val), f"{self._val_files[0]}: {said} remove it")
            yield [], val
            fraction, beside = 0.0, " beside that of files named val*"
        group, held, before = list[bytes](), 0, len(seen)
        for document in self._take(self._train_files, self._limit, seen):
            group.append(document)
            held += len(document)
            if held >= size:
                yield split(group, fraction)
                group, held = [], 0
        if group:
            yield split(group, fraction)
        check(len(seen) > before, f"{self.name}: no text in it{beside}")

    def _take(
        self, files: Sequence[Path], limit: int, seen: set[int]
    ) -> Iterator[bytes]:
        """Documents up to the limit, each text once, and none of `seen`, which grows.

        Whether its last line has an end makes no other text.
        """
        room = limit or math.inf
        for document in text.documents(files, self._field, self._bad):
            # 64 bits tell a billion documents apart, and take little memory.
            digest = hashlib.sha256(document.rstrip(b"\r\n")).digest()[:8]
            if (key := int.from_bytes(digest)) in seen:
                continue
            seen.add(key)
            if len(document) > room:
                self.notes.append(f"text cut at {limit:,} bytes (--max-bytes)")
                document = _cut(document, int(room))
                yield from [document] if document.strip() else []
                return
            room -= len(document)
            yield document


def _cut(document: bytes, size: int) -> bytes:
    """The first `size` bytes, less a character that the cut would break."""
    return codecs.utf_8_decode(document[:size])[0].encode()


def split(documents: list[bytes], fraction: float) -> Group:
    """Hold out the last documents: `fraction` of the bytes, or up to half as much more.

    Where whole documents would be more than that, the first of them is cut in two at a
    line end.
    """
    wanted, held_out, first = fraction * sum(map(len, documents)), 0, len(documents)
    while held_out < wanted:
        first -= 1
        held_out += len(documents[first])
    train, val = documents[:first], documents[first:]
    if train and held_out <= 1.5 * wanted:
        return train, val
    excess = int(held_out - wanted)
    place = val[0].rfind(b"\n", 0, excess) + 1 or len(_cut(val[0], excess))
    return [*train, val[0][:place]], [val[0][place:], *val[1:]]


def python_sources() -> list[Path]:
    """Files of the standard library; a hash of their names mixes the folders."""
    root, found = sysconfig.get_path("stdlib"), dict[bytes, Path]()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [n for n in subfolders if n not in _SKIPPED_FOLDERS]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            usual = path.is_file() and path.stat().st_size in _SIZES
            if usual and not path.name.startswith(_SKIPPED_FILE):
                name = path.relative_to(root).as_posix()
                found[hashlib.sha256(name.encode()).digest()] = path
    return [found[key] for key in sorted(found)]
