"""Milliseconds of steps, as a training loop issues them."""

import time
from collections.abc import Callable
from typing import Any

import jax

# Steps that are issued before the first one is waited for. A training loop does not
# wait between steps: while the device works, the host prepares the next one. With 1,
# the time to hand over some 700 arrays (about 3 ms for LLaMA-1B) counts as well.
CHAIN = 5


def milliseconds(
    run: Callable[[], Any], wait: Callable[[], Any], repeats: int, chain: int = CHAIN
) -> list[float]:
    """Time per call of ``run``, ``repeats`` times over ``chain`` calls each."""
    run()
    wait()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(chain):
            run()
        wait()
        taken.append(1e3 * (time.perf_counter() - start) / chain)
    return taken


def of_step(
    step: Any, params: Any, state: Any, grads: Any, repeats: int, chain: int = CHAIN
) -> list[float]:
    """The same for a donated jitted step (params, state, grads) -> params, state."""
    kept = [params, state]

    def run() -> None:
        kept[:] = step(*kept, grads)

    return milliseconds(run, lambda: jax.block_until_ready(kept), repeats, chain)
