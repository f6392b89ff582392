"""Read documents from text files; whatever cannot be read is an error with its place.

`.txt` files hold documents separated by a line `<|endoftext|>` (without such a line the
file is one document); `.jsonl` files hold one object with a "text" field per line. Both
may be compressed with xz or gzip.
"""

import codecs
import hashlib
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from examples.flags import UserError

_KINDS = (".txt", ".jsonl")
_DECODERS: dict[str, Callable[[], Any]] = {
    ".xz": lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ),
    ".gz": lambda: zlib.decompressobj(wbits=zlib.MAX_WBITS | 16),
}
SUFFIXES = tuple(kind + packed for kind in _KINDS for packed in ("", *_DECODERS))
SEPARATOR = b"<|endoftext|>"
_CHUNK = 1 << 20


def text_hash(document: bytes) -> bytes:
    """Equal for equal texts; whether the last line has an end makes no difference."""
    return hashlib.sha256(document.rstrip(b"\r\n")).digest()


def is_text_file(path: Path) -> bool:
    """Whether the name is one of the forms that `read_documents` understands."""
    return path.name.endswith(SUFFIXES)


def _raw_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _chunks(path: Path) -> Iterator[bytes]:
    """The bytes of the file, decompressed: every stream of it.

    `lzma.open` and `gzip.open` are not used: data after the first stream that is no
    valid stream itself is ignored by the one, and zeros in its place by the other, so
    text could be lost without a word.
    """
    make_decoder = _DECODERS.get(path.suffix)
    if make_decoder is None:
        yield from _raw_chunks(path)
        return
    decoder: Any = None
    streams = 0
    for chunk in _raw_chunks(path):
        while chunk:
            if decoder is None:
                chunk = chunk.lstrip(b"\0")  # padding is allowed between streams
                if not chunk:
                    break
                decoder = make_decoder()
                streams += 1
            yield decoder.decompress(chunk)
            chunk = decoder.unused_data if decoder.eof else b""
            if decoder.eof:
                decoder = None
    if decoder is not None:
        raise EOFError("the file ends inside a compressed stream")
    if not streams:
        raise EOFError("the file holds no compressed stream")


def _lines(path: Path, most: int = 0) -> Iterator[tuple[int, bytes]]:
    """Numbered lines, line ends kept; each is checked to be valid UTF-8.

    A line that proves longer than `most` bytes (0: no limit) is given cut to them,
    before its rest is read. A byte order mark that begins the file is no text.
    """
    number, held, dropping = 0, 0, False
    rest: list[bytes] = []
    try:
        for chunk in _chunks(path):
            *ended, last = chunk.split(b"\n")
            for part in ended:
                number += 1
                if not dropping:
                    yield _checked(path, number, b"".join([*rest, part, b"\n"]))
                rest, held, dropping = [], 0, False
            if last and not dropping:
                rest.append(last)
                held += len(last)
            if most and held > most + len(codecs.BOM_UTF8):
                yield _checked(path, number + 1, b"".join(rest), most)
                rest, held, dropping = [], 0, True
    except (lzma.LZMAError, zlib.error, EOFError) as error:
        place, kind = f"{path}, after line {number}", path.suffix.removeprefix(".")
        raise UserError(
            f"{place}: corrupt or truncated {kind} data ({error})"
        ) from None
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{path}, after line {number}: {reason}") from None
    if held:
        yield _checked(path, number + 1, b"".join(rest))


def cut(text: bytes, size: int) -> bytes:
    """The first `size` bytes, less a character that the cut would break."""
    while 0 < size < len(text) and text[size] & 0xC0 == 0x80:
        size -= 1
    return text[:size]


def _checked(path: Path, number: int, line: bytes, most: int = 0) -> tuple[int, bytes]:
    if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
    line = cut(line, most) if most else line
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        byte, column = line[error.start], error.start + 1
        raise UserError(
            f"{path}, line {number}: invalid UTF-8 (byte 0x{byte:02x} at column "
            f"{column})"
        ) from None
    return number, line


def _json_documents(path: Path, field: str) -> Iterator[bytes]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: invalid JSON ({error})") from None
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise UserError(f'{place}: no string field "{field}"')
        try:
            yield text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f'{place}: lone surrogate in "{field}"') from None


def _text_documents(path: Path, most: int) -> Iterator[bytes]:
    # So much that a document is still longer than `most` when it is cut.
    reach = most + 4 if most else 0
    lines: list[bytes] = []
    held, dropping = 0, False
    for _, line in _lines(path, reach and reach + 1_000):  # no separator is cut
        if line.strip() == SEPARATOR:
            if not dropping:
                yield b"".join(lines)
            lines, held, dropping = [], 0, False
        elif not dropping:
            lines.append(line)
            held += len(line)
            if most and held > most:
                yield cut(b"".join(lines), reach)
                lines, dropping = [], True
    yield b"".join(lines)


def read_documents(path: Path, field: str = "text", most: int = 0) -> Iterator[bytes]:
    """Yield the UTF-8 documents of one file; blank ones between separators go.

    Who takes no more than `most` bytes (0: all) need not wait for the end of a text
    document that is longer: it comes cut, but longer than `most` all the same.
    """
    if ".jsonl" in path.suffixes:
        documents = _json_documents(path, field)
    else:
        documents = _text_documents(path, most)
    return (document for document in documents if document.strip())
