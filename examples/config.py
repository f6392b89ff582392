"""Options of a training run: what `python -m examples.pretrain` takes.

This module imports neither JAX nor NumPy, so that a bad option is reported at once.
"""

import dataclasses
import hashlib
import json
import typing
from collections.abc import Sequence
from typing import Any

from examples import flags
from examples.data.config import DataConfig
from examples.flags import check, check_range, option
from examples.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """Optimizers to compare; None stands for the optimizer's own default."""

    optimizer: str = option(
        "adamw,muon,muon2,muon2_f",
        "names joined by commas, or 'all' for every known optimizer",
    )
    learning_rate: float | None = option(
        None, "peak learning rate of every optimizer that runs"
    )
    adam_learning_rate: float | None = option(
        None, "peak learning rate of the AdamW branch of the Muon family"
    )
    warmup_steps: int = option(15, "steps of linear warm-up")
    final_lr_fraction: float = option(0.1, "the cosine ends at this part of the peak")
    clip_norm: float = option(1.0, "clip the global gradient norm here (0: never)")
    weight_decay: float = option(0.0, "decoupled weight decay of the matrices")
    b1: float | None = option(None, "momentum decay")
    b2: float | None = option(None, "second-moment decay")
    eps: float | None = option(None, "epsilon of the second moment")
    ns_steps: int | None = option(None, "Newton-Schulz steps K")
    ns_coeffs: str | None = option(None, "Newton-Schulz coefficients, by name")
    nesterov: bool | None = option(None, "Nesterov momentum")

    def __post_init__(self) -> None:
        check(bool(self.names()), "--optimizer names no optimizer")
        for name in ("learning_rate", "adam_learning_rate"):
            check_range(self, name, 0, open_low=True)
        for name in ("warmup_steps", "clip_norm", "weight_decay", "eps"):
            check_range(self, name, 0)
        for name in ("b1", "b2"):
            check_range(self, name, 0, 1)
        check_range(self, "final_lr_fraction", 0, 1)
        check_range(self, "ns_steps", 1, 100)

    def names(self) -> tuple[str, ...]:
        """The names as written, without repeats; 'all' is resolved by `optim`."""
        names = (name.strip() for name in self.optimizer.split(","))
        return tuple(dict.fromkeys(name for name in names if name))


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Length of the run, how often it reports, and where its files go."""

    steps: int = option(150, "training steps per optimizer")
    batch_size: int = option(16, "sequences per step")
    eval_every: int = option(50, "steps between validations")
    eval_tokens: int = option(
        32_768, "validation tokens, spread evenly over the held-out text (0: all)"
    )
    log_every: int = option(5, "steps between training records in the JSONL")
    seed: int = option(0, "seed of the initial parameters and of the data order")
    out: str | None = option(
        None, "output folder (default: a new folder under runs/ named by the options)"
    )

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_every", "log_every"):
            check_range(self, name, 1)
        check_range(self, "eval_tokens", 0)
        check_range(self, "seed", 0, 2**31 - 1)
        check(self.out != "", "--out must not be empty")


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a run depends on."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)

    def as_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries, ready for JSON."""
        return dataclasses.asdict(self)

    def fingerprint(self) -> str:
        """Eight hex digits that name these options; the output folder is left out."""
        content = self.as_dict()
        del content["run"]["out"]
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


SECTIONS: dict[str, type] = {
    field.name: typing.get_type_hints(Config)[field.name]
    for field in dataclasses.fields(Config)
}


def parse(argv: Sequence[str] | None = None) -> Config:
    """Read the command line; raises `UserError` with one line for a bad option."""
    sections = flags.parse(
        SECTIONS,
        argv,
        prog="python -m examples.pretrain",
        description="Train a small LLaMA on real text and compare optimizers.",
    )
    return Config(**sections)
