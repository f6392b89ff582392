"""What the multi-device benchmarks share: abstract states, and what a program moves."""

import re
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "u16": 2, "pred": 1}


def collectives(text: str) -> dict[str, tuple[int, int]]:
    """{kind: (count, bytes of the results on one device)} of a compiled program."""
    found: dict[str, tuple[int, int]] = {}
    for line in text.splitlines():
        match = re.search(rf"= (.+?) ({_KINDS})(?:-start)?\(", line)
        if match is None:
            continue
        sizes = re.findall(r"(\w+)\[([\d,]*)\]", match.group(1))
        moved = sum(
            _BYTES.get(t, 4) * int(np.prod([int(n) for n in d.split(",") if n]))
            for t, d in sizes
        )
        if "-start(" in line:  # an asynchronous start returns its operand as well
            moved //= 2
        count, total = found.get(match.group(2), (0, 0))
        found[match.group(2)] = (count + 1, total + moved)
    return found


def abstract_state(tx: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """The state's shapes with the shardings that ``init`` gives on typed axes."""
    types = (AxisType.Explicit,) * len(mesh.axis_names)
    typed = Mesh(mesh.devices, mesh.axis_names, axis_types=types)

    def on(x: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
        spec = x.sharding.spec if x.sharding is not None else PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    with jax.set_mesh(typed):
        shapes = jax.eval_shape(tx.init, jax.tree.map(lambda p: on(p, typed), params))
    return jax.tree.map(lambda x: on(x, mesh), shapes)


def compile_step(
    tx: optax.GradientTransformation, params: Any, mesh: Mesh
) -> tuple[Any, Any]:
    """The donated step, update and apply, and the abstract state that it takes."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = abstract_state(tx, params, mesh)
    out = jax.tree.map(lambda x: x.sharding, (params, state))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=out)
    return jitted.lower(params, state, params).compile(), state
