"""Turn text into token shards: `python -m examples.prepare --data TEXT --out FOLDER`.

Reads files or streams a data set of the Hugging Face hub, tokenizes on all cores, and
holds no more than one shard in memory. A preparation that was stopped goes on when the
same command is given again; `--verify FOLDER` compares the checksums of a finished one.
"""

import dataclasses
import hashlib
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from examples import options
from examples.data import shards, text
from examples.data import tokens as tok
from examples.data.loader import prefetch
from examples.files import WriteFailed, write_json
from examples.options import Options, UserError, check, option

# Documents are tokenized this many bytes at a time: enough to keep all cores busy.
_BATCH_BYTES = 4_000_000

# A document and its split: "train", "val", "out" (left out, but counted), or None,
# which leaves the choice to the hash of its text.
Document = tuple[str | None, bytes]


@dataclasses.dataclass(frozen=True)
class PrepareConfig(Options):
    """Which text becomes which shards."""

    data: tuple[str, ...] = option(
        (), "text files or folders (.txt, .jsonl, also with .xz or .gz)"
    )
    hf_dataset: str | None = option(
        None, "a data set of the Hugging Face hub, streamed, or a local folder of one"
    )
    hf_config: str | None = option(None, "its configuration, such as sample-10BT")
    hf_split: str = option("train", "its split")
    text_field: str = option("text", "the field of a record that holds the text")
    skip_bad: bool = option(False, "leave out lines that cannot be read; count them")
    tokenizer: str = option(
        "bpe", "'bytes', 'bpe' (trained on the text) or the path of a tokenizer.json"
    )
    vocab_size: int = option(32_000, "vocabulary of --tokenizer bpe", "[300, 1000000]")
    bpe_bytes: int = option(50_000_000, "text that bpe is trained on", "[1, 1e18]")
    out: str | None = option(None, "folder of the shards")
    shard_tokens: int = option(50_000_000, "tokens of a shard, about", "[1000, ]")
    val_fraction: float = option(
        0.005,
        "part of the documents held out, chosen by a hash of their text, where "
        "no file is named val*",
        "(0, 0.5]",
    )
    max_tokens: int = option(
        0, "stop after so many training tokens, at a document (0: never)", "[0, 1e18]"
    )
    verify: str | None = option(None, "only compare the checksums of this folder")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verify is None:
            check(bool(self.out), "--out FOLDER is needed")
            one = bool(self.data) != bool(self.hf_dataset)
            check(one, "either --data or --hf-dataset is needed")


class TextFiles:
    """Documents of text files, in a fixed order; those named val* are held out.

    Every source has an `identity` that changes when its documents do.
    """

    def __init__(self, config: PrepareConfig):
        self._config = config
        self._train, self._val, others = text.find_texts(config.data)
        files = [*self._val, *self._train]
        self.name = f"{len(files)} text files in {' '.join(config.data)}"
        self.name += f" ({len(others)} other files not read)" if others else ""
        sizes = [(path.name, path.stat().st_size) for path in files]
        self.identity = hashlib.sha256(repr(sizes).encode()).hexdigest()
        self.skipped = 0

    def documents(self, skip: int = 0) -> Iterator[Document]:
        """All documents but the first `skip`."""
        return itertools.islice(self._all(), skip, None)

    def _all(self) -> Iterator[Document]:
        config, held_out = self._config, set[bytes]()
        reader = text.Reader(config.text_field, skip_bad=config.skip_bad)
        for document in reader.documents(self._val):
            held_out.add(text.text_hash(document))
            yield "val", document
        if self._val and not held_out:
            raise text.no_val_text(self._val)
        for document in reader.documents(self._train):
            self.skipped = reader.skipped
            seen = text.text_hash(document) in held_out
            yield ("out" if seen else "train") if self._val else None, document
        self.skipped = reader.skipped


