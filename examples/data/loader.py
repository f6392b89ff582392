"""Batches as a pure function of seed and step: the same for every optimizer."""

import functools
import hashlib
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from examples.config import Config, DataConfig
from examples.data import shards
from examples.data import tokens as tok
from examples.data.corpus import Corpus
from examples.options import check, flag

# Token ids, or another number per token, one after the other.
Stream = np.ndarray | shards.ShardStream
T = TypeVar("T")
# Of `epoch_order`; part of a text's hash, so that a run goes on in the same order only.
_ORDER_VERSION = 2


@functools.lru_cache(maxsize=2)
def epoch_order(windows: int, seed: int, epoch: int) -> np.ndarray:
    """All windows of an epoch in the order in which they are read.

    So the position in the data is the number of the step and nothing else. Windows are
    sorted by random numbers because NumPy promises that those of a bit generator stay
    the same in other versions, which it does not promise of `permutation`.
    """
    numbers = np.random.PCG64([seed, epoch]).random_raw(windows)
    return np.argsort(numbers, kind="stable")


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
        needed = self.batch_size * self.seq_len + 1
        check(
            self.windows >= self.batch_size,
            f"the training text has {len(self.stream):,} tokens, one batch needs "
            f"{needed:,} (--batch-size {self.batch_size}, --seq-len {self.seq_len})",
        )

    @property
    def windows(self) -> int:
        return max(0, len(self.stream) - 1) // self.seq_len

    def at(self, step: int, rows: slice = slice(None)) -> np.ndarray:
        """Token ids of one step, (B, L+1): inputs, and targets one to the right.

        A host that feeds only some rows of the global batch reads only these.
        """
        chosen = step * self.batch_size + np.arange(self.batch_size)[rows]
        epochs, places = np.divmod(chosen, self.windows)
        batch = np.empty((len(chosen), self.seq_len + 1), np.int32)
        for row, (epoch, place) in enumerate(zip(epochs.tolist(), places)):
            window = epoch_order(self.windows, self.seed, epoch)[place]
            start = int(window) * self.seq_len
            batch[row] = self.stream[start : start + self.seq_len + 1]
        return batch


def eval_batches(
    stream: Stream, batch_size: int, seq_len: int, max_tokens: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Windows of about `max_tokens` tokens (0: all), spread evenly over a stream.

    Each batch is (tokens (B, L+1), weight (B,)); the last batch is filled up with rows
    of weight zero, so that every batch has the same shape.
    """
    windows = max(0, len(stream) - 1) // seq_len
    check(
        windows > 0,
        f"the validation text has {len(stream):,} tokens, one sequence needs "
        f"{seq_len + 1:,} (--seq-len {seq_len})",
    )
    wanted = min(windows, max(1, max_tokens // seq_len)) if max_tokens else windows
    starts = (np.arange(wanted) * windows // wanted * seq_len).tolist()
    rows = np.stack([stream[i : i + seq_len + 1] for i in starts]).astype(np.int32)
    rows = np.pad(rows, ((0, -wanted % batch_size), (0, 0)))
    weight = (np.arange(len(rows)) < wanted).astype(np.float32)
    parts = (slice(i, i + batch_size) for i in range(0, len(rows), batch_size))
    return [(rows[part], weight[part]) for part in parts]


@dataclass(frozen=True)
class Dataset:
    """Everything the training loop needs to know about the text.

    `about` is what a run says and records of it; its `digest` names the exact tokens.
    """

    about: dict[str, Any]
    tokenizer: tok.Tokenizer
    train: TrainBatches
    val: list[tuple[np.ndarray, np.ndarray]]

    @property
    def val_tokens(self) -> int:
        """How many tokens a validation looks at."""
        return int(sum(weight.sum() for _, weight in self.val)) * self.train.seq_len


def _from_text(config: DataConfig) -> tuple[dict[str, Any], tok.Tokenizer, Any]:
    """A description of the text, its tokenizer, and the stream of each split."""
    corpus = Corpus(config.data, config.val_fraction, config.max_bytes)
    parts = [list(chain(*part)) for part in zip(*corpus.groups())]
    tokenizer = tok.make_tokenizer(config.tokenizer, config.vocab_size, parts[0])
    about: dict[str, Any] = {"source": corpus.name, "notes": corpus.notes}
    # Of the ids, not of a tokenizer.json: its layout changes with its library.
    sha, streams = hashlib.sha256(str(tokenizer.vocab_size).encode()), {}
    for split, documents in zip(("train", "val"), parts):
        streams[split] = ids = tok.stream(tokenizer, documents)
        sizes = len(documents), sum(map(len, documents)), len(ids)
        about[split] = dict(zip(("documents", "bytes", "tokens"), sizes))
        sha.update(ids.data)
        sha.update(b"".join(documents))
    return about | {"digest": sha.hexdigest()[:16]}, tokenizer, streams


def load(config: Config) -> Dataset:
    """Token shards if `--data` is a folder of them, else text to read and tokenize."""
    folder, run = shards.find(config.data.data), config.run
    if folder is None:
        about, tokenizer, streams = _from_text(config.data)
    else:
        for name in ("tokenizer", "vocab_size", "max_bytes", "val_fraction"):
            given = getattr(config.data, name) != getattr(DataConfig(), name)
            said = "token shards bring their own tokenizer and split; leave it out"
            check(not given, f"{flag(name)}: {said}")
        about, tokenizer = folder.about(), folder.tokenizer()
        streams = {split: folder.stream(split) for split in ("train", "val")}
    about["digest"] = f"{_ORDER_VERSION}-{about['digest']}"
    sizes = run.batch_size, config.model.seq_len
    train = TrainBatches(streams["train"], *sizes, run.seed)
    val = eval_batches(streams["val"], *sizes, run.eval_tokens)
    return Dataset(about, tokenizer, train, val)


def prefetch(items: Iterator[T], depth: int = 4) -> Generator[T]:
    """The items, in order, some of them prepared in a thread ahead of the consumer.

    An error in the thread is raised in the consumer at its place in the order.
    """
    end = object()
    pool = ThreadPoolExecutor(1)
    try:
        ahead = deque(pool.submit(next, items, end) for _ in range(depth))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(pool.submit(next, items, end))
            yield item  # pyrefly: ignore
    finally:
        pool.shutdown(cancel_futures=True)
