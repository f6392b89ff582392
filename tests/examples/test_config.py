"""The command line: every bad option is one line and exit code 2."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from examples import config, runs
from examples.files import write_json
from examples.options import UserError
from examples.pretrain import main

ROOT = Path(__file__).parents[2]


def fails_with_one_line(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """Run the trainer, check the form of the failure, return its line."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("pretrain: error: ")
    assert err.endswith("\n") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--no-such-option"], "--no-such-option"),
        (["--dim"], "--dim"),
        (["--dim", "wide"], "wide"),
        (["--dim", "0"], "--dim must be at least 1"),
        (["--dim", "30", "--heads", "4"], "multiple"),
        (["--dtype", "float8"], "float8"),
        (["--steps", "-3"], "--steps"),
        (["--ste", "3"], "--ste"),
        (["--learning-rate", "0"], "above 0"),
        (["--learning-rate", "nan"], "--learning-rate"),
        (["--adam-learning-rate", "inf"], "--adam-learning-rate"),
        (["--b1", "1.0"], "--b1 must be at least 0 and below 1, got 1.0"),
        (["--b2", "1.5"], "below 1"),
        (["--steps", "99999999999999999999"], "at most 2147483647"),
        (["--init-optimizer"], "--init-optimizer needs --init-from"),
        (["--distributed"], "--distributed needs --out"),
        (["--distributed", "--out", "x"], "JAX_COORDINATOR_ADDRESS=HOST:PORT"),
        (["--val-fraction", "0.9"], "--val-fraction"),
        (["--optimizer", ""], "--optimizer"),
        (["--optimizer", "muon,sgd9"], "unknown name 'sgd9' (known: adamw, "),
        (["--optimizer", "adamw", "--ns-steps", "3"], "--ns-steps does not apply"),
        (["--optimizer", "muon", "--ns-coeffs", "no\nsuch"], "ns_coeffs"),
        (["--data", "no/such/place"], "no such file"),
        (["--data"], "--data"),
        (["--out", ""], "--out"),
        (["--resume"], "--resume needs --out"),
        (["--resume", "maybe"], "maybe"),
        (["--resume", "--out", "no/such/run"], "no run there"),
        (["--schedule", "square"], "square"),
        (["--keep", "0"], "--keep"),
        (["--decay-fraction", "0.3"], "--decay-fraction acts only with --schedule"),
        (["--schedule", "constant", "--final-lr-fraction", "0.3"], "that falls"),
        (["--vocab-size", "512"], "--vocab-size acts only with --tokenizer bpe"),
        (["--router-z-loss", "0.1"], "--router-z-loss acts only in a mixture"),
        (["--balance-loss", "0"], "--balance-loss acts only in a mixture"),
        (["--model", "gpt_tiny", "--capacity-factor", "2"], "only in a mixture"),
        (["--model", "gpt_tiny", "--rope-theta", "500"], "not in a GPT"),
        (
            ["--optimizer", "muon2_f_h", "--weight-decay", "1"],
            "--weight-decay does not",
        ),
        (["stray"], "stray"),
    ],
)
def test_bad_options(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert said in fails_with_one_line(capsys, argv)


def test_a_folder_that_may_not_be_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refused)
    err = fails_with_one_line(capsys, ["--data", "closed/texts"])
    assert "closed/texts" in err and "Permission denied" in err


def test_bad_option_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.pretrain", "--layers", "two"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and "two" in done.stderr


