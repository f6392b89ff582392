"""What the benchmarks compute from what they measure."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import compilation, overlap, profile, traces


@pytest.mark.parametrize(
    "moving, working, want",
    [
        ([(0, 4)], [], 4),
        ([(0, 4)], [(1, 2), (3, 9)], 2),  # (0, 1) and (2, 3)
        ([(0, 4), (2, 6)], [(5, 6)], 5),  # two at once count once
        ([(2, 3)], [(0, 9)], 0),
        ([], [(0, 9)], 0),
    ],
)
def test_exposed_is_where_nothing_works(moving, working, want):
    assert overlap.exposed(moving, working) == want


def test_a_trace_without_a_gpu_says_nothing(tmp_path):
    step = jax.jit(lambda p, s, g: (p - g, s + 1))
    x = jnp.ones(3)
    gpus = traces.of_step(step, x, x, [x], 2, tmp_path)
    assert gpus == [] and overlap.milliseconds(gpus, 2) == {}


def test_communication_is_told_by_its_name():
    events = [("loop_fusion", (0, 2e6)), ("MemcpyP2P", (1e6, 4e6))]
    want = {"exposed_ms": 1, "communication_ms": 1.5, "computing_ms": 1}
    assert overlap.milliseconds([events, events[:1]], 2) == want


def test_programs_of_one_kind_are_counted_together():
    events = [("mul_fusion_3", (0, 1e6)), ("mul_fusion_12", (1e6, 4e6))] * 2
    events += [("small.1", (4e6, 4.1e6))]
    assert profile.programs(events, 2) == {"mul_fusion": [2, 4.0]}


def test_a_profile_leaves_a_line(tmp_path, monkeypatch):
    out = tmp_path / "profile.jsonl"
    argv = "profile --model tiny --repeats 1 --chain 1 --steps 1 --optimizers".split()
    monkeypatch.setattr("sys.argv", [*argv, "muon K=3", "--out", str(out)])
    profile.main()
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["optimizer"] == "muon K=3" and line["ms"] > 0
    assert line["programs"] == {} and line["busy_ms"] == 0  # no GPU here


def test_compilation_leaves_a_line_for_each_time(tmp_path, monkeypatch):
    out = tmp_path / "compilation.jsonl"
    argv = ["compilation", "--model", "tiny", "--optimizers", "muon K=3,optax.adamw"]
    monkeypatch.setattr("sys.argv", [*argv, "--out", str(out)])
    compilation.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    told = [(line["optimizer"], line["time"]) for line in lines]
    assert told == [(n, t) for n in ("muon K=3", "optax.adamw") for t in (1, 2)]
    for line in lines:
        parts = line["trace_s"] + line["lower_s"] + line["xla_s"]
        assert line["total_s"] == pytest.approx(parts, abs=0.02) and parts > 0
