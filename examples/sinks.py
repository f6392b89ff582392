"""Optional copies of the records: TensorBoard and Weights & Biases."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from examples.config import Config
from examples.flags import UserError

# (name of the optimizer, training or validation, step, numbers) -> None
Sink = Callable[[str, str, int, Mapping[str, float]], None]


def _require(module: str, flag: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{flag}: the package {package!r} is not installed") from None


def _tensorboard(folder: Path) -> Sink:
    library = _require("tensorboardX", "--tensorboard", "tensorboardX")
    writers: dict[str, Any] = {}

    def write(name: str, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        if name not in writers:  # one curve per optimizer in the same charts
            writers[name] = library.SummaryWriter(str(folder / "tensorboard" / name))
        for key, value in numbers.items():
            writers[name].add_scalar(f"{kind}/{key}", value, step)
        if kind == "eval":
            writers[name].flush()

    return write


def _wandb(folder: Path, config: Config) -> Sink:
    library = _require("wandb", "--wandb", "wandb")
    run = library.init(
        project="muon2_optax", dir=str(folder), config=config.as_dict(), resume="allow"
    )

    def write(name: str, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        # Every optimizer counts its own steps, and W&B's counter cannot go back.
        run.log(
            {f"{name}/step": step}
            | {f"{name}/{kind}/{k}": v for k, v in numbers.items()}
        )

    return write


def open_sinks(config: Config, folder: Path) -> list[Sink]:
    """Those that the options ask for; `UserError` if a package is missing."""
    sinks = []
    if config.run.tensorboard:
        sinks.append(_tensorboard(folder))
    if config.run.wandb:
        sinks.append(_wandb(folder, config))
    return sinks
