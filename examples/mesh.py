"""Devices: what they can do, how they form a mesh, which axis divides which array.

Four axes are known: `data` repeats parameters and divides batches, `fsdp` divides both,
`expert` divides the experts of an MoE and batches, `tensor` divides matrices inside.
The axes are of type Auto: constraints say where activations live, and the compiler
derives the communication.
"""

import math
import platform
import re
from collections.abc import Sequence
from typing import Any

import flax
import jax
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.options import UserError, check

# XLA's flag for imagined CPU devices.
CPU_COUNT = "--xla_force_host_platform_device_count"
# From the slowest links to the fastest: neighbours share the axis that comes last.
AXES = ("data", "fsdp", "expert", "tensor")
BATCH = ("data", "fsdp", "expert")  # an entry of `constrain`: the dimension of rows

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
        check(name in AXES, f"--mesh: no axis {name!r} (known: {', '.join(AXES)})")
        check(name not in sizes, f"--mesh: axis {name} is given twice")
        said = f"--mesh: want {name}=NUMBER, at least 1 or -1 for the rest, got {part}"
        check(bool(re.fullmatch(r"-1|[1-9]\d*", number)), said)
        sizes[name] = int(number)
    check([*sizes.values()].count(-1) <= 1, "--mesh: only one axis can be -1")
    return sizes


def make_mesh(text: str, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh from text such as `fsdp=8,tensor=2`; without text, `data=-1`.

    Fewer devices than there are may be named, except where several processes would then
    hold none.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = parse(text or "data=-1")
    count = math.prod(size for size in sizes.values() if size != -1)
    for name, size in sizes.items():
        if size == -1:
            sizes[name] = max(1, len(devices) // count)
            count *= sizes[name]
    several_processes = len({device.process_index for device in devices}) > 1
    if count > len(devices) or (several_processes and count < len(devices)):
        said = f"--mesh {text} takes {count} devices, here are {len(devices)}"
        if devices[0].platform == "cpu":
            said += f" (XLA_FLAGS={CPU_COUNT}={count} imagines so many CPUs)"
        raise UserError(f"{said}; name another --mesh")
    names = [name for name in AXES if name in sizes]
    auto, shape = (AxisType.Auto,) * len(names), [sizes[name] for name in names]
    return jax.make_mesh(shape, names, axis_types=auto, devices=devices[:count])


def _fitting(mesh: Any, shape: tuple[int, ...], names: Sequence[Any]) -> PartitionSpec:
    """The spec of `names`, without axes that the mesh lacks or that do not divide."""
    spec: list[Any] = []
    for size, name in zip(shape, names, strict=True):
        group = name if isinstance(name, tuple) else (name,)
        there = tuple(axis for axis in group if mesh.shape.get(axis, 1) > 1)
        parts = math.prod(mesh.shape[axis] for axis in there)
        spec.append(there if there and size % parts == 0 else None)
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)


def param_shardings(params: Any, mesh: Mesh) -> Any:
    """The shardings of a tree of parameters, or of their shapes."""

    def place(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axes = next((axes for rule, axes in _RULES if re.search(rule, name)), ())
        whole = (None,) * (leaf.ndim - len(axes))
        return NamedSharding(mesh, _fitting(mesh, leaf.shape, (*whole, *axes)))

    return jax.tree_util.tree_map_with_path(place, params)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over every axis but `tensor`."""
    axes = tuple(axis for axis in BATCH if axis in mesh.shape)
    return NamedSharding(mesh, PartitionSpec(axes) if axes else PartitionSpec())


def constrain(x: jax.Array, *names: Any) -> jax.Array:
    """Say which mesh axes divide the dimensions of an activation.

    Does nothing without an ambient mesh (`jax.set_mesh`); axes that it lacks, or that
    do not divide a dimension, are left out.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if math.prod(mesh.shape.values()) <= 1:
        return x
    return jax.lax.with_sharding_constraint(x, _fitting(mesh, x.shape, names))


def peak_memory() -> float | None:
    """Most GiB that a device of this process has held; None where nobody counts."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    used = max(entry.get("peak_bytes_in_use", 0) for entry in stats)
    return used / 2**30 if used else None


def environment() -> dict[str, Any]:
    """What a reader of the records must know about the machine."""
    device = jax.devices()[0]
    return {
        "device": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
        "processes": jax.process_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
    }