class HubStream:
    """Records of a data set, read over the network as they are needed."""

    def __init__(self, config: PrepareConfig):
        try:
            import datasets  # only this source needs the library
        except ImportError:
            raise UserError(
                "--hf-dataset: the package 'datasets' is not installed "
                "(pip install datasets)"
            ) from None
        self._config, self.skipped = config, 0
        parts = config.hf_dataset, config.hf_config, config.hf_split
        self.name = self.identity = " ".join(["data set", *filter(None, parts)])
        try:
            self._records: Any = datasets.load_dataset(
                *parts[:2], split=config.hf_split, streaming=True
            )
        except Exception as error:  # of whichever library could not reach or read it
            raise UserError(f"{self.name}: {error}") from None

    def documents(self, skip: int = 0) -> Iterator[Document]:
        """All documents but the first `skip`; blank ones are left out."""
        number = skip
        try:
            for number, record in enumerate(self._records.skip(skip), start=skip + 1):
                raw = self._raw(f"{self.name}, record {number}", record)
                yield (None if raw.strip() else "out"), raw
        except UserError:
            raise
        except Exception as error:  # of whichever library lost the connection
            place = f"{self.name}, after record {number}"
            raise UserError(f"{place}: {error}; the same command goes on") from None

    def _raw(self, place: str, record: dict[str, Any]) -> bytes:
        field = self._config.text_field
        try:
            return record[field].encode("utf-8")
        except (KeyError, AttributeError, UnicodeEncodeError) as error:
            if not self._config.skip_bad:
                said = f"no text in --text-field {field} (fields: {', '.join(record)})"
                if isinstance(error, UnicodeEncodeError):
                    said = "lone surrogate in the text"
                raise UserError(f"{place}: {said}") from None
            self.skipped += 1
            return b""


Source = TextFiles | HubStream


def split_by_hash(document: bytes, val_fraction: float) -> str:
    """A rule without memory: equal texts are on the same side, wherever they occur."""
    head = text.text_hash(document)[:8]
    return "val" if int.from_bytes(head) < val_fraction * 2**64 else "train"


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


class Packer:
    """Fills one training and one validation shard at a time and writes them together.

    Only then is the place in the source recorded, in `progress.json`. Whatever a stop
    leaves behind beyond that is written anew, to the same bytes.
    """

    def __init__(
        self, folder: Path, tokenizer: tok.Tokenizer, config: PrepareConfig, about: dict
    ):
        self.folder, self.tokenizer = folder, tokenizer
        self._config, self._about = config, about
        self.shards: list[shards.Shard] = []
        self.documents_read = self.left_out = 0
        self._dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
        # Documents that are not written yet: ids, bytes per token, length of the text.
        self._waiting: dict[str, list[tuple[Any, Any, int]]] = {"train": [], "val": []}

    def resume(self, progress: dict[str, Any], written: Sequence[shards.Shard]) -> None:
        """Go on where `progress.json` ends."""
        self.shards = [*written]
        self.documents_read = progress["documents_read"]
        self.left_out = progress["left_out"]
        problems = shards.size_problems(self.folder, self.shards)
        said = f"{'; '.join(problems)}; remove the folder"
        check(not problems, f"--out {self.folder}: {said}")

    def tokens(self, split: str) -> int:
        """Tokens of a split so far, those that wait included."""
        written = sum(shard.tokens for shard in self.shards if shard.split == split)
        return written + sum(len(ids) for ids, *_ in self._waiting[split])

    def pack(self, documents: Iterator[Document], tell: Any) -> None:
        """Take all documents, or those up to --max-tokens."""
        config = self._config
        size = min(_BATCH_BYTES, config.shard_tokens)
        for batch in prefetch(_batches(documents, size), depth=2):
            more = self._add(batch)
            waiting = [sum(len(ids) for ids, *_ in w) for w in self._waiting.values()]
            if max(waiting) >= config.shard_tokens:
                self.flush()
            tell(self, sum(len(document) for _, document in batch))
            if not more:
                break
        self.flush()

    def _add(self, batch: list[Document]) -> bool:
        """Tokenize a batch; False when there are as many tokens as were asked for."""
        config, end, none = self._config, self.tokenizer.end_id, iter(())
        sides = [s or split_by_hash(t, config.val_fraction) for s, t in batch]
        kept = [(s, t) for s, (_, t) in zip(sides, batch) if s != "out"]
        encoded = iter(self.tokenizer.encode([document for _, document in kept]))
        held_out = [document for side, document in kept if side == "val"]
        counts = iter(self.tokenizer.byte_counts(held_out)) if held_out else none
        room = (config.max_tokens or np.inf) - self.tokens("train")
        for side, (_, document) in zip(sides, batch):
            if room <= 0:
                return False
            self.documents_read += 1
            if side == "out":
                self.left_out += 1
                continue
            ids = np.append(next(encoded), end)
            # The end of a document stands for no byte.
            shares = np.append(next(counts), 0) if side == "val" else None
            self._waiting[side].append((ids, shares, len(document)))
            room -= len(ids) if side == "train" else 0
        return room > 0

    def flush(self) -> None:
        """Write what waits as shards, then the place in the source."""
        for split, waiting in self._waiting.items():
            if not waiting:
                continue
            ids, counts, sizes = zip(*waiting)
            kinds = [(split, ".bin", self._dtype, ids)]
            kinds += [("val_bytes", ".bytes", "<u4", counts)] if split == "val" else []
            number = sum(shard.split == split for shard in self.shards)
            for kind, suffix, dtype, arrays in kinds:
                name, size = f"{split}_{number:05d}{suffix}", sum(sizes)
                self.shards.append(
                    shards.write_shard(self.folder, name, kind, dtype, arrays, size)
                )
            self._waiting[split] = []
        self.write(shards.PROGRESS, identity=self._about)

    def write(self, name: str, **more: Any) -> None:
        """Write `progress.json` or, at the end, `index.json`."""
        content = {
            "documents_read": self.documents_read,
            "left_out": self.left_out,
            "shards": [dataclasses.asdict(shard) for shard in self.shards],
        }
        write_json(self.folder / name, content | more)


