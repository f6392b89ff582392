"""Whole runs of the trainer on real text."""

import contextlib
import dataclasses
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import muon2_optax as m2
from benchmarks import plot
from examples import optim, report, setup
from examples import train as training
from examples.checkpoint import load_params
from examples.config import parse
from examples.files import read_metrics
from examples.options import UserError
from examples.pretrain import main
from examples.runs import claimed

Records = list[dict]
NAMES = ("adamw", "muon2", "muon2_f")


def of_kind(folder: Path, kind: str) -> Records:
    records = read_metrics(folder / "metrics.jsonl")
    return [record for record in records if record["kind"] == kind]


@pytest.fixture(scope="module")
def full_run(
    tmp_path_factory: pytest.TempPathFactory,
    text_path: Path,
    tiny: list[str],
) -> Path:
    """Three optimizers for 30 steps on the same text."""
    folder = tmp_path_factory.mktemp("run")
    argv = [*tiny, "--data", str(text_path), "--out", str(folder), "--steps", "30"]
    argv += ["--optimizer", ",".join(NAMES), "--eval-every", "10", "--warmup-steps"]
    assert main([*argv, "3", "--log-every", "1"]) == 0
    return folder


@pytest.mark.slow
def test_every_optimizer_trains(
    text_path: Path, tiny: list[str], tmp_path: Path
) -> None:
    argv = [*tiny, "--data", str(text_path), "--out", str(tmp_path / "run")]
    argv += ["--steps", "30", "--optimizer", "all", "--warmup-steps", "3"]
    assert main([*argv, "--log-every", "1"]) == 0
    for name in ("adamw", *m2.REGISTRY):
        records = of_kind(tmp_path / "run", "train")
        losses = [r["loss"] for r in records if r["optimizer"] == name]
        assert len(losses) == 30 and sum(losses[-5:]) / 5 < losses[0] - 1.5


@pytest.mark.parametrize("name", NAMES)
def test_loss_falls(full_run: Path, name: str) -> None:
    losses = [r["loss"] for r in of_kind(full_run, "train") if r["optimizer"] == name]
    assert len(losses) == 30
    assert abs(losses[0] - math.log(257)) < 0.2
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5
    evals = [r["loss"] for r in of_kind(full_run, "eval") if r["optimizer"] == name]
    assert len(evals) == 3
    assert evals[-1] < evals[0]


def test_all_start_from_the_same_model_and_batch(full_run: Path) -> None:
    first = {r["loss"] for r in of_kind(full_run, "train") if r["step"] == 1}
    assert len(first) == 1


def test_records(full_run: Path) -> None:
    (run,) = of_kind(full_run, "run")
    assert run["config"]["run"]["steps"] == 30
    assert run["text"]["train"]["documents"] >= 1
    results = of_kind(full_run, "result")
    assert [r["optimizer"] for r in results] == [*NAMES]
    for result in results:
        assert math.isclose(result["perplexity"], math.exp(result["val_loss"]))
        # Nearly every token is one byte.
        bits = result["val_loss"] / math.log(2)
        assert math.isclose(result["bits_per_byte"], bits, rel_tol=0.01)
        assert 0 < result["tokens_per_second"]
        assert 0 < result["compile_seconds"] < result["seconds"]
    assert "embed/embedding" in (full_run / "parameters.txt").read_text()


