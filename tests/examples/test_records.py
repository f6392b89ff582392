"""A run's folder and its records: cut, damaged, locked, or on a full disk."""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from examples import config, optim, pretrain, runs, sample
from examples.files import (
    RecordFile,
    WriteFailed,
    locked,
    read_json,
    read_metrics,
    write_atomically,
    write_json,
)
from examples.options import UserError
from examples.report import Report
from examples.runs import METRICS_FILE, claimed

TRAIN = {"kind": "train", "optimizer": "muon2", "step": 1, "tokens": 8, "seconds": 0.1}
TRAIN |= {"loss": 5.5}


def test_a_line_that_a_kill_cut_off_is_removed_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps(TRAIN) + "\n"
    for tail in ('{"kind": "tr', "\0" * 40, whole[:-1]):
        path.write_text(whole + tail)
        file = RecordFile(path)
        file.write(TRAIN | {"step": 2})
        assert [r["step"] for r in read_metrics(path)] == [1, 2]
        assert [r["step"] for r in file.rewind(lambda r: r["step"] == 2)] == [2]
        file.write(TRAIN | {"step": 3})
        assert [r["step"] for r in read_metrics(path)] == [2, 3]
    path.write_text('{"kind"')
    RecordFile(path)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "line",
    [
        *(b"5", b"\xff", b'{"kind": "tra', b"{}", b'{"kind": "train"}', b"[]", b""),
        json.dumps(TRAIN | {"step": "7"}).encode(),
        json.dumps(TRAIN | {"seconds": None}).encode(),
        json.dumps(TRAIN | {"optimizer": 3}).encode(),
    ],
)
def test_a_damaged_line_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps(TRAIN).encode() + b"\n"
    path.write_bytes(whole + line + b"\n" + whole)
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 is damaged"):
        read_metrics(path)
    with pytest.raises(UserError, match="line 2"):
        RecordFile(path).rewind(lambda _: True)
    assert path.read_bytes() == before


class FullDisk:
    """Where an open file is given a few bytes more and no others."""

    def __init__(self, room: int):
        self.room = room

    def holding(self, file: Any) -> "FullDisk":
        self.file = file
        return self

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = self.file.write(data[: self.room])
        self.room -= part
        return part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_full_disk_leaves_whole_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = RecordFile(path)
    file.write(TRAIN)
    disk, opened = FullDisk(room=30), Path.open
    monkeypatch.setattr(
        Path, "open", lambda *how, **more: disk.holding(opened(*how, **more))
    )
    with pytest.raises(WriteFailed, match=r"metrics\.jsonl could not be .*No space"):
        file.write(TRAIN)
    monkeypatch.undo()
    assert path.read_text() == json.dumps(TRAIN) + "\n"
    file.write(TRAIN | {"step": 2})
    assert [r["step"] for r in read_metrics(path)] == [1, 2]


def test_replacing_a_file_fails_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text("old")

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(WriteFailed, match=r"config\.json .*No space"):
        write_atomically(path, b"new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
def test_a_full_disk_under_stdout_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with Report(config.parse([]), tmp_path) as report:
            report.say("one line", "and another")
            report.say("one more")
            report.record("sample", optimizer="muon2", step=1, text="text")
    assert [r["text"] for r in read_metrics(tmp_path / METRICS_FILE)] == ["text"]


def test_a_run_goes_on_only_under_the_defaults_that_it_had() -> None:
    """Who changes the trainer's choices gives them another version, and this digest."""
    choices = optim.CHOICES, optim.TINY_RATES, optim.RATES, optim.ADAM
    digest = hashlib.sha256(repr(choices).encode()).hexdigest()[:8]
    assert (runs._VERSION, digest) == (3, "ade800b7")


def test_one_run_at_a_time(tmp_path: Path) -> None:
    begun = config.parse(["--out", str(tmp_path)])
    with claimed(begun):
        with pytest.raises(UserError, match="another process is writing there"):
            with claimed(begun):
                raise AssertionError("two runs in one folder")
    with claimed(begun) as folder:
        assert folder == tmp_path
    assert not list(tmp_path.iterdir())


def test_a_lock_that_a_killed_process_left_behind_goes(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with locked(tmp_path):
        assert (tmp_path / "lock").exists()
    assert not (tmp_path / "lock").exists()


def test_a_lock_in_a_folder_that_was_made_anew_is_another_s(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with contextlib.ExitStack() as other:
        with locked(folder):
            shutil.rmtree(folder)
            other.enter_context(locked(folder))
        with pytest.raises(UserError, match="another process is writing there"):
            with locked(folder):
                raise AssertionError("two runs in one folder")


def test_records_of_a_folder_that_is_gone_fail_to_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    file = RecordFile(folder / "metrics.jsonl")
    shutil.rmtree(folder)
    with pytest.raises(WriteFailed, match="could not be written"):
        file.write({"kind": "train"})


def test_runs_without_a_name_take_different_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with claimed(config.Config()) as first, claimed(config.Config()) as second:
        assert (first, second) == (Path("runs/1"), Path("runs/2"))


def test_a_lock_on_a_file_that_is_removed_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that held it ends between the opening and the locking by the next."""
    flock = fcntl.flock

    def late(file: Any, how: int) -> None:
        (tmp_path / "lock").unlink()
        flock(file, how)

    monkeypatch.setattr("fcntl.flock", late)
    with pytest.raises(UserError, match="another process is writing there"):
        with locked(tmp_path):
            raise AssertionError("two runs in one folder")


def test_what_is_refused_leaves_no_lock(
    tmp_path: Path, tiny: list[str], text_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither in the folder of another run, nor where options do not fit the data."""
    argv = [*tiny, "--data", str(text_path), "--out", str(tmp_path)]
    assert pretrain.main([*argv, "--loss-chunks", "5"]) == 2
    assert "--loss-chunks 5 does not divide" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    (tmp_path / "checkpoints").mkdir()
    assert pretrain.main(argv) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize("damage", ["digit", "cut", "empty", "[]", "null", "[" * 9_999])
def test_a_damaged_config_is_one_line(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {"config": dataclasses.asdict(config.parse([])), "vocab_size": 257}
    path = tmp_path / "config.json"
    write_json(path, content | {"text": "0"})
    assert read_json(path)["vocab_size"] == 257
    whole = path.read_text()
    damaged = {"digit": whole.replace("120", "121"), "cut": whole[:-9], "empty": ""}
    path.write_text(damaged.get(damage, damage))
    for mode in ("yes", "auto"):
        assert pretrain.main(["--out", str(tmp_path), "--resume", mode]) == 2
        err = capsys.readouterr().err
        assert "config.json: " in err and "put back a copy" in err
        assert err.count("\n") == 1
    assert sample.main(["--run", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "config.json: " in err and err.count("\n") == 1


@pytest.mark.parametrize("mode", ["yes", "auto", "no"])
@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints"])
def test_without_its_config_a_run_does_not_go_on(
    left: str, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / left).mkdir()
    argv = ["--out", str(tmp_path), "--resume", mode]
    if mode == "no":
        with pytest.raises(UserError, match="already holds a run"):
            with claimed(config.parse(argv)):
                raise AssertionError("two runs in one folder")
        return
    assert pretrain.main(argv) == 2
    err = capsys.readouterr().err
    assert "lost its options" in err and err.count("\n") == 1
