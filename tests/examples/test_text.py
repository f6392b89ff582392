"""Reading text: every form, the split, and an error for all that cannot be read."""

import gzip
import json
import lzma
import time
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from examples.config import parse
from examples.data import corpus, loader
from examples.data import text as texts
from examples.options import UserError

DOCUMENTS = [f"document {i}\nwith a second line \u00e9\n" for i in range(40)]
JOINED = "<|endoftext|>\n".join(DOCUMENTS).encode()
LINES = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS).encode()


def write(path: Path, content: bytes) -> Path:
    pack = {".xz": lzma.compress, ".gz": gzip.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(content))
    return path


def documents(path: Path) -> list[bytes]:
    return list(texts.documents([path], "text", pytest.fail))


class Loaded(NamedTuple):
    train: list[bytes]
    val: list[bytes]
    notes: str


def load(*paths: Path, val_fraction: float = 0.05, limit: int = 0) -> Loaded:
    source = corpus.Corpus([*map(str, paths)], val_fraction, limit)
    train, val = (sum(part, []) for part in zip(*source.groups()))
    return Loaded(train, val, "; ".join(source.notes))


def size(text: Loaded) -> int:
    return sum(map(len, [*text.train, *text.val]))


@pytest.mark.parametrize("suffix", texts.SUFFIXES)
def test_every_form_gives_the_same_documents(tmp_path: Path, suffix: str) -> None:
    content = LINES if "jsonl" in suffix else JOINED
    path = write(tmp_path / f"text{suffix}", content)
    assert documents(path) == [text.encode() for text in DOCUMENTS]


@pytest.mark.parametrize(("suffix", "pack"), [("xz", lzma), ("gz", gzip)])
def test_all_streams_of_a_file_are_read(
    tmp_path: Path, suffix: str, pack: ModuleType
) -> None:
    path = tmp_path / f"a.txt.{suffix}"
    path.write_bytes(pack.compress(b"one ") + bytes(8) + pack.compress(b"two"))
    assert documents(path) == [b"one two"]


GOOD_XZ = lzma.compress(b"line\n" * 10_000)
GOOD_GZ = gzip.compress(b"line\n" * 10_000)


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("a.txt.xz", b"this is not xz", "corrupt or truncated"),
        ("a.txt.xz", b"", "corrupt or truncated"),
        ("a.txt.xz", GOOD_XZ[:-20], "corrupt or truncated"),
        ("a.txt.xz", GOOD_XZ[:60] + b"!" + GOOD_XZ[61:], "corrupt or truncated"),
        ("a.txt.xz", GOOD_XZ + b"rest", "after line 10000: corrupt or truncated"),
        ("a.txt.gz", b"this is not gzip", "corrupt or truncated"),
        ("a.txt.gz", GOOD_GZ[:-6], "corrupt or truncated"),
        ("a.txt.gz", GOOD_GZ[:-8] + bytes(8), "corrupt or truncated"),
        ("a.txt.gz", GOOD_GZ + b"rest", "after line 10000: corrupt or truncated"),
        (
            "a.txt",
            b"fine\nbroken \xff\n",
            "line 2: invalid UTF-8 ('utf-8' codec can't decode byte 0xff in position 7",
        ),
        ("a.txt", b"cut off \xc3", "line 1: invalid UTF-8"),
        ("a.txt.xz", lzma.compress(b"\n\n\xfe"), "line 3: invalid UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: invalid JSON"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"body": "b"}\n',
            'line 2: no string field "text"',
        ),
        ("a.jsonl", b'{"text": 3}\n', 'line 1: no string field "text"'),
        ("a.jsonl", b'["text"]\n', 'line 1: no string field "text"'),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "surrogates not allowed"),
        ("a.jsonl.xz", lzma.compress(b"{}\n"), 'line 1: no string field "text"'),
        ("a.jsonl", b'{"text": "\xff"}\n', "line 1: invalid UTF-8"),
    ],
)
def test_errors_name_file_and_line(
    tmp_path: Path, name: str, raw: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(raw)
    with pytest.raises(UserError) as error:
        load(path)
    assert str(path) in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["empty", "notes.md"])
