"""Full disks, damaged checkpoints, other meshes: the last good state is never lost."""

import contextlib
import errno
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import evaluate, plot
from examples import checkpoint, export, sample, step
from examples.config import parse
from examples.files import RecordFile, WriteFailed, read_metrics
from examples.models import make_model
from examples.options import UserError
from examples.pretrain import main
from examples.runs import claimed, store_settings

ROOT = Path(__file__).parents[2]
# Orbax leaves a coroutine without awaiting it where a checkpoint is damaged.
pytestmark = pytest.mark.filterwarnings("ignore:.*never awaited:RuntimeWarning")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, checkpointed: list[str]) -> Path:
    """A run of 12 steps on one device, with checkpoints of 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main([*checkpointed, "--steps", "12", "--out", str(folder)]) == 0
    return folder


def losses(folder: Path, kind: str = "train") -> dict[int, float]:
    records = read_metrics(folder / "metrics.jsonl")
    return {r["step"]: r["loss"] for r in records if r["kind"] == kind}


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints" / "muon2").iterdir())


def cut_back(finished: Path, target: Path, *removed: str) -> Path:
    """A copy of the run as if it had been killed before its last checkpoints."""
    shutil.copytree(finished, target)
    for name in removed:
        shutil.rmtree(target / "checkpoints" / "muon2" / name)
    if "12" in removed:  # then there was no result yet
        path = target / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(x for x in lines if '"kind": "result"' not in x))
    return target


@pytest.mark.parametrize(
    "mesh",
    [
        "fsdp=2",
        pytest.param("fsdp=4,tensor=2", marks=pytest.mark.slow),
        pytest.param("", marks=pytest.mark.slow),  # all eight
    ],
)
def test_another_mesh_goes_on_with_the_same_losses(
    mesh: str, finished: Path, checkpointed: list[str], tmp_path: Path
) -> None:
    folder = cut_back(finished, tmp_path / "run", "8", "12")
    assert main(["--resume", "--out", str(folder), "--mesh", mesh]) == 0
    for kind in ("train", "eval"):
        before, after = losses(finished, kind), losses(folder, kind)
        assert list(before) == list(after)
        np.testing.assert_allclose(
            list(after.values()), list(before.values()), rtol=1e-5
        )


def test_more_steps_go_on_from_the_last(finished: Path, tmp_path: Path) -> None:
    folder = cut_back(finished, tmp_path / "run")
    assert main(["--resume", "--out", str(folder), "--steps", "14"]) == 0
    assert list(losses(folder)) == list(range(1, 15))
    assert {s: losses(folder)[s] for s in range(1, 13)} == losses(finished)
    metrics = list(read_metrics(folder / "metrics.jsonl"))
    assert [r["steps"] for r in metrics if "digest" in r] == [14]
    (change,) = [r["changes"] for r in metrics if r["kind"] == "run"][-1]
    assert "--steps was 12, now 14" in change


def damage(path: Path, kind: str) -> None:
    """Change what is stored: numbers only, or the whole structure."""
    files = [p for p in path.rglob("*") if p.is_file() and p.parent.name == "d"]
    largest = max(files, key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    if kind == "truncated":
        content = content[: len(content) // 2]
    elif kind == "flipped":
        content[len(content) // 2] ^= 1
    largest.write_bytes(bytes(content))
    if kind == "missing":
        largest.unlink()


@pytest.mark.parametrize(
    "kind",
    [
        "flipped",
        pytest.param("truncated", marks=pytest.mark.slow),
        pytest.param("missing", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_set_aside(
    kind: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cut_back(finished, tmp_path / "run")
    damage(folder / "checkpoints" / "muon2" / "12", kind)
    (folder / "damaged" / "muon2-12-2" / "of an earlier time").mkdir(parents=True)
    # The run had finished: only a longer one reads its checkpoints again.
    assert main(["--resume", "--out", str(folder), "--steps", "13"]) == 0
    assert "checkpoint of step 12 skipped" in capsys.readouterr().out
    moved = {*(folder / "damaged").glob("muon2-12-*")} - {
        folder / "damaged" / "muon2-12-2"
    }
    assert [(path / "params").is_dir() for path in moved] == [True]
    assert steps(folder) == ["12", "13", "8"] or steps(folder) == ["13", "4", "8"]
    assert list(losses(folder)) == list(range(1, 14))


def test_a_damaged_checkpoint_that_cannot_be_moved_is_one_line(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints" / "soap"
    (place / "3").mkdir(parents=True)
    (tmp_path / "damaged").write_text("a file")
    with contextlib.closing(checkpoint.Store(place, keep=1)) as store:
        with pytest.raises(WriteFailed, match="damaged could not be written"):
            store._set_aside([3])


def test_when_nothing_is_readable_nothing_is_touched(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cut_back(finished, tmp_path / "run")
    for name in ("4", "8", "12"):
        damage(folder / "checkpoints" / "muon2" / name, "missing")
    damage(folder / "checkpoints" / "muon2" / "12" / "params", "truncated")
    before = steps(folder)
    assert main(["--resume", "--out", str(folder), "--steps", "13"]) == 2
    err = capsys.readouterr().err
    assert "none of 3 checkpoints is readable" in err and err.count("\n") == 1
    assert steps(folder) == before and not (folder / "damaged").exists()
    with pytest.raises(UserError, match="unreadable"):
        checkpoint.load_params(folder)


def test_a_damaged_checkpoint_has_a_neighbour(finished: Path, tmp_path: Path) -> None:
    folder = cut_back(finished, tmp_path / "run")
    place = folder / "checkpoints" / "muon2"
    for name in ("8", "12"):
        damage(place / name / "params", "truncated")
    said = r"step 12 is unreadable .*; name another with --step \(there: 4, 8, 12\), or"
    with pytest.raises(UserError, match=said):
        checkpoint.load_params(folder)
    checkpoint.load_params(folder, step=4)


def test_damaged_parameters_are_neither_sampled_nor_evaluated(
    finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One bit, or a file cut short; one line is said, and nothing by libraries."""
    for kind in ("flipped", "truncated"):
        folder = cut_back(finished, tmp_path / kind)
        damage(folder / "checkpoints" / "muon2" / "12" / "params", kind)
        assert sample.main(["--run", str(folder)]) == 2
        out, err = capfd.readouterr()
        assert "checkpoint of step 12 is unreadable" in err and "--step" in err
        assert not out and err.count("\n") == 1 and "handler" not in err
    argv = ["--run", str(folder), "--task-data", str(tmp_path)]
    assert evaluate.main(argv) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_a_checkpoint_under_the_number_of_another_is_not_read(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cut_back(finished, tmp_path / "run", "12")
    place = folder / "checkpoints" / "muon2"
    shutil.copytree(place / "4", place / "11")
    said = "step 11 is unreadable .*it is that of step 4 under another name"
    with pytest.raises(UserError, match=said):
        checkpoint.load_params(folder)
    out = str(tmp_path / "x.safetensors")
    assert export.main(["--run", str(folder), "--step", "11", "--out", out]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["--resume", "--out", str(folder)]) == 0  # from step 8
    said = "checkpoint of step 11 skipped: ValueError: it is that of step 4"
    assert said in capsys.readouterr().out
    assert losses(folder) == pytest.approx(losses(finished), rel=1e-5)


def test_parameters_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    config = parse(["--optimizer", "adamw", "--dim", "16", "--hidden", "16"])
    store_settings(tmp_path, config, 257, "0")
    _, init = make_model(config.model, 257)
    params = init(jax.random.key(0))
    params["final_norm"]["scale"] = params["final_norm"]["scale"].at[3].set(jnp.nan)
    count = jnp.int32(5)
    state = step.TrainState(params, {"count": count}, count, count, count)
    place = tmp_path / "checkpoints" / "adamw"
    with contextlib.closing(checkpoint.Store(place, keep=1)) as store:
        store.save(state)
    with pytest.raises(UserError, match="its parameters are not finite"):
        checkpoint.load_params(tmp_path)


def test_other_text_is_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cut_back(finished, tmp_path / "run", "12")
    other = tmp_path / "other.txt"
    other.write_text("to be or not to be, that is the question\n" * 500)
    assert main(["--resume", "--out", str(folder), "--data", str(other)]) == 2
    assert "the text or its tokenizer differs" in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_disk_keeps_the_last_checkpoint(
    finished: Path, checkpointed: list[str], tmp_path: Path
) -> None:
    """The limit on the size of a file stands for the disk: writing fails at 20 kB."""
    folder = tmp_path / "run"
    limited = ["bash", "-c", 'ulimit -f 20; exec "$@"', "-"]  # units of 1 kB
    command = [*limited, sys.executable, "-m", "examples.pretrain", *checkpointed]
    command += ["--out", str(folder), "--steps", "16"]
    settings = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    # What it cannot write whole must not lie in the cache that the others read.
    settings["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    cut_back(finished, folder)
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "checkpoint of step 16" in last and "the one of step 12 is kept" in last
    assert {"4", "8", "12"} < set(steps(folder))
    assert main(["--resume", "--out", str(folder)]) == 0
    assert list(losses(folder)) == list(range(1, 17))


def test_cut_and_damaged_records(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a kill cut off is written anew; what cannot be read is named and left."""
    folder = cut_back(finished, tmp_path / "run", "12")
    path = folder / "metrics.jsonl"
    before = path.read_bytes()
    path.write_bytes(before.replace(b"\n", b"\n\xff\n", 1))
    assert main(["--resume", "--out", str(folder)]) == 2
    err = capsys.readouterr().err
    assert "metrics.jsonl: line 2 is damaged" in err and err.count("\n") == 1
    assert plot.main([str(folder)]) == 2
    err = capsys.readouterr().err
    assert "metrics.jsonl: line 2 is damaged" in err and err.count("\n") == 1
    assert path.read_bytes() == before.replace(b"\n", b"\n\xff\n", 1)
    path.write_bytes(before[: before.rindex(b'"train"') + 3])
    assert main(["--resume", "--out", str(folder)]) == 0
    assert "missing" not in capsys.readouterr().out
    assert losses(folder) == pytest.approx(losses(finished), rel=1e-5)


def test_missing_records_are_counted(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cut_back(finished, tmp_path / "run", "12")
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b'"kind": "train"' in line][:3]
    path.write_bytes(b"".join(kept))
    assert main(["--resume", "--out", str(folder)]) == 0
    assert "5 of 8 records up to step 8 are missing" in capsys.readouterr().out


def test_records_that_cannot_be_written_end_the_run(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = cut_back(finished, tmp_path / "run", "12")
    before = steps(folder)
    write, full = RecordFile.write, OSError(errno.ENOSPC, "No space left on device")

    def failing(self: RecordFile, record: dict[str, Any]) -> None:
        if record.get("step") == 10:
            raise WriteFailed(folder / "metrics.jsonl", full)
        write(self, record)

    monkeypatch.setattr(RecordFile, "write", failing)
    assert main(["--resume", "--out", str(folder)]) == 1
    err = capsys.readouterr().err
    assert "metrics.jsonl could not be written: No space" in err
    assert err.count("\n") == 1 and steps(folder) == before
    monkeypatch.undo()
    with claimed(parse(["--out", str(folder), "--resume"])):
        assert main(["--resume", "--out", str(folder)]) == 2
    assert "another process is writing there" in capsys.readouterr().err
    assert main(["--resume", "--out", str(folder)]) == 0
    assert losses(folder) == pytest.approx(losses(finished), rel=1e-5)


def test_digest_sees_every_bit_and_no_division() -> None:
    tree = {"a": jnp.arange(16.0).reshape(8, 2), "b": jnp.ones(3, jnp.bfloat16)}
    tree |= {"c": jnp.arange(4), "d": jnp.array([True, False])}
    whole = int(checkpoint.digest(tree))
    mesh = jax.make_mesh((8,), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    divided = jax.device_put(tree["a"], jax.sharding.NamedSharding(mesh, spec))
    assert int(checkpoint.digest(tree | {"a": divided})) == whole
    for key in tree:
        other = tree | {key: tree[key].at[1].set(tree[key][0])}
        if key == "b":
            other = tree | {"b": tree["b"] * 2}
        assert int(checkpoint.digest(other)) != whole


def test_load_params_names_what_is_missing(finished: Path, tmp_path: Path) -> None:
    params, config, _ = checkpoint.load_params(finished, "muon2", 8)
    assert config.run.steps == 12
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(params))
    with pytest.raises(UserError, match=r"no checkpoint of step 5 \(there: 4, 8, 12"):
        checkpoint.load_params(finished, step=5)
    with pytest.raises(UserError, match="no adamw"):
        checkpoint.load_params(finished, "adamw")
    with pytest.raises(UserError, match="no run there"):
        checkpoint.load_params(tmp_path)


def injure(path: Path, rng: random.Random) -> str:
    """Damage one file of a checkpoint in some way; says how."""
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.stat().st_size)
    file = rng.choice(files)
    raw = bytearray(file.read_bytes())
    kind = rng.choice(["bit", "byte", "cut", "zeros", "missing", "swapped", "longer"])
    place = rng.randrange(len(raw))
    if kind == "bit":
        raw[place] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        raw[place] = (raw[place] + rng.randrange(1, 256)) % 256
    elif kind == "cut":
        raw = raw[:place]
    elif kind == "zeros":
        raw[place : place + 64] = bytes(len(raw[place : place + 64]))
    elif kind == "swapped":
        raw = bytearray(rng.choice(files).read_bytes())
    elif kind == "longer":
        raw += raw[-100:]
    file.write_bytes(bytes(raw))
    if kind == "missing":
        file.unlink()
    return f"{kind} of {file.relative_to(path)}"


@pytest.mark.slow
def test_no_damage_gives_a_wrong_number(finished: Path, tmp_path: Path) -> None:
    """80 damages of the newest checkpoint: it is refused, or the numbers are right."""
    expected, config, _ = checkpoint.load_params(finished, step=12)
    refused = 0
    for seed in range(80):
        folder = tmp_path / str(seed)
        copy = folder / "checkpoints" / "muon2" / "12"
        shutil.copytree(finished / "checkpoints" / "muon2" / "12", copy)
        shutil.copy(finished / "config.json", folder)
        how = injure(copy, random.Random(seed))
        try:
            found, _, _ = checkpoint.load_params(folder)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 500, how
            refused += 1
        else:
            jax.tree.map(np.testing.assert_array_equal, found, expected)
        shutil.rmtree(folder)
    print(f"{refused} of 80 refused, {80 - refused} read right")
    assert refused > 20  # other damages are of what is not read
