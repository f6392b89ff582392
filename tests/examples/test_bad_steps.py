"""Steps that are not finite change nothing, and what is saved beside them is good."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from examples import step
from examples.config import parse
from examples.data import loader
from examples.files import read_metrics
from examples.pretrain import main


def steps(folder: Path) -> list[str]:
    """Those of the checkpoints of a run."""
    return sorted(path.name for path in (folder / "checkpoints" / "muon2").iterdir())


@pytest.fixture
def poison(
    checkpointed: list[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], None]:
    """Makes the gradient of the batch of one step not finite."""

    def of_step(number: int) -> None:
        averaged = step._averaged_gradients

        def poisoned(loss_fn: Any, params: Any, tokens_BxM: Any, parts: int) -> Any:
            losses, grads = averaged(loss_fn, params, tokens_BxM, parts)
            bad = (tokens_BxM == bad_row[None]).all(axis=1).any()
            return losses, jax.tree.map(lambda g: jnp.where(bad, jnp.nan, g), grads)

        bad_row = loader.load(parse(checkpointed)).train.at(number - 1)[2]
        monkeypatch.setattr(step, "_averaged_gradients", poisoned)

    return of_step


def test_a_failing_step_is_skipped_counted_and_shown(
    checkpointed: list[str],
    tmp_path: Path,
    poison: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One batch whose gradient is not finite; its neighbours train as ever."""
    poison(5)
    assert main([*checkpointed, "--steps", "8", "--out", str(tmp_path / "run")]) == 0
    assert "muon2: step 5 skipped" in capsys.readouterr().out
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    (skipped,) = (r for r in records if r["kind"] == "skipped")
    assert (skipped["step"], skipped["in_a_row"]) == (5, 1)
    train = [r for r in records if r["kind"] == "train"]
    assert [r["grad_norm"] is None for r in train] == [r["step"] == 5 for r in train]
    assert train[-1]["loss"] < train[0]["loss"]
    assert [r["skipped"] for r in train] == [0] * 4 + [1] * 4


def test_a_checkpoint_that_is_due_at_a_failing_step_is_made_at_the_next(
    checkpointed: list[str], tmp_path: Path, poison: Callable[[int], None]
) -> None:
    poison(3)
    options = ["--steps", "7", "--save-every", "3", "--save-minutes", "0"]
    assert main([*checkpointed, *options, "--out", str(tmp_path / "run")]) == 0
    assert steps(tmp_path / "run") == ["4", "6", "7"]


def test_the_best_of_a_failing_step_is_kept(
    checkpointed: list[str], tmp_path: Path, poison: Callable[[int], None]
) -> None:
    """The state is that of the step before, and its validation loss the lowest."""
    poison(4)
    options = ["--steps", "8", "--save-every", "0", "--save-minutes", "0"]
    options += ["--keep", "1", "--keep-best", "--eval-every", "4"]
    options += ["--warmup-steps", "8"]
    options += ["--learning-rate", "1e-9", "--adam-learning-rate", "0.3"]
    assert main([*checkpointed, *options, "--out", str(tmp_path / "run")]) == 0
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    evals = [record for record in records if record["kind"] == "eval"]
    assert min(evals, key=lambda record: record["loss"])["step"] == 4
    assert steps(tmp_path / "run") == ["4", "8"]
