"""Configuration: frozen dataclasses, and the command line built from their fields.

Every field declared with `option` becomes one flag: `weight_decay` is
`--weight-decay`.
This module imports neither JAX nor NumPy, so that a bad option is reported at once.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, NoReturn


class UserError(ValueError):
    """Something the user can put right; shown as one line, exit code 2."""


def option(default: Any, text: str) -> Any:
    """A dataclass field that is also a command-line flag with a help text."""
    return dataclasses.field(default=default, metadata={"help": text})


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _check_range(
    owner: Any, name: str, low: float, high: float = math.inf, *, open_low: bool = False
) -> None:
    """Check one numeric field; None (meaning "use the default") always passes."""
    value = getattr(owner, name)
    if value is None:
        return
    above = value > low if open_low else value >= low
    flag = "--" + name.replace("_", "-")
    bounds = f"{'above' if open_low else 'at least'} {low:g}"
    if high != math.inf:
        bounds += f" and at most {high:g}"
    _check(
        math.isfinite(value) and above and value <= high,
        f"{flag} must be {bounds}, got {value}",
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A LLaMA decoder. The defaults train within seconds on two CPU cores."""

    dim: int = option(128, "width of the residual stream")
    layers: int = option(2, "number of decoder blocks")
    heads: int = option(4, "attention heads per block")
    hidden: int = option(352, "width inside the SwiGLU feed-forward")
    seq_len: int = option(128, "tokens the model sees at once")
    rope_theta: float = option(10_000.0, "base of the rotary position angles")
    dtype: Literal["float32", "bfloat16"] = option(
        "float32", "compute dtype; parameters are always float32"
    )

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "hidden", "seq_len"):
            _check_range(self, name, 1)
        _check_range(self, "rope_theta", 0, open_low=True)
        _check(
            self.dim % (2 * self.heads) == 0,
            f"--dim must be a multiple of 2 * --heads, got {self.dim} and {self.heads}",
        )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes tokens."""

    data: tuple[str, ...] = option(
        (),
        "text files or folders (.txt, .txt.xz, .jsonl, .jsonl.xz); without it, the "
        "Python sources installed on this machine",
    )
    tokenizer: str = option(
        "bytes", "'bytes', 'bpe' (trained on the spot) or the path of a tokenizer.json"
    )
    vocab_size: int = option(2048, "vocabulary of --tokenizer bpe")
    max_bytes: int = option(4_000_000, "read at most this much text (0: all of it)")
    val_fraction: float = option(
        0.05, "part of the text held out for validation, by whole documents"
    )

    def __post_init__(self) -> None:
        _check(bool(self.tokenizer), "--tokenizer must not be empty")
        _check_range(self, "vocab_size", 300, 1_000_000)
        _check_range(self, "max_bytes", 0)
        _check_range(self, "val_fraction", 0.001, 0.5)


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
        _check(bool(self.names()), "--optimizer names no optimizer")
        for name in ("learning_rate", "adam_learning_rate"):
            _check_range(self, name, 0, open_low=True)
        for name in ("warmup_steps", "clip_norm", "weight_decay", "eps"):
            _check_range(self, name, 0)
        for name in ("b1", "b2"):
            _check_range(self, name, 0, 1)
        _check_range(self, "final_lr_fraction", 0, 1)
        _check_range(self, "ns_steps", 1, 100)

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
            _check_range(self, name, 1)
        _check_range(self, "eval_tokens", 0)
        _check_range(self, "seed", 0, 2**31 - 1)
        _check(self.out != "", "--out must not be empty")


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


class _Parser(argparse.ArgumentParser):
    """argparse prints a usage text and exits; one line is enough for our users."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _flag_kwargs(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Translate one dataclass field into the keywords of `add_argument`."""
    if isinstance(hint, types.UnionType):  # X | None: the flag itself takes an X
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    shown = "" if field.default in (None, ()) else f" [{field.default}]"
    text = field.metadata["help"].replace("%", "%%") + shown
    kwargs: dict[str, Any] = {"help": text, "default": field.default}
    if hint is bool:
        kwargs["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(hint) is Literal:
        kwargs["choices"] = typing.get_args(hint)
    elif typing.get_origin(hint) is tuple:
        kwargs |= {"nargs": "+", "metavar": "PATH"}
    else:
        kwargs |= {"type": hint, "metavar": hint.__name__.upper()}
    return kwargs


def parse(argv: Sequence[str] | None = None) -> Config:
    """Read the command line; raises `UserError` with one line for a bad option."""
    parser = _Parser(
        prog="python -m examples.pretrain",
        description="Train a small LLaMA on real text and compare optimizers.",
        allow_abbrev=False,
    )
    for name, section in SECTIONS.items():
        group = parser.add_argument_group(name, (section.__doc__ or "").split("\n")[0])
        hints = typing.get_type_hints(section)
        for field in dataclasses.fields(section):
            flag = "--" + field.name.replace("_", "-")
            group.add_argument(flag, **_flag_kwargs(field, hints[field.name]))
    values = vars(parser.parse_args(argv))
    if isinstance(values["data"], list):
        values["data"] = tuple(values["data"])
    sections = {
        name: section(**{f.name: values[f.name] for f in dataclasses.fields(section)})
        for name, section in SECTIONS.items()
    }
    return Config(**sections)
