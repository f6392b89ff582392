"""One JSON line per measurement: the number, and what it takes to read it."""

import json
import os
import pathlib
import platform
import subprocess
import time
from typing import Any

import jax
import optax

RESULTS = pathlib.Path(__file__).parent / "results"


def commit() -> str:
    """The commit of this checkout, with + where files differ from it."""
    root = pathlib.Path(__file__).parent
    try:
        run = {"cwd": root, "capture_output": True, "text": True, "check": True}
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **run).stdout
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], **run).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + ("+" if changed.strip() else "")


def environment(commit_id: str | None = None) -> dict[str, Any]:
    device = jax.devices()[0]
    flags = os.environ.get("XLA_FLAGS")
    return {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "jax": jax.__version__,
        "optax": optax.__version__,
        "python": platform.python_version(),
        **({"xla_flags": flags} if flags else {}),
        "commit": commit_id or commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def write(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Appends; earlier lines stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
