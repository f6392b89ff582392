"""Where documents come from: text files, or a data set of the Hugging Face hub.

A source gives its documents in a fixed order, from any place on, and has an `identity`
that changes when the documents do.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from examples.data import corpus, reading
from examples.data.packing import Document
from examples.flags import UserError


class TextFiles:
    """Documents of text files; those named val* come first and are held out."""

    def __init__(self, paths: Sequence[str], field: str):
        self._field = field
        train, val, others = corpus.find_texts(paths)
        self._val, self._train = val, train
        self.name = f"{len(train) + len(val)} text files in {' '.join(paths)}"
        if others:
            self.name += f" ({len(others)} other files not read)"
        sizes = [(path.name, path.stat().st_size) for path in [*val, *train]]
        self.identity = hashlib.sha256(repr(sizes).encode()).hexdigest()

    def documents(self, skip: int) -> Iterator[Document]:
        """All documents but the first `skip`."""
        return itertools.islice(self._all(), skip, None)

    def _all(self) -> Iterator[Document]:
        held_out: set[bytes] = set()
        for path in self._val:
            for text in reading.read_documents(path, self._field):
                held_out.add(reading.text_hash(text))
                yield "val", text
        if self._val and not held_out:
            raise corpus.no_val_text(self._val)
        for path in self._train:
            for text in reading.read_documents(path, self._field):
                if not self._val:
                    yield None, text
                    continue
                seen = reading.text_hash(text) in held_out
                yield "out" if seen else "train", text


class HubStream:
    """Records of a data set, read over the network as they are needed."""

    def __init__(self, name: str, config: str | None, split: str, field: str):
        try:
            import datasets  # only this source needs the library
        except ImportError:
            raise UserError(
                "--hf-dataset: the package 'datasets' is not installed "
                "(pip install datasets)"
            ) from None
        self._field = field
        self.name = " ".join(part for part in ("data set", name, config, split) if part)
        try:
            self._records: Any = datasets.load_dataset(
                name, config, split=split, streaming=True
            )
        except Exception as error:  # of whichever library could not reach or read it
            raise UserError(f"{self.name}: {error}") from None
        self.identity = self.name

    def documents(self, skip: int) -> Iterator[Document]:
        """All documents but the first `skip`; blank ones are left out."""
        number = skip
        try:
            for number, record in enumerate(self._records.skip(skip), start=skip + 1):
                yield self._document(f"{self.name}, record {number}", record)
        except UserError:
            raise
        except Exception as error:  # of whichever library lost the connection
            place = f"{self.name}, after record {number}"
            raise UserError(f"{place}: {error}; the same command goes on") from None

    def _document(self, place: str, record: dict[str, Any]) -> Document:
        text = record.get(self._field)
        if not isinstance(text, str):
            raise UserError(
                f"{place}: no text in --text-field {self._field} "
                f"(fields: {', '.join(record)})"
            )
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{place}: lone surrogate in the text") from None
        return (None if raw.strip() else "out"), raw
