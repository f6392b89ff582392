"""Real text and tiny options shared by the tests of the trainer."""

import argparse
import inspect
import pathlib

import pytest

# A model and a length that train in about a second; tests add what they are about.
TINY = (
    *("--dim", "32", "--layers", "1", "--heads", "2", "--hidden", "64"),
    *("--seq-len", "32", "--batch-size", "4", "--eval-tokens", "512"),
    *("--mesh", "data=1"),
)


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    """Options of a tiny run."""
    return list(TINY)


@pytest.fixture(scope="session")
def text_path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """About 100 kB of Python source as documents of one text file."""
    documents = [inspect.getsource(module) for module in (argparse, pathlib)]
    path = tmp_path_factory.mktemp("text") / "sources.txt"
    path.write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    return path
