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
_LINE_SECONDS = 10.0

# A document and its split: "train", "val", "out" (left out, but counted), or None,
# which leaves the choice to the hash of its text.
Document = tuple[str | None, bytes]


@dataclasses.dataclass(frozen=True)
class PrepareConfig(Options):
    """Which text becomes which shards."""

    data: tuple[str, ...] = option((), "text files or folders, as for pretrain")
    hf_dataset: str | None = option(
        None, "a data set of the Hugging Face hub, streamed"
    )
    hf_config: str | None = option(None, "its configuration, such as sample-10BT")
    hf_split: str = option("train", "its split")
    text_field: str = option("text", "the field of a record that holds the text")
    skip_bad: bool = option(False, "leave out lines that cannot be read; count them")
    tokenizer: str = option("bpe", "'bytes', 'bpe' or the path of a tokenizer.json")
    vocab_size: int = option(32_000, "vocabulary of --tokenizer bpe", "[300, 1000000]")
    bpe_bytes: int = option(50_000_000, "text that bpe is trained on", "[1, 1e18]")
    out: str | None = option(None, "folder of the shards")
    shard_tokens: int = option(50_000_000, "tokens of a shard, about", "[1000, ]")
    val_fraction: float = option(
        0.005, "part held out, by a hash of the text (if no file is val*)", "(0, 0.5]"
    )
    max_tokens: int = option(0, "stop at so many training tokens (0: no)", "[0, 1e18]")
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
        self._train, self._val, others = text.find_texts(config.data)
        files = [*self._val, *self._train]
        self.name = f"{len(files)} text files in {' '.join(config.data)}"
        self.name += f" ({len(others)} other files not read)" if others else ""
        sizes = [(path.name, path.stat().st_size) for path in files]
        self.identity = hashlib.sha256(repr(sizes).encode()).hexdigest()
        self._config, self._reader = config, text.Reader()

    @property
    def skipped(self) -> int:
        return self._reader.skipped

    def documents(self, skip: int = 0) -> Iterator[Document]:
        """All documents but the first `skip`."""
        return itertools.islice(self._all(), skip, None)

    def _all(self) -> Iterator[Document]:
        config, held_out = self._config, set[bytes]()
        self._reader = text.Reader(config.text_field, skip_bad=config.skip_bad)
        for document in self._reader.documents(self._val):
            held_out.add(text.text_hash(document))
            yield "val", document
        text.check_val(held_out, self._val)
        for document in self._reader.documents(self._train):
            seen = text.text_hash(document) in held_out
            yield ("out" if seen else "train") if self._val else None, document


