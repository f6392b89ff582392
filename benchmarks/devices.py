"""Devices to compile for that need not be there."""

import math
import os
from typing import Any

import jax

from examples import mesh
from examples.options import UserError, check


def _cpu_devices(count: int) -> list[Any]:
    """Imagined devices: enough CPUs, or those that JAX already has."""
    os.environ.setdefault("XLA_FLAGS", "")
    # Read when the first device is asked for.
    if mesh.CPU_COUNT not in os.environ["XLA_FLAGS"]:
        os.environ["XLA_FLAGS"] += f" {mesh.CPU_COUNT}={count}"
    jax.config.update("jax_platforms", "cpu")
    return jax.devices("cpu")


def _tpu_devices(topology: str) -> list[Any]:
    # The compiler looks for a machine that is not there unless told so.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:  # of many kinds, from the plugin
        raise UserError(
            f"--topology {topology}: {error} (the TPU compiler is in the package "
            "libtpu)"
        ) from None
    return list(found.devices)


def devices(mesh_text: str, topology: str | None, here: bool) -> list[Any]:
    """Those of a TPU slice, of this machine, or as many CPUs as a mesh takes.

    To be called before anything asks JAX for a device: that settles what there is.
    """
    if topology is not None:
        return _tpu_devices(topology)
    if here:
        return jax.devices()
    sizes = mesh.parse(mesh_text or "data=1")
    check(-1 not in sizes.values(), "--mesh: -1 needs --topology or --here")
    return _cpu_devices(math.prod(sizes.values()))
