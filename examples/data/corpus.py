"""The documents of a run that reads text, and which of them are held out.

Without `--data` they are the Python sources of the standard library and of installed
packages: real text that is on every machine that can run this trainer. The standard
library comes first: a few megabytes of it are the same wherever the same Python is.
"""

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from examples.config import DataConfig
from examples.data import text
from examples.options import check

# Tests hold deliberately broken files. The largest files are mostly generated tables,
# one of which could make up a good part of the validation text.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "encodings"}
_SKIPPED_FOLDERS |= {"test", "tests", "idle_test"}
_SIZES = range(1_000, 65_000)


@dataclass(frozen=True)
class Corpus:
    """Documents as UTF-8 bytes; no text is in both parts."""

    train: list[bytes]
    val: list[bytes]
    source: str
    notes: list[str] = field(default_factory=list)


def _unique(documents: Iterable[bytes], seen: set[bytes]) -> list[bytes]:
    """Each text once; those of `seen`, which grows, not at all."""
    taken = []
    for document in documents:
        if (digest := text.text_hash(document)) not in seen:
            seen.add(digest)
            taken.append(document)
    return taken


def split(
    documents: Sequence[bytes], fraction: float
) -> tuple[list[bytes], list[bytes], str]:
    """Hold out the last documents: `fraction` of the bytes, or up to half as much more.

    Where whole documents would be more than that, the first of them is cut in two at a
    line end. The text returned says how it was done.
    """
    wanted, count, held_out = fraction * sum(map(len, documents)), 0, 0
    while held_out < wanted:
        count += 1
        held_out += len(documents[-count])
    train, val = list(documents[:-count]), list(documents[-count:])
    if train and held_out <= 1.5 * wanted:
        return train, val, f"the last {count:,} documents"
    excess = int(held_out - wanted)
    place = val[0].rfind(b"\n", 0, excess) + 1 or len(text.cut(val[0], excess))
    train, val[0] = [*train, val[0][:place]], val[0][place:]
    if len(documents) == 1:
        return train, val, "the last part of the only document"
    return train, val, f"the last {count:,} documents, the first of them in part"


def source_files() -> Iterator[Path]:
    """All sources; within each root the order mixes folders by a hash of the names."""
    keys = ("stdlib", "platstdlib", "purelib", "platlib")
    for root in dict.fromkeys(Path(sysconfig.get_path(key)) for key in keys):
        found: dict[str, Path] = {}
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [n for n in subfolders if n not in _SKIPPED_FOLDERS]
            paths = [Path(folder, name) for name in names if name.endswith(".py")]
            found |= {path.relative_to(root).as_posix(): path for path in paths}
        for name in sorted(found, key=lambda n: hashlib.sha256(n.encode()).digest()):
            # _sysconfigdata describes the machine that Python was built on.
            if not found[name].name.startswith("_sysconfigdata"):
                yield found[name]


def _sources(limit: int) -> Iterator[bytes]:
    """Sources that are UTF-8 and neither tiny nor huge, up to `limit` bytes."""
    read = 0
    for path in source_files():
        try:
            source = path.read_bytes().removeprefix(codecs.BOM_UTF8)
            source.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if len(source) in _SIZES and not (limit and read >= limit):
            yield text.cut(source, limit - read) if limit else source
            read += len(source)


def load(config: DataConfig) -> Corpus:
    """Read, limit and split the text that `config` names; each document once."""
    limit, seen = config.max_bytes, set[bytes]()
    if not config.data:
        documents = _unique(_sources(limit), seen)
        check(len(documents) > 1, "no installed Python sources found; use --data PATH")
        train, val, how = split(documents, config.val_fraction)
        source = f"{len(documents):,} installed Python sources"
        return Corpus(train, val, source, [f"held out: {how}"])
    train_files, val_files, others = text.find_texts(config.data)
    named, reader = f"--data {' '.join(config.data)}", text.Reader(limit=limit)
    notes = [f"other files not read: {text.some(others)}"] if others else []
    if val_files:
        # Validation text is read first, so that a document found in both parts is
        # dropped from training. The limit is at least one byte, because a limit of 0
        # means that there is no limit.
        most = limit and max(1, int(limit * config.val_fraction))
        val_reader = text.Reader(limit=most)
        val = _unique(val_reader.documents(val_files), seen)
        text.check_val(val, val_files)
        train = _unique(reader.documents(train_files), seen)
        beside = f"beside that of the files named val* ({text.some(val_files)})"
        check(bool(train), f"{named}: no training text in it, {beside}")
        how = f"files named val* ({len(val_files)})"
        notes += [f"validation text cut at {most:,} bytes"] if val_reader.is_cut else []
    else:
        documents = _unique(reader.documents(train_files), seen)
        check(bool(documents), f"{named}: no text in it")
        train, val, how = split(documents, config.val_fraction)
    notes += [f"text cut at --max-bytes {limit:,}"] if reader.is_cut else []
    source = f"{len(train_files) + len(val_files)} text files in {named[7:]}"
    return Corpus(train, val, source, [*notes, f"held out: {how}"])
