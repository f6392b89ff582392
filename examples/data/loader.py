"""Batches as a pure function of seed and step: the same for every optimizer."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from examples.config import Config
from examples.data import corpus as corpora
from examples.data import tokens as tok
from examples.flags import UserError


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, windows: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(windows)


@dataclass(frozen=True)
class TrainBatches:
    """Windows of the training stream, every one once per epoch, shuffled each time.

    Neighbouring windows share one token: the last target of one is the first input of
    the next.
    """

    stream: np.ndarray
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

    def at(self, step: int) -> np.ndarray:
        """Token ids of one step, (B, L+1): inputs, and targets one to the right."""
        first = step * self.batch_size
        batch = np.empty((self.batch_size, self.seq_len + 1), np.int32)
        for row in range(self.batch_size):
            epoch, place = divmod(first + row, self.windows)
            window = _epoch_order(self.seed, epoch, self.windows)[place]
            start = window * self.seq_len
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
    stream: np.ndarray,
    byte_counts: np.ndarray,
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
    index = chosen[:, None] * seq_len + np.arange(seq_len + 1)[None, :]
    rows = stream[index].astype(np.int32)
    batches = []
    for first in range(0, wanted, batch_size):
        part = rows[first : first + batch_size]
        missing = batch_size - len(part)
        weight = np.r_[np.ones(len(part)), np.zeros(missing)].astype(np.float32)
        batches.append((np.pad(part, ((0, missing), (0, 0))), weight))
    covered = byte_counts[index[:, 1:]].sum()
    return EvalBatches(batches, wanted * seq_len, int(covered))


@dataclass(frozen=True)
class Dataset:
    """Everything the training loop needs to know about the text."""

    corpus: corpora.Corpus
    tokenizer: tok.Tokenizer
    train: TrainBatches
    val: EvalBatches


def load(config: Config) -> Dataset:
    """Read the text, tokenize it, and cut it into batches."""
    text = corpora.load(config.data)
    tokenizer = tok.make_tokenizer(config.data, text.train)
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    end, run, length = tokenizer.end_id, config.run, config.model.seq_len
    train = tok.stream(tokenizer.encode(text.train), end, dtype)
    val = tok.stream(tokenizer.encode(text.val), end, dtype)
    # The end of a document is a token to predict, but it is no byte of the text.
    val_bytes = tok.stream(tokenizer.byte_counts(text.val), 0, np.int64)
    return Dataset(
        corpus=text,
        tokenizer=tokenizer,
        train=TrainBatches(train, run.batch_size, length, run.seed),
        val=eval_batches(val, val_bytes, run.batch_size, length, run.eval_tokens),
    )
