"""What the multi-device benchmarks share: the step, compiled for shapes on a mesh."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh

from benchmarks import timing
from muon2_optax.state_sharding import abstract_state


def compile_step(
    tx: optax.GradientTransformation, params: Any, mesh: Mesh
) -> tuple[Any, Any]:
    """The donated step, update and apply, and the abstract state that it takes."""
    state = abstract_state(tx.init, params, mesh)
    out = jax.tree.map(lambda x: x.sharding, (params, state))
    jitted = jax.jit(timing.full_step(tx), donate_argnums=(0, 1), out_shardings=out)
    return jitted.lower(params, state, params).compile(), state
