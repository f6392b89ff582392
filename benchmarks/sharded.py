"""What the multi-device benchmarks share: the step, compiled for shapes on a mesh."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh

from examples.state import abstract_opt_state


def compile_step(
    tx: optax.GradientTransformation, params: Any, mesh: Mesh
) -> tuple[Any, Any]:
    """The donated step, update and apply, and the abstract state that it takes."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = abstract_opt_state(tx, params, mesh)
    out = jax.tree.map(lambda x: x.sharding, (params, state))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=out)
    return jitted.lower(params, state, params).compile(), state
