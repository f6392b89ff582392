"""What communication costs a step: how long it takes, and how long nothing hides it."""

import itertools
import pathlib
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import jax

# Kernels and copies between GPUs, as NVIDIA's profiler names them: NCCL's, XLA's own,
# and the copy engines' (xla_gpu_use_memcpy_local_p2p).
COMMUNICATION = ("nccl", "memcpyp2p", "all_to_all", "all_reduce")

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in time as disjoint intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """How long at least one of the intervals lasts."""
    return sum(end - start for start, end in union(intervals))


def exposed(moving: Sequence[Interval], working: Sequence[Interval]) -> float:
    """How long something moves while nothing works."""
    return length([*moving, *working]) - length(working)


def milliseconds(trace: pathlib.Path, steps: int) -> dict[str, float]:
    """Per step, on the GPU where it is longest: ``{}`` where no GPU was traced."""
    (file,) = trace.rglob("*.xplane.pb")
    found = []
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        events = [
            (event.name.lower(), (event.start_ns, event.start_ns + event.duration_ns))
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
        moves = {n for n, _ in events if any(word in n for word in COMMUNICATION)}
        moving = [span for name, span in events if name in moves]
        working = [span for name, span in events if name not in moves]
        found.append((exposed(moving, working), length(moving), length(working)))
    if not found:
        return {}
    names = ("exposed_ms", "communication_ms", "computing_ms")
    return {name: round(ns / 1e6 / steps, 3) for name, ns in zip(names, max(found))}


def of_step(
    step: Any,
    params: Any,
    state: Any,
    grads: Sequence[Any],
    steps: int,
    keep: pathlib.Path | None = None,
) -> dict[str, float]:
    """The same for a donated jitted step (params, state, grads) -> params, state.

    Args:
      grads: gradients that are taken in turn.
      keep: a folder for the profiler's trace, which is thrown away otherwise.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = keep or pathlib.Path(folder)
        params, state = jax.block_until_ready(step(params, state, grads[0]))
        with jax.profiler.trace(trace):
            for _, g in zip(range(steps), itertools.cycle(grads)):
                params, state = step(params, state, g)
            jax.block_until_ready((params, state))
        return milliseconds(trace, steps)