def _tokenizer(config: PrepareConfig, source: Source) -> tok.Tokenizer:
    def sample() -> Iterator[bytes]:
        room = config.bpe_bytes
        for split, document in source.documents():
            side = split or split_by_hash(document, config.val_fraction)
            if side == "train" and room > 0:
                yield document
                room -= len(document)
            elif room <= 0:
                return

    return tok.make_tokenizer(config.tokenizer, config.vocab_size, sample())


def _read_progress(folder: Path, identity: dict[str, Any]) -> tuple[dict, tuple]:
    """What an unfinished preparation has done; it must be the same preparation."""
    file = folder / shards.PROGRESS
    try:
        kinds = {"identity": dict, "documents_read": int, "left_out": int}
        progress, written = shards.read_entries(file, kinds)
    except (ValueError, RecursionError) as error:
        said = f"not valid ({error}); remove the folder and begin again"
        raise UserError(f"{file}: {said}") from None
    before = progress["identity"]
    other = [key for key, value in identity.items() if before.get(key) != value]
    said = f"an unfinished preparation with another {', '.join(other)}"
    remedy = "repeat its options or remove the folder"
    check(not other, f"--out {folder}: {said}; {remedy}")
    check((folder / tok.FILE).is_file(), f"{folder / tok.FILE}: missing; {remedy}")
    return progress, written


def _start(config: PrepareConfig, source: Source, console: Console) -> Packer:
    """A packer at the beginning of the source, or where the last one stopped."""
    folder, path = Path(config.out or ""), Path(config.tokenizer)
    # What a preparation must have in common with the one that it goes on with.
    identity = dataclasses.asdict(config)
    for name in ("out", "verify", "data"):
        del identity[name]
    identity["source"] = source.identity
    identity["tokenizer_sha256"] = shards.file_sha256(path) if path.is_file() else None
    done = (folder / shards.INDEX).exists()
    check(not done, f"--out {folder}: already holds shards; choose another")
    begun = (folder / shards.PROGRESS).exists()
    progress, written = _read_progress(folder, identity) if begun else ({}, ())
    console.print(f"{source.name}; tokenizer {config.tokenizer}", highlight=False)
    if not begun:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteFailed(folder, error) from None
        other = any(folder.glob("*.bin"))
        check(not other, f"--out {folder}: holds other .bin files; choose another")
        if config.tokenizer == "bpe":
            size = f"{config.bpe_bytes / 1e6:,.0f} MB of text"
            console.print(f"training the tokenizer on up to {size}", highlight=False)
        _tokenizer(config, source).save(folder / tok.FILE)
    packer = Packer(folder, tok.load_tokenizer(folder / tok.FILE), config, identity)
    if begun:
        packer.resume(progress, written)
        done = f"going on after {packer.documents_read:,} documents"
        console.print(done, highlight=False)
    else:
        packer.write(shards.PROGRESS, identity=identity)
    return packer