def test_paths_without_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix:
        path.write_text("x")
    else:
        path.mkdir()
    with pytest.raises(UserError, match="text file"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"<|endoftext|>\n"])
def test_a_file_without_text(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match="no text in it"):
        load(write(tmp_path / "a.txt", content))


def test_the_last_documents_are_held_out(tmp_path: Path) -> None:
    text = load(write(tmp_path / "a.txt", JOINED), val_fraction=0.1)
    assert [*text.train, *text.val] == [document.encode() for document in DOCUMENTS]
    assert 4 <= len(text.val) <= 5
    assert not set(text.train) & set(text.val)


def test_a_long_last_document_is_held_out_in_part(tmp_path: Path) -> None:
    """Whole documents would be a third of the text instead of a twentieth."""
    texts = [f"{i} {'word ' * 40}\n" * 10 for i in range(8)]
    texts += ["".join(f"line {i} {'tail ' * 40}\n" for i in range(50))]
    text = load(write(tmp_path / "a.txt", "<|endoftext|>\n".join(texts).encode()))
    held_out = sum(map(len, text.val))
    assert 0.045 < held_out / size(text) < 0.075
    assert text.train[-1] + text.val[0] == texts[-1].encode()
    assert text.train[-1].endswith(b"\n")


def test_a_single_document_is_cut_at_a_line(tmp_path: Path) -> None:
    content = JOINED.replace(b"<|endoftext|>", b"-")
    text = load(write(tmp_path / "a.txt", content), val_fraction=0.1)
    assert text.train[0] + text.val[0] == content
    assert text.train[0].endswith(b"\n")
    assert 0.05 < len(text.val[0]) / len(content) < 0.2


def test_files_named_val_are_the_validation_text(tmp_path: Path) -> None:
    write(tmp_path / "train_1.txt.xz", JOINED)
    write(tmp_path / "train_0.jsonl", LINES[: LINES.index(b"\n") + 1])
    write(tmp_path / "val_0.txt", DOCUMENTS[7].encode())
    (tmp_path / "README.md").write_text("about")
    text = load(tmp_path, val_fraction=0.5)
    assert text.val == [DOCUMENTS[7].encode()]
    # Document 7 is validation text, and document 0 is in two files.
    assert text.train == [d.encode() for d in DOCUMENTS if d != DOCUMENTS[7]]
    assert "other files not read: README.md" in text.notes


