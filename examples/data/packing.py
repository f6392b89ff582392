"""Pack a stream of documents into token shards, so that it can go on after a stop."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from examples.data import shards
from examples.data.entries import Shard, entry, shard_entries
from examples.data.prefetch import Prefetch
from examples.data.reading import text_hash
from examples.data.tokens import FILE as TOKENIZER_FILE
from examples.data.tokens import Tokenizer
from examples.flags import UserError

# Documents are tokenized this many bytes at a time: enough to keep all cores busy.
_BATCH_BYTES = 4_000_000

# A document and its split: "train", "val", "out" (left out, but counted), or None,
# which leaves the choice to the hash of its text.
Document = tuple[str | None, bytes]


def split_by_hash(text: bytes, val_fraction: float) -> str:
    """A rule without memory: equal texts are on the same side, wherever they occur."""
    head = text_hash(text)[:8]
    return "val" if int.from_bytes(head) < val_fraction * 2**64 else "train"


def read_progress(file: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """What an unfinished preparation has done; it must be the same preparation."""
    try:
        progress = json.loads(file.read_text(encoding="utf-8"))
        before = entry(progress, "identity", dict)
        if missing := [key for key in identity if key not in before]:
            raise ValueError(f"identity.{missing[0]} is missing")
        shard_entries(progress)
        for key in ("documents_read", "left_out"):
            entry(progress, key, int)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file}: not valid ({error}); remove the folder and begin again"
        ) from None
    if other := [key for key, value in identity.items() if before[key] != value]:
        raise UserError(
            f"--out {file.parent}: an unfinished preparation with another "
            f"{', '.join(other)}; repeat its options or remove the folder"
        )
    if not (file.parent / TOKENIZER_FILE).is_file():
        raise UserError(f"{file.parent / TOKENIZER_FILE}: missing; remove the folder")
    return progress


def _batches(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    batch, held = [], 0
    for document in documents:
        batch.append(document)
        held += len(document[1])
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


@dataclass
class _Waiting:
    """Documents of one split that are not written yet."""

    ids: list[np.ndarray] = field(default_factory=list)
    counts: list[np.ndarray] = field(default_factory=list)
    tokens: int = 0
    bytes: int = 0


class Packer:
    """Fills one training and one validation shard at a time and writes them together.

    Only then is the place in the source recorded, in `progress.json`. Whatever a stop
    leaves behind beyond that is written anew, to the same bytes.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        shard_tokens: int,
        val_fraction: float,
        identity: dict[str, Any],
    ):
        self.folder, self.tokenizer = folder, tokenizer
        self.shard_tokens, self.val_fraction = shard_tokens, val_fraction
        self.identity = identity
        self.shards: list[Shard] = []
        self.documents_read = self.left_out = 0
        self._dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
        self._waiting = {"train": _Waiting(), "val": _Waiting()}

    def resume(self, progress: dict[str, Any]) -> None:
        """Go on where `progress.json` ends."""
        self.shards = [*shard_entries(progress)]
        self.documents_read = progress["documents_read"]
        self.left_out = progress["left_out"]
        if problems := shards.size_problems(self.folder, self.shards):
            raise UserError(
                f"--out {self.folder}: {'; '.join(problems)}; remove the folder"
            )

    def tokens(self, split: str) -> int:
        """Tokens of a split so far, those that wait included."""
        written = sum(shard.tokens for shard in self.shards if shard.split == split)
        return written + self._waiting[split].tokens

    def pack(
        self,
        documents: Iterable[Document],
        max_tokens: int,
        tell: Callable[["Packer", int], None],
    ) -> None:
        """Take all documents, or about `max_tokens` training tokens (0: all).

        `tell` hears of every batch and of its bytes.
        """
        size = min(_BATCH_BYTES, self.shard_tokens)
        with Prefetch(_batches(documents, size), depth=2) as batches:
            while not max_tokens or self.tokens("train") < max_tokens:
                batch = next(batches, None)
                if batch is None:
                    break
                self._add(batch)
                full = (w.tokens >= self.shard_tokens for w in self._waiting.values())
                if any(full):
                    self.flush()
                tell(self, sum(len(text) for _, text in batch))
        self.flush()

    def _add(self, batch: list[Document]) -> None:
        self.documents_read += len(batch)
        chosen = [(s or split_by_hash(t, self.val_fraction), t) for s, t in batch]
        kept = [(split, text) for split, text in chosen if split != "out"]
        self.left_out += len(batch) - len(kept)
        held_out = [text for split, text in kept if split == "val"]
        counts = iter(self.tokenizer.byte_counts(held_out) if held_out else ())
        encoded = self.tokenizer.encode([text for _, text in kept])
        for (split, text), ids in zip(kept, encoded, strict=True):
            waiting = self._waiting[split]
            waiting.ids.append(np.append(ids, self.tokenizer.end_id))
            waiting.tokens += len(ids) + 1
            waiting.bytes += len(text)
            if split == "val":  # the end of a document stands for no byte
                waiting.counts.append(np.append(next(counts), 0))

    def flush(self) -> None:
        """Write what waits as shards, then the place in the source."""
        for split, waiting in self._waiting.items():
            if not waiting.ids:
                continue
            number = sum(shard.split == split for shard in self.shards)
            kinds = [(split, ".bin", self._dtype, waiting.ids)]
            if split == "val":
                kinds.append(("val_bytes", ".bytes", "<u4", waiting.counts))
            for kind, suffix, dtype, arrays in kinds:
                name = f"{split}_{number:05d}{suffix}"
                self.shards.append(
                    shards.write_shard(
                        self.folder, name, kind, dtype, arrays, waiting.bytes
                    )
                )
            self._waiting[split] = _Waiting()
        shards.write_json(self.folder / shards.PROGRESS, self.progress())

    def progress(self) -> dict[str, Any]:
        """The content of `progress.json`."""
        return {
            "identity": self.identity,
            "documents_read": self.documents_read,
            "left_out": self.left_out,
            "shards": [dataclasses.asdict(shard) for shard in self.shards],
        }
