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


@pytest.fixture(scope="session")
def checkpointed(text_path: pathlib.Path, tiny: list[str]) -> list[str]:
    """Options of a tiny run with a checkpoint every four steps, that can go on."""
    options = [*tiny, "--batch-size", "8", "--data", str(text_path), "--log-every", "1"]
    options += ["--optimizer", "muon2", "--save-every", "4", "--eval-every", "4"]
    return [*options, "--keep", "3", "--warmup-steps", "2", "--resume", "auto"]
