"""What communication costs a step: how long it takes, and how long nothing hides it."""

from collections.abc import Iterable, Sequence

from benchmarks.traces import Event, Interval

# Kernels and copies between GPUs, as NVIDIA's profiler names them: NCCL's, XLA's own,
# and the copy engines' (xla_gpu_use_memcpy_local_p2p).
COMMUNICATION = ("nccl", "memcpyp2p", "all_to_all", "all_reduce")


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


def _communicates(name: str) -> bool:
    return any(word in name.lower() for word in COMMUNICATION)


def milliseconds(gpus: Sequence[Sequence[Event]], steps: int) -> dict[str, float]:
    """Per step, on the GPU where it is longest: ``{}`` where no GPU was traced."""
    found = []
    for events in gpus:
        moving = [span for name, span in events if _communicates(name)]
        working = [span for name, span in events if not _communicates(name)]
        found.append((exposed(moving, working), length(moving), length(working)))
    if not found:
        return {}
    names = ("exposed_ms", "communication_ms", "computing_ms")
    return {name: round(ns / 1e6 / steps, 3) for name, ns in zip(names, max(found))}