def test_a_text_that_is_cut_is_said_to_be(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", JOINED)
    total = sum(len(text.encode()) for text in DOCUMENTS)
    for limit, cut in ((300, True), (total - 1, True), (total, False), (0, False)):
        text = load(path, limit=limit)
        assert size(text) == (limit or total)
        assert (f"cut at {limit:,} bytes (--max-bytes)" in text.notes) == cut


def test_the_digest_names_text_and_split(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", JOINED)
    options = ["--seq-len", "16", "--batch-size", "2", "--data", str(path)]
    digests = [
        loader.load(parse([*options, *more])).about["digest"]
        for more in ([], [], ["--val-fraction", "0.3"])
    ]
    assert digests[0] == digests[1] != digests[2]


def test_the_standard_library_is_the_default_text() -> None:
    first, second = load(limit=300_000), load(limit=300_000)
    assert first == second
    assert size(first) == 300_000
    assert not set(first.train) & set(first.val)
    assert len(set(corpus.python_sources())) > 100


def test_a_last_line_end_does_not_make_another_document(tmp_path: Path) -> None:
    parts = [*DOCUMENTS, DOCUMENTS[0].rstrip("\n"), DOCUMENTS[1] + "\r\n"]
    text = load(write(tmp_path / "a.txt", "\n<|endoftext|>\n".join(parts).encode()))
    assert len(text.train) + len(text.val) == len(DOCUMENTS)
    write(tmp_path / "val.jsonl", LINES[: LINES.index(b"\n") + 1])
    text = load(tmp_path)
    assert text.val == [DOCUMENTS[0].encode()]
    assert not any(t.startswith(b"document 0\n") for t in text.train)


@pytest.mark.parametrize("suffix", texts.SUFFIXES)
def test_a_byte_order_mark_is_no_text(tmp_path: Path, suffix: str) -> None:
    content = LINES if "jsonl" in suffix else JOINED
    path = write(tmp_path / f"text{suffix}", b"\xef\xbb\xbf" + content)
    assert documents(path) == [text.encode() for text in DOCUMENTS]


def test_an_empty_validation_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train.txt", JOINED)
    write(tmp_path / "val.txt", b"\n")
    with pytest.raises(UserError, match=r"val\.txt: no text in it; files named val\*"):
        load(tmp_path)
    write(tmp_path / "val.txt", DOCUMENTS[0].encode())
    write(tmp_path / "train.txt", DOCUMENTS[0].encode())
    with pytest.raises(UserError, match="no text in it beside that of files named val"):
        load(tmp_path)


def test_one_huge_line_is_read_in_linear_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_CHUNK", 1 << 10)
    line = b"0123456789abcdef" * (1 << 18)
    path = write(tmp_path / "a.txt", line + b"\nnext\n")
    begin = time.process_time()
    assert documents(path) == [line + b"\nnext\n"]
    assert time.process_time() - begin < 3  # copying all at every chunk takes minutes


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("limit", [3, 59, 60, 61, 95, 400, 100_000])
def test_a_limit_cuts_between_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, limit: int
) -> None:
    """However the files are read: the first bytes, less a character that is broken."""
    monkeypatch.setattr(texts, "_CHUNK", chunk)
    whole = ("\u00e9" * 30, "ab\n" + "\U0001f600" * 20 + "\n", "x" + "\u00e9" * 3_000)
    one = write(tmp_path / "1.txt", whole[0].encode())
    two = write(tmp_path / "2.txt", "<|endoftext|>\n".join(whole[1:]).encode())
    text = load(one, two, limit=limit, val_fraction=0.01)
    expected = "".join(whole).encode()[:limit].decode(errors="ignore")
    assert b"".join([*text.train, *text.val]).decode() == expected


@pytest.mark.parametrize("size", [10, 40, 100_000])
def test_long_texts_are_divided_at_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """So that a file without separators need not fit into memory, nor be read on."""
    monkeypatch.setattr(texts, "_LONGEST", size)
    lines = [f"line {i}\n".encode() for i in range(40)]
    path = write(tmp_path / "a.txt", b"".join(lines))
    found = documents(path)
    assert b"".join(found) == b"".join(lines)
    assert all(text.endswith(b"\n") and len(text) < size + 8 for text in found)
    assert len(found) > 1 or size > 1000
    if size < 1000:
        path.write_bytes(b"".join([*lines, b"\xff"]))
        assert load(path, limit=100).notes


def test_each_group_is_split(tmp_path: Path) -> None:
    """As much is held out of each, and all are the whole."""
    texts = [f"{i} {'word ' * 20}\n".encode() for i in range(200)]
    path = write(tmp_path / "a.txt", b"<|endoftext|>\n".join(texts))
    groups = list(corpus.Corpus([str(path)], 0.1).groups(5_000))
    assert len(groups) > 3
    found = [x for train, val in groups for x in [*train, *val]]
    assert found[:-2] == texts[:-1]  # the last of a small group is cut in two
    assert b"".join(found) == b"".join(texts)
    for train, val in groups[:-1]:
        assert 5_000 <= sum(map(len, [*train, *val])) < 5_200
        assert 500 <= sum(map(len, val)) <= 750
