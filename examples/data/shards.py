"""Token shards: raw little-endian arrays on disk, and the index that vouches for them.

A folder holds `train_00000.bin`, `val_00000.bin`, ... (one unsigned integer per token,
every document ended by the separator), `val_00000.bytes` (the bytes of text that each
validation token stands for), `tokenizer.json`, and `index.json`, which is written last:
a folder without it is not complete. Shards end where a document ends.
"""

import bisect
import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.data import tokens as tok
from examples.files import read_json, write_atomically
from examples.options import UserError, check

INDEX = "index.json"
PROGRESS = "progress.json"  # there while a preparation is not finished
FORMAT = "token shards, version 2"
# Bytes covered by one checksum. Reading a window means reading every block that it
# touches, so a block is only a few windows long: random access stays cheap.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Shard:
    """One file: what is in it, its checksum, and one for each block of it."""

    name: str
    split: str  # train, val or val_bytes
    dtype: str
    documents: int
    bytes: int
    tokens: int
    sha256: str
    blocks: Sequence[int]


def write_shard(
    file: Path, split: Any, dtype: Any, pieces: Sequence[Any], text: int
) -> Shard:
    """Write one array per document as one shard; `text` is their bytes."""
    data = np.concatenate(pieces).astype(dtype)
    sha256, raw = write_atomically(file, [data]), data.tobytes()
    blocks = tuple(zlib.crc32(raw[i : i + _BLOCK]) for i in range(0, len(raw), _BLOCK))
    sizes = len(pieces), text, len(data)
    return Shard(file.name, split, dtype, *sizes, sha256, blocks)


def file_sha256(path: Path) -> str:
    """Checksum of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ShardStream:
    """The shards of one split as one array, of which slices are read.

    What is read is compared with the checksum of its block the first time: a shard that
    has changed since it was written is never trained on.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard]):
        self._shards, self._folder = list(shards), folder
        self._maps = [np.memmap(folder / s.name, s.dtype, mode="r") for s in shards]
        self._ends = np.cumsum([len(part) for part in self._maps]).tolist()
        self._read = [np.zeros(len(s.blocks), bool) for s in shards]

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
            pieces.append(self._piece(number, start - base, end - base))
            start, number = end, number + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else self._maps[0][:0]

    def _piece(self, number: int, start: int, stop: int) -> np.ndarray:
        shard, array = self._shards[number], self._maps[number]
        per_block = _BLOCK // array.itemsize
        for block in range(start // per_block, -(-stop // per_block)):
            if not self._read[number][block]:
                content = array[block * per_block : (block + 1) * per_block]
                check(
                    zlib.crc32(content.tobytes()) == shard.blocks[block],
                    f"{self._folder / shard.name}: altered since it was written (block "
                    f"{block:,}); put that file back or prepare the folder anew",
                )
                self._read[number][block] = True
        return array[start:stop]


@dataclass(frozen=True)
class Folder:
    """A complete folder of shards, its sizes checked."""

    path: Path
    shards: tuple[Shard, ...]
    index: dict[str, Any]

    def split(self, name: str) -> list[Shard]:
        """The shards of one split."""
        return [shard for shard in self.shards if shard.split == name]

    def counts(self, split: str) -> dict[str, int]:
        """Documents, bytes of text and tokens of a split."""
        parts, names = self.split(split), ("documents", "bytes", "tokens")
        return {name: sum(getattr(part, name) for part in parts) for name in names}

    def stream(self, split: str) -> ShardStream:
        """The token ids of a split, or (val_bytes) the bytes they stand for."""
        return ShardStream(self.path, self.split(split))

    def digest(self) -> str:
        """Names the exact tokens, their order, the split and the tokenizer."""
        lines = [f"{s.split} {s.tokens} {s.sha256}\n" for s in self.shards]
        lines.append(self.index["tokenizer"]["sha256"])
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]

    def tokenizer(self) -> tok.Tokenizer:
        """The tokenizer that made the shards; another one in its place is refused."""
        path, made = self.path / tok.FILE, self.index["tokenizer"]
        same = file_sha256(path) == made["sha256"]
        tokenizer = tok.load_tokenizer(path) if same else None
        if tokenizer is None or tokenizer.vocab_size != made["vocab_size"]:
            raise UserError(
                f"{path}: not the tokenizer that made the shards (by its checksum or "
                f"size in {INDEX}); put that file back or prepare the folder anew"
            )
        tokenizer.name = made["name"]
        return tokenizer

    def verify(self) -> None:
        """Read every file and compare its checksum; all that differ are named."""
        files = [(self.path / shard.name, shard.sha256) for shard in self.shards]
        files.append((self.path / tok.FILE, self.index["tokenizer"]["sha256"]))
        bad = [path.name for path, sha in files if file_sha256(path) != sha]
        said = f"altered since it was written: {', '.join(bad)}"
        check(not bad, f"{self.path}: {said}; prepare the folder anew")


def size_problems(folder: Path, shards: Iterable[Shard]) -> list[str]:
    """What is wrong with the sizes of the files, in words."""
    found = []
    for shard in shards:
        wanted, path = (
            shard.tokens * np.dtype(shard.dtype).itemsize,
            folder / shard.name,
        )
        if not path.exists():
            found.append(f"{shard.name} is missing")
        elif (size := path.stat().st_size) != wanted:
            found.append(f"{shard.name} has {size:,} bytes instead of {wanted:,}")
    return found


def read_entries(path: Path) -> tuple[dict[str, Any], tuple[Shard, ...]]:
    """The content of `index.json` or `progress.json`, and its shards."""
    content = read_json(path)
    return content, tuple(Shard(**record) for record in content["shards"])


def open_folder(path: Path) -> Folder:
    """Read the index and check that every file is there in its full size."""
    said = f"{path}: no {INDEX} in it: not a folder of token shards, or one whose"
    there = (path / INDEX).is_file()
    check(there, f"{said} preparation was interrupted; run examples.prepare again")
    index, shards = read_entries(path / INDEX)
    known = index.get("format") == FORMAT
    check(known, f"{path / INDEX}: not of the format {FORMAT!r}; prepare it anew")
    problems = size_problems(path, shards)
    if not (path / tok.FILE).is_file():
        problems.append(f"{tok.FILE} is missing")
    check(not problems, f"{path}: {'; '.join(problems)}; prepare the folder anew")
    return Folder(path, shards, index)


def find(paths: Sequence[str]) -> Folder | None:
    """The folder of shards among `--data` paths; None if they are text."""
    marks = (INDEX, PROGRESS, "train_00000.bin")
    found = [p for p in map(Path, paths) if any((p / m).exists() for m in marks)]
    if not found:
        return None
    check(len(paths) == 1, f"--data {found[0]}: a folder of token shards goes alone")
    return open_folder(found[0])