def test_plot(full_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plot.curves(full_run / "metrics.jsonl")
    assert list(found) == [*NAMES]
    train, evals = found["muon2"]["train"], found["muon2"]["eval"]
    assert train[-1]["tokens"] == evals[-1]["tokens"] == 30 * 4 * 32
    assert len(train) == 30
    seconds = [record["seconds"] for record in train]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert plot.main([str(full_run)]) == 0
    assert (full_run / "loss.png").read_bytes().startswith(b"\x89PNG")
    before = (full_run / "loss.png").stat().st_mtime_ns
    monkeypatch.chdir(tmp_path)
    assert plot.main([str(full_run), str(full_run)]) == 0
    assert Path("comparison.png").stat().st_size > 1000
    assert (full_run / "loss.png").stat().st_mtime_ns == before
    target = tmp_path / "all.png"
    assert plot.main([str(full_run), "--out", str(target)]) == 0
    assert target.stat().st_size > 1000
    assert plot.smoothed([1.0, 3.0, 5.0, 1.0], 2) == [1.0, 2.0, 4.0, 3.0]
    with pytest.raises(UserError, match="metrics.jsonl"):
        plot.collect([tmp_path])


def test_an_earlier_run_is_never_overwritten(
    full_run: Path, text_path: Path, tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (full_run / "metrics.jsonl").read_bytes()
    argv = [*tiny, "--data", str(text_path), "--out", str(full_run), "--steps", "2"]
    assert main(argv) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (full_run / "metrics.jsonl").read_bytes() == before
    blocked = [*argv[:-3], str(full_run / "metrics.jsonl"), "--steps", "2"]
    assert main(blocked) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_same_command_gives_the_same_losses(
    full_run: Path, text_path: Path, tiny: list[str], tmp_path: Path
) -> None:
    argv = [*tiny, "--data", str(text_path), "--out", str(tmp_path / "run")]
    argv += ["--steps", "30", "--eval-every", "10", "--warmup-steps", "3"]
    assert main([*argv, "--optimizer", "muon2_f", "--log-every", "1"]) == 0
    for kind in ("train", "eval"):
        first = [r for r in of_kind(full_run, kind) if r["optimizer"] == "muon2_f"]
        again = of_kind(tmp_path / "run", kind)
        assert [r["loss"] for r in first] == [r["loss"] for r in again]


@pytest.mark.slow
def test_bpe_and_bfloat16_and_the_default_folder(
    text_path: Path,
    tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = [*tiny, "--data", str(text_path), "--optimizer", "muon2", "--steps", "15"]
    argv += ["--tokenizer", "bpe", "--vocab-size", "300", "--dtype", "bfloat16"]
    assert main([*argv, "--log-every", "1", "--warmup-steps", "2"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    losses = [r["loss"] for r in of_kind(run, "train")]
    assert losses[-1] < losses[0] - 0.3
    out = capsys.readouterr().out
    assert f"python -m benchmarks.plot {Path('runs', run.name)}\n" in out
    assert "\x1b" not in out  # no colours or cursor movements outside a terminal
    # Tokens are longer than a byte, so bits per byte are fewer than bits per token.
    (result,) = of_kind(run, "result")
    assert result["bits_per_byte"] < 0.95 * result["val_loss"] / math.log(2)
    stored = json.loads((run / "tokenizer.json").read_text())
    assert stored["model"]["type"] == "BPE"


def test_the_default_folder_is_new_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as stack:
        entered = (stack.enter_context(claimed(parse([]))) for _ in range(3))
        names = [folder.name for folder in entered]
    assert names == ["1", "2", "3"]


def test_a_run_that_diverges_stops_and_says_so(
    text_path: Path, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*tiny, "--data", str(text_path), "--out", str(tmp_path / "run")]
    argv += ["--optimizer", "adamw", "--learning-rate", "1e30", "--steps", "20"]
    assert main([*argv, "--max-bad-steps", "4", "--log-every", "1"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "adamw: 4 steps in a row" in err and "the first of them step 1" in err
    (stopped,) = of_kind(tmp_path / "run", "stopped")
    assert stopped["reason"] in err
    skipped = of_kind(tmp_path / "run", "skipped")
    assert [r["in_a_row"] for r in skipped] == [1, 2, 3, 4]
    params, _, _ = load_params(tmp_path / "run")  # the untouched model is kept
    assert np.isfinite(params["lm_head"]["kernel"]).all()


def test_a_ruined_model_takes_the_place_of_no_good_one(
    text_path: Path,
    tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Update 5 is not finite; its gradient is, and so are the steps before.

    Nothing of it reaches the model: the state of step 4 is what is saved at the end.
    """
    plans = optim.plans

    def ruining(*args: Any, **kwargs: Any) -> list[optim.Plan]:
        ruin = optax.scale_by_schedule(lambda n: jnp.where(n >= 4, jnp.inf, 1.0))
        return [
            dataclasses.replace(plan, transform=optax.chain(plan.transform, ruin))
            for plan in plans(*args, **kwargs)
        ]

    monkeypatch.setattr(optim, "plans", ruining)
    argv = [*tiny, "--data", str(text_path), "--out", str(tmp_path / "run")]
    argv += ["--optimizer", "adamw", "--steps", "20", "--save-every", "1"]
    assert main([*argv, "--max-bad-steps", "4", "--keep", "1"]) == 1
    monkeypatch.undo()
    (kept,) = (tmp_path / "run" / "checkpoints" / "adamw").iterdir()
    assert kept.name == "8"
    err = capsys.readouterr().err
    assert "the first of them step 5" in err and "the last checkpoint is 8" in err
    assert err.count("\n") == 1
    params, _, _ = load_params(tmp_path / "run")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


@pytest.mark.slow
def test_accumulation_and_chunks_and_a_mesh_change_nothing(
    full_run: Path, text_path: Path, tiny: list[str], tmp_path: Path
) -> None:
    """The same losses as in one piece on one device, but for rounding."""
    whole = [r for r in of_kind(full_run, "train") if r["optimizer"] == "muon2"][:8]
    argv = [*tiny, "--data", str(text_path), "--optimizer", "muon2", "--steps", "30"]
    argv += ["--warmup-steps", "3", "--log-every", "1", "--out", str(tmp_path / "run")]
    argv += ["--accumulate", "2", "--loss-chunks", "4", "--mesh", "fsdp=2"]
    assert main(argv) == 0
    parts = of_kind(tmp_path / "run", "train")[:8]
    np.testing.assert_allclose(
        [r["loss"] for r in parts], [r["loss"] for r in whole], rtol=1e-4
    )
    assert whole[3]["loss"] < whole[0]["loss"] - 0.02


@pytest.mark.slow
def test_mixture_of_experts_with_everything_on(
    text_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", "moe_tiny", "--dim", "32", "--layers", "1", "--heads", "2"]
    argv += ["--hidden", "32", "--experts", "4", "--seq-len", "32", "--batch-size", "4"]
    argv += ["--data", str(text_path), "--optimizer", "normuon", "--steps", "12"]
    argv += ["--schedule", "wsd", "--log-every"]
    argv += ["1", "--weight-decay", "0.1", "--adam-weight-decay", "0.1"]
    argv += ["--shape-scale", "match_rms", "--eval-tokens", "256", "--warmup-steps"]
    argv += ["2", "--mesh", "expert=2", "--out", str(tmp_path / "run")]
    assert main(argv) == 0
    train = of_kind(tmp_path / "run", "train")
    assert train[-1]["loss"] < train[0]["loss"]
    assert all(record["balance_loss"] > 0 for record in train)
    assert "active" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--mesh", "fsdp=3"], "cannot be divided"),
        (["--mesh", "fsdp=64"], "takes 64 devices"),
        (["--mesh", "rows=2"], "no axis"),
        (["--accumulate", "3"], "does not divide"),
        (["--loss-chunks", "5"], "--loss-chunks"),
    ],
)
def test_bad_divisions(
    more: list[str],
    said: str,
    text_path: Path,
    tiny: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = [*tiny, "--data", str(text_path), "--out", str(tmp_path / "run"), *more]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_lines_of_progress(
    text_path: Path,
    tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(report, "_LINE_SECONDS", 0.0)
    argv = [*tiny, "--data", str(text_path), "--optimizer", "muon2", "--steps", "4"]
    assert main([*argv, "--log-every", "1", "--out", str(tmp_path / "run")]) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if "muon2 step" in x]
    # Compiling, every logged step, and the validation.
    assert "compiling" in lines[0] and "eta" not in lines[0]
    assert "step 1/4" in lines[1] and "tok/s" in lines[1]
    assert "step 3/4" in lines[3] and "eta 0:0" in lines[3]
    assert "val loss" in lines[-1] and len(lines) == 6


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_another(
    full_run: Path, text_path: Path, tiny: list[str], tmp_path: Path
) -> None:
    """With the optimizer's state, too, if that is wanted; schedules begin anew."""
    argv = [*tiny, "--data", str(text_path), "--optimizer", "muon2", "--seed", "7"]
    argv += ["--steps", "3", "--log-every", "1", "--init-from", str(full_run)]
    first = {}
    for name, more in (("bare", []), ("warm", ["--init-optimizer"])):
        out = tmp_path / name
        assert main([*argv, *more, "--warmup-steps", "1", "--out", str(out)]) == 0
        records = of_kind(out, "train")
        first[name] = [r["loss"] for r in records]
        half = optim.TINY_RATES["muon2"] / 2  # the warm-up begins anew
        assert records[0]["learning_rate"] == pytest.approx(half)
    done = [r for r in of_kind(full_run, "train") if r["optimizer"] == "muon2"]
    # Other batches, so not the loss of the last step, but nearer to it than the first.
    between = (done[0]["loss"] + done[-1]["loss"]) / 2
    assert first["bare"][0] == first["warm"][0] < between
    assert first["bare"][1:] != first["warm"][1:]
    assert main([*argv, "--dim", "64", "--out", str(tmp_path / "wide")]) == 2


def test_the_best_checkpoint_is_kept_and_the_model_looked_at(
    text_path: Path,
    tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    losses = iter([3.0, 1.0, 2.0, 2.5])  # the best is that of step 4
    monkeypatch.setattr(setup.Setup, "evaluate", lambda *_: (next(losses, 2.0), 1.0))
    argv = [*tiny, "--data", str(text_path), "--optimizer", "adamw", "--steps", "8"]
    argv += ["--eval-every", "2", "--keep", "1", "--keep-best"]
    argv += ["--sample-prompt", "def "]
    assert main([*argv, "--out", str(tmp_path / "run")]) == 0
    kept = {p.name for p in (tmp_path / "run" / "checkpoints" / "adamw").iterdir()}
    assert kept == {"4", "8"}
    best, last = (
        load_params(tmp_path / "run", step=step)[0]["final_norm"]["scale"]
        for step in ("best", None)
    )
    assert (best != last).any()
    out = capsys.readouterr().out
    samples = of_kind(tmp_path / "run", "sample")
    assert out.count("'def ") == 4 and all("def " in r["text"] for r in samples)
    assert [r["step"] for r in samples] == [2, 4, 6, 8]
    # The closing table, too, fits into 80 columns.
    lines = out.split("metrics:")[0].splitlines()
    (row,) = [line for line in lines if "coeffs" in line]
    table = lines[lines.index(row) :]
    assert "skipped" in row and row.rstrip().endswith(" s")
    assert "\u2026" not in out and max(map(len, table)) <= 80


@pytest.mark.parametrize("kind", ["device", "host"])
def test_full_memory_is_one_line_of_advice(
    kind: str,
    text_path: Path,
    tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = {
        "device": jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB\nmore\nlines"),
        "host": MemoryError("9 GiB"),
    }[kind]

    def fails(*_: Any) -> None:
        raise full

    monkeypatch.setattr(training, "Training", fails)
    argv = [*tiny, "--data", str(text_path), "--out", str(tmp_path / "run")]
    assert main([*argv, "--optimizer", "adamw", "--steps", "2"]) == 1
    err = capsys.readouterr().err
    assert "out of memory" in err and "--accumulate" in err and "--remat full" in err
    assert "9 GiB" in err and err.count("\n") == 1


def test_signals_are_remembered_and_ignored_ones_stay_so() -> None:
    # Whoever started the tests may have them ignored.
    numbers = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
    first = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    for number in numbers:
        with training.signals() as received:
            assert received() == 0
            os.kill(os.getpid(), number)
            assert received() == number
            with pytest.raises(KeyboardInterrupt):  # a second one does not wait
                os.kill(os.getpid(), number)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with training.signals() as received:
        os.kill(os.getpid(), signal.SIGHUP)
        assert received() == 0
    for number, handler in first.items():
        signal.signal(number, handler)
