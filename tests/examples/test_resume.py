"""A run that is killed goes on as if nothing had happened."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from examples import checkpoint
from examples.files import read_metrics
from examples.pretrain import main

ROOT = Path(__file__).parents[2]
# Each kill is a start of the trainer more, some ten seconds: 24 of them in a release.
KILLS = int(os.environ.get("TRAINER_KILLS", "6"))
STEPS = str(65 * KILLS)
OPTIONS = (
    *("--optimizer", "muon2", "--eval-every", "40", "--log-every", "1"),
    *("--save-every", "2"),
)


class Runs:
    """Processes that all run the same command, each into a folder of its own."""

    def __init__(self, root: Path, argv: list[str], settings: dict[str, str]):
        self.root, self.argv, self.settings = root, argv, settings

    def start(
        self, folder: Path, *more: str, settings: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "examples.pretrain", *self.argv]
        command += ["--resume", "auto", "--out", str(folder), *more]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | self.settings | (settings or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, folder: Path, *more: str) -> None:
        process = self.start(folder, *more)
        _, err = process.communicate()
        assert process.returncode == 0, err


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, text_path: Path, tiny: list[str]
) -> Runs:
    root = tmp_path_factory.mktemp("resume")
    # One device, and no optimizations: compiling takes most of such a short run.
    quick = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    quick["JAX_COMPILATION_CACHE_DIR"] = str(root / "cache")
    return Runs(root, [*tiny, *OPTIONS, "--data", str(text_path)], quick)


def records(folder: Path, kind: str) -> list[dict]:
    path = folder / "metrics.jsonl"
    return [r for r in read_metrics(path) if r["kind"] == kind] if path.exists() else []


def last_step(folder: Path) -> int:
    return max((r["step"] for r in records(folder, "train")), default=0)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Return when it holds, or when the process has ended by itself."""
    end = time.monotonic() + 120
    while process.poll() is None and not condition():
        assert time.monotonic() < end, "the run makes no progress"
        time.sleep(0.002)


def kill_at_random(runs: Runs, folder: Path, rng: random.Random, steps: str) -> bool:
    """Kill the run at some moment: any, or while a checkpoint is being written."""
    process = runs.start(folder, "--steps", steps)
    before, place = last_step(folder), folder / "checkpoints" / "muon2"
    kind = rng.choice(["start", "steps", "saving"])
    if kind == "start":
        time.sleep(rng.uniform(0, 4))
    else:
        wait_for(lambda: last_step(folder) not in (0, before), process)
        time.sleep(rng.uniform(0, 0.4))
    if kind == "saving":
        wait_for(lambda: any(place.glob("*tmp*")), process)
        time.sleep(rng.uniform(0, 0.05))
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def assert_same(first: Path, second: Path) -> None:
    """Losses, validations and all numbers of the last state are equal, bit by bit."""
    for kind in ("train", "eval"):
        a, b = records(first, kind), records(second, kind)
        assert [r["step"] for r in a] == [r["step"] for r in b]
        assert [r["loss"] for r in a] == [r["loss"] for r in b]
        assert [r["tokens"] for r in a] == [r["tokens"] for r in b]
    (a,), (b,) = records(first, "result"), records(second, "result")
    assert (a["digest"], a["val_loss"]) == (b["digest"], b["val_loss"])
    left, right = (checkpoint.load_params(f)[0] for f in (first, second))
    jax.tree.map(np.testing.assert_array_equal, left, right)


def killed_and_resumed(runs: Runs, kills: int, steps: str, seed: int) -> None:
    whole, folder = runs.root / f"whole-{steps}", runs.root / f"killed-{steps}"
    if not whole.exists():
        runs.finish(whole, "--steps", steps)
    rng = random.Random(seed)
    killed = sum(kill_at_random(runs, folder, rng, steps) for _ in range(kills))
    assert killed == kills, "the run ended too soon: give it more steps"
    runs.finish(folder, "--steps", steps)
    assert_same(whole, folder)


