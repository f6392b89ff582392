"""Tokens of the study's corpus, and which of them each training step sees.

The corpus is a folder of ``train_*.txt.xz`` and ``val_*.txt.xz`` whose documents are
separated by lines ``<|endoftext|>``. Tokenized once, it is kept as two NumPy files.
"""

import argparse
import concurrent.futures
import dataclasses
import lzma
import os
import pathlib
import tempfile
from collections.abc import Iterator

import numpy as np

SEPARATOR = "\n<|endoftext|>\n"
_ENDS = ("<|endoftext|>", "</s>")


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Token ids as uint16; the validation text is never trained on."""

    train: np.ndarray
    val: np.ndarray


def load(folder: pathlib.Path) -> Tokens:
    """What ``tokenize`` has written."""
    return Tokens(*(np.load(folder / f"{part}.npy") for part in ("train", "val")))


def tokenize(
    corpus: pathlib.Path, tokenizer: pathlib.Path, folder: pathlib.Path, processes: int
) -> None:
    """Write ``train.npy`` and ``val.npy``, unless they are there already.

    Args:
      corpus: folder of the text.
      tokenizer: a ``tokenizer.json`` with fewer than 65,536 entries.
      folder: where the two files go.
      processes: text files that are tokenized at the same time.

    Raises:
      ValueError: the corpus has no file of one part.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # One process for each file; threads within a process would compete for its cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with concurrent.futures.ProcessPoolExecutor(processes) as pool:
        for part in ("train", "val"):
            path = folder / f"{part}.npy"
            if path.exists():
                continue
            texts = sorted(corpus.glob(f"{part}_*.txt*"))
            if not texts:
                raise ValueError(f"{corpus} has no file {part}_*.txt.xz")
            ids = list(pool.map(_encode, texts, [tokenizer] * len(texts)))
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                np.save(file, np.concatenate(ids))
            os.replace(file.name, path)


def _encode(text: pathlib.Path, tokenizer: pathlib.Path) -> np.ndarray:
    """All documents of a file, each with an end token behind it."""
    import tokenizers

    coder = tokenizers.Tokenizer.from_file(str(tokenizer))
    # A separator spelled out inside a document is text like any other.
    coder.encode_special_tokens = True
    ends = (coder.token_to_id(end) for end in _ENDS)
    end = next(i for i in ends if i is not None)
    reader = lzma.open if text.suffix == ".xz" else open
    with reader(text, "rt", encoding="utf-8") as file:
        documents = file.read().removesuffix("\n").split(SEPARATOR)
    ids: list[int] = []
    for document in documents:
        ids += [*coder.encode(document, add_special_tokens=False).ids, end]
    return np.array(ids, np.uint16)


def batches(
    windows: int, batch_size: int, steps: int, seed: int
) -> Iterator[np.ndarray]:
    """Numbers of the windows of each step: all once, in an order by the seed, then all
    once more in another order.

    A shorter run sees the first steps of a longer one.
    """
    if batch_size > windows:
        raise ValueError(f"a batch of {batch_size} from {windows} windows")
    rng = np.random.default_rng(seed)
    order = rng.permutation(windows)
    for _ in range(steps):
        if len(order) < batch_size:
            order = np.concatenate([order, rng.permutation(windows)])
        yield order[:batch_size].astype(np.int32)
        order = order[batch_size:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=pathlib.Path)
    parser.add_argument("tokenizer", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    tokenize(args.corpus, args.tokenizer, args.folder, args.processes)
    found = load(args.folder)
    print(f"{found.train.size:,} training and {found.val.size:,} validation tokens")


if __name__ == "__main__":
    main()
