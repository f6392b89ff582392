"""Read documents from text files; whatever cannot be read is an error with its place.

`.txt` files hold documents separated by a line `<|endoftext|>` (without such a line the
file is one document); `.jsonl` files hold one object with a "text" field per line. Both
may be compressed with xz.
"""

import json
import lzma
from collections.abc import Iterator
from pathlib import Path

from examples.flags import UserError

SUFFIXES = (".txt", ".txt.xz", ".jsonl", ".jsonl.xz")
SEPARATOR = b"<|endoftext|>"
_CHUNK = 1 << 20


def is_text_file(path: Path) -> bool:
    """Whether the name is one of the forms that `read_documents` understands."""
    return path.name.endswith(SUFFIXES)


def _raw_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _xz_chunks(path: Path) -> Iterator[bytes]:
    """Decompress every stream of the file.

    `lzma.open` is not used: it ignores data after the first stream that is no valid
    stream itself, and text would be lost without a word.
    """
    decoder: lzma.LZMADecompressor | None = None
    streams = 0
    for chunk in _raw_chunks(path):
        while chunk:
            if decoder is None:
                chunk = chunk.lstrip(b"\0")  # padding is allowed between streams
                if not chunk:
                    break
                decoder = lzma.LZMADecompressor(format=lzma.FORMAT_XZ)
                streams += 1
            yield decoder.decompress(chunk)
            chunk = decoder.unused_data if decoder.eof else b""
            if decoder.eof:
                decoder = None
    if decoder is not None:
        raise EOFError("the file ends inside a compressed stream")
    if not streams:
        raise EOFError("the file holds no compressed stream")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines, line ends kept; each is checked to be valid UTF-8."""
    number, rest = 0, b""
    chunks = _xz_chunks(path) if path.name.endswith(".xz") else _raw_chunks(path)
    try:
        for chunk in chunks:
            *complete, rest = (rest + chunk).split(b"\n")
            for line in complete:
                number += 1
                yield number, _checked(path, number, line + b"\n")
    except (lzma.LZMAError, EOFError) as error:
        place = f"{path}, after line {number}"
        raise UserError(f"{place}: corrupt or truncated xz data ({error})") from None
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{path}, after line {number}: {reason}") from None
    if rest:
        yield number + 1, _checked(path, number + 1, rest)


def _checked(path: Path, number: int, line: bytes) -> bytes:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        byte, column = line[error.start], error.start + 1
        raise UserError(
            f"{path}, line {number}: invalid UTF-8 (byte 0x{byte:02x} at column "
            f"{column})"
        ) from None
    return line


def _json_documents(path: Path) -> Iterator[bytes]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: invalid JSON ({error})") from None
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise UserError(f'{place}: no string field "text"')
        try:
            yield text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f'{place}: lone surrogate in "text"') from None


def _text_documents(path: Path) -> Iterator[bytes]:
    lines: list[bytes] = []
    for _, line in _lines(path):
        if line.strip() == SEPARATOR:
            yield b"".join(lines)
            lines = []
        else:
            lines.append(line)
    yield b"".join(lines)


def read_documents(path: Path) -> Iterator[bytes]:
    """Yield the UTF-8 documents of one file; blank ones between separators go."""
    json_lines = path.name.removesuffix(".xz").endswith(".jsonl")
    for document in _json_documents(path) if json_lines else _text_documents(path):
        if document.strip():
            yield document
