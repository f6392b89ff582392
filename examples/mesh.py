"""Devices as a mesh, and which axis of it divides which array.

Four axes are known: `data` repeats parameters and divides batches, `fsdp` divides both,
`expert` divides the experts of an MoE and batches, `tensor` divides matrices inside.
The axes are of type Auto: constraints say where activations live, and the compiler
derives the communication.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.flags import UserError

# XLA's flag for imagined CPU devices.
CPU_COUNT = "--xla_force_host_platform_device_count"
# From the slowest links to the fastest: neighbours share the axis that comes last.
AXES = ("data", "fsdp", "expert", "tensor")
_BATCH_AXES = ("data", "fsdp", "expert")

# Path of a parameter to the axes of its last dimensions; the first match wins, and what
# matches nothing (norms, biases, routers) is on every device. Dimensions in front,
# as of scanned layers, stay whole.
_RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(^|/)embed/embedding$", ("tensor", "fsdp")),
    (r"position_table$", (None, "fsdp")),
    (r"lm_head/kernel$", ("fsdp", "tensor")),
    (r"experts/up$", ("expert", "fsdp", "tensor")),
    (r"experts/down$", ("expert", "tensor", "fsdp")),
    (r"(query|key|value|gate|up)/kernel$", ("fsdp", "tensor")),
    (r"(out|down)/kernel$", ("tensor", "fsdp")),
)


def parse(text: str) -> dict[str, int]:
    """`fsdp=8,tensor=2` to sizes by axis; one size may be -1, to be filled in."""
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.partition("=")
        if name not in AXES:
            raise UserError(f"--mesh: no axis {name!r} (known: {', '.join(AXES)})")
        if name in sizes:
            raise UserError(f"--mesh: axis {name} is given twice")
        try:
            sizes[name] = int(number)
        except ValueError:
            raise UserError(f"--mesh: want {name}=NUMBER, got {part!r}") from None
        if sizes[name] < 1 and sizes[name] != -1:
            raise UserError(f"--mesh: {name} must be at least 1, or -1 for the rest")
    if list(sizes.values()).count(-1) > 1:
        raise UserError("--mesh: only one axis can be -1")
    return sizes


def make_mesh(text: str, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh from text such as `fsdp=8,tensor=2`; empty text is one device.

    Fewer devices than there are may be named, except where several processes would then
    hold none.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = parse(text) or {"data": 1}
    count = math.prod(size for size in sizes.values() if size != -1)
    for name, size in sizes.items():
        if size == -1:
            sizes[name] = max(1, len(devices) // count)
            count *= sizes[name]
    several_processes = len({device.process_index for device in devices}) > 1
    if count > len(devices) or (several_processes and count < len(devices)):
        hint = ""
        if devices[0].platform == "cpu":
            hint = f" (XLA_FLAGS={CPU_COUNT}={count} imagines so many CPUs)"
        raise UserError(
            f"--mesh {text or 'of one device'} takes {count} devices, "
            f"here are {len(devices)}; name another --mesh{hint}"
        )
    names = [name for name in AXES if name in sizes]
    return jax.make_mesh(
        [sizes[name] for name in names],
        names,
        axis_types=(AxisType.Auto,) * len(names),
        devices=devices[:count],
    )


def _spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    for pattern, names in _RULES:
        if re.search(pattern, path):
            whole = (None,) * (len(shape) - len(names))
            return _fitting(mesh, shape, (*whole, *names))
    return PartitionSpec()


def _fitting(mesh: Any, shape: tuple[int, ...], names: Sequence[Any]) -> PartitionSpec:
    """The spec of `names`, without axes that the mesh lacks or that do not divide."""
    spec: list[Any] = []
    for size, name in zip(shape, names, strict=True):
        group = name if isinstance(name, tuple) else (name,)
        there = tuple(axis for axis in group if mesh.shape.get(axis, 1) > 1)
        parts = math.prod(mesh.shape[axis] for axis in there)
        if not there or size % parts:
            spec.append(None)
        else:
            spec.append(there if len(there) > 1 else there[0])
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)


def param_shardings(params: Any, mesh: Mesh) -> Any:
    """The shardings of a tree of parameters, or of their shapes."""

    def place(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, _spec(name, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(place, params)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over every axis but `tensor`."""
    axes = tuple(axis for axis in _BATCH_AXES if axis in mesh.shape)
    return NamedSharding(mesh, PartitionSpec(axes) if axes else PartitionSpec())


BATCH = _BATCH_AXES  # an entry of `constrain`: the dimension of rows


def on_mesh() -> bool:
    """Whether an ambient mesh (`jax.set_mesh`) of several devices is there."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape.values()) > 1


def constrain(x: jax.Array, *names: Any) -> jax.Array:
    """Say which mesh axes divide the dimensions of an activation.

    Does nothing without an ambient mesh; axes that the mesh lacks, or that do not
    divide a dimension, are left out.
    """
    if not on_mesh():
        return x
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, _fitting(mesh, x.shape, names))
