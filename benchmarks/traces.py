"""What GPUs run during a step, as JAX's profiler saw it."""

import itertools
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import jax

Interval = tuple[float, float]
# Name of a kernel or copy, and its nanoseconds from start to end.
Event = tuple[str, Interval]


def of_step(
    step: Any,
    params: Any,
    state: Any,
    grads: Sequence[Any],
    steps: int,
    keep: pathlib.Path | None = None,
) -> list[list[Event]]:
    """Events of each GPU during some steps; none where no GPU was traced.

    Args:
      step: donated and jitted, (params, state, grads) -> params, state.
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
        return read(trace)


def read(trace: pathlib.Path) -> list[list[Event]]:
    (file,) = trace.rglob("*.xplane.pb")
    return [
        [
            (event.name, (event.start_ns, event.start_ns + event.duration_ns))
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        if plane.name.startswith("/device:GPU")
    ]
