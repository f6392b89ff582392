"""Compiled programs: how many there are, which collectives they hold, what moves."""

import contextlib
import re

import jax
import numpy as np

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_BYTES = {"f64": 8, "f32": 4, "u32": 4, "s32": 4, "bf16": 2, "f16": 2, "u16": 2}


def collectives(compiled):
    """{kind: (how many, bytes of their results on one device)}, wherever they stand."""
    found = {}
    for line in compiled.as_text().splitlines():
        match = re.search(rf"= (.+?) ({_KINDS})(?:-start)?\(", line)
        if match is None:
            continue
        moved = sum(
            _BYTES[dtype] * int(np.prod([int(n) for n in dims.split(",") if n]))
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match.group(1))
        )
        count, total = found.get(match.group(2), (0, 0))
        found[match.group(2)] = (count + 1, total + moved)
    return found


def loops(compiled):
    """Whether the program holds a loop (whose body is counted once)."""
    return " while(" in compiled.as_text()


def flops(compiled):
    cost = compiled.cost_analysis()
    return (cost[0] if isinstance(cost, (list, tuple)) else cost)["flops"]


def dot_generals(text):
    """The lines of a lowered program's products."""
    return [line for line in text.splitlines() if "stablehlo.dot_general" in line]


@contextlib.contextmanager
def count_compilations():
    """Collects the durations of XLA's compilations while it is open."""
    taken = []

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            taken.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield taken
    finally:
        jax.monitoring.clear_event_listeners()
