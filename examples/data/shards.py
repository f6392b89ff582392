"""Token shards: raw little-endian arrays on disk, and the index that vouches for them.

A folder holds `train_00000.bin`, `val_00000.bin`, ... (one unsigned integer per token,
every document ended by the separator), `val_00000.bytes` (the bytes of text that each
validation token stands for), `tokenizer.json`, and `index.json`, which is written last:
a folder without it is not complete. Shards end where a document ends.
"""

import bisect
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from examples.data import tokens as tok
from examples.data.entries import Shard, entry, shard_entries
from examples.files import write_atomically
from examples.flags import UserError

INDEX = "index.json"
PROGRESS = "progress.json"  # there while a preparation is not finished
FORMAT = "token shards, version 1"


def write_shard(
    folder: Path, name: str, split: str, dtype: str, pieces: Sequence[Any], text: int
) -> Shard:
    """Write one array per document as one shard; `text` is their bytes."""
    arrays = [np.asarray(piece, np.dtype(dtype)) for piece in pieces]
    sha256 = write_atomically(folder / name, arrays)
    tokens = sum(map(len, arrays))
    return Shard(name, split, dtype, len(arrays), text, tokens, sha256)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` atomically."""
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    write_atomically(path, [text.encode()])


def file_sha256(path: Path) -> str:
    """Checksum of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ShardStream:
    """The shards of one split as one array, of which slices are read.

    Where `vocab_size` is given, whatever is read must be below it: an id that the model
    does not know would be clipped by it without a word.
    """

    def __init__(
        self, folder: Path, shards: Sequence[Shard], vocab_size: int | None = None
    ):
        self._paths = [folder / shard.name for shard in shards]
        self._vocab_size = vocab_size
        self._maps = [
            np.memmap(folder / shard.name, np.dtype(shard.dtype), mode="r")
            for shard in shards
        ]
        self._ends = np.cumsum([len(part) for part in self._maps]).tolist()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, stride = part.indices(len(self))
        if stride != 1:
            raise ValueError("only contiguous slices can be read")
        pieces: list[np.ndarray] = []
        number = bisect.bisect_right(self._ends, start)
        while start < stop:
            base = self._ends[number] - len(self._maps[number])
            end = min(stop, self._ends[number])
            pieces.append(self._checked(number, start - base, end - base))
            start, number = end, number + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else self._maps[0][:0]

    def _checked(self, number: int, start: int, stop: int) -> np.ndarray:
        piece = self._maps[number][start:stop]
        if self._vocab_size is None or piece.max() < self._vocab_size:
            return piece
        first = int(np.argmax(piece >= self._vocab_size))
        raise UserError(
            f"{self._paths[number]}: token {start + first:,} of it has the id "
            f"{piece[first]}, but the vocabulary ends at {self._vocab_size - 1}; "
            "prepare the folder anew"
        )


@dataclass(frozen=True)
class Folder:
    """A complete folder of shards, its sizes checked."""

    path: Path
    shards: tuple[Shard, ...]
    index: dict[str, Any]

    def split(self, name: str) -> list[Shard]:
        return [shard for shard in self.shards if shard.split == name]

    def stream(self, split: str) -> ShardStream:
        """The token ids of a split, each checked to be in the vocabulary."""
        vocab_size = self.index["tokenizer"]["vocab_size"]
        return ShardStream(self.path, self.split(split), vocab_size)

    def byte_counts(self) -> ShardStream:
        """Bytes of text per validation token; the end of a document has none."""
        return ShardStream(self.path, self.split("val_bytes"))

    def digest(self) -> str:
        """Names the exact tokens, their order and the split."""
        lines = "".join(f"{s.split} {s.tokens} {s.sha256}\n" for s in self.shards)
        return hashlib.sha256(lines.encode()).hexdigest()[:16]

    def tokenizer(self) -> tok.Tokenizer:
        """The tokenizer that made the shards; another one in its place is refused."""
        path, made = self.path / tok.FILE, self.index["tokenizer"]
        if file_sha256(path) != made["sha256"]:
            raise UserError(
                f"{path}: not the tokenizer that made the shards (its checksum is not "
                f"that of {INDEX}); put that file back or prepare the folder anew"
            )
        tokenizer = tok.load_tokenizer(path)
        if tokenizer.vocab_size != made["vocab_size"]:
            raise UserError(
                f"{self.path / INDEX}: tokenizer.vocab_size is {made['vocab_size']}, "
                f"but {tok.FILE} has {tokenizer.vocab_size}; prepare the folder anew"
            )
        tokenizer.name = made["name"]
        return tokenizer

    @cached_property
    def _files(self) -> list[tuple[Path, str]]:
        pairs = [(self.path / shard.name, shard.sha256) for shard in self.shards]
        return [*pairs, (self.path / tok.FILE, self.index["tokenizer"]["sha256"])]

    def verify(self) -> None:
        """Read every file and compare its checksum; all that differ are named."""
        bad = [path.name for path, sha in self._files if file_sha256(path) != sha]
        if bad:
            raise UserError(
                f"{self.path}: altered since it was written: {', '.join(bad)}; "
                "prepare the folder anew"
            )


def _size_problem(path: Path, shard: Shard) -> str | None:
    wanted = shard.tokens * np.dtype(shard.dtype).itemsize
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{shard.name} is missing"
    if size == wanted:
        return None
    return f"{shard.name} has {size:,} bytes instead of {wanted:,}"


def size_problems(folder: Path, shards: Iterable[Shard]) -> list[str]:
    """What is wrong with the sizes of the files, in words."""
    found = (_size_problem(folder / shard.name, shard) for shard in shards)
    return [problem for problem in found if problem]


def make_index(shards: Iterable[Shard], **about: Any) -> dict[str, Any]:
    """The content of `index.json`."""
    return {"format": FORMAT, "shards": [asdict(shard) for shard in shards], **about}


def open_folder(path: Path) -> Folder:
    """Read the index and check that every file is there in its full size."""
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        if entry(index, "format", str) != FORMAT:
            raise ValueError(f"format {index['format']!r} is not {FORMAT!r}")
        shards = shard_entries(index)
        entry(index, "left_out", int)
        made = entry(index, "tokenizer", dict)
        for key, kind in (("name", str), ("sha256", str), ("vocab_size", int)):
            entry(made, key, kind, "tokenizer")
    except FileNotFoundError:
        raise UserError(
            f"{path}: no {INDEX} in it: not a folder of token shards, or one whose "
            "preparation was interrupted; run examples.prepare again"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path / INDEX}: not a valid index ({error})") from None
    problems = size_problems(path, shards)
    if not (path / tok.FILE).is_file():
        problems.append(f"{tok.FILE} is missing")
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}; prepare the folder anew")
    missing = {"train", "val", "val_bytes"} - {s.split for s in shards}
    if missing:
        raise UserError(f"{path}: no shard of {' and '.join(sorted(missing))} in it")
    return Folder(path, shards, index)


def find(paths: Sequence[str]) -> Folder | None:
    """The folder of shards among `--data` paths; None if they are text."""
    marks = (INDEX, PROGRESS, "train_00000.bin")
    found = [
        path for path in map(Path, paths) if any((path / m).exists() for m in marks)
    ]
    if not found:
        return None
    if len(paths) > 1:
        raise UserError(f"--data {found[0]}: a folder of token shards goes alone")
    return open_folder(found[0])