class _Progress:
    """A status line on a terminal, elsewhere a line now and then."""

    def __init__(self, console: Console, every: float = 10.0):
        self._console, self._every = console, every
        self._begin = self._last = time.perf_counter()
        self._bytes = 0
        self.status = console.status("reading")
        if console.is_terminal:
            self.status.start()

    def __call__(self, packer: Packer, size: int) -> None:
        now, tokens = time.perf_counter(), packer.tokens("train") + packer.tokens("val")
        self._bytes += size
        speed = self._bytes / (now - self._begin) / 1e6
        line = f"{packer.documents_read:,} documents, {tokens:,} tokens in "
        line += f"{len(packer.shards)} files; {speed:.1f} MB/s"
        if self._console.is_terminal:
            self.status.update(line)
        elif now - self._last >= self._every:
            self._last = now
            self._console.print(line, highlight=False)


def prepare(config: PrepareConfig, console: Console) -> shards.Folder:
    """Write the shards of `config`, or those that are still missing."""
    source: Source = HubStream(config) if config.hf_dataset else TextFiles(config)
    packer = _start(config, source, console)
    progress = _Progress(console)
    try:
        packer.pack(source.documents(packer.documents_read), progress)
    finally:
        progress.status.stop()
    folder = packer.folder
    empty = packer.documents_read == packer.left_out
    check(not empty, f"{source.name}: no text in it; remove {folder}")
    for split in ("train", "val"):
        remedy = "change --val-fraction or name a file val*, and remove the folder"
        none = f"{folder}: no document for {split}; {remedy}"
        check(packer.tokens(split) > 0, none)
    if source.skipped:
        console.print(f"lines that could not be read: {source.skipped:,}")
    about = {
        "name": config.tokenizer if config.tokenizer != "bpe" else "bpe (own)",
        "sha256": shards.file_sha256(folder / tok.FILE),
        "vocab_size": packer.tokenizer.vocab_size,
    }
    named = {"format": shards.FORMAT, "source": source.name, "tokenizer": about}
    packer.write(shards.INDEX, **named, skipped=source.skipped)
    (folder / shards.PROGRESS).unlink()
    return shards.open_folder(folder)


def describe(folder: shards.Folder) -> Iterator[str]:
    """A line for each split, and one for the tokenizer."""
    for split in ("train", "val"):
        chosen = folder.split(split)
        documents, size, tokens = (
            sum(getattr(shard, name) for shard in chosen)
            for name in ("documents", "bytes", "tokens")
        )
        yield (
            f"{split}: {len(chosen)} shards, {documents:,} documents, {size:,} bytes, "
            f"{tokens:,} tokens ({size / tokens:.3f} bytes per token)"
        )
    tokenizer = folder.tokenizer()
    yield f"vocabulary: {tokenizer.vocab_size:,} ({tokenizer.name})"
    if folder.index["left_out"]:
        yield f"left out (blank, or also held out): {folder.index['left_out']:,}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare or verify; returns the exit code."""

    def run() -> None:
        console = Console(soft_wrap=True)
        about = "Turn text into token shards."
        config: PrepareConfig = options.parse_one(PrepareConfig, argv, about)
        if config.verify is not None:
            folder = shards.open_folder(Path(config.verify))
            folder.verify()
            console.print(f"all {len(folder.shards)} files are as they were written")
        else:
            try:
                folder = prepare(config, console)
            except KeyboardInterrupt:
                said = "interrupted; the same command goes on"
                raise options.Interrupted(2, said) from None
            except OSError as error:  # of a folder that may not be read
                place = f"{error.filename}: " if error.filename else ""
                raise UserError(f"{place}{error.strerror or error}") from None
        for line in describe(folder):
            console.print(line, highlight=False)

    return options.run_command("prepare", run)


if __name__ == "__main__":
    sys.exit(main())
