"""Reading text: every form, the split, and an error for all that cannot be read."""

import gzip
import json
import lzma
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from examples.config import DataConfig, parse
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


def load(*paths: Path, **options: Any) -> corpus.Corpus:
    return corpus.load(DataConfig(data=tuple(map(str, paths)), **options))


def size(text: corpus.Corpus) -> int:
    return sum(map(len, [*text.train, *text.val]))


@pytest.mark.parametrize("suffix", texts.SUFFIXES)
def test_every_form_gives_the_same_documents(tmp_path: Path, suffix: str) -> None:
    content = LINES if "jsonl" in suffix else JOINED
    path = write(tmp_path / f"text{suffix}", content)
    assert list(texts.Reader().documents([path])) == [
        text.encode() for text in DOCUMENTS
    ]


@pytest.mark.parametrize(("suffix", "pack"), [("xz", lzma), ("gz", gzip)])
def test_all_streams_of_a_file_are_read(
    tmp_path: Path, suffix: str, pack: ModuleType
) -> None:
    path = tmp_path / f"a.txt.{suffix}"
    path.write_bytes(pack.compress(b"one ") + bytes(8) + pack.compress(b"two"))
    assert list(texts.Reader().documents([path])) == [b"one two"]


GOOD_XZ = lzma.compress(b"line\n" * 10_000)
GOOD_GZ = gzip.compress(b"line\n" * 10_000)


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("a.txt.xz", b"this is not xz", "corrupt or truncated xz"),
        ("a.txt.xz", b"", "corrupt or truncated xz"),
        ("a.txt.xz", GOOD_XZ[:-20], "corrupt or truncated xz"),
        ("a.txt.xz", GOOD_XZ[:60] + b"!" + GOOD_XZ[61:], "corrupt or truncated xz"),
        ("a.txt.xz", GOOD_XZ + b"rest", "after line 10000: corrupt or truncated xz"),
        ("a.txt.gz", b"this is not gzip", "corrupt or truncated gz"),
        ("a.txt.gz", GOOD_GZ[:-6], "corrupt or truncated gz"),
        ("a.txt.gz", GOOD_GZ[:-8] + bytes(8), "corrupt or truncated gz"),
        ("a.txt.gz", GOOD_GZ + b"rest", "after line 10000: corrupt or truncated gz"),
        (
            "a.txt",
            b"fine\nbroken \xff\n",
            "line 2: invalid UTF-8 (byte 0xff at column 8",
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
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: lone surrogate"),
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
    assert any("in part" in note for note in text.notes)


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
    notes = "; ".join(text.notes)
    assert "README.md" in notes


def test_max_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", JOINED)
    text = load(path, max_bytes=300)
    # Lines between documents count as well, and a character that is cut goes.
    assert 300 - 7 * len("<|endoftext|>\n") <= size(text) <= 300
    assert b"".join([*text.train, *text.val]).decode()
    assert any("--max-bytes 300" in note for note in text.notes)
    everything = load(path, max_bytes=0)
    assert size(everything) == sum(len(text.encode()) for text in DOCUMENTS)


def test_the_digest_names_text_and_split(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", JOINED)
    options = ["--seq-len", "16", "--batch-size", "2", "--data", str(path)]
    digests = [
        loader.load(parse([*options, *more])).about["digest"]
        for more in ([], [], ["--val-fraction", "0.3"])
    ]
    assert digests[0] == digests[1] != digests[2]


def test_installed_sources_are_deterministic_and_split_by_file() -> None:
    config = DataConfig(max_bytes=300_000)
    first, second = corpus.load(config), corpus.load(config)
    assert (first.train, first.val) == (second.train, second.val)
    assert size(first) > 290_000
    assert not set(first.train) & set(first.val)
    files = list(corpus.source_files())
    assert len(files) == len(set(files)) > 100


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
    assert list(texts.Reader().documents([path])) == [
        text.encode() for text in DOCUMENTS
    ]


def test_an_empty_validation_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train.txt", JOINED)
    write(tmp_path / "val.txt", b"\n")
    with pytest.raises(UserError, match=r"val\.txt: no text in it; files named val\*"):
        load(tmp_path)
    write(tmp_path / "val.txt", DOCUMENTS[0].encode())
    write(tmp_path / "train.txt", DOCUMENTS[0].encode())
    with pytest.raises(UserError, match="no training text in it, beside"):
        load(tmp_path)


def test_one_huge_line_is_read_in_linear_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_CHUNK", 1 << 10)
    line = b"0123456789abcdef" * (1 << 20)
    path = write(tmp_path / "a.txt", line + b"\nnext\n")
    begin = time.process_time()
    assert list(texts.Reader().documents([path])) == [line + b"\nnext\n"]
    assert time.process_time() - begin < 3  # copying all at every chunk takes minutes


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("limit", [3, 20, 95, 400, 100_000])
def test_a_limit_cuts_between_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, limit: int
) -> None:
    """However the file is read: the first bytes, less a character that is broken."""
    monkeypatch.setattr(texts, "_CHUNK", chunk)
    whole = ("\u00e9" * 30, "ab\n" + "\U0001f600" * 20, "x" + "\u00e9" * 3_000)
    one = write(tmp_path / "1.txt", whole[0].encode())
    two = write(tmp_path / "2.txt", "\n<|endoftext|>\n".join(whole[1:]).encode())
    reader = texts.Reader(limit=limit)
    found = list(reader.documents([one, two]))
    raw = b"".join([one.read_bytes(), two.read_bytes()])
    text = raw[:limit].decode(errors="ignore")
    separated = text[30:].replace("\n<|endoftext|>\n", "\n|").split("|")
    expected = [t.encode() for t in (text[:30], *separated) if t.strip()]
    assert found == expected
    assert reader.is_cut == (len(raw) > limit)


def test_max_bytes_does_not_read_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"x" * (3 << 20) + b"\xff")
    text = load(path, max_bytes=1000)
    assert size(text) == 1000
