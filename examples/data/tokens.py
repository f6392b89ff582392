"""Turn documents into one stream of token ids, each document ended by a separator."""

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
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
    """One token per byte, and one more for the end of a document."""

    name = "bytes"
    vocab_size = 257
    end_id = 256

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """The token ids of each document, without a separator."""
        return [np.frombuffer(text, np.uint8) for text in documents]

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

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        for first in range(0, len(documents), _AT_ONCE):
            part = documents[first : first + _AT_ONCE]
            texts = [document.decode("utf-8") for document in part]
            made = self._tokenizer.encode_batch(texts, add_special_tokens=False)
            found += (np.asarray(item.ids, np.int32) for item in made)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        known = [i for i in map(int, ids) if i != self.end_id]
        return self._tokenizer.decode(known, skip_special_tokens=False)

    def content(self) -> bytes:
        return self._tokenizer.to_str(pretty=True).encode()


Tokenizer = ByteTokenizer | SubwordTokenizer


def save(tokenizer: Tokenizer, path: Path) -> str:
    """Write the tokenizer's file; returns its SHA-256."""
    # The library's own `save` raises bare Exception where the file cannot be written.
    write_atomically(path, content := tokenizer.content())
    return hashlib.sha256(content).hexdigest()


def train_bpe(documents: Iterable[bytes], vocab_size: int) -> SubwordTokenizer:
    """Train a byte-level BPE on the documents; a terminal shows how far it is."""
    bpe = tokenizers.ByteLevelBPETokenizer()
    texts = (document.decode("utf-8") for document in documents)
    more: Any = {"special_tokens": [END], "show_progress": sys.stderr.isatty()}
    bpe.train_from_iterator(texts, vocab_size, min_frequency=0, **more)
    trained = tokenizers.Tokenizer.from_str(bpe.to_str())
    trained.post_processor = None  # it would change offsets, which nobody reads
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


def stream(tokenizer: Tokenizer, documents: Sequence[bytes]) -> np.ndarray:
    """The token ids of documents, each followed by the tokenizer's separator."""
    dtype, end = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4", [tokenizer.end_id]
    ended = (part for ids in tokenizer.encode(documents) for part in (ids, end))
    return np.concatenate([np.asarray(part, dtype) for part in ended])
