"""Eight fake CPU devices, strict shapes and one compilation cache for the suite."""

import atexit
import contextlib
import ctypes
import gc
import importlib.metadata
import os
import pathlib
import shutil
import tempfile

# All of these only take effect before JAX starts, and serve the processes that tests
# and pytest-xdist start as well.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads of NumPy's products wait for one another by spinning, as long as several
# workers share the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
flags = {"xla_force_host_platform_device_count": "8"}
on_cpu = os.environ["JAX_PLATFORMS"] == "cpu"
if on_cpu:
    # Most of the suite's time would go into optimizing programs that run for
    # microseconds.
    flags |= {
        "xla_backend_optimization_level": "0",
        "xla_llvm_disable_expensive_passes": "true",
    }
if on_cpu and importlib.metadata.version("jaxlib").startswith("0.10."):
    # The older of XLA's two generators of CPU code takes a sixth of the time. Later
    # versions have lost it, and XLA ends the process at a flag that it does not know.
    flags |= {
        "xla_cpu_use_fusion_emitters": "false",
        "xla_cpu_parallel_codegen_split_count": "1",
    }
given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [given, *(f"--{name}={flags[name]}" for name in flags if name not in given)]
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

# Compiled programs stay in memory as long as JAX knows them, 5 GB in the end. Letting
# them go takes time that grows with the square of their number, so it is done often.
GROWTH = 500e6
allowed = 900e6


def pytest_collection_finish():
    """What is imported stays; and tracing makes many objects, of which few are cycles.

    Looking for cycles as often as Python does by default takes a seventh of the time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def resident():
    """Bytes of this process in memory; 0 where the system does not say."""
    try:  # not on every system, nor to a process that has given up its rights
        pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def pytest_runtest_teardown():
    """Bounds the memory of a worker to about 1.5 GB."""
    global allowed
    if resident() > allowed:
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # another system's C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        allowed = max(allowed, resident() + GROWTH)