class HubStream:
    """Records of a data set, read over the network as they are needed."""

    def __init__(self, config: PrepareConfig):
        self._config, self.skipped = config, 0
        parts = config.hf_dataset, config.hf_config
        self.name = " ".join(filter(None, ("data set", *parts, config.hf_split)))
        self.identity = self.name
        try:
            import datasets  # only this source needs the library

            split = {"split": config.hf_split, "streaming": True}
            self._records: Any = datasets.load_dataset(*parts, **split)
        except ImportError:
            said = "--hf-dataset: the package 'datasets' is not installed"
            raise UserError(f"{said} (pip install datasets)") from None
        except Exception as error:  # of whichever library could not reach or read it
            raise UserError(f"{self.name}: {error}") from None

    def documents(self, skip: int = 0) -> Iterator[Document]:
        """All documents but the first `skip`; blank ones are left out."""
        number, field = skip, self._config.text_field
        try:
            for number, record in enumerate(self._records.skip(skip), start=skip + 1):
                known = isinstance(record.get(field), str)
                said = f"no text in --text-field {field} (fields: {', '.join(record)})"
                place = f"{self.name}, record {number}"
                check(known or self._config.skip_bad, f"{place}: {said}")
                self.skipped += not known
                raw = record[field].encode("utf-8", "replace") if known else b""
                yield (None if raw.strip() else "out"), raw
        except UserError:
            raise
        except Exception as error:  # of whichever library lost the connection
            place = f"{self.name}, after record {number}"
            raise UserError(f"{place}: {error}; the same command goes on") from None


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

    def __init__(self, config: PrepareConfig, source: Source, console: Console):
        self._config, self._source, self._console = config, source, console
        self.folder = Path(config.out or "")
        self.shards: list[shards.Shard] = []
        self.documents_read = self.left_out = 0
        # Documents that are not written yet: ids, bytes per token, length of the text.
        self._waiting: dict[str, list[tuple[Any, Any, int]]] = {"train": [], "val": []}
        # What a preparation must have in common with the one that it goes on with.
        self._identity = dataclasses.asdict(config) | {"source": source.identity}
        for name in ("out", "verify", "data"):
            del self._identity[name]
        path = Path(config.tokenizer)
        content = shards.file_sha256(path) if path.is_file() else None
        self._identity["tokenizer_sha256"] = content

    def start(self) -> None:
        """Begin at the beginning of the source, or where the last one stopped."""
        folder, config = self.folder, self._config
        begun = (folder / shards.PROGRESS).exists()
        done = (folder / shards.INDEX).exists()
        check(not done, f"--out {folder}: already holds shards; choose another")
        if begun:
            self._resume()
        say = self._console.print
        say(f"{self._source.name}; tokenizer {config.tokenizer}", highlight=False)
        if begun:
            say(f"going on after {self.documents_read:,} documents", highlight=False)
        else:
            other = any(folder.glob("*.bin"))
            check(not other, f"--out {folder}: holds other .bin files; choose another")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise WriteFailed(folder, error) from None
            if config.tokenizer == "bpe":
                size = f"{config.bpe_bytes / 1e6:,.0f} MB of text"
                say(f"training the tokenizer on up to {size}", highlight=False)
            name, size = config.tokenizer, config.vocab_size
            tok.make_tokenizer(name, size, self._sample()).save(folder / tok.FILE)
            self.write(shards.PROGRESS, identity=self._identity)
        self.tokenizer = tok.load_tokenizer(folder / tok.FILE)

    def _resume(self) -> None:
        progress, written = shards.read_entries(self.folder / shards.PROGRESS)
        before, now = progress["identity"], self._identity
        other = ", ".join(key for key in now if before.get(key) != now[key])
        said = f"--out {self.folder}: an unfinished preparation with another {other}"
        check(not other, f"{said}; repeat its options or remove the folder")
        problems = shards.size_problems(self.folder, written)
        if not (self.folder / tok.FILE).is_file():
            problems.append(f"{tok.FILE} is missing")
        said = f"--out {self.folder}: {'; '.join(problems)}; remove the folder"
        check(not problems, said)
        self.shards, self.left_out = [*written], progress["left_out"]
        self.documents_read = progress["documents_read"]

    def _sample(self) -> Iterator[bytes]:
        """Training text for a tokenizer."""
        room = self._config.bpe_bytes
        for split, document in self._source.documents():
            side = split or split_by_hash(document, self._config.val_fraction)
            if room > 0 and side == "train":
                yield document
                room -= len(document)
            elif room <= 0:
                return

    def tokens(self, split: str) -> int:
        """Tokens of a split so far, those that wait included."""
        written = sum(shard.tokens for shard in self.shards if shard.split == split)
        return written + sum(len(ids) for ids, *_ in self._waiting[split])

    def pack(self) -> None:
        """Take all documents that are left, or those up to --max-tokens."""
        config, told = self._config, time.perf_counter()
        size = min(_BATCH_BYTES, config.shard_tokens)
        documents = self._source.documents(self.documents_read)
        with self._console.status("reading") as status:
            for batch in prefetch(_batches(documents, size), depth=2):
                more = self._add(batch)
                waiting = [sum(len(x) for x, *_ in w) for w in self._waiting.values()]
                if max(waiting) >= config.shard_tokens:
                    self.flush()
                line = f"{self.documents_read:,} documents, {self.tokens('train'):,} "
                line += f"training tokens in {len(self.shards)} files"
                status.update(line)
                late = time.perf_counter() - told >= _LINE_SECONDS
                if late and not self._console.is_terminal:
                    told = time.perf_counter()
                    self._console.print(line, highlight=False)
                if not more:
                    break
        self.flush()

    def _add(self, batch: list[Document]) -> bool:
        """Tokenize a batch; False when there are as many tokens as were asked for."""
        config, end = self._config, self.tokenizer.end_id
        sides = [s or split_by_hash(t, config.val_fraction) for s, t in batch]
        kept = [(s, t) for s, (_, t) in zip(sides, batch) if s != "out"]
        encoded = iter(self.tokenizer.encode([document for _, document in kept]))
        held_out = [document for side, document in kept if side == "val"]
        counts = iter(self.tokenizer.byte_counts(held_out) if held_out else ())
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
        dtype = "<u2" if self.tokenizer.vocab_size <= 2**16 else "<u4"
        for split, waiting in self._waiting.items():
            if not waiting:
                continue
            ids, counts, sizes = zip(*waiting)
            kinds = [(split, "bin", dtype, ids)]
            kinds += [("val_bytes", "bytes", "<u4", counts)] if split == "val" else []
            number = sum(shard.split == split for shard in self.shards)
            for kind, suffix, width, arrays in kinds:
                file = self.folder / f"{split}_{number:05d}.{suffix}"
                made = shards.write_shard(file, kind, width, arrays, sum(sizes))
                self.shards.append(made)
            self._waiting[split] = []
        self.write(shards.PROGRESS, identity=self._identity)

    def write(self, name: str, **more: Any) -> None:
        """Write `progress.json` or, at the end, `index.json`."""
        more["shards"] = [dataclasses.asdict(shard) for shard in self.shards]
        more |= {"documents_read": self.documents_read, "left_out": self.left_out}
        write_json(self.folder / name, more)


