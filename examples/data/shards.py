"""Token shards: raw little-endian arrays on disk, and the index that vouches for them.

A folder holds `train_00000.bin`, `val_00000.bin`, ... (one unsigned integer per token,
every document ended by the separator), `val_00000.bytes` (the bytes of text that each
validation token stands for), `tokenizer.json`, and `index.json`, which is written last:
a folder without it is not complete. Shards end where a document ends.
"""

import bisect
import hashlib
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from examples.data import tokens as tok
from examples.files import write_atomically
from examples.options import Options, UserError, check, option

INDEX = "index.json"
PROGRESS = "progress.json"  # there while a preparation is not finished
FORMAT = "token shards, version 2"
# Bytes that one checksum stands for. Whoever reads a window reads whole blocks of it,
# once: a few windows long, so that reading in a random order stays cheap.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Shard(Options):
    """One file: what is in it, its checksum, and one for each block of it."""

    name: str
    split: Literal["train", "val", "val_bytes"]
    dtype: Literal["<u2", "<u4"]
    documents: int = option(0, "", "[0, 1e18]")
    bytes: int = option(0, "", "[0, 1e18]")
    tokens: int = option(0, "", "[1, 1e18]")
    sha256: str = ""
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        unsafe = self.name in ("", ".", "..") or set(self.name) & set("/\\\0")
        check(not unsafe, f"name cannot be {self.name!r}")
        count = -(-self.tokens * np.dtype(self.dtype).itemsize // _BLOCK)
        check(len(self.blocks) == count, f"blocks must be {count} checksums")


def write_shard(
    folder: Path, name: str, split: str, dtype: str, pieces: Sequence[Any], text: int
) -> Shard:
    """Write one array per document as one shard; `text` is their bytes."""
    data = np.concatenate(pieces).astype(np.dtype(dtype))
    sha256 = write_atomically(folder / name, [data])
    raw = data.tobytes()
    blocks = tuple(zlib.crc32(raw[i : i + _BLOCK]) for i in range(0, len(raw), _BLOCK))
    kind: Any = split
    width: Any = dtype
    return Shard(name, kind, width, len(pieces), text, len(data), sha256, blocks)


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
        wanted = shard.tokens * np.dtype(shard.dtype).itemsize
        try:
            size = (folder / shard.name).stat().st_size
        except FileNotFoundError:
            found.append(f"{shard.name} is missing")
        else:
            if size != wanted:
                found.append(f"{shard.name} has {size:,} bytes instead of {wanted:,}")
    return found


def read_entries(path: Path, kinds: dict[str, type]) -> tuple[dict, tuple[Shard, ...]]:
    """The content of `index.json` or `progress.json`, and its shards.

    `ValueError` names the first entry that is missing or not of its kind.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    for key, kind in ({"shards": list} | kinds).items():
        value: Any = content.get(key) if isinstance(content, dict) else None
        negative = kind is int and isinstance(value, int) and value < 0
        if type(value) is not kind or negative:
            raise ValueError(f"{key} is {value!r:.60}")
    shards = []
    for number, record in enumerate(content["shards"]):
        try:
            shards.append(Shard.from_mapping(record))
        except (UserError, TypeError) as error:
            raise ValueError(f"shards[{number}]: {error}") from None
    return content, tuple(shards)


def open_folder(path: Path) -> Folder:
    """Read the index and check that every file is there in its full size."""
    kinds = {"format": str, "left_out": int, "tokenizer": dict}
    try:
        index, shards = read_entries(path / INDEX, kinds)
        if index["format"] != FORMAT:
            raise ValueError(f"format {index['format']!r} is not {FORMAT!r}")
        for key, kind in (("name", str), ("sha256", str), ("vocab_size", int)):
            if type(index["tokenizer"].get(key)) is not kind:
                raise ValueError(f"tokenizer.{key} is {index['tokenizer'].get(key)!r}")
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
    check(not problems, f"{path}: {'; '.join(problems)}; prepare the folder anew")
    missing = {"train", "val", "val_bytes"} - {s.split for s in shards}
    check(not missing, f"{path}: no shard of {' and '.join(sorted(missing))} in it")
    return Folder(path, shards, index)


def find(paths: Sequence[str]) -> Folder | None:
    """The folder of shards among `--data` paths; None if they are text."""
    marks = (INDEX, PROGRESS, "train_00000.bin")
    found = [p for p in map(Path, paths) if any((p / m).exists() for m in marks)]
    if not found:
        return None
    check(len(paths) == 1, f"--data {found[0]}: a folder of token shards goes alone")
    return open_folder(found[0])
