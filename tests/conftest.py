"""Eight fake CPU devices and strict shapes for the whole suite."""

import os

# Both only take effect before JAX starts its backends.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

import jax  # noqa: E402

# A rank mismatch that broadcasts by accident is a bug here, not a convenience.
jax.config.update("jax_numpy_rank_promotion", "raise")
