"""Turn documents into one stream of token ids, each document ended by a separator."""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from examples.files import write_atomically
from examples.options import UserError, check

END = "<|endoftext|>"
FILE = "tokenizer.json"
_KNOWN_ENDS = (END, "</s>", "<eos>", "<|end_of_text|>")
# Documents that are tokenized together, on all cores. What the library returns takes a
# hundred bytes a token, so that not too many may be held at once.
_AT_ONCE = 128


class ByteTokenizer:
    """One token per byte, and one more for the end of a document.

    A tokenizer gives, for each of some documents, token ids without a separator
    (`encode`) and the bytes that each of them stands for (`byte_counts`).
    """

    name = "bytes"
    vocab_size = 257
    end_id = 256

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in documents]

    def byte_counts(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        return [np.ones(len(text), np.int64) for text in documents]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens, separators left out."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def content(self) -> bytes:
        """The file in which the tokenizer is kept."""
        return b'{"model": {"type": "bytes"}}\n'


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer: Any, name: str):
        self.name, self._tokenizer = name, tokenizer
        # A separator spelled out inside a document is text like any other.
        tokenizer.encode_special_tokens = True
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        known = (tokenizer.token_to_id(end) for end in _KNOWN_ENDS)
        end_id = next((index for index in known if index is not None), None)
        if end_id is None:  # no end token in the file: one more id of our own
            end_id, self.vocab_size = self.vocab_size, self.vocab_size + 1
        self.end_id = end_id

    def _encode(self, documents: Sequence[bytes]) -> Iterator[Any]:
        for first in range(0, len(documents), _AT_ONCE):
            part = documents[first : first + _AT_ONCE]
            texts = [document.decode("utf-8") for document in part]
            yield from self._tokenizer.encode_batch(texts, add_special_tokens=False)

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        return [np.asarray(item.ids, np.int32) for item in self._encode(documents)]

    def byte_counts(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        pairs = zip(documents, self._encode(documents), strict=True)
        return [_bytes_per_token(text, item.offsets) for text, item in pairs]

    def decode(self, ids: Sequence[int]) -> str:
        known = [i for i in map(int, ids) if i != self.end_id]
        return self._tokenizer.decode(known, skip_special_tokens=False)

    def content(self) -> bytes:
        return self._tokenizer.to_str(pretty=True).encode()


Tokenizer = ByteTokenizer | SubwordTokenizer


def save(tokenizer: Tokenizer, path: Path) -> str:
    """Write the tokenizer's file; returns its SHA-256."""
    # The library's own `save` raises bare Exception where the file cannot be written.
    return write_atomically(path, [tokenizer.content()])


def _bytes_per_token(document: bytes, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Share the bytes of a document out over its tokens, each byte exactly once.

    Offsets count characters, and the tokens of a character that was split into bytes
    all carry the offsets of the whole: the first of them is given all its bytes.
    """
    raw = np.frombuffer(document, np.uint8)
    starts = np.flatnonzero((raw & 0xC0) != 0x80)  # bytes that begin a character
    byte_at = np.append(starts, len(raw))
    ends = np.asarray([end for _, end in offsets], np.int64)
    ends = np.maximum.accumulate(ends)
    if len(ends):
        ends[-1] = len(starts)  # what follows the last token counts as well
    return np.diff(byte_at[ends], prepend=0)


def train_bpe(documents: Iterable[bytes], vocab_size: int) -> SubwordTokenizer:
    """Train a byte-level BPE on the documents; a terminal shows how far it is."""
    bpe = tokenizers.ByteLevelBPETokenizer()
    texts = (document.decode("utf-8") for document in documents)
    more: Any = {"special_tokens": [END], "show_progress": sys.stderr.isatty()}
    bpe.train_from_iterator(texts, vocab_size, min_frequency=0, **more)
    trained = tokenizers.Tokenizer.from_str(bpe.to_str())
    return SubwordTokenizer(trained, f"bpe {trained.get_vocab_size()}")


def load_tokenizer(path: Path, sha256: str | None = None) -> Tokenizer:
    """Read a `tokenizer.json`, of the `tokenizers` library or of `ByteTokenizer`.

    It must have this SHA-256, if one is known.
    """
    try:
        raw = path.read_bytes()
        said = "altered or damaged (its SHA-256 is another); put back a copy of it"
        same = not sha256 or hashlib.sha256(raw).hexdigest() == sha256
        check(same, f"{path}: {said}")
        text = raw.decode()
        if json.loads(text)["model"].get("type") == "bytes":
            return ByteTokenizer()
        return SubwordTokenizer(tokenizers.Tokenizer.from_str(text), str(path))
    except OSError as error:
        raise UserError(f"--tokenizer {path}: {error.strerror}") from None
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"--tokenizer {path}: not a tokenizer.json ({error})") from None


def make_tokenizer(name: str, vocab_size: int, documents: Iterable[bytes]) -> Tokenizer:
    """The tokenizer of `--tokenizer name`; only 'bpe' needs size and documents."""
    if name in ("bytes", "bpe"):
        return ByteTokenizer() if name == "bytes" else train_bpe(documents, vocab_size)
    said = f"--tokenizer {name}: neither 'bytes' nor 'bpe' nor an existing file"
    check(Path(name).is_file(), said)
    return load_tokenizer(Path(name))


def _stream(pieces: Sequence[np.ndarray], end: int, dtype: str) -> np.ndarray:
    """Join per-document arrays, each followed by `end`."""
    ended = (part for piece in pieces for part in (piece, [end]))
    return np.concatenate([np.asarray(part, dtype) for part in ended])


def streams(
    tokenizer: Tokenizer, split: str, documents: Sequence[bytes]
) -> dict[str, np.ndarray]:
    """The token ids of a split and, of the validation text, the bytes of each token."""
    dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    made = {split: _stream(tokenizer.encode(documents), tokenizer.end_id, dtype)}
    if split == "val":  # the end of a document is a token to predict, but no byte
        made["val_bytes"] = _stream(tokenizer.byte_counts(documents), 0, "<u4")
    return made
