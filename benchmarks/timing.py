"""Milliseconds of steps, as a training loop issues them."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

# Steps that are issued before the first one is waited for. A training loop does not
# wait between steps: while the device works, the host prepares the next one. With 1,
# the time to hand over some 700 arrays (about 3 ms for LLaMA-1B) counts as well.
CHAIN = 5
# Gradients that are taken in turn, if one of them has no more bytes than this.
GRADIENTS, ONE_ONLY = 3, 8e9


def full_step(tx: optax.GradientTransformation) -> Callable[[Any, Any, Any], Any]:
    """Update and apply: (params, state, grads) -> params, state."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


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


def drawn(normal: Callable[..., Any], shapes: dict[str, Any], seed: int = 0) -> Any:
    """Leaves ``normal(key, shape)`` of these shapes."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {k: normal(key, s) for key, (k, s) in zip(keys, shapes.items())}


def gradients(normal: Callable[..., Any], shapes: dict[str, Any]) -> list[Any]:
    """Some, ``drawn``, to be taken in turn.

    With the same gradient in every step Muon^2's update becomes its sign. Equal
    magnitudes cost a GPU less power to multiply, and it would run faster than it does
    on a model's gradients.
    """
    made = [drawn(normal, shapes)]
    if sum(x.nbytes for x in jax.tree.leaves(made)) < ONE_ONLY:
        made += [drawn(normal, shapes, seed) for seed in range(1, GRADIENTS)]
    return made


def of_step(
    step: Any,
    params: Any,
    state: Any,
    grads: Sequence[Any],
    repeats: int,
    chain: int = CHAIN,
) -> list[float]:
    """The same for a donated jitted step (params, state, grads) -> params, state.

    Args:
      grads: gradients that are taken in turn.
    """
    kept, order = [params, state], itertools.cycle(grads)

    def run() -> None:
        kept[:] = step(*kept, next(order))

    return milliseconds(run, lambda: jax.block_until_ready(kept), repeats, chain)
