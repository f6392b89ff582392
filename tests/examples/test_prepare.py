"""Preparing shards: nothing lost, stops survived, every source the same."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples import files, prepare
from examples.data import shards
from examples.data import tokens as tok

DOCUMENTS = [f"document {i}\nwith a second line \u00e9 {i * i}\n" for i in range(400)]
SMALL = ["--tokenizer", "bytes", "--shard-tokens", "3000", "--val-fraction", "0.1"]
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: object) -> tuple[int, str]:
        code = prepare.main([*map(str, argv)])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents(folder: Path, split: str) -> list[str]:
    stream = shards.open_folder(folder).stream(split)
    raw = stream[0 : len(stream)].tolist()
    texts = bytes(0xFF if i == 256 else i for i in raw).split(b"\xff")
    assert texts[-1] == b""
    return [text.decode() for text in texts[:-1]]


def test_every_document_is_in_one_split(run: Run, text: Path, tmp_path: Path) -> None:
    code, said = run("--data", text, "--out", tmp_path / "out", *SMALL)
    assert code == 0, said
    train, val = (documents(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(DOCUMENTS)
    assert train == [document for document in DOCUMENTS if document not in set(val)]
    assert 20 < len(val) < 70
    assert f"{len(train)} documents" in said
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_files_named_val_are_held_out(run: Run, text: Path, tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text(f"{DOCUMENTS[5]}<|endoftext|>\nother\n")
    code, said = run("--data", tmp_path, "--out", tmp_path / "out", *SMALL)
    assert code == 0, said
    assert documents(tmp_path / "out", "val") == [DOCUMENTS[5], "other\n"]
    train = documents(tmp_path / "out", "train")
    assert train == [*DOCUMENTS[:5], *DOCUMENTS[6:]]
    assert "left out (blank, or also held out): 1" in said


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 8, 11])
def test_a_stopped_preparation_goes_on(
    run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """Stopped before a file is renamed, and again when everything but the end is."""
    assert run("--data", text, "--out", tmp_path / "whole", *SMALL)[0] == 0
    out = tmp_path / "out"
    write, left = files.write_atomically, stop

    def stops(path: Path, pieces: Any) -> str:
        nonlocal left
        left -= 1
        if left == 0:
            path.with_name(path.name + ".tmp").write_bytes(b"half of it")
            raise KeyboardInterrupt
        return write(path, pieces)

    for module in (files, shards, tok):
        monkeypatch.setattr(module, "write_atomically", stops)
    code, said = run("--data", text, "--out", out, *SMALL)
    assert code == 130 and "goes on" in said
    assert not (out / shards.INDEX).exists()
    monkeypatch.undo()
    code, said = run("--data", text, "--out", out, *SMALL)
    assert code == 0, said
    assert content(out) == content(tmp_path / "whole")


def test_going_on_needs_the_same_options_and_text(
    run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def stops(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shards, "file_sha256", stops)
        assert run("--data", text, "--out", out, *SMALL)[0] == 130
    code, said = run("--data", text, "--out", out, *SMALL, "--val-fraction", "0.2")
    assert code == 2 and "with another val_fraction" in said
    text.write_text(text.read_text() + '{"text": "more"}\n')
    code, said = run("--data", text, "--out", out, *SMALL)
    assert code == 2 and "with another source" in said
    text.write_text(text.read_text().replace('{"text": "more"}\n', ""))
    (out / "train_00001.bin").unlink()
    code, said = run("--data", text, "--out", out, *SMALL)
    assert code == 2 and "train_00001.bin is missing" in said


def test_errors_are_one_line(run: Run, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for argv, expected in (
        (["--data", text], "--out FOLDER is needed"),
        (["--out", out], "either --data or --hf-dataset"),
        (["--out", out, "--data", tmp_path / "none"], "no such file"),
        (["--out", out, "--data", text, "--text-field", "body"], 'field "body"'),
        (["--verify", tmp_path / "none"], "no index.json"),
    ):
        code, said = run(*argv, *SMALL)
        assert code == 2 and expected in said and said.count("\n") <= 2, said
    assert run("--data", text, "--out", tmp_path / "again", *SMALL)[0] == 0
    code, said = run("--data", text, "--out", tmp_path / "again", *SMALL)
    assert code == 2 and "already holds shards" in said


def test_no_room_on_the_disk(
    run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    code, said = run("--data", text, "--out", tmp_path / "out", *SMALL)
    assert code == 1 and "json could not be written: No space left on device" in said
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_max_tokens(run: Run, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = ["--data", text, "--out", out, *SMALL, "--max-tokens", "5000"]
    assert run(*argv)[0] == 0
    train = documents(out, "train")
    assert train == [d for d in DOCUMENTS if d in set(train)]
    tokens = sum(len(document.encode()) + 1 for document in train)
    assert 5000 <= tokens < 5000 + max(map(len, DOCUMENTS))
    assert "going on" not in run(*argv)[1]


def test_a_trained_tokenizer_is_kept(run: Run, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = [*SMALL, "--tokenizer", "bpe", "--vocab-size", "300"]
    assert run("--data", text, "--out", out, *options)[0] == 0
    opened = shards.open_folder(out)
    stream = opened.stream("train")
    ids = stream[0 : len(stream)].tolist()
    end = ids.index(opened.tokenizer().end_id)
    assert opened.tokenizer().decode(ids[:end]) in DOCUMENTS
    assert opened.index["tokenizer"]["vocab_size"] == 300


def hub_options(tmp_path: Path, text: Path, name: str = "out") -> list[object]:
    return ["--hf-dataset", text.parent, "--out", tmp_path / name, *SMALL]


def test_the_hub_loader_on_local_files(run: Run, text: Path, tmp_path: Path) -> None:
    """The library's own streaming, on a folder of the form that the hub serves."""
    pytest.importorskip("datasets")
    home = tmp_path / "set"
    home.mkdir()
    local = text.rename(home / "train-00000.jsonl")
    code, said = run(*hub_options(tmp_path, local))
    assert code == 0, said
    assert run("--data", local, "--out", tmp_path / "files", *SMALL)[0] == 0
    for path in (tmp_path / "files").iterdir():
        if path.name != shards.INDEX:
            assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    code, said = run(*hub_options(tmp_path, local, "no"), "--text-field", "body")
    assert code == 2 and "record 1: no text in --text-field body" in said
    code, said = run(*hub_options(tmp_path, local, "no"), "--hf-split", "nosplit")
    assert code == 2 and "nosplit" in said