def test_help_names_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        config.parse(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for section in config.SECTIONS.values():
        for field in dataclasses.fields(section):
            assert "--" + field.name.replace("_", "-") in shown


def test_values_reach_their_sections() -> None:
    parsed = config.parse(
        [
            "--dim",
            "64",
            "--data",
            "a",
            "b",
            "--no-nesterov",
            "--optimizer",
            "muon, muon",
        ]
    )
    assert parsed.model.dim == 64
    assert parsed.data.data == ("a", "b")
    assert parsed.optim.nesterov is False
    assert parsed.optim.names() == ("muon",)
    assert parsed.optim.learning_rate is None


def test_flags_are_unique() -> None:
    names = [
        field.name
        for section in config.SECTIONS.values()
        for field in dataclasses.fields(section)
    ]
    assert len(names) == len(set(names))


def test_the_default_is_the_recommended_recipe_and_a_comparison_of_tiny_models() -> (
    None
):
    assert config.parse([]).optim.names() == tuple(config.COMPARED.split(","))
    assert config.parse(["--model", "gpt_tiny"]).optim.names()[-1] == "muon2_f_h"
    for model in ("llama_60m", "gpt_small", "moe_7b"):
        assert config.parse(["--model", model]).optim.names() == ("muon2_f_h",)
    asked = config.parse(["--model", "llama_60m", "--optimizer", "muon"])
    assert asked.optim.names() == ("muon",)


def store(folder: Path, begun: config.Config) -> None:
    content = {"config": dataclasses.asdict(begun), "vocab_size": 9, "text": ""}
    write_json(folder / "config.json", content)


def test_an_option_that_is_no_more_must_not_have_been_in_use(tmp_path: Path) -> None:
    begun = dataclasses.asdict(config.parse(["--out", str(tmp_path)]))
    for value, said in ((0.0, None), (0.1, "this version has no --z-loss")):
        begun["run"]["z_loss"] = value
        write_json(tmp_path / "config.json", {"config": begun})
        if said is None:
            assert runs.stored_config(tmp_path).run.steps == 120
            continue
        with pytest.raises(UserError, match=said):
            runs.stored_config(tmp_path)


def continued(folder: Path, *more: str) -> config.Config:
    return runs.read_options(["--out", str(folder), "--resume", *more])


def test_a_continued_run_has_the_options_of_its_start(tmp_path: Path) -> None:
    argv = ["--out", str(tmp_path), "--steps", "9", "--data", "a", "b", "--b1", "0.9"]
    begun = config.parse([*argv, "--resume", "auto"])
    store(tmp_path, begun)
    again = continued(tmp_path)
    assert (again.run.steps, again.data.data, again.optim.b1) == (9, ("a", "b"), 0.9)
    assert runs.stored_config(tmp_path) == begun
    # What changes nothing that is computed may differ, and more steps.
    free = continued(tmp_path, "--steps", "12", "--log-every", "2", "--mesh", "fsdp=2")
    assert (free.run.steps, free.run.log_every) == (12, 2)


def test_a_run_with_the_defaults_of_an_earlier_version_does_not_go_on(
    tmp_path: Path,
) -> None:
    begun = config.parse(["--steps", "9"])
    store(tmp_path, begun)  # as versions before 0.2 did
    with pytest.raises(UserError, match="begun by an earlier version"):
        runs.check_text(tmp_path, begun, "")
    runs.store_settings(tmp_path, begun, 257, "abc")
    longer = config.parse(["--steps", "12", "--mesh", "fsdp=2"])
    steps, mesh = runs.check_text(tmp_path, longer, "abc")
    assert "--steps was 9, now 12" in steps and "--mesh was all devices" in mesh
    with pytest.raises(UserError, match="hash abc, now abd"):
        runs.check_text(tmp_path, begun, "abd")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--seed", "1"], "--seed was 0, now 1"),
        (["--steps", "8"], "--steps was 9, now 8"),
        (["--optimizer", "muon"], "--optimizer was"),
        (["--dim", "64"], "--dim was 128, now 64"),
        (["--eval-tokens", "64"], "--eval-tokens was 32768, now 64"),
    ],
)
def test_a_continued_run_names_what_must_not_change(
    more: list[str], said: str, tmp_path: Path
) -> None:
    begun = config.parse(["--steps", "9"])
    store(tmp_path, begun)
    with pytest.raises(UserError, match=said):
        continued(tmp_path, *more)


def test_micro_batches_of_an_moe_must_not_change(tmp_path: Path) -> None:
    """Its balance loss is a mean over each; of other models only rounding changes."""
    for model in ("moe_tiny", "gpt_tiny"):
        begun = config.parse(["--model", model])
        store(tmp_path, begun)
        if model == "gpt_tiny":
            assert continued(tmp_path, "--accumulate", "2").run.accumulate == 2
            continue
        with pytest.raises(UserError, match="--accumulate was 1, now 2"):
            continued(tmp_path, "--accumulate", "2")


def test_a_signal_while_importing_is_one_line() -> None:
    """Ctrl-C as soon as JAX begins to be imported."""
    code = (
        "import sys; from examples.pretrain import main\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'jax': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop()); sys.exit(main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "pretrain: interrupted\n")
