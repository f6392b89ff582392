"""Documents from text files; what cannot be read is an error that names its place.

`.txt` files hold documents separated by a line `<|endoftext|>` (without such a line the
file is one document); `.jsonl` files hold one object with a "text" field per line. Both
may be compressed with xz or gzip.
"""

import codecs
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
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
# A longer text is divided into several documents, so that no file must fit into memory.
_LONGEST = 1 << 26


def _chunks(path: Path) -> Iterator[bytes]:
    """The bytes of the file, decompressed: every stream of it.

    `lzma.open` is not used: it ignores what follows the first stream and is no valid
    stream, so that text could be lost without a word.
    """
    with path.open("rb") as file:
        chunks = iter(lambda: file.read(_CHUNK), b"")
        make_decoder = _DECODERS.get(path.suffix)
        if make_decoder is None:
            yield from chunks
            return
        decoder = make_decoder()
        for chunk in chunks:
            while chunk:
                if decoder.eof:  # another stream, or padding, which is allowed
                    chunk = chunk.lstrip(b"\0")
                    decoder = make_decoder() if chunk else decoder
                else:
                    yield decoder.decompress(chunk)
                    chunk = decoder.unused_data
        if not decoder.eof:
            raise EOFError("the file ends inside a compressed stream")


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines, their ends kept, in time linear in their length."""
    parts: list[bytes] = []
    for chunk in chunks:
        for part in io.BytesIO(chunk):
            parts.append(part)
            if part.endswith(b"\n"):
                yield b"".join(parts)
                parts = []
    if parts:
        yield b"".join(parts)


def documents(
    paths: Sequence[Path], field: str, bad: Callable[[str], None]
) -> Iterator[bytes]:
    """The UTF-8 documents of the files; blank ones between separators go.

    The text is in this `field` of JSON records; `bad` is told of lines that cannot be
    read.
    """
    for path in paths:
        lines = _lines(path, bad)
        json_lines = ".jsonl" in path.suffixes
        found = _records(lines, field, bad) if json_lines else _texts(lines)
        yield from (document for document in found if document.strip())


def _lines(path: Path, bad: Callable[[str], None]) -> Iterator[tuple[str, bytes]]:
    """The place and the bytes of each line. A byte order mark goes."""
    number = 0
    try:
        for number, line in enumerate(_split_lines(_chunks(path)), start=1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            place = f"{path}, line {number}"
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                bad(f"{place}: invalid UTF-8 ({error})")
            else:
                yield place, line
    except (lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        damaged = "" if isinstance(error, OSError) else "corrupt or truncated: "
        raise UserError(f"{path}, after line {number}: {damaged}{error}") from None


def _records(
    lines: Iterator[tuple[str, bytes]], field: str, bad: Callable[[str], None]
) -> Iterator[bytes]:
    for place, line in lines:
        if not line.strip():
            continue
        try:
            document = json.loads(line)[field].encode("utf-8")
        except (KeyError, TypeError, AttributeError, IndexError):
            bad(f'{place}: no string field "{field}"')
        except (ValueError, RecursionError) as error:  # or a lone surrogate
            bad(f"{place}: invalid JSON ({error})")
        else:
            yield document


def _texts(lines: Iterator[tuple[str, bytes]]) -> Iterator[bytes]:
    parts, size = list[bytes](), 0
    for _, line in lines:
        separator = line.strip() == SEPARATOR
        if not separator:
            parts.append(line)
            size += len(line)
        if separator or size >= _LONGEST:
            yield b"".join(parts)
            parts, size = [], 0
    yield b"".join(parts)


def find_texts(paths: Sequence[str]) -> tuple[list[Path], list[Path], list[str]]:
    """Training files, files named val*, and the names of other files seen."""
    files, others = dict[Path, None](), list[str]()  # each file once, in order
    for path in map(Path, paths):
        check(path.exists(), f"--data {path}: no such file or folder")
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        inside = [entry for entry in inside if entry.is_file()]
        texts = [entry for entry in inside if entry.name.endswith(SUFFIXES)]
        said = "no text file in it" if path.is_dir() else "not a text file"
        check(bool(texts), f"--data {path}: {said} ({' '.join(SUFFIXES)})")
        files |= dict.fromkeys(texts)
        others += [entry.name for entry in inside if not entry.name.endswith(SUFFIXES)]
    val = dict.fromkeys(path for path in files if path.name.startswith("val"))
    train = [path for path in files if path not in val]
    if not train:  # then the names are no sign of a split
        return list(files), [], others
    return train, list(val), others