class _Records(list):
    """A stream that may break."""

    end = 10_000

    def skip(self, count: int) -> Iterator[dict[str, Any]]:
        yield from self[count : self.end]
        if self.end < len(self):
            raise ConnectionError("no route to host")


def test_a_stopped_stream_goes_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = _Records({"text": text} for text in ["  ", *DOCUMENTS])
    library = SimpleNamespace(load_dataset=lambda *_, **__: records)
    monkeypatch.setitem(sys.modules, "datasets", library)
    argv = ["--hf-dataset", "some/set", "--hf-config", "small", *SMALL]
    code, said = run(*argv, "--out", tmp_path / "whole")
    assert code == 0 and "left out (blank, or also held out): 1" in said
    records[300] = {"text": None}
    code, said = run(*argv, "--out", tmp_path / "out")
    assert code == 2 and "some/set small train, record 301: no text" in said
    records[300] = {"text": DOCUMENTS[299]}
    records.end = 350
    code, said = run(*argv, "--out", tmp_path / "out")
    assert code == 2 and "after record 350: no route to host; the same" in said
    records.end = 10_000
    code, said = run(*argv, "--out", tmp_path / "out")
    assert code == 0 and "going on after" in said
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_missing_library_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    code, said = run("--hf-dataset", "some/set", "--out", tmp_path / "out")
    assert code == 2 and "pip install datasets" in said


def test_the_byte_tokenizer_is_kept_too(run: Run, text: Path, tmp_path: Path) -> None:
    assert run("--data", text, "--out", tmp_path / "out", *SMALL)[0] == 0
    tokenizer = shards.open_folder(tmp_path / "out").tokenizer()
    assert isinstance(tokenizer, tok.ByteTokenizer)


def test_a_last_line_end_does_not_choose_the_split(run: Run, tmp_path: Path) -> None:
    for number, end in enumerate(("", "\n", "\r\n\n")):
        lines = [json.dumps({"text": text.rstrip() + end}) for text in DOCUMENTS]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out"
    assert run("--data", tmp_path, "--out", out, *SMALL)[0] == 0
    train, val = (
        {text.rstrip() for text in documents(out, split)} for split in ("train", "val")
    )
    assert not train & val


def test_text_that_is_not_there(run: Run, text: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("\n")
    out = tmp_path / "out"
    for tokenizer in ("bytes", "bpe"):
        argv = ["--data", tmp_path / "empty", "--out", out / tokenizer]
        code, said = run(*argv, *SMALL, "--tokenizer", tokenizer)
        assert code == 2 and "no text in it" in said and "--val" not in said
    (tmp_path / "val.txt").write_text("")
    code, said = run("--data", text, tmp_path / "val.txt", "--out", out / "3", *SMALL)
    assert code == 2 and "val.txt: no text in it; files named val*" in said


def test_a_broken_progress_is_named(
    run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(shards, "file_sha256", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run("--data", text, "--out", out, *SMALL)
    file = out / shards.PROGRESS
    file.write_text(
        file.read_text().replace('"documents_read": 4', '"documents_read": 3')
    )
    code, said = run("--data", text, "--out", out, *SMALL)
    assert code == 2 and "progress.json: altered or damaged" in said


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
    code, said = run(*argv, "--vocab-size", "300")
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


def test_training_a_tokenizer_is_announced(
    run: Run, text: Path, tmp_path: Path
) -> None:
    argv = ["--data", text, "--out", tmp_path / "out", *SMALL, "--tokenizer", "bpe"]
    assert (
        "training the tokenizer on up to 50 MB" in run(*argv, "--vocab-size", "300")[1]
    )
