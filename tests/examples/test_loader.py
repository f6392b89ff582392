"""Tokens and batches: nothing lost, everything deterministic."""

import argparse
import inspect
import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from examples.config import parse
from examples.data import loader
from examples.data import tokens as tok
from examples.data.loader import epoch_order, prefetch
from examples.options import UserError

TEXTS = ["def f(x):\n    return x\n", "caf\u00e9 \u4f60\u597d \U0001f600  \n\n", "a"]
DOCUMENTS = [text.encode() for text in TEXTS]


@pytest.fixture(scope="module")
def bpe() -> tok.SubwordTokenizer:
    return tok.train_bpe([inspect.getsource(argparse).encode()], 400)


def test_bytes_are_tokens() -> None:
    tokenizer = tok.ByteTokenizer()
    ids = tok.stream(tokenizer, DOCUMENTS)
    parts = [bytes(part.astype(np.uint8)) for part in np.split(ids, [0])]
    assert len(parts[1]) == len(ids) == sum(map(len, DOCUMENTS)) + 3
    assert np.flatnonzero(ids == tokenizer.end_id).tolist() == [
        len(DOCUMENTS[0]),
        len(DOCUMENTS[0]) + len(DOCUMENTS[1]) + 1,
        len(ids) - 1,
    ]
    assert bytes(ids[: len(DOCUMENTS[0])].astype(np.uint8)) == DOCUMENTS[0]


def test_bpe_is_shorter(bpe: tok.SubwordTokenizer) -> None:
    assert bpe.vocab_size == 400
    for ids, text in zip(bpe.encode(DOCUMENTS), DOCUMENTS, strict=True):
        assert len(ids) <= len(text)
        assert ids.max() < bpe.vocab_size
    source = inspect.getsource(argparse).encode()
    assert len(bpe.encode([source])[0]) < 0.7 * len(source)


