"""What a run is begun with, and what it leaves where it cannot begin."""

from pathlib import Path

import pytest

from examples import report, runs, sample
from examples.data import tokens as tok
from examples.files import RecordFile
from examples.pretrain import main


@pytest.fixture
def argv(text_path: Path, tiny: list[str]) -> list[str]:
    return [*tiny, "--data", str(text_path), "--optimizer", "muon", "--steps", "1"]


def test_a_run_killed_before_its_first_record_goes_on(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the latest when its records exist, so do its options."""

    def killed(path: Path) -> RecordFile:
        path.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "RecordFile", killed)
    argv = [*argv, "--out", str(tmp_path), "--resume", "auto"]
    assert main(argv) == 130
    assert runs.stored_config(tmp_path).optim.optimizer == "muon"
    monkeypatch.undo()
    # As earlier versions left it: records without a line, and no options.
    (tmp_path / "config.json").unlink()
    assert not runs.holds_run(tmp_path)
    assert main([*argv[:-1], "no"]) == 0
    assert main([*argv[:-1], "no"]) == 2


def fails(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_a_run_begins_with_weights_that_mean_the_same_to_it(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is refused leaves the folder free for the corrected command."""
    coders = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, text in zip(coders, (b"to be or not to be " * 9, b"all that glitters")):
        tok.save(tok.train_bpe([text], 259), path)
    old, out = tmp_path / "old", tmp_path / "out"
    assert main([*argv, "--tokenizer", str(coders[0]), "--out", str(old)]) == 0
    argv = [*argv, "--init-from", str(old), "--out", str(out), "--tokenizer"]
    capsys.readouterr()
    assert "the tokenizer's hash is" in fails([*argv, str(coders[1])], capsys)
    argv += [str(coders[0])]
    assert "--heads is 2 there, 4 here" in fails([*argv, "--heads", "4"], capsys)
    err = fails([*argv, "--rope-theta", "500"], capsys)
    assert "--rope-theta is 10000.0 there, 500.0 here" in err
    nowhere = [*argv, "--init-from", str(tmp_path / "nowhere")]
    assert "no run there" in fails(nowhere, capsys)
    for name in ("nowhere.safetensors", "a.json.safetensors"):
        (tmp_path / "a.json.safetensors").write_bytes(b"no tensors")
        assert "--init-from" in fails([*argv, "--init-from", name], capsys)
    assert not runs.holds_run(out)
    assert main([*argv]) == 0
    # One letter of the source's tokenizer, with the size that it had.
    file = old / tok.FILE
    raw = file.read_text(encoding="utf-8")
    assert raw.count('"!"') == 1
    file.write_text(raw.replace('"!"', '"¿"'), encoding="utf-8")
    capsys.readouterr()
    assert sample.main(["--run", str(old)]) == 2
    err = capsys.readouterr().err
    assert "tokenizer.json: altered or damaged" in err and err.count("\n") == 1


def test_the_state_of_an_optimizer_is_of_one_dtype(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, out = str(tmp_path / "old"), str(tmp_path / "out")
    assert main([*argv, "--mu-dtype", "bfloat16", "--out", old]) == 0
    argv = [*argv, "--init-from", old, "--out", out]
    capsys.readouterr()
    err = fails([*argv, "--init-optimizer"], capsys)
    assert "--init-optimizer" in err
    assert "--mu-dtype is bfloat16 there, float32 here" in err
    assert main([*argv, "--init-optimizer", "--mu-dtype", "bfloat16"]) == 0


def test_a_kernel_for_gpus_is_refused_elsewhere(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*argv, "--attention", "cudnn", "--out", str(tmp_path)]  # in float32
    assert "--attention cudnn needs a GPU and --dtype" in fails(argv, capsys)
