"""Batches as a pure function of seed and step: the same for every optimizer."""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from examples.config import Config
from examples.data import corpus as corpora
from examples.data import shards
from examples.data import tokens as tok
from examples.data.order import shuffled
from examples.flags import UserError, check


class Stream(Protocol):
    """Token ids (or another number per token) one after the other: array or shards."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


@dataclass(frozen=True)
class TrainBatches:
    """Windows of the training stream, every one once per epoch, shuffled each time.

    Neighbouring windows share one token: the last target of one is the first input of
    the next.
    """

    stream: Stream
    batch_size: int
    seq_len: int
    seed: int

    def __post_init__(self) -> None:
        if self.windows < self.batch_size:
            needed = self.batch_size * self.seq_len + 1
            raise UserError(
                f"the training text has {len(self.stream):,} tokens, one batch needs "
                f"{needed:,} (--batch-size {self.batch_size}, --seq-len {self.seq_len})"
            )

    @property
    def windows(self) -> int:
        return max(0, len(self.stream) - 1) // self.seq_len

    def at(self, step: int, rows: slice = slice(None)) -> np.ndarray:
        """Token ids of one step, (B, L+1): inputs, and targets one to the right.

        A host that feeds only some rows of the global batch reads only these.
        """
        first = step * self.batch_size
        chosen = first + np.arange(self.batch_size)[rows]
        epochs, places = np.divmod(chosen, self.windows)
        batch = np.empty((len(chosen), self.seq_len + 1), np.int32)
        for epoch in np.unique(epochs):
            inside = np.flatnonzero(epochs == epoch)
            order = shuffled(places[inside], self.windows, self.seed, int(epoch))
            for row, window in zip(inside, order):
                start = int(window) * self.seq_len
                batch[row] = self.stream[start : start + self.seq_len + 1]
        return batch


@dataclass(frozen=True)
class EvalBatches:
    """Fixed windows of the validation stream, spread evenly over it.

    Each batch is (tokens (B, L+1), weight (B,)); the last batch is filled up with rows
    of weight zero, so that every batch has the same shape.
    """

    batches: list[tuple[np.ndarray, np.ndarray]]
    tokens: int
    bytes: int


def eval_batches(
    stream: Stream,
    byte_counts: Stream,
    batch_size: int,
    seq_len: int,
    max_tokens: int,
) -> EvalBatches:
    """Choose about `max_tokens` validation tokens (0: all) and count their bytes."""
    windows = max(0, len(stream) - 1) // seq_len
    if windows == 0:
        raise UserError(
            f"the validation text has {len(stream):,} tokens, one sequence needs "
            f"{seq_len + 1:,} (--seq-len {seq_len})"
        )
    wanted = min(windows, max(1, max_tokens // seq_len)) if max_tokens else windows
    chosen = np.arange(wanted) * windows // wanted
    starts = [int(start) for start in chosen * seq_len]
    rows = np.stack([stream[i : i + seq_len + 1] for i in starts]).astype(np.int32)
    batches = []
    for first in range(0, wanted, batch_size):
        part = rows[first : first + batch_size]
        missing = batch_size - len(part)
        weight = np.r_[np.ones(len(part)), np.zeros(missing)].astype(np.float32)
        batches.append((np.pad(part, ((0, missing), (0, 0))), weight))
    covered = sum(int(byte_counts[i + 1 : i + 1 + seq_len].sum()) for i in starts)
    return EvalBatches(batches, wanted * seq_len, covered)


@dataclass(frozen=True)
class Part:
    """How much text is in the training or the validation part."""

    documents: int
    bytes: int
    tokens: int


@dataclass(frozen=True)
class About:
    """What a run says and records about its text.

    `digest` names the text exactly, `tokens_digest` what the tokenizer made of it.
    """

    source: str
    digest: str
    tokens_digest: str
    train: Part
    val: Part
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dataset:
    """Everything the training loop needs to know about the text."""

    about: About
    tokenizer: tok.Tokenizer
    train: TrainBatches
    val: EvalBatches


def _dataset(
    config: Config,
    about: About,
    tokenizer: tok.Tokenizer,
    train: Stream,
    val: Stream,
    val_bytes: Stream,
) -> Dataset:
    run, length = config.run, config.model.seq_len
    return Dataset(
        about=about,
        tokenizer=tokenizer,
        train=TrainBatches(train, run.batch_size, length, run.seed),
        val=eval_batches(val, val_bytes, run.batch_size, length, run.eval_tokens),
    )


def _tokens_digest(vocab_size: int, *streams: np.ndarray) -> str:
    """Of the ids, not of a tokenizer.json: its layout changes with its library."""
    sha = hashlib.sha256(str(vocab_size).encode())
    for stream in streams:
        sha.update(stream.data)
    return sha.hexdigest()[:16]


def _from_text(config: Config) -> Dataset:
    text = corpora.load(config.data)
    tokenizer = tok.make_tokenizer(
        config.data.tokenizer, config.data.vocab_size, text.train
    )
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    end = tokenizer.end_id
    train = tok.stream(tokenizer.encode(text.train), end, dtype)
    val = tok.stream(tokenizer.encode(text.val), end, dtype)
    # The end of a document is a token to predict, but it is no byte of the text.
    val_bytes = tok.stream(tokenizer.byte_counts(text.val), 0, np.int64)
    about = About(
        source=text.source,
        digest=text.digest(),
        tokens_digest=_tokens_digest(tokenizer.vocab_size, train, val),
        train=Part(len(text.train), text.train_bytes, len(train)),
        val=Part(len(text.val), text.val_bytes, len(val)),
        notes=tuple(text.notes),
    )
    return _dataset(config, about, tokenizer, train, val, val_bytes)


def _from_shards(config: Config, folder: shards.Folder) -> Dataset:
    def part(split: str) -> Part:
        chosen = folder.split(split)
        return Part(
            documents=sum(shard.documents for shard in chosen),
            bytes=sum(shard.bytes for shard in chosen),
            tokens=sum(shard.tokens for shard in chosen),
        )

    check(
        config.data.tokenizer == "bytes",
        f"--tokenizer {config.data.tokenizer}: token shards bring their own; leave it "
        "out",
    )
    count = len(folder.split("train")) + len(folder.split("val"))
    about = About(
        source=f"{count} token shards in {folder.path}",
        digest=folder.digest(),
        tokens_digest=folder.index["tokenizer"]["sha256"][:16],
        train=part("train"),
        val=part("val"),
    )
    return _dataset(
        config,
        about,
        folder.tokenizer(),
        folder.stream("train"),
        folder.stream("val"),
        folder.byte_counts(),
    )


def load(config: Config) -> Dataset:
    """Token shards if `--data` is a folder of them, else text to read and tokenize."""
    folder = shards.find(config.data.data)
    return _from_text(config) if folder is None else _from_shards(config, folder)