def prepare(config: PrepareConfig, console: Console) -> shards.Folder:
    """Write the shards of `config`, or those that are still missing."""
    source: Source = HubStream(config) if config.hf_dataset else TextFiles(config)
    packer = Packer(config, source, console)
    packer.start()
    packer.pack()
    folder, tokenizer = packer.folder, packer.tokenizer
    empty = packer.documents_read == packer.left_out
    check(not empty, f"{source.name}: no text in it; remove {folder}")
    for split in ("train", "val"):
        remedy = "change --val-fraction or name a file val*, and remove the folder"
        said = f"{folder}: no document for {split}; {remedy}"
        check(packer.tokens(split) > 0, said)
    if source.skipped:
        console.print(f"lines that could not be read: {source.skipped:,}")
    about = {
        "name": config.tokenizer if config.tokenizer != "bpe" else "bpe (own)",
        "sha256": shards.file_sha256(folder / tok.FILE),
        "vocab_size": tokenizer.vocab_size,
    }
    named = {"format": shards.FORMAT, "source": source.name, "tokenizer": about}
    packer.write(shards.INDEX, **named, skipped=source.skipped)
    (folder / shards.PROGRESS).unlink()
    return shards.open_folder(folder)


def describe(folder: shards.Folder) -> Iterator[str]:
    """A line for each split, and one for the tokenizer."""
    for split in ("train", "val"):
        counts = folder.counts(split)
        parts = ", ".join(f"{number:,} {name}" for name, number in counts.items())
        ratio = counts["bytes"] / counts["tokens"]
        count = len(folder.split(split))
        yield f"{split}: {count} shards, {parts} ({ratio:.3f} bytes per token)"
    tokenizer = folder.tokenizer()
    yield f"vocabulary: {tokenizer.vocab_size:,} ({tokenizer.name})"
    if folder.index["left_out"]:
        yield f"left out (blank, or also held out): {folder.index['left_out']:,}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare or verify; returns the exit code."""

    def run() -> None:
        console, about = Console(soft_wrap=True), "Turn text into token shards."
        config: PrepareConfig = options.parse_one(PrepareConfig, argv, about)
        try:
            if config.verify is not None:
                folder = shards.open_folder(Path(config.verify))
                folder.verify()
                console.print(
                    f"all {len(folder.shards)} files are as they were written"
                )
            else:
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
