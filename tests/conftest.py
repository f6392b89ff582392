"""Eight fake CPU devices, strict shapes and one compilation cache for the suite."""

import atexit
import os
import shutil
import tempfile

# All of these only take effect before JAX starts, and serve the processes that tests
# and pytest-xdist start as well.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # New for each run: trainings of the same little model take most of the suite's time
    # to compile the same step.
    cache = tempfile.mkdtemp(prefix="muon2-tests-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

import jax  # noqa: E402

# A rank mismatch that broadcasts by accident is a bug here, not a convenience.
jax.config.update("jax_numpy_rank_promotion", "raise")
