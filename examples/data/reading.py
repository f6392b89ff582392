"""Read documents from text files; whatever cannot be read is an error with its place.

`.txt` files hold documents separated by a line `<|endoftext|>` (without such a line the
file is one document); `.jsonl` files hold one object with a "text" field per line. Both
may be compressed with xz or gzip.
"""

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


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines, line ends kept; each is checked to be valid UTF-8."""
    number, rest = 0, b""
    try:
        for chunk in _chunks(path):
            *complete, rest = (rest + chunk).split(b"\n")
            for line in complete:
                number += 1
                yield number, _checked(path, number, line + b"\n")
    except (lzma.LZMAError, zlib.error, EOFError) as error:
        place, kind = f"{path}, after line {number}", path.suffix.removeprefix(".")
        raise UserError(
            f"{place}: corrupt or truncated {kind} data ({error})"
        ) from None
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


def _text_documents(path: Path) -> Iterator[bytes]:
    lines: list[bytes] = []
    for _, line in _lines(path):
        if line.strip() == SEPARATOR:
            yield b"".join(lines)
            lines = []
        else:
            lines.append(line)
    yield b"".join(lines)


def read_documents(path: Path, field: str = "text") -> Iterator[bytes]:
    """Yield the UTF-8 documents of one file; blank ones between separators go."""
    json_lines = ".jsonl" in path.suffixes
    documents = _json_documents(path, field) if json_lines else _text_documents(path)
    return (document for document in documents if document.strip())
