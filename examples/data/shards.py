"""Token shards: raw little-endian arrays on disk, and the index that vouches for them.

A folder holds `train_00000.bin`, `val_00000.bin`, ... (one unsigned integer per token,
every document ended by the separator), `tokenizer.json`, and `index.json`, which lists
all files that are written and says whether they are all. Shards end where a document
ends. Of each the index has the name, the split (train or val), the dtype, how many
documents, bytes of text and tokens it holds, and checksums of it and of its blocks.
"""

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.data import tokens as tok
from examples.files import read_json, write_atomically
from examples.options import check

INDEX = "index.json"
FORMAT = "token shards, version 2"
# Bytes covered by one checksum. Reading a window means reading every block that it
# touches, so a block is only a few windows long: random access stays cheap.
_BLOCK = 1 << 16


Shard = dict[str, Any]  # as it is in the index


def write_shard(
    file: Path, split: str, data: np.ndarray, documents: int, size: int
) -> Shard:
    """Write a number for each token of some documents, `size` bytes of text."""
    raw = data.tobytes()
    write_atomically(file, raw)
    return {
        "name": file.name,
        "split": split,
        "dtype": data.dtype.str,
        "documents": documents,
        "bytes": size,
        "tokens": len(data),
        "sha256": hashlib.sha256(raw).hexdigest(),
        "blocks": [zlib.crc32(raw[i : i + _BLOCK]) for i in range(0, len(raw), _BLOCK)],
    }


class ShardStream:
    """The shards of one split as one array, of which slices are read.

    What is read is compared with the checksum of its block the first time: a shard that
    has changed since it was written is never trained on.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard]):
        self._folder, self._shards = folder, shards
        names = ((folder / shard["name"], shard["dtype"]) for shard in shards)
        self._maps = [np.memmap(path, dtype, mode="r") for path, dtype in names]
        self._starts = np.cumsum([0, *map(len, self._maps)])
        self._checked = [np.zeros(len(s["blocks"]), bool) for s in shards]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        behind = int(np.searchsorted(self._starts, stop))
        pieces = [self._maps[0][:0]]
        for number in range(first, behind):
            begin, array = int(self._starts[number]), self._maps[number]
            span = slice(max(0, start - begin), min(len(array), stop - begin))
            self._check(number, span)
            pieces.append(array[span])
        return np.concatenate(pieces)

    def _check(self, number: int, span: slice) -> None:
        shard, array = self._shards[number], self._maps[number]
        size = _BLOCK // array.itemsize
        for block in range(span.start // size, -(-span.stop // size)):
            if not self._checked[number][block]:
                content = array[block * size :][:size].tobytes()
                said = f"altered since it was written (block {block:,})"
                check(
                    zlib.crc32(content) == shard["blocks"][block],
                    f"{self._folder / shard['name']}: {said}; put that file back or "
                    "prepare the folder anew",
                )
                self._checked[number][block] = True


@dataclass(frozen=True)
class Folder:
    """A folder of shards, its sizes checked."""

    path: Path
    index: dict[str, Any]

    def split(self, name: str) -> list[Shard]:
        """The shards of one split."""
        return [shard for shard in self.index["shards"] if shard["split"] == name]

    def counts(self, split: str) -> dict[str, int]:
        """Documents, bytes of text and tokens of a split."""
        names = ("documents", "bytes", "tokens")
        return {name: sum(shard[name] for shard in self.split(split)) for name in names}

    def stream(self, split: str) -> ShardStream:
        """The token ids of a split."""
        return ShardStream(self.path, self.split(split))

    def about(self) -> dict[str, Any]:
        """A description; `digest` names tokens, their order, split and tokenizer."""
        shards = self.index["shards"]
        lines = [f"{s['split']} {s['tokens']} {s['sha256']}\n" for s in shards]
        lines.append(self.index["tokenizer"]["sha256"])
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()[:16]
        source = f"{len(shards)} token shards in {self.path}"
        counts = {split: self.counts(split) for split in ("train", "val")}
        return {"source": source, "notes": [], "digest": digest, **counts}

    def tokenizer(self) -> tok.Tokenizer:
        """The tokenizer that made the shards; another one in its place is refused."""
        made = self.index["tokenizer"]
        tokenizer = tok.load_tokenizer(self.path / tok.FILE, made["sha256"])
        tokenizer.name = made["name"]
        return tokenizer


def open_folder(path: Path, *, finished: bool = True) -> Folder:
    """Read the index and check that every file is there in its full size.

    A preparation that was stopped is refused unless `finished` is False.
    """
    there = (path / INDEX).is_file()
    check(there, f"{path}: no {INDEX} in it; put it back or prepare the folder anew")
    index = read_json(path / INDEX)
    known = index.get("format") == FORMAT
    check(known, f"{path / INDEX}: not of the format {FORMAT!r}; prepare it anew")
    said = "its preparation was interrupted; run examples.prepare again"
    check(index.get("finished", True) or not finished, f"{path}: {said}")
    problems = [f"{tok.FILE} is missing"] if not (path / tok.FILE).is_file() else []
    for shard in index["shards"]:
        name, itemsize = shard["name"], np.dtype(shard["dtype"]).itemsize
        wanted = shard["tokens"] * itemsize
        if not (path / name).exists():
            problems.append(f"{name} is missing")
        elif (size := (path / name).stat().st_size) != wanted:
            problems.append(f"{name} has {size:,} bytes instead of {wanted:,}")
    check(not problems, f"{path}: {'; '.join(problems)}; prepare the folder anew")
    return Folder(path, index)


def find(paths: Sequence[str]) -> Folder | None:
    """The folder of shards among `--data` paths; None if they are text."""
    marks = (INDEX, "train_00000.bin")
    found = [p for p in map(Path, paths) if any((p / m).exists() for m in marks)]
    if not found:
        return None
    check(len(paths) == 1, f"--data {found[0]}: a folder of token shards goes alone")
    return open_folder(found[0])
