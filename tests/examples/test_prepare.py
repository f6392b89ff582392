"""Preparing shards: nothing lost, and stops survived."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples import files, prepare
from examples.data import shards
from examples.data import tokens as tok
from examples.files import read_json
from examples.options import UserError

DOCUMENTS = [f"document {i}\nwith a second line \u00e9 {i * i}\n" for i in range(400)]
SMALL = ["--tokenizer", "bytes", "--shard-bytes", "3000", "--val-fraction", "0.1"]
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: object) -> tuple[int, str]:
        code = prepare.main([*map(str, argv)])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def write_text(folder: Path) -> Path:
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A preparation that nothing has stopped."""
    folder = tmp_path_factory.mktemp("whole")
    argv = ["--data", write_text(folder), "--out", folder / "out", *SMALL]
    assert prepare.main([*map(str, argv)]) == 0
    return folder / "out"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents(folder: Path, split: str) -> list[str]:
    stream = shards.open_folder(folder).stream(split)
    raw = stream[0 : len(stream)].tolist()
    texts = bytes(0xFF if i == 256 else i for i in raw).split(b"\xff")
    assert texts[-1] == b""
    return [text.decode() for text in texts[:-1]]


def test_every_document_is_in_one_split(whole: Path) -> None:
    train, val = (documents(whole, split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(DOCUMENTS)
    assert train == [document for document in DOCUMENTS if document not in val]
    assert 40 <= len(val) < 60
    assert not list(whole.glob("*.tmp"))


def test_files_named_val_are_held_out(run: Run, text: Path, tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text(f"{DOCUMENTS[5]}<|endoftext|>\nother\n")
    code, said = run("--data", tmp_path, "--out", tmp_path / "out", *SMALL)
    assert code == 0, said
    assert documents(tmp_path / "out", "val") == [DOCUMENTS[5], "other\n"]
    train = documents(tmp_path / "out", "train")
    assert train == [*DOCUMENTS[:5], *DOCUMENTS[6:]]


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 8, 17])
def test_a_stopped_preparation_goes_on(
    run: Run,
    text: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: int,
) -> None:
    """Stopped before a file is renamed, and again when everything but the end is."""
    out = tmp_path / "out"
    write, left = files.write_atomically, stop

    def stops(path: Path, content: bytes) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            path.with_name(path.name + ".tmp").write_bytes(b"half of it")
            raise KeyboardInterrupt
        write(path, content)

    for module in (files, shards, tok):
        monkeypatch.setattr(module, "write_atomically", stops)
    code, said = run("--data", text, "--out", out, *SMALL)
    assert code == 130 and "goes on" in said
    with pytest.raises(UserError, match="no index.json|was interrupted"):
        shards.open_folder(out)
    monkeypatch.undo()
    code, said = run("--data", text, "--out", out, *SMALL)
    assert code == 0, said
    same = content(out), content(whole)
    for files_of in same:  # which names the folder
        del files_of[shards.INDEX]
    assert same[0] == same[1]
    one, two = (read_json(folder / shards.INDEX) for folder in (out, whole))
    assert one["shards"] == two["shards"]


@pytest.fixture
def stopped(
    run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A preparation that was stopped after two groups."""
    out, write = tmp_path / "out", prepare._write_group

    def stops(folder: Path, group: Any, tokenizer: Any, index: Any) -> None:
        if index["groups"] == 2:
            raise KeyboardInterrupt
        write(folder, group, tokenizer, index)

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_write_group", stops)
        assert run("--data", text, "--out", out, *SMALL)[0] == 130
    return out


def test_going_on_needs_the_same_options_and_text(
    run: Run, text: Path, stopped: Path
) -> None:
    argv, good = ["--data", text, "--out", stopped, *SMALL], text.read_text()
    code, said = run(*argv, "--val-fraction", "0.2")
    assert code == 2 and "with another val_fraction" in said
    text.write_text(good + '{"text": "more"}\n')
    code, said = run(*argv)
    assert code == 2 and "with another data" in said
    text.write_text(good)
    (stopped / "train_00001.bin").unlink()
    code, said = run(*argv)
    assert code == 2 and "train_00001.bin is missing" in said


def test_a_broken_index_is_named(run: Run, text: Path, stopped: Path) -> None:
    file = stopped / shards.INDEX
    file.write_text(file.read_text().replace('"groups": 2', '"groups": 1'))
    code, said = run("--data", text, "--out", stopped, *SMALL)
    assert code == 2 and "index.json: altered or damaged" in said


def test_errors_are_one_line(run: Run, text: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for argv, expected in (
        (["--data", text], "--out FOLDER is needed"),
        (["--out", out], "--data PATH is needed"),
        (["--out", out, "--data", tmp_path / "none"], "no such file"),
        (["--out", out, "--data", text, "--text-field", "body"], 'field "body"'),
        (["--vocab-size", "900"], "--vocab-size acts only with --tokenizer bpe"),
    ):
        code, said = run(*argv, *SMALL)
        assert code == 2 and expected in said.splitlines()[-1], said
    code, said = run("--data", text, "--out", whole, *SMALL)
    assert code == 2 and "already holds shards" in said


def test_one_preparation_at_a_time(run: Run, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with files.locked(out):
        code, said = run("--data", text, "--out", out, *SMALL)
        assert code == 2 and "another process is writing there" in said.splitlines()[-1]
        assert [path.name for path in out.iterdir()] == ["lock"]
    assert run("--data", text, "--out", out, *SMALL)[0] == 0
    assert not (out / "lock").exists()


@pytest.mark.parametrize(
    ("call", "name"), [(1, "tokenizer.json"), (3, "index.json"), (5, "train_00000.bin")]
)
def test_no_room_on_the_disk(
    run: Run,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: int,
    name: str,
) -> None:
    """A file is synchronized, and then its folder."""
    calls = itertools.count(1)

    def full(_: int) -> None:
        if next(calls) >= call:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    code, said = run("--data", text, "--out", tmp_path / "out", *SMALL)
    assert code == 1 and f"{name} could not be written: No space left on device" in said
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_a_long_document_is_in_both_splits(run: Run, tmp_path: Path) -> None:
    """As much of it is held out as was asked for."""
    lines = "".join(f"line {i}\n" for i in range(400))
    (tmp_path / "a.txt").write_text(lines)
    argv = ["--data", tmp_path / "a.txt", "--out", tmp_path / "out", *SMALL]
    assert run(*argv)[0] == 0
    (train,), (val,) = (documents(tmp_path / "out", part) for part in ("train", "val"))
    assert train + val == lines
    assert 0.08 < len(val) / len(lines) < 0.12


def test_each_document_is_taken_once(run: Run, text: Path, tmp_path: Path) -> None:
    """Also over the ends of shards, where one of both may be held out."""
    text.write_text(2 * text.read_text())
    code, said = run("--data", text, "--out", tmp_path / "out", *SMALL)
    assert code == 0 and "shard 4, " in said  # a line for each tells of the progress
    found = [documents(tmp_path / "out", split) for split in ("train", "val")]
    assert sorted(sum(found, [])) == sorted(DOCUMENTS)


def test_a_trained_tokenizer_is_announced_and_kept(
    run: Run, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = [*SMALL, "--tokenizer", "bpe", "--vocab-size", "300"]
    code, said = run("--data", text, "--out", out, *options)
    assert code == 0 and "training the tokenizer on 2,7" in said
    opened = shards.open_folder(out)
    stream = opened.stream("train")
    ids = stream[0 : len(stream)].tolist()
    end = ids.index(opened.tokenizer().end_id)
    assert opened.tokenizer().decode(ids[:end]) in DOCUMENTS
    assert opened.index["tokenizer"]["vocab_size"] == 300


def test_the_byte_tokenizer_is_kept_too(whole: Path) -> None:
    assert isinstance(shards.open_folder(whole).tokenizer(), tok.ByteTokenizer)


def test_text_that_is_not_there(run: Run, text: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("\n")
    out = tmp_path / "out"
    for tokenizer in ("bytes", "bpe"):
        argv = ["--data", tmp_path / "empty", "--out", out / tokenizer]
        code, said = run(*argv, *SMALL, "--tokenizer", tokenizer)
        assert code == 2 and "no text in it" in said
    (tmp_path / "val.txt").write_text("")
    code, said = run("--data", text, tmp_path / "val.txt", "--out", out / "3", *SMALL)
    assert code == 2 and "val.txt: no text in it; files named val*" in said


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_folder_that_cannot_be_written(
    run: Run,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: str,
) -> None:
    def refused(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refused)
    argv = ["--data", text, "--out", tmp_path, *SMALL, "--tokenizer", tokenizer]
    more = ["--vocab-size", "300"] if tokenizer == "bpe" else []
    code, said = run(*argv, *more)
    assert code in (1, 2) and "Permission denied" in said.splitlines()[-1]


def test_bad_lines_are_left_out_and_counted_if_that_is_wanted(
    run: Run, text: Path, tmp_path: Path
) -> None:
    lines = text.read_bytes().splitlines(keepends=True)
    bad = [b'{"text": 5}\n', b"{\n", b'{"text": "\xff"}\n']
    text.write_bytes(b"".join([lines[0], *bad, *lines[1:]]))
    code, said = run("--data", text, "--out", tmp_path / "out", *SMALL)
    assert code == 2 and "line 2: no string field" in said
    code, said = run("--data", text, "--out", tmp_path / "all", *SMALL, "--skip-bad")
    assert code == 0 and "lines that could not be read: 3" in said
    both = [documents(tmp_path / "all", split) for split in ("train", "val")]
    assert sorted(sum(both, [])) == sorted(DOCUMENTS)
