"""Choose the documents of a run and split them into training and validation text."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from examples.data import installed, reading
from examples.data.config import DataConfig
from examples.flags import UserError


@dataclass(frozen=True)
class Corpus:
    """Documents as UTF-8 bytes; no document is in both parts."""

    train: list[bytes]
    val: list[bytes]
    source: str
    notes: list[str] = field(default_factory=list)

    @property
    def train_bytes(self) -> int:
        return sum(map(len, self.train))

    @property
    def val_bytes(self) -> int:
        return sum(map(len, self.val))

    def digest(self) -> str:
        """Names the exact text: documents, their order and the split."""
        sha = hashlib.sha256()
        for part in (self.train, self.val):
            for document in part:
                sha.update(hashlib.sha256(document).digest())
            sha.update(b"end of part")
        return sha.hexdigest()[:16]


class _Collector:
    """Takes documents up to a limit of bytes, each text once, and keeps count."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self.repeated = 0

    def take(self, documents: Iterable[bytes], limit: int) -> tuple[list[bytes], bool]:
        """The documents, and whether the limit cut them; a limit of 0 is none."""
        taken: list[bytes] = []
        room = limit
        for document in documents:
            if limit and room <= 0:
                return taken, True
            digest = reading.text_hash(document)
            if digest in self.seen:
                self.repeated += 1
                continue
            self.seen.add(digest)
            if limit and len(document) > room:
                document = reading.cut(document, room)
                if document:
                    taken.append(document)
                return taken, True
            taken.append(document)
            room -= len(document)
        return taken, False

    def notes(self) -> list[str]:
        return [f"{self.repeated} repeated documents left out"] if self.repeated else []


def split(
    documents: Sequence[bytes], fraction: float
) -> tuple[list[bytes], list[bytes], str]:
    """Hold out the last documents, at least `fraction` of the bytes.

    The text returned says how it was done. A single document is cut in two at
    a line end: its last part is then the validation text.
    """
    wanted = fraction * sum(map(len, documents))
    if len(documents) == 1:
        (text,) = documents
        cut = text.rfind(b"\n", 0, len(text) - int(wanted)) + 1
        cut = cut or len(reading.cut(text, len(text) - int(wanted)))
        return [text[:cut]], [text[cut:]], "the last part of the only document"
    count, held_out = 0, 0
    while held_out < wanted and count < len(documents) - 1:
        count += 1
        held_out += len(documents[-count])
    train, val = list(documents[:-count]), list(documents[-count:])
    return train, val, f"the last {count:,} documents"


def _find_files(paths: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Text files below the paths, sorted, and the names of other files seen."""
    files: list[Path] = []
    others: list[str] = []
    for name in paths:
        path = Path(name)
        if not path.exists():
            raise UserError(f"--data {name}: no such file or folder")
        if path.is_dir():
            inside = sorted(entry for entry in path.rglob("*") if entry.is_file())
            texts = [entry for entry in inside if reading.is_text_file(entry)]
            others += [entry.name for entry in inside if entry not in set(texts)]
            if not texts:
                kinds = " ".join(reading.SUFFIXES)
                raise UserError(f"--data {name}: no text file in it ({kinds})")
            files += texts
        elif reading.is_text_file(path):
            files.append(path)
        else:
            kinds = " ".join(reading.SUFFIXES)
            raise UserError(f"--data {name}: not a text file of a known kind ({kinds})")
    return list(dict.fromkeys(files)), others


def find_texts(paths: Sequence[str]) -> tuple[list[Path], list[Path], list[str]]:
    """Training files, files named val*, and the names of other files seen."""
    files, others = _find_files(paths)
    val = [path for path in files if path.name.startswith("val")]
    if len(val) == len(files):  # then the names are no sign of a split
        val = []
    return [path for path in files if path not in set(val)], val, others


def _some(names: Sequence[str], shown: int = 5) -> str:
    rest = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest


def no_val_text(files: Sequence[Path]) -> UserError:
    """Of files named val* that hold nothing."""
    names = _some([str(path) for path in files])
    return UserError(
        f"{names}: no text in it; files named val* are the validation text: fill it, "
        "or remove it to hold out a part of the other text"
    )


def _chain(files: Sequence[Path], most: int) -> Iterator[bytes]:
    for path in files:
        yield from reading.read_documents(path, most=most)


def _from_paths(config: DataConfig) -> Corpus:
    train_files, val_files, others = find_texts(config.data)
    collector = _Collector()
    notes = [f"other files not read: {_some(others)}"] if others else []
    source = (
        f"{len(train_files) + len(val_files)} text files in {' '.join(config.data)}"
    )
    if val_files:
        # Validation text first: a document that is in both parts leaves training.
        # At least one byte: a limit of 0 would be none.
        limit = int(config.max_bytes * config.val_fraction)
        limit = max(limit, min(1, config.max_bytes))
        val, val_cut = collector.take(_chain(val_files, config.max_bytes), limit)
        if not val:
            raise no_val_text(val_files)
        train, cut = collector.take(
            _chain(train_files, config.max_bytes), config.max_bytes
        )
        if not train:
            raise UserError(
                f"--data {' '.join(config.data)}: no training text in it, beside "
                f"that of the files named val* ({_some([str(f) for f in val_files])})"
            )
        how = f"files named val* ({len(val_files)})"
        if val_cut:
            notes.append(f"validation text cut at {limit:,} bytes")
    else:
        documents, cut = collector.take(
            _chain(train_files, config.max_bytes), config.max_bytes
        )
        if not documents:
            raise UserError(f"--data {' '.join(config.data)}: no text in it")
        train, val, how = split(documents, config.val_fraction)
    if cut:
        notes.append(f"text cut at --max-bytes {config.max_bytes:,}")
    notes += [f"held out: {how}", *collector.notes()]
    return Corpus(train, val, source, notes)


def _from_installed(config: DataConfig) -> Corpus:
    unfit = 0

    def sources() -> Iterator[bytes]:
        nonlocal unfit
        for path in installed.source_files():
            text = installed.read_source(path)
            if text is None:
                unfit += 1
            else:
                yield text

    collector = _Collector()
    documents, _ = collector.take(sources(), config.max_bytes)
    if len(documents) < 2:
        raise UserError("no installed Python sources found here; use --data PATH")
    train, val, how = split(documents, config.val_fraction)
    notes = [
        f"held out: {how}",
        f"{unfit} files passed over (not UTF-8, under 1 kB or over 65 kB)",
        *collector.notes(),
    ]
    return Corpus(train, val, f"{len(documents):,} installed Python sources", notes)


def load(config: DataConfig) -> Corpus:
    """Read, deduplicate, limit and split the text that `config` names."""
    return _from_paths(config) if config.data else _from_installed(config)
