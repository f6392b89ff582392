"""What the devices of this run can do and hold."""

import platform
from typing import Any

import flax
import jax
import optax

# Dense bfloat16 FLOP/s of one device, by a part of its `device_kind`, from the vendors'
# data sheets: NVIDIA H100 SXM, H200 and A100, Google Cloud TPU v4 to v6e.
_PEAKS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
}


def peak_flops(devices: int) -> float | None:
    """FLOP/s that so many devices together could reach; None if unknown."""
    kind = jax.devices()[0].device_kind
    found = (peak for name, peak in _PEAKS.items() if name in kind)
    peak = next(found, None)
    return None if peak is None else peak * devices


def peak_memory() -> float | None:
    """Most GiB that a device of this process has held; None where nobody counts."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    used = [entry.get("peak_bytes_in_use", 0) for entry in stats]
    return max(used) / 2**30 if any(used) else None


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
