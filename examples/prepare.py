"""Turn text into token shards: `python -m examples.prepare --data TEXT --out FOLDER`.

Reads files or streams a data set of the Hugging Face hub, tokenizes on all cores, and
holds no more than one shard in memory. A preparation that was stopped goes on when the
same command is given again; `--verify FOLDER` compares the checksums of a finished one.
"""

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from examples import flags
from examples.data import shards
from examples.data import tokens as tok
from examples.data.packing import Packer, read_progress, split_by_hash
from examples.data.sources import HubStream, TextFiles
from examples.flags import UserError, check, check_range, failed, option


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
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
    tokenizer: str = option(
        "bpe", "'bytes', 'bpe' (trained on the text) or the path of a tokenizer.json"
    )
    vocab_size: int = option(32_000, "vocabulary of --tokenizer bpe")
    bpe_bytes: int = option(50_000_000, "text that --tokenizer bpe is trained on")
    out: str | None = option(None, "folder of the shards")
    shard_tokens: int = option(50_000_000, "tokens of a shard, about")
    val_fraction: float = option(
        0.005,
        "part of the documents held out, chosen by a hash of their text, where "
        "no file is named val*",
    )
    max_tokens: int = option(0, "stop after about this many training tokens (0: never)")
    verify: str | None = option(None, "only compare the checksums of this folder")

    def __post_init__(self) -> None:
        check_range(self, "vocab_size", 300, 1_000_000)
        check_range(self, "bpe_bytes", 1)
        check_range(self, "shard_tokens", 1_000, 2**31)
        check_range(self, "val_fraction", 0, 0.5, open_low=True)
        check_range(self, "max_tokens", 0)
        if self.verify is None:
            check(bool(self.out), "--out FOLDER is needed")
            one = bool(self.data) != bool(self.hf_dataset)
            check(one, "either --data or --hf-dataset is needed")


Source = TextFiles | HubStream


class _Progress:
    """A status line on a terminal, elsewhere a line now and then."""

    def __init__(self, console: Console, every: float = 10.0):
        self._console, self._every = console, every
        self._begin = self._last = time.perf_counter()
        self._bytes = 0
        self._status = console.status("reading") if console.is_terminal else None

    def __call__(self, packer: Packer, size: int) -> None:
        now, tokens = time.perf_counter(), packer.tokens("train") + packer.tokens("val")
        self._bytes += size
        speed = self._bytes / (now - self._begin) / 1e6
        line = (
            f"{packer.documents_read:,} documents, {tokens:,} tokens in "
            f"{len(packer.shards)} files; {speed:.1f} MB/s"
        )
        if self._status is not None:
            self._status.start()
            self._status.update(line)
        elif now - self._last >= self._every:
            self._last = now
            self._console.print(line, highlight=False)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()


def _tokenizer(config: PrepareConfig, source: Source) -> tok.Tokenizer:
    def sample() -> Iterator[bytes]:
        room = config.bpe_bytes
        for split, text in source.documents(0):
            if (split or split_by_hash(text, config.val_fraction)) != "train":
                continue
            yield text
            room -= len(text)
            if room <= 0:
                return

    return tok.make_tokenizer(config.tokenizer, config.vocab_size, sample())


def _identity(config: PrepareConfig, source: Source) -> dict[str, Any]:
    """What a preparation must have in common with the one that it goes on with."""
    options = dataclasses.asdict(config)
    del options["out"], options["verify"], options["data"]
    path = Path(config.tokenizer)
    content = shards.file_sha256(path) if path.is_file() else None
    return {**options, "source": source.identity, "tokenizer_sha256": content}


def _start(config: PrepareConfig, source: Source) -> Packer:
    """A packer at the beginning of the source, or where the last one stopped."""
    folder, identity = Path(config.out or ""), _identity(config, source)
    file = folder / shards.PROGRESS
    if (folder / shards.INDEX).exists():
        raise UserError(f"--out {folder}: already holds shards; choose another")
    progress = read_progress(file, identity) if file.exists() else None
    if progress is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {folder}: {error.strerror}") from None
        if any(folder.glob("*.bin")):
            raise UserError(f"--out {folder}: holds other .bin files; choose another")
        _tokenizer(config, source).save(folder / tok.FILE)
    tokenizer = tok.load_tokenizer(folder / tok.FILE)
    sizes = (config.shard_tokens, config.val_fraction)
    packer = Packer(folder, tokenizer, *sizes, identity=identity)
    if progress is None:
        shards.write_json(file, packer.progress())
    else:
        packer.resume(progress)
    return packer


def prepare(config: PrepareConfig, console: Console) -> shards.Folder:
    """Write the shards of `config`, or those that are still missing."""
    if config.hf_dataset:
        names = (config.hf_dataset, config.hf_config, config.hf_split)
        source: Source = HubStream(*names, config.text_field)
    else:
        source = TextFiles(config.data, config.text_field)
    packer = _start(config, source)
    skip = packer.documents_read
    console.print(f"{source.name}; tokenizer {config.tokenizer}", highlight=False)
    if skip:
        console.print(f"going on after {skip:,} documents", highlight=False)
    progress = _Progress(console)
    try:
        packer.pack(source.documents(skip), config.max_tokens, progress)
    finally:
        progress.close()
    folder = packer.folder
    if packer.documents_read == packer.left_out:
        raise UserError(f"{source.name}: no text in it; remove {folder}")
    for split in ("train", "val"):
        if not packer.tokens(split):
            raise UserError(
                f"{folder}: no document for {split}; change --val-fraction or name a "
                "file val*, and remove the folder"
            )
    about = {
        "name": config.tokenizer if config.tokenizer != "bpe" else "bpe (own)",
        "sha256": shards.file_sha256(folder / tok.FILE),
        "vocab_size": packer.tokenizer.vocab_size,
        "end_id": packer.tokenizer.end_id,
    }
    index = shards.make_index(
        packer.shards, source=source.name, left_out=packer.left_out, tokenizer=about
    )
    shards.write_json(folder / shards.INDEX, index)
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
    """Prepare or verify; returns the exit code (2: the user can fix it)."""
    console = Console(soft_wrap=True)
    try:
        options = flags.parse(
            {"prepare": PrepareConfig},
            argv,
            prog="python -m examples.prepare",
            description="Turn text into token shards.",
        )
        config: PrepareConfig = options["prepare"]
        if config.verify is not None:
            folder = shards.open_folder(Path(config.verify))
            folder.verify()
            console.print(f"all {len(folder.shards)} files are as they were written")
        else:
            folder = prepare(config, console)
        for line in describe(folder):
            console.print(line, highlight=False)
    except UserError as error:
        return failed("prepare", error)
    except OSError as error:  # of a folder that may not be read or written
        place = f"{error.filename}: " if error.filename else ""
        return failed("prepare", f"{place}{error.strerror or error}")
    except KeyboardInterrupt:
        print("prepare: stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
