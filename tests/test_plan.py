"""Plans: sizes of known states, operations and traffic of known programs."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import cost
from benchmarks.plan import main
from examples.mesh import make_mesh

SMALL = ("--dim", "32", "--heads", "2", "--hidden", "64", "--seq-len", "16")
SMALL += ("--vocab-size", "64")


def plan(tmp_path: Path, *options: str) -> dict[str, Any]:
    path = tmp_path / "plan.jsonl"
    assert main([*SMALL, *options, "--jsonl", str(path)]) == 0
    return json.loads(path.read_text().splitlines()[-1])


# Bytes of float32: two blocks of 4 x 32 x 32 and 3 x 32 x 64, the tables, the norms.
MATRICES = 4 * 2 * (4 * 32 * 32 + 3 * 32 * 64)
REST = 4 * (2 * 64 * 32 + 5 * 32)


@pytest.mark.parametrize(
    ("optimizer", "momentum", "second", "adam"),
    [
        ("adamw", 0, 0, 2 * (MATRICES + REST)),
        ("muon", MATRICES, 0, 2 * REST),
        ("muon2", MATRICES, MATRICES, 2 * REST),
        ("muon2_f", MATRICES, 4 * 2 * (4 * 64 + 3 * 96), 2 * REST),
    ],
)
def test_states_by_kind(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    optimizer: str,
    momentum: int,
    second: int,
    adam: int,
) -> None:
    row = plan(tmp_path, "--optimizer", optimizer)
    sizes = row["bytes"]
    assert sizes["parameters"] == row["gradient_bytes"] == MATRICES + REST
    assert sizes["momentum"] == momentum
    assert sizes["second moment"] == second
    assert sizes["AdamW states"] == adam
    assert 0 < sizes["other states"] < 100
    assert row["total_bytes"] >= sum(sizes.values()) + row["temporary_bytes"]
    assert row["product_flops"] > row["model_flops"]
    out = capsys.readouterr().out
    assert optimizer in out and "TFLOP" in out


def test_a_mesh_divides_states_and_communicates(tmp_path: Path) -> None:
    options = ("--optimizer", "muon2", "--scan-layers", "--remat", "full")
    row = plan(tmp_path, "--mesh", "fsdp=4,tensor=2", *options)
    assert row["mesh"] == {"fsdp": 4, "tensor": 2}
    assert row["batch"] == [4, 16]
    assert row["bytes"]["momentum"] == MATRICES / 8
    assert row["collectives"]["all-to-all"][0] > 0


@pytest.mark.slow
def test_states_of_another_dtype(tmp_path: Path) -> None:
    row = plan(tmp_path, "--optimizer", "muon2", "--state-dtype", "bfloat16")
    assert row["bytes"]["parameters"] == (MATRICES + REST) / 2
    assert row["bytes"]["second moment"] == MATRICES / 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--mesh", "fsdp=-1"), "-1 needs --topology or --here"),
        (("--mesh", "fsdp=4", "--batch-size", "6"), "divided into 4 parts"),
        (("--here", "--topology", "v5e:2x2"), "exclude each other"),
        (("--optimizer", "sgd9"), "unknown name 'sgd9'"),
        (("--model", "gpt9"), "unknown name 'gpt9'"),
        (("--state-dtype", "int8"), "--state-dtype"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    assert main(list(options)) == 2
    error = capsys.readouterr().err
    assert error.startswith("plan: error: ") and error.count("\n") == 1
    assert said in error


def test_products_are_counted_as_often_as_they_run() -> None:
    x = jnp.ones((8, 8))
    one = 2 * 8**3

    def program(x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda y, _: (y @ x, None), x, length=5)
        y = jax.lax.cond(y[0, 0] > 0, lambda y: y @ x @ x, lambda y: y @ x, y)
        return jax.jit(jnp.dot)(y, x)

    traced = jax.jit(program).trace(x)
    assert cost.product_flops(traced.jaxpr.jaxpr) == (5 + 2 + 1) * one
    # A product's derivative takes two; of the first one of each pass only one is used.
    grad = jax.jit(jax.grad(lambda w: jnp.square(x @ w).sum())).trace(x)
    assert cost.product_flops(grad.jaxpr.jaxpr) == 2 * one
    ragged = jax.jit(jax.lax.ragged_dot).trace(
        x, jnp.ones((4, 8, 3)), jnp.array([2] * 4)
    )
    assert cost.product_flops(ragged.jaxpr.jaxpr) == 2 * 8 * 8 * 3


def test_collectives_count_inside_loops() -> None:
    mesh = make_mesh("fsdp=8")
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=rows)

    def body(y: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(jax.lax.with_sharding_constraint(y.T, rows)), None

    program = jax.jit(lambda x: jax.lax.scan(body, x, length=5)[0], out_shardings=rows)
    found = cost.collectives(program.lower(x).compile().as_text())
    times = {kind: count for kind, (count, _) in found.items()}
    moved = sum(size for _, size in found.values())
    assert sum(times.values()) % 5 == 0 and times
    # A transposition moves every device's eighth of 64 x 64 numbers of four bytes.
    assert moved >= 5 * math.prod((64, 64)) * 4 / 8
