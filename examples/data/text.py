"""Documents from text files; what cannot be read is an error that names its place.

`.txt` files hold documents separated by a line `<|endoftext|>` (without such a line the
file is one document); `.jsonl` files hold one object with a "text" field per line. Both
may be compressed with xz or gzip.
"""

import codecs
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.options import UserError, check

_DECODERS: dict[str, Callable[[], Any]] = {
    ".xz": lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ),
    ".gz": lambda: zlib.decompressobj(wbits=zlib.MAX_WBITS | 16),
}
_KINDS = (".txt", ".jsonl")
SUFFIXES = tuple(kind + packed for kind in _KINDS for packed in ("", *_DECODERS))
SEPARATOR = b"<|endoftext|>"
_CHUNK = 1 << 20


def text_hash(document: bytes) -> bytes:
    """Equal for equal texts; whether the last line has an end makes no difference."""
    return hashlib.sha256(document.rstrip(b"\r\n")).digest()


def cut(text: bytes, size: int) -> bytes:
    """The first `size` bytes, less a character that the cut would break."""
    while 0 < size < len(text) and text[size] & 0xC0 == 0x80:
        size -= 1
    return text[:size]


def _chunks(path: Path) -> Iterator[bytes]:
    """The bytes of the file, decompressed: every stream of it.

    `lzma.open` and `gzip.open` are not used: what follows the first stream and is no
    valid stream is ignored by the one, and zeros in its place by the other, so that
    text could be lost without a word.
    """
    make_decoder = _DECODERS.get(path.suffix)
    decoder, streams = None, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            if make_decoder is None:
                yield chunk
                continue
            while chunk:
                if decoder is None:
                    chunk = chunk.lstrip(b"\0")  # padding is allowed between streams
                    if not chunk:
                        break
                    decoder, streams = make_decoder(), streams + 1
                yield decoder.decompress(chunk)
                chunk = decoder.unused_data if decoder.eof else b""
                decoder = None if decoder.eof else decoder
    if decoder is not None:
        raise EOFError("the file ends inside a compressed stream")
    if make_decoder is not None and not streams:
        raise EOFError("the file holds no compressed stream")


class _Chunks(io.RawIOBase):
    """Chunks of bytes as a file, which `io.BufferedReader` divides into lines."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks = (memoryview(chunk) for chunk in chunks if chunk)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or next(self._chunks, memoryview(b""))
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


class Reader:
    """Reads documents of files; counts what is left out.

    Args:
      field: the field of a JSON record that holds the text.
      limit: bytes to read of all files together (0: all); a text document is cut there.
      skip_bad: leave out lines that cannot be read.
    """

    def __init__(self, field: str = "text", limit: int = 0, skip_bad: bool = False):
        self._field, self._room, self._skip_bad = field, limit or None, skip_bad
        self.skipped, self.is_cut = 0, False

    def documents(self, paths: Sequence[Path]) -> Iterator[bytes]:
        """The UTF-8 documents of the files; blank ones between separators go."""
        for path in paths:
            json_lines = ".jsonl" in path.suffixes
            found = self._records(path) if json_lines else self._texts(path)
            yield from (document for document in found if document.strip())

    def _bad(self, message: str) -> None:
        if not self._skip_bad:
            raise UserError(message)
        self.skipped += 1

    def _raw_lines(self, path: Path) -> Iterator[bytes]:
        """Lines up to the limit, the last of them cut between characters."""
        file = io.BufferedReader(_Chunks(_chunks(path)), _CHUNK)
        while True:
            line = file.readline(-1 if self._room is None else self._room + 4)
            if self._room is not None and len(line) > self._room:
                line, self._room, self.is_cut = cut(line, self._room), 0, True
            elif self._room is not None:
                self._room -= len(line)
            if not line:
                return
            yield line

    def _lines(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """Numbered lines, line ends kept. A byte order mark that begins a file goes."""
        number = 0
        try:
            for number, line in enumerate(self._raw_lines(path), start=1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                try:
                    line.decode("utf-8")
                except UnicodeDecodeError as error:
                    byte, column = line[error.start], error.start + 1
                    where = f"byte 0x{byte:02x} at column {column}"
                    self._bad(f"{path}, line {number}: invalid UTF-8 ({where})")
                else:
                    yield number, line
        except (lzma.LZMAError, zlib.error, EOFError) as error:
            kind = path.suffix.removeprefix(".")
            said = f"corrupt or truncated {kind} data ({error})"
            raise UserError(f"{path}, after line {number}: {said}") from None
        except OSError as error:
            said = error.strerror or error
            raise UserError(f"{path}, after line {number}: {said}") from None

    def _records(self, path: Path) -> Iterator[bytes]:
        for number, line in self._lines(path):
            if not line.strip() or self.is_cut:
                continue
            try:
                text = json.loads(line)[self._field]
                yield text.encode("utf-8")
            except (KeyError, TypeError, AttributeError, IndexError):
                self._bad(f'{path}, line {number}: no string field "{self._field}"')
            except UnicodeEncodeError:
                said = f'lone surrogate in "{self._field}"'
                self._bad(f"{path}, line {number}: {said}")
            except (ValueError, RecursionError) as error:
                self._bad(f"{path}, line {number}: invalid JSON ({error})")

    def _texts(self, path: Path) -> Iterator[bytes]:
        lines: list[bytes] = []
        for _, line in self._lines(path):
            if line.strip() == SEPARATOR:
                yield b"".join(lines)
                lines = []
            else:
                lines.append(line)
        yield b"".join(lines)


def _files_below(path: Path) -> tuple[list[Path], list[str]]:
    """Text files below a path, sorted, and the names of other files seen."""
    check(path.exists(), f"--data {path}: no such file or folder")
    inside = sorted(path.rglob("*")) if path.is_dir() else [path]
    inside = [entry for entry in inside if entry.is_file()]
    texts = [entry for entry in inside if entry.name.endswith(SUFFIXES)]
    said = "no text file in it" if path.is_dir() else "not a text file"
    check(bool(texts), f"--data {path}: {said} ({' '.join(SUFFIXES)})")
    return texts, [entry.name for entry in inside if entry not in set(texts)]


def find_texts(paths: Sequence[str]) -> tuple[list[Path], list[Path], list[str]]:
    """Training files, files named val*, and the names of other files seen."""
    found = [_files_below(Path(path)) for path in paths]
    files = list(dict.fromkeys(file for texts, _ in found for file in texts))
    others = [name for _, names in found for name in names]
    val = [path for path in files if path.name.startswith("val")]
    if len(val) == len(files):  # then the names are no sign of a split
        val = []
    return [path for path in files if path not in set(val)], val, others


def some(names: Sequence[object], shown: int = 5) -> str:
    """The first few of some names, and how many more there are."""
    rest = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(map(str, names[:shown])) + rest


def check_val(documents: Collection[bytes], files: Sequence[Path]) -> None:
    """Files named val* must hold something."""
    meaning = "files named val* are the validation text: fill it, or remove it to hold"
    said = f"{some(files)}: no text in it; {meaning} out a part of the other text"
    check(bool(documents) or not files, said)