def test_a_killed_run_ends_as_the_uninterrupted_one(runs: Runs) -> None:
    """Between two checkpoints, as soon as it has trained for some steps."""
    whole, folder = runs.root / "whole-12", runs.root / "killed-12"
    process = runs.start(folder, "--steps", "12", "--save-every", "5")
    wait_for(lambda: last_step(folder) > 6, process)
    process.kill()
    process.communicate()
    # In this process, which has imported JAX and compiles in the same way.
    for path in (folder, whole):
        argv = [*runs.argv, "--resume", "auto", "--out", str(path), "--steps", "12"]
        assert main(argv) == 0
    assert_same(whole, folder)


@pytest.mark.slow
def test_many_kills(runs: Runs) -> None:
    killed_and_resumed(runs, kills=KILLS, steps=STEPS, seed=2)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU")
def test_killed_runs_on_a_gpu(tmp_path: Path, text_path: Path) -> None:
    """With `--deterministic`, at sizes that the symmetric kernels serve."""
    sizes = ("--dim", "768", "--heads", "6", "--hidden", "1024", "--layers", "3")
    shape = ("--seq-len", "128", "--batch-size", "8", "--eval-tokens", "1024")
    argv = [*sizes, *shape, *OPTIONS, "--deterministic", "--dtype", "bfloat16"]
    argv += ["--data", str(text_path), "--save-every", "6"]
    settings = {"JAX_PLATFORMS": "cuda", "XLA_FLAGS": ""}
    settings["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path / "cache")
    runs = Runs(tmp_path, argv, settings)
    killed_and_resumed(runs, kills=4, steps="60", seed=3)


@pytest.mark.slow
def test_a_signal_saves_and_a_finished_run_is_left_alone(runs: Runs) -> None:
    whole, folder = runs.root / f"whole-{STEPS}", runs.root / "signal"
    if not whole.exists():
        runs.finish(whole, "--steps", STEPS)
    # Without regular checkpoints: the signal itself saves.
    process = runs.start(folder, "--steps", STEPS, "--save-every", "0")
    wait_for(lambda: last_step(folder) > 5, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 143, err
    assert err.count("\n") == 1 and "SIGTERM: saved at step" in err
    (stopped,) = records(folder, "stopped")
    assert "SIGTERM" in stopped["reason"]
    runs.finish(folder, "--steps", STEPS)
    assert_same(whole, folder)
    last = folder / "checkpoints" / "muon2" / STEPS
    before = last.stat().st_mtime_ns
    runs.finish(folder, "--steps", STEPS)
    assert last.stat().st_mtime_ns == before
    assert len(records(folder, "result")) == 1
    assert json.loads((folder / "config.json").read_text())["config"]["run"]


@pytest.mark.slow
def test_two_processes_train_as_one_and_save_together(runs: Runs) -> None:
    """Each feeds its rows; a signal to either of them ends both with a checkpoint.

    They find each other by what a launcher sets, then by JAX's own variables.
    """
    alone, folder = runs.root / "alone", runs.root / "together"
    steps = ("--steps", "12", "--save-every", "4")
    runs.finish(alone, *steps)

    def both(launcher: str, *more: str) -> list[subprocess.Popen[str]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        found = []
        for rank in ("0", "1"):
            # What Open MPI's launcher sets, which JAX knows how to read.
            mpi = {
                "OMPI_MCA_orte_hnp_uri": f"1531576320.0;tcp://127.0.0.1:{port}",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": rank,
                "OMPI_COMM_WORLD_LOCAL_RANK": rank,
            }
            own = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"}
            own |= {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": rank}
            argv = ("--distributed", "--mesh", "fsdp=2", *more)
            settings = {"mpi": mpi, "own": own}[launcher]
            found.append(runs.start(folder, *argv, settings=settings))
        return found

    processes = both("mpi", "--steps", "3000", "--save-every", "0")
    wait_for(lambda: last_step(folder) > 3, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 143, err
    (saved,) = (folder / "checkpoints" / "muon2").iterdir()
    assert int(saved.name) >= 3

    shutil.rmtree(folder)
    for process in both("own", *steps):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    together, single = records(folder, "train"), records(alone, "train")
    assert [r["step"] for r in together] == [r["step"] for r in single]
    np.testing.assert_allclose(
        [r["loss"] for r in together], [r["loss"] for r in single], rtol=1e-4
    )
