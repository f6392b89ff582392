"""A sweep runs every combination once and sums them up."""

import json
from pathlib import Path

import pytest

from benchmarks import plot, sweep


@pytest.mark.slow
def test_a_sweep_and_its_continuation(
    text_path: Path,
    tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    grid = ["--set", "learning_rate=0.01,0.04", "--set", "optimizer=adamw,muon"]
    common = ["--", *tiny, "--data", str(text_path), "--steps", "6", "--log-every", "2"]
    argv = [*grid, "--out", str(tmp_path / "sweep"), *common]

    calls: list[str] = []
    run = sweep._run

    def counted(folder: Path, argv: list[str]) -> int:
        calls.append(folder.name)
        if len(calls) == 3:  # a signal in the third run
            return 143
        return run(folder, argv)

    monkeypatch.setattr(sweep, "_run", counted)
    assert sweep.main(argv) == 143
    assert sweep.main(argv) == 0
    assert len(calls) == 5 and len(set(calls)) == 4
    summary = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert summary["varied"] == "learning_rate"
    losses = {(r["row"], r["column"]): r["mean"] for r in summary["cells"]}
    assert set(losses) == {(r, o) for r in (0.01, 0.04) for o in ("adamw", "muon")}
    assert losses[0.01, "muon"] != losses[0.04, "muon"]
    shown = capsys.readouterr().out
    assert f"{losses[0.04, 'muon']:.4f}" in shown and "learning_rate" in shown
    # Finished runs are no answer to a question with other options.
    for more, said in (
        (["--clip-norm", "0.5"], "--clip-norm was 1.0, now 0.5"),
        (["--eval-tokens", "256"], "--eval-tokens was 512, now 256"),
        (["--steps", "5"], "--steps was 6, now 5"),
    ):
        assert sweep.main([*argv, *more]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1
    assert len(calls) == 5
    assert plot.main([str(tmp_path / "sweep")]) == 0
    assert (tmp_path / "sweep" / "sweep.png").stat().st_size > 1000


def test_a_diverging_run_is_a_dash_and_the_others_go_on(
    text_path: Path,
    tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["--set", "learning-rate=1e30,0.01", "--out", str(tmp_path), "--", *tiny]
    argv += ["--data", str(text_path), "--steps", "8", "--optimizer", "adamw"]
    assert sweep.main([*argv, "--max-bad-steps", "2"]) == 1
    summary = json.loads((tmp_path / "sweep.json").read_text())
    assert [cell["mean"] is None for cell in summary["cells"]] == [True, False]
    assert "1e+30" in capsys.readouterr().out
    # It would diverge again: it is not run again.
    monkeypatch.setattr(sweep, "_run", None)
    assert sweep.main([*argv, "--max-bad-steps", "2"]) == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--set"),
        (["--set", "no_such=1"], "no option 'no_such'"),
        (["--set", "steps="], "no values"),
        (["--set", "b2=0.8", "--set", "b2=0.9"], "b2 is given twice"),
        (["--set", "out=a,b"], "no option 'out'"),
        (["--set", "steps=5,many"], "many"),
        (["--set", "optimizer=muon,sgd9"], "sgd9"),
    ],
)
def test_bad_sweeps_end_before_the_first_run(
    argv: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.main([*argv, "--out", str(tmp_path / "sweep")]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
    assert not (tmp_path / "sweep").exists()


def test_flags_and_folders() -> None:
    setting = {"nesterov": "true", "optimizer": "muon+muon2", "mesh": "fsdp=2"}
    assert sweep._flags(setting) == [
        *("--nesterov", "--optimizer", "muon,muon2", "--mesh", "fsdp=2")
    ]
    assert sweep._flags({"nesterov": "false"}) == ["--no-nesterov"]
    assert "/" not in sweep.folder_name({"data": "a/b"})


def test_seeds_of_a_setting_are_one_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = {"seed": ["0", "1", "2"], "learning_rate": ["0.1", "0.2"]}
    losses = {"0.1": [1.0, 2.0, 4.5], "0.2": [3.0, 3.0, None]}
    for setting in sweep.settings(grid):
        folder = tmp_path / sweep.folder_name(setting)
        folder.mkdir()
        loss = losses[setting["learning_rate"]][int(setting["seed"])]
        if loss is not None:  # the last one diverged
            result = {"kind": "result", "optimizer": "muon", "steps": 5}
            line = json.dumps(result | {"val_loss": loss})
            (folder / "metrics.jsonl").write_text(line + "\n")
    summary = sweep.summarize(grid, tmp_path)
    first, *others = summary["cells"]
    assert (first["row"], first["column"], first["mean"]) == (0.1, "muon", 2.5)
    assert first["deviation"] == pytest.approx((3.25) ** 0.5)  # (2.25 + 0.25 + 4) / 2
    assert all(cell["mean"] is None or cell["row"] == 0.2 for cell in others)
    sweep.show(summary)
    assert "2.5000 \u00b1 1.8028" in capsys.readouterr().out
