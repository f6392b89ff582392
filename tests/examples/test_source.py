"""What a run is begun with, and what it leaves where it cannot begin."""

from pathlib import Path

import pytest

from examples import report, runs
from examples.files import RecordFile
from examples.pretrain import main

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def argv(text_path: Path, tiny: list[str]) -> list[str]:
    return [*tiny, "--data", str(text_path), "--optimizer", "muon", "--steps", "1"]


def test_a_run_killed_before_its_first_record_goes_on(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the latest when its records exist, so do its options."""

    def killed(path: Path, *, new: bool) -> RecordFile:
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
