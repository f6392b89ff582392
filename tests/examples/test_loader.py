"""Tokens and batches: nothing lost, everything deterministic."""

import argparse
import inspect
import json
from pathlib import Path

import numpy as np
import pytest

from examples.config import parse
from examples.data import loader
from examples.data import tokens as tok
from examples.data.config import DataConfig
from examples.flags import UserError

TEXTS = ["def f(x):\n    return x\n", "caf\u00e9 \u4f60\u597d \U0001f600  \n\n", "a"]
DOCUMENTS = [text.encode() for text in TEXTS]


@pytest.fixture(scope="module")
def bpe() -> tok.SubwordTokenizer:
    return tok.train_bpe([inspect.getsource(argparse).encode()], 400)


def test_bytes_are_tokens() -> None:
    tokenizer = tok.ByteTokenizer()
    ids = tok.stream(tokenizer.encode(DOCUMENTS), tokenizer.end_id, np.uint16)
    parts = [bytes(part.astype(np.uint8)) for part in np.split(ids, [0])]
    assert len(parts[1]) == len(ids) == sum(map(len, DOCUMENTS)) + 3
    assert np.flatnonzero(ids == tokenizer.end_id).tolist() == [
        len(DOCUMENTS[0]),
        len(DOCUMENTS[0]) + len(DOCUMENTS[1]) + 1,
        len(ids) - 1,
    ]
    assert bytes(ids[: len(DOCUMENTS[0])].astype(np.uint8)) == DOCUMENTS[0]


def test_bpe_is_shorter_and_counts_every_byte_once(bpe: tok.SubwordTokenizer) -> None:
    assert bpe.vocab_size == 400
    for ids, counts, text in zip(
        bpe.encode(DOCUMENTS), bpe.byte_counts(DOCUMENTS), DOCUMENTS, strict=True
    ):
        assert len(ids) == len(counts) <= len(text)
        assert counts.sum() == len(text)
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
    bpe.save(path)
    again = tok.make_tokenizer(DataConfig(tokenizer=str(path)), [])
    assert (again.vocab_size, again.end_id) == (bpe.vocab_size, bpe.end_id)
    for one, two in zip(bpe.encode(DOCUMENTS), again.encode(DOCUMENTS), strict=True):
        np.testing.assert_array_equal(one, two)
    # Without a token that ends a document there is one more id.
    stored = json.loads(path.read_text())
    stored["added_tokens"] = []
    path.write_text(json.dumps(stored).replace(tok.END, "<|other|>"))
    other = tok.make_tokenizer(DataConfig(tokenizer=str(path)), [])
    assert other.end_id == other.vocab_size - 1 == bpe.vocab_size


def test_tokenizer_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither"):
        tok.make_tokenizer(DataConfig(tokenizer=str(tmp_path / "none.json")), [])
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer.json"):
        tok.make_tokenizer(DataConfig(tokenizer=str(path)), [])


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


def test_eval_batches_cover_the_text() -> None:
    stream, counts = np.arange(101), np.arange(101) % 3
    everything = loader.eval_batches(stream, counts, 4, 10, 0)
    rows = np.concatenate([rows[weight > 0] for rows, weight in everything.batches])
    np.testing.assert_array_equal(rows[:, 0], np.arange(0, 100, 10))
    assert [weight.sum() for _, weight in everything.batches] == [4, 4, 2]
    assert {rows.shape for rows, _ in everything.batches} == {(4, 11)}
    assert everything.tokens == 100
    assert everything.bytes == counts[1:].sum()
    some = loader.eval_batches(stream, counts, 4, 10, 30)
    assert [rows[0] for rows in some.batches[0][0]][:3] == [0, 30, 60]
    assert some.tokens == 30


@pytest.mark.parametrize("length", [0, 5, 60])
def test_a_text_shorter_than_one_batch(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * max(1, length))
    options = ["--data", str(path), "--seq-len", "16", "--batch-size", "4"]
    with pytest.raises(UserError, match="tokens, one (batch|sequence) needs"):
        loader.load(parse(options))
