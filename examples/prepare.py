"""Turn text into token shards: `python -m examples.prepare --data TEXT --out FOLDER`.

Tokenizes on all cores, a shard at a time. A preparation that was stopped goes on when
the same command is given again.
"""

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

from examples.config import BPE
from examples.data import shards
from examples.data import tokens as tok
from examples.data.corpus import Corpus, Group
from examples.data.loader import prefetch
from examples.files import locked, write_json
from examples.options import Interrupted, Options, check, command, option


@dataclasses.dataclass(frozen=True)
class PrepareConfig(Options):
    """Which text becomes which shards."""

    data: tuple[str, ...] = option((), "text files or folders, as for pretrain")
    text_field: str = option("text", "the field of a record that holds the text")
    skip_bad: bool = option(False, "leave out lines that cannot be read; count them")
    tokenizer: str = option("bpe", "'bytes', 'bpe' or the path of a tokenizer.json")
    vocab_size: int = option(32_000, "vocabulary of --tokenizer bpe", "[300, 1000000]")
    out: str = option("", "folder of the shards")
    shard_bytes: int = option(100_000_000, "text of a shard, about", "[1000, ]")
    val_fraction: float = option(
        0.005, "part of each shard's text held out (if no file is val*)", "(0, 0.5]"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check(bool(self.out), "--out FOLDER is needed")
        check(bool(self.data), "--data PATH is needed")

    def corpus(self) -> Corpus:
        """The text, to be read once."""
        fields = {"field": self.text_field, "skip_bad": self.skip_bad}
        return Corpus(self.data, self.val_fraction, **fields)


def _begin(config: PrepareConfig, corpus: Corpus) -> shards.Folder:
    """A new folder with a tokenizer, or that of a preparation that was stopped."""
    path = Path(config.out)
    # What a preparation must have in common with the one that it goes on with.
    begun: dict[str, Any] = dataclasses.asdict(config)
    del begun["out"]
    begun["data"] = [[file.name, file.stat().st_size] for file in corpus.files]
    if (path / shards.INDEX).exists():
        folder = shards.open_folder(path, finished=False)
        done = folder.index.get("finished", True)
        check(not done, f"--out {path}: already holds shards; choose another")
        before = folder.index["begun"]
        other = ", ".join(key for key in begun if before.get(key) != begun[key])
        said = f"--out {path}: an unfinished preparation with another {other}"
        check(not other, f"{said}; repeat its options or remove the folder")
        print(f"going on after {folder.index['groups']} shards")
        return folder
    foreign = any(path.glob("*.bin"))
    check(not foreign, f"--out {path}: holds other .bin files; choose another")
    sample: list[bytes] = []
    if config.tokenizer == "bpe":
        groups = config.corpus().groups(config.shard_bytes)
        sample = next(train for train, _ in groups if train)
        size = sum(map(len, sample))
        print(f"training the tokenizer on {size:,} bytes, the first shard", flush=True)
    tokenizer = tok.make_tokenizer(config.tokenizer, config.vocab_size, sample)
    about = {"name": tokenizer.name, "vocab_size": tokenizer.vocab_size}
    about["sha256"] = tok.save(tokenizer, path / tok.FILE)
    index = {"format": shards.FORMAT, "finished": False, "source": corpus.name}
    index |= {"begun": begun, "tokenizer": about, "groups": 0, "shards": []}
    write_json(path / shards.INDEX, index)
    return shards.open_folder(path, finished=False)


def _write_group(
    folder: Path, group: Group, tokenizer: tok.Tokenizer, index: Any
) -> None:
    """Write the shards of a group, and then the index that tells of them.

    What a stop leaves behind without it is written anew, to the same bytes.
    """
    for split, documents in zip(("train", "val"), group):
        if documents:
            number = sum(shard["split"] == split for shard in index["shards"])
            file = folder / f"{split}_{number:05d}.bin"
            sizes = len(documents), sum(map(len, documents))
            ids = tok.stream(tokenizer, documents)
            index["shards"].append(shards.write_shard(file, split, ids, *sizes))
    index["groups"] += 1
    write_json(folder / shards.INDEX, index)


def prepare(config: PrepareConfig) -> shards.Folder:
    """Write the shards of `config`, or those that are still missing."""
    corpus = config.corpus()
    with locked(Path(config.out)):
        return _write(config, corpus)


def _write(config: PrepareConfig, corpus: Corpus) -> shards.Folder:
    print(f"{corpus.name}; tokenizer {config.tokenizer}", *corpus.notes, sep="\n  ")
    folder = _begin(config, corpus)
    path, index, tokenizer = folder.path, folder.index, folder.tokenizer()
    groups = corpus.groups(config.shard_bytes)
    for group in prefetch(itertools.islice(groups, index["groups"], None), depth=1):
        _write_group(path, group, tokenizer, index)
        tokens = sum(s["tokens"] for s in index["shards"] if s["split"] == "train")
        print(f"shard {index['groups']}, {tokens:,} training tokens so far", flush=True)
    if corpus.skipped:
        print(f"lines that could not be read: {corpus.skipped:,}")
    index |= {"finished": True, "skipped": corpus.skipped}
    write_json(path / shards.INDEX, index)
    return shards.open_folder(path)


def _prepare(config: PrepareConfig) -> None:
    """Turn text into token shards."""
    try:
        folder = prepare(config)
    except KeyboardInterrupt:
        raise Interrupted(2, "interrupted; the same command goes on") from None
    for split in ("train", "val"):
        counts = folder.counts(split).items()
        print(f"{split}:", ", ".join(f"{n:,} {name}" for name, n in counts))


_CONDITIONS = {"vocab_size": BPE}
main = command("examples.prepare", PrepareConfig, _prepare, conditions=_CONDITIONS)

if __name__ == "__main__":
    sys.exit(main())
