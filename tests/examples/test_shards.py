"""Token shards: reading them is reading one array, and damage is named."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from examples.config import parse
from examples.data import loader, shards
from examples.data import tokens as tok
from examples.files import read_json, write_json
from examples.options import UserError
from examples.prepare import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, text_path: Path) -> Path:
    """The text of `text_path` in documents of some lines, as several shards."""
    root = tmp_path_factory.mktemp("shards")
    lines = text_path.read_text(encoding="utf-8").splitlines(keepends=True)
    parts = ["".join(lines[i : i + 40]) for i in range(0, len(lines), 40)]
    (root / "train.txt").write_text("<|endoftext|>\n".join(parts[:-5]))
    (root / "val.txt").write_text("<|endoftext|>\n".join(parts[-5:]))
    argv = ["--data", str(root), "--out", str(root / "out"), "--tokenizer", "bpe"]
    assert main([*argv, "--vocab-size", "400", "--shard-bytes", "20000"]) == 0
    return root / "out"


def texts_of(root: Path) -> list[list[bytes]]:
    """Documents of train.txt and val.txt."""
    files = (root / f"{split}.txt" for split in ("train", "val"))
    return [file.read_bytes().split(b"<|endoftext|>\n") for file in files]


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_shards_hold_the_tokens_of_the_text(folder: Path) -> None:
    opened = shards.open_folder(folder)
    assert len(opened.split("train")) > 2
    (train, val), tokenizer = texts_of(folder.parent), opened.tokenizer()
    for split, documents in (("train", train), ("val", val)):
        expected = tok.stream(tokenizer, documents)
        stream = opened.stream(split)
        np.testing.assert_array_equal(stream[0 : len(stream)], expected)
        chosen = opened.split(split)
        assert sum(shard["documents"] for shard in chosen) == len(documents)
        assert sum(shard["bytes"] for shard in chosen) == sum(map(len, documents))
        assert sum(shard["tokens"] for shard in chosen) == len(expected)


def test_slices_go_over_the_ends_of_shards(folder: Path) -> None:
    stream = shards.open_folder(folder).stream("train")
    whole = stream[0 : len(stream)]
    ends = np.cumsum([s["tokens"] for s in shards.open_folder(folder).split("train")])
    for end in [0, *ends.tolist()]:
        for start, stop in ((end - 3, end + 4), (end, end + 2), (end - 2, end)):
            start, stop = max(0, start), min(len(stream), stop)
            np.testing.assert_array_equal(stream[start:stop], whole[start:stop])


def test_a_run_reads_shards_as_it_reads_text(folder: Path) -> None:
    options = ["--seq-len", "64", "--batch-size", "4", "--eval-tokens", "0"]
    one = loader.load(parse(["--data", str(folder), *options]))
    tokenizer = str(folder / tok.FILE)
    source = ["--data", str(folder.parent / "train.txt"), "--tokenizer", tokenizer]
    source += [str(folder.parent / "val.txt")]
    two = loader.load(parse([*source[:2], source[4], *source[2:4], *options]))
    assert one.tokenizer.vocab_size == two.tokenizer.vocab_size == 400
    for part in ("train", "val"):
        assert one.about[part] == two.about[part]
    for step in (0, 5, 100):
        np.testing.assert_array_equal(one.train.at(step), two.train.at(step))
        rows = one.train.at(step, slice(1, 3))
        np.testing.assert_array_equal(rows, one.train.at(step)[1:3])
    assert one.val_tokens == two.val_tokens
    assert one.about["val"] == two.about["val"]
    np.testing.assert_array_equal(one.val[0][0], two.val[0][0])
    assert one.about["digest"] != two.about["digest"]


def test_truncated_and_missing_files_are_named(copy: Path) -> None:
    path = copy / "train_00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    (copy / "val_00000.bin").unlink()
    for read in (lambda: shards.open_folder(copy), lambda: shards.find([str(copy)])):
        with pytest.raises(UserError) as error:
            read()
        assert "train_00001.bin has" in str(error.value)
        assert "val_00000.bin is missing" in str(error.value)


@pytest.mark.parametrize(
    "content", ["", "{}", '{"format": "other"}', "[]", '{"shards": 3', "[" * 100_000]
)
def test_a_broken_index(copy: Path, content: str) -> None:
    (copy / shards.INDEX).write_text(content)
    with pytest.raises(UserError, match=r"index\.json: (damaged|altered)"):
        shards.open_folder(copy)


@pytest.mark.parametrize("key", ["dtype", "tokens", "sha256", "blocks", "name"])
def test_any_change_of_the_index_is_named(copy: Path, key: str) -> None:
    index = json.loads((copy / shards.INDEX).read_text())
    entry = index["shards"][0]
    entry[key] = [*entry[key], 1] if key == "blocks" else entry[key] * 2
    (copy / shards.INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"index\.json: altered or damaged"):
        shards.open_folder(copy)


def test_another_tokenizer_is_refused(copy: Path) -> None:
    options = ["--data", str(copy), "--seq-len", "64", "--batch-size", "4"]
    path = copy / tok.FILE
    good = path.read_text()
    tok.save(tok.ByteTokenizer(), path)
    said = r"tokenizer\.json: altered or damaged \(its SHA-256 is another\)"
    with pytest.raises(UserError, match=said):
        loader.load(parse(options))
    # Of the same size: only the checksum tells.
    path.write_text(json.dumps(json.loads(good)))
    with pytest.raises(UserError, match=said):
        loader.load(parse(options))
    path.write_text(good)
    assert loader.load(parse(options)).tokenizer.vocab_size == 400


def test_content_that_changed_is_named_when_it_is_read(copy: Path) -> None:
    """At the same size, one bit of one token: also an id beyond the vocabulary."""
    name = "train_00001.bin"
    ids = np.fromfile(copy / name, "<u2")
    ids[500] ^= 1
    ids.tofile(copy / name)
    opened = shards.open_folder(copy)
    stream, first = opened.stream("train"), opened.split("train")[0]["tokens"]
    stream[0:first]
    with pytest.raises(UserError, match=rf"{name}: altered since .* \(block 0\)"):
        stream[first - 10 : first + 5]  # of the same block as token 500
    options = ["--data", str(copy), "--seq-len", "64", "--batch-size", "4"]
    train = loader.load(parse(options)).train
    with pytest.raises(UserError, match="altered since it was written"):
        for step in range(train.windows // 4 + 1):
            train.at(step)


def test_every_block_has_a_checksum(tmp_path: Path) -> None:
    ids = np.arange(100_000).astype("<u2")
    shard = shards.write_shard(tmp_path / "a.bin", "train", ids, 2, 10)
    assert len(shard["blocks"]) == -(-200_000 // 2**16) == 4
    raw = bytearray((tmp_path / "a.bin").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "a.bin").write_bytes(raw)
    stream = shards.ShardStream(tmp_path, [shard])
    np.testing.assert_array_equal(stream[39_990:40_010], np.arange(39_990, 40_010))
    with pytest.raises(UserError, match=r"\(block 3\)"):
        stream[99_000:99_001]


def test_what_is_no_complete_folder(copy: Path, text_path: Path) -> None:
    with pytest.raises(UserError, match="goes alone"):
        shards.find([str(text_path), str(copy)])
    assert shards.find([str(text_path)]) is None
    index = read_json(copy / shards.INDEX)
    write_json(copy / shards.INDEX, index | {"finished": False})
    with pytest.raises(UserError, match="preparation was interrupted"):
        loader.load(parse(["--data", str(copy)]))
    del index["finished"]  # as folders were written before there was this field
    write_json(copy / shards.INDEX, index)
    shards.open_folder(copy)
    (copy / shards.INDEX).unlink()
    with pytest.raises(UserError, match=r"no index\.json in it"):
        loader.load(parse(["--data", str(copy)]))
    write_json(copy / shards.INDEX, {"format": "version 0", "shards": []})
    with pytest.raises(UserError, match="not of the format .*; prepare it anew"):
        shards.open_folder(copy)


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    ids = np.array([1, 70_000, 2**31], "<u4")
    shard = shards.write_shard(tmp_path / "a.bin", "train", ids, 2, 10)
    assert (tmp_path / "a.bin").stat().st_size == 12
    stream = shards.ShardStream(tmp_path, [shard])
    assert stream[0:3].tolist() == [1, 70_000, 2**31]


def test_another_tokenizer_than_that_of_the_shards_is_refused(folder: Path) -> None:
    for option in (
        ("--tokenizer", "bpe"),
        ("--max-bytes", "1000"),
        ("--val-fraction", "0.1"),
    ):
        with pytest.raises(UserError, match=f"{option[0]}: token shards bring their"):
            loader.load(parse(["--data", str(folder), *option]))
    config = parse(["--data", str(folder)])
    size = dataclasses.replace(config.data, vocab_size=512)
    with pytest.raises(UserError, match="--vocab-size: token shards bring their"):
        loader.load(dataclasses.replace(config, data=size))
