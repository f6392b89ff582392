"""Options of a training run: what `python -m examples.pretrain` takes.

This module imports neither JAX nor NumPy, so that a bad option is reported at once.
"""

import dataclasses
import hashlib
import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from examples import flags
from examples.data.config import DataConfig
from examples.flags import UserError, check, check_range, option
from examples.models.config import ModelConfig

SETTINGS_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINT_FOLDER = "checkpoints"


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
    schedule: Literal["cosine", "wsd", "constant"] = option(
        "cosine", "after the warm-up: cosine, constant and then linear (wsd), constant"
    )
    warmup_steps: int = option(15, "steps of linear warm-up")
    decay_fraction: float = option(0.2, "part of all steps in which wsd decays")
    final_lr_fraction: float = option(0.1, "where cosine and wsd end, of the peak")
    clip_norm: float = option(1.0, "clip the global gradient norm here (0: never)")
    weight_decay: float = option(0.0, "decoupled weight decay of the matrices")
    adam_weight_decay: float = option(
        0.0, "decoupled weight decay of embeddings and head (never of norms and biases)"
    )
    b1: float | None = option(None, "momentum decay")
    b2: float | None = option(None, "second-moment decay")
    eps: float | None = option(None, "epsilon of the second moment")
    ns_steps: int | None = option(None, "Newton-Schulz steps K")
    ns_coeffs: str | None = option(None, "Newton-Schulz coefficients, by name")
    nesterov: bool | None = option(None, "Nesterov momentum")
    shape_scale: str | None = option(
        None, "factor by a matrix's shape: spectral, keller, match_rms or none"
    )
    mu_dtype: str | None = option(None, "dtype of the momentum, float32 or bfloat16")

    def __post_init__(self) -> None:
        check(bool(self.names()), "--optimizer names no optimizer")
        for name in ("learning_rate", "adam_learning_rate"):
            check_range(self, name, 0, open_low=True)
        decays = ("weight_decay", "adam_weight_decay")
        for name in ("warmup_steps", "clip_norm", "eps", *decays):
            check_range(self, name, 0)
        for name in ("b1", "b2", "final_lr_fraction", "decay_fraction"):
            check_range(self, name, 0, 1)
        check_range(self, "ns_steps", 1, 100)

    def names(self) -> tuple[str, ...]:
        """The names as written, without repeats; 'all' is resolved by `optim`."""
        names = (name.strip() for name in self.optimizer.split(","))
        return tuple(dict.fromkeys(name for name in names if name))


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Length of the run, its devices, how often it reports, where its files go."""

    steps: int = option(150, "training steps per optimizer")
    batch_size: int = option(16, "sequences per step, over all devices")
    accumulate: int = option(1, "micro-batches that a step is cut into")
    mesh: str = option(
        "",
        "devices, as in fsdp=8,tensor=2 (axes: data, fsdp, expert, tensor; -1: rest)",
    )
    distributed: bool = option(False, "one process of several: join the others first")
    z_loss: float = option(0.0, "weight of the squared log-sum-exp of the logits")
    loss_chunks: int = option(
        0, "parts that the logits are computed in (0: as many as memory asks for)"
    )
    ema: float | None = option(None, "decay of averaged parameters, then evaluated")
    max_bad_steps: int = option(
        10, "stop when so many steps in a row had no finite loss and gradient"
    )
    eval_every: int = option(50, "steps between validations")
    eval_tokens: int = option(
        32_768, "validation tokens, spread evenly over the held-out text (0: all)"
    )
    log_every: int = option(5, "steps between training records in the JSONL")
    seed: int = option(0, "seed of the initial parameters and of the data order")
    deterministic: bool = option(False, "only repeatable operations on GPUs (slower)")
    compile_cache: str | None = option(
        None, "folder of compiled programs, for the next start"
    )
    tensorboard: bool = option(False, "also write TensorBoard files (tensorboardX)")
    wandb: bool = option(False, "also report to Weights & Biases (wandb)")
    out: str | None = option(
        None, "output folder (default: a new folder under runs/ named by the options)"
    )

    def __post_init__(self) -> None:
        every = ("eval_every", "log_every", "max_bad_steps")
        for name in ("steps", "batch_size", "accumulate", *every):
            check_range(self, name, 1)
        for name in ("eval_tokens", "z_loss", "loss_chunks"):
            check_range(self, name, 0)
        check_range(self, "ema", 0, 0.999_999)
        check_range(self, "seed", 0, 2**31 - 1)
        check(
            self.batch_size % self.accumulate == 0,
            f"--accumulate {self.accumulate} does not divide "
            f"--batch-size {self.batch_size}",
        )
        check(self.out != "", "--out must not be empty")


@dataclasses.dataclass(frozen=True)
class SaveConfig:
    """Checkpoints; one is always written at the end and when a signal ends the run."""

    save_every: int = option(0, "steps between checkpoints (0: by time alone)")
    save_minutes: float = option(
        10.0, "minutes between checkpoints (0: by steps alone)"
    )
    keep: int = option(2, "checkpoints to keep, the newest ones")
    resume: Literal["no", "yes", "auto"] = option(
        "no",
        "go on with the run in --out (auto: start it if there is none); its options "
        "need not be repeated",
        bare="yes",
    )

    def __post_init__(self) -> None:
        for name in ("save_every", "save_minutes"):
            check_range(self, name, 0)
        check_range(self, "keep", 1)


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a run depends on."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    save: SaveConfig = dataclasses.field(default_factory=SaveConfig)

    def as_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Config":
        """The inverse of `as_dict`; options that are new since then get defaults."""
        sections = {}
        for name, section in SECTIONS.items():
            known = {field.name for field in dataclasses.fields(section)}
            stored = content.get(name, {})
            check(isinstance(stored, Mapping), f"{name!r} must hold options")
            values = {k: v for k, v in stored.items() if k in known}
            tuples = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
            flags.check_types(section, values | tuples)
            sections[name] = section(**(values | tuples))
        return cls(**sections)

    def flat(self) -> dict[str, Any]:
        """Every option by its field name, which no two sections share."""
        return {k: v for part in self.as_dict().values() for k, v in part.items()}

    def fingerprint(self) -> str:
        """Eight hex digits that name these options; the output folder is left out."""
        content = self.as_dict()
        del content["run"]["out"], content["save"]["resume"]
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


SECTIONS: dict[str, type] = {
    field.name: typing.get_type_hints(Config)[field.name]
    for field in dataclasses.fields(Config)
}


def _read(
    argv: Sequence[str] | None, defaults: Mapping[str, Any] | None = None
) -> Config:
    sections = flags.parse(
        SECTIONS,
        argv,
        prog="python -m examples.pretrain",
        description="Train a language model on real text and compare optimizers.",
        defaults=defaults,
    )
    return Config(**sections)


def parse(argv: Sequence[str] | None = None) -> Config:
    """Read the command line; raises `UserError` with one line for a bad option.

    When a run is continued, options that are not given are those of its start.
    """
    config = _read(argv)
    if config.save.resume == "no":
        return config
    if config.run.out is None:
        raise UserError("--resume needs --out, the folder of the run")
    # Which imports this module.
    from examples.folder import check_unchanged, holds_run, stored_config

    folder = Path(config.run.out)
    if config.save.resume == "auto" and not holds_run(folder):
        return config
    old = stored_config(folder)
    config = _read(argv, old.flat() | {"resume": config.save.resume})
    check_unchanged(old, config, f"--resume {folder}")
    return config