def test_bpe_training_is_deterministic(bpe: tok.SubwordTokenizer) -> None:
    again = tok.train_bpe([inspect.getsource(argparse).encode()], 400)
    for one, two in zip(bpe.encode(DOCUMENTS), again.encode(DOCUMENTS), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_saved_tokenizer_can_be_used_again(
    bpe: tok.SubwordTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    tok.save(bpe, path)
    again = tok.make_tokenizer(str(path), 0, [])
    assert (again.vocab_size, again.end_id) == (bpe.vocab_size, bpe.end_id)
    for one, two in zip(bpe.encode(DOCUMENTS), again.encode(DOCUMENTS), strict=True):
        np.testing.assert_array_equal(one, two)
    # Without a token that ends a document there is one more id.
    stored = json.loads(path.read_text())
    stored["added_tokens"] = []
    path.write_text(json.dumps(stored).replace(tok.END, "<|other|>"))
    other = tok.make_tokenizer(str(path), 0, [])
    assert other.end_id == other.vocab_size - 1 == bpe.vocab_size


def test_tokenizer_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither"):
        tok.make_tokenizer(str(tmp_path / "none.json"), 0, [])
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer.json"):
        tok.make_tokenizer(str(path), 0, [])


def test_an_epoch_visits_every_window_once() -> None:
    batches = loader.TrainBatches(np.arange(8 * 10 + 5), 4, 10, seed=3)
    assert batches.windows == 8
    first, second = (
        np.concatenate([batches.at(step) for step in steps])
        for steps in ((0, 1), (2, 3))
    )
    for epoch in (first, second):
        assert sorted(epoch[:, 0].tolist()) == list(range(0, 80, 10))
        np.testing.assert_array_equal(epoch, epoch[:, :1] + np.arange(11)[None, :])
    assert first[:, 0].tolist() != second[:, 0].tolist()


def test_batches_depend_on_seed_and_step_alone() -> None:
    stream = np.arange(1000)
    one, two = (loader.TrainBatches(stream, 4, 10, seed=3) for _ in range(2))
    np.testing.assert_array_equal(one.at(57), two.at(57))
    other = loader.TrainBatches(stream, 4, 10, seed=4)
    assert not np.array_equal(one.at(57), other.at(57))


def test_a_host_reads_its_rows_of_the_same_batch() -> None:
    batches = loader.TrainBatches(np.arange(10 * 10 + 1), 8, 10, seed=3)
    for step in (0, 1, 7):  # the second batch goes over into the next epoch
        whole = batches.at(step)
        parts = [batches.at(step, slice(i, i + 2)) for i in range(0, 8, 2)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_the_order_looks_shuffled() -> None:
    size = 20_000
    order = epoch_order(size, 0, 0)
    np.testing.assert_array_equal(np.sort(order), np.arange(size))
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.03
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    # Every block of the order draws from all of the range alike (chi-squared, 90 d.f.).
    counts = np.histogram2d(np.arange(size), order, bins=10)[0]
    assert ((counts - size / 100) ** 2 / (size / 100)).sum() < 140
    # Few places stay, and few neighbours stay neighbours, as chance has it (1 and 2).
    assert (order == np.arange(size)).sum() < 8
    assert (np.abs(np.diff(order)) == 1).sum() < 12
    for other in (epoch_order(size, 0, 1), epoch_order(size, 1, 0)):
        assert (order == other).sum() < 8


def pcg64(state: int, increment: int, count: int) -> Iterator[int]:
    """XSL RR 128/64 in Python's integers (M. O'Neill, 2014, section 6.3.3)."""
    for _ in range(count):
        state = (state * 0x2360ED051FC65DA44385DF649FCCF645 + increment) % 2**128
        word, turn = (state >> 64 ^ state) % 2**64, state >> 122
        yield (word >> turn | word << 64 - turn) % 2**64


def test_the_order_is_that_of_a_published_generator() -> None:
    """So that a run can be continued with another version of NumPy."""
    start = np.random.PCG64([5, 2]).state["state"]
    words = list(pcg64(start["state"], start["inc"], 300))
    expected = sorted(range(300), key=words.__getitem__)
    assert epoch_order(300, 5, 2).tolist() == expected


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_separator_inside_a_document_is_text(name: str) -> None:
    tokenizer = tok.make_tokenizer(name, 300, DOCUMENTS)
    text = f"one {tok.END} two"
    (ids,) = tokenizer.encode([text.encode()])
    assert tokenizer.end_id not in ids
    assert tokenizer.decode([*ids, tokenizer.end_id]) == text


def test_prefetch_keeps_order_and_bound() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for i in range(20):
            made.append(i)
            yield i

    batches = prefetch(items(), depth=3)
    assert next(batches) == 0
    time.sleep(0.2)
    assert len(made) <= 1 + 3 + 1
    assert list(batches) == list(range(1, 20))
    assert list(batches) == []


def test_prefetch_raises_in_the_consumer_and_closes() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("no such shard")

    before = threading.active_count()
    batches = prefetch(items())
    assert next(batches) == 1
    with pytest.raises(OSError, match="no such shard"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    endless = prefetch(itertools.count(), depth=2)
    assert next(endless) == 0
    endless.close()
    assert threading.active_count() == before


def test_eval_batches_cover_the_text() -> None:
    stream = np.arange(101)
    everything = loader.eval_batches(stream, 4, 10, 0)
    rows = np.concatenate([rows[weight > 0] for rows, weight in everything])
    np.testing.assert_array_equal(rows[:, 0], np.arange(0, 100, 10))
    assert [weight.sum() for _, weight in everything] == [4, 4, 2]
    assert {rows.shape for rows, _ in everything} == {(4, 11)}
    some = loader.eval_batches(stream, 4, 10, 30)
    assert [rows[0] for rows in some[0][0]][:3] == [0, 30, 60]
    assert [weight.sum() for _, weight in some] == [3]


@pytest.mark.parametrize("length", [0, 5, 60])
def test_a_text_shorter_than_one_batch(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * max(1, length))
    options = ["--data", str(path), "--seq-len", "16", "--batch-size", "4"]
    with pytest.raises(UserError, match="tokens, one (batch|sequence) needs"):
        loader.load(parse(options))


def test_another_tokenizer_has_another_digest(tmp_path: Path, text_path: Path) -> None:
    """Of the same size, and the same text: only the ids tell. Runs go on by it."""
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    text = text_path.read_bytes()
    for path, part in ((one, text[:20_000]), (two, text[-20_000:])):
        tok.save(tok.train_bpe([part], 300), path)

    def digest(path: Path) -> str:
        options = ["--data", str(text_path), "--seq-len", "32", "--batch-size", "4"]
        return loader.load(parse([*options, "--tokenizer", str(path)])).about["digest"]

    before = digest(one)
    # Another layout of the same file is the same tokenizer.
    one.write_text(json.dumps(json.loads(one.read_text())))
    assert digest(one) == before != digest(two)
