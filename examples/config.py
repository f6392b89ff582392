"""Options of a training run: what `python -m examples.pretrain` takes.

This module imports neither JAX nor NumPy, so that a bad option is reported at once.
"""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from examples import options
from examples.options import Options, check, option

Architecture = Literal["gpt", "llama", "moe"]
_SIZES = ("architecture", "dim", "hidden", "layers", "heads", "seq_len")


def _sizes(*sizes: Any, experts: int = 0, active: int = 0) -> dict[str, Any]:
    """One preset; the tiny ones are for CPUs, the others compute in bfloat16."""
    dtype = "float32" if sizes[1] <= 128 else "bfloat16"
    more = {"experts": experts, "active_experts": active, "dtype": dtype}
    return dict(zip(_SIZES, sizes, strict=True)) | more


# Widths, depths and numbers of heads are those of the paper's appendix
# (arXiv:2604.09967). LLaMA-7B is not listed there and comes from arXiv:2302.13971.
PRESETS: dict[str, dict[str, Any]] = {
    "llama_tiny": _sizes("llama", 128, 352, 2, 4, 128),
    "gpt_tiny": _sizes("gpt", 128, 512, 2, 4, 128),
    "moe_tiny": _sizes("moe", 128, 192, 2, 4, 128, experts=8, active=2),
    "gpt_small": _sizes("gpt", 768, 3072, 12, 12, 1024),
    "gpt_base": _sizes("gpt", 1024, 4096, 24, 16, 1024),
    "gpt_large": _sizes("gpt", 1280, 5120, 36, 20, 1024),
    "llama_60m": _sizes("llama", 512, 1344, 8, 8, 1024),
    "llama_350m": _sizes("llama", 1024, 2736, 24, 16, 1024),
    "llama_1b": _sizes("llama", 2048, 5472, 24, 32, 4096),
    "llama_7b": _sizes("llama", 4096, 11008, 32, 32, 4096),
    "llama_13b": _sizes("llama", 5120, 13827, 40, 40, 4096),
    "moe_7b": _sizes("moe", 2048, 4096, 24, 32, 4096, experts=16, active=2),
}

_REMAT = "recompute in the backward pass: all but matrix products (dots), or all"
_ATTENTION = "attention kernel; auto: cuDNN on GPUs in 16 bits, else XLA"


def _preset(text: str, bounds: str = "") -> Any:
    """A field whose default comes from the preset."""
    return option(None, f"{text} (default: the preset's)", bounds)


@dataclasses.dataclass(frozen=True)
class ModelConfig(Options):
    """A decoder: a preset, and single sizes that differ from it.

    Fields left at None take the preset's value as soon as the object exists, so that
    everybody else reads plain numbers.
    """

    model: str = option("llama_tiny", f"preset: {', '.join(PRESETS)}")
    dim: int = _preset("width of the residual stream", "[1, ]")
    layers: int = _preset("number of decoder blocks", "[1, ]")
    heads: int = _preset("attention heads per block", "[1, ]")
    hidden: int = _preset("width of the feed-forward, or of one expert", "[1, ]")
    experts: int = _preset("feed-forward experts per block of an MoE", "[0, ]")
    active_experts: int = _preset("experts that each token passes through", "[0, ]")
    seq_len: int = _preset("tokens the model sees at once", "[1, ]")
    dtype: Literal["float32", "bfloat16"] = _preset("of products, not of parameters")
    # Compiles faster, runs slower: on an H100, LLaMA-350M took 121 ms for its gradients
    # instead of 87, and 3 s to compile instead of 12.
    scan_layers: bool = option(False, "compile one block for all layers")
    rope_theta: float = option(10_000.0, "base of the rotary position angles", "(0, ]")
    remat: Literal["none", "dots", "full"] = option("none", _REMAT)
    attention: Literal["auto", "xla", "cudnn"] = option("auto", _ATTENTION)
    capacity_factor: float = option(
        1.25, "places per expert, of an even share", "(0, ]"
    )
    balance_loss: float = option(0.01, "weight of the load-balancing loss", "[0, ]")
    router_z_loss: float = option(0.0, "weight of the router's z-loss", "[0, ]")

    def __post_init__(self) -> None:
        said = f"unknown name {self.model!r} (known: {', '.join(PRESETS)})"
        check(self.model in PRESETS, f"--model: {said}")
        for name, value in PRESETS[self.model].items():
            if name != "architecture" and getattr(self, name) is None:
                object.__setattr__(self, name, value)
        super().__post_init__()
        said = f"a multiple of 2 * --heads, got {self.dim} and {self.heads}"
        check(self.dim % (2 * self.heads) == 0, f"--dim must be {said}")
        experts, active = self.experts, self.active_experts
        if self.architecture != "moe":
            said = f"--experts and --active-experts do not apply to {self.model}"
            check(not experts and not active, said)
        else:
            said = f"at least 1 and at most --experts {experts}, got {active}"
            check(1 <= active <= experts, f"--active-experts must be {said}")

    @property
    def architecture(self) -> Architecture:
        return PRESETS[self.model]["architecture"]

    @property
    def is_tiny(self) -> bool:
        return self.model.endswith("_tiny")

    def without_drops(self) -> "ModelConfig":
        """The same model with a place in every expert for every token.

        Training drops tokens of experts that are full; evaluation and sampling do not.
        """
        factor = self.experts / self.active_experts if self.experts else 1.0
        return dataclasses.replace(self, capacity_factor=factor)


_DATA = (
    "text files or folders (.txt, .jsonl, also with .xz or .gz), or a folder of token "
    "shards (examples.prepare); without it, Python sources that are installed here"
)


@dataclasses.dataclass(frozen=True)
class DataConfig(Options):
    """Where the text comes from and how it becomes tokens."""

    data: tuple[str, ...] = option((), _DATA)
    tokenizer: str = option("bytes", "'bytes', 'bpe' or the path of a tokenizer.json")
    vocab_size: int = option(2048, "vocabulary of --tokenizer bpe", "[300, 1000000]")
    max_bytes: int = option(4_000_000, "read so much text (0: all of it)", "[0, 1e18]")
    val_fraction: float = option(0.05, "part of the text held out", "[0.001, 0.5]")


# Models are trained by the optimizer that docs/choosing.md recommends. Tiny ones are
# also trained by those that it is compared with.
RECOMMENDED = "muon2_f_h"
COMPARED = f"adamw,muon,muon2,muon2_f,{RECOMMENDED}"
_OPTIMIZER = (
    "names joined by commas, or 'all' (default: the recommended muon2_f_h; for "
)
_OPTIMIZER += "a tiny model a comparison of five)"
_SCHEDULE = "after the warm-up: cosine, constant and then linear (wsd), constant"


@dataclasses.dataclass(frozen=True)
class OptimConfig(Options):
    """Optimizers to compare; None stands for the trainer's choice (`optim.CHOICES`)."""

    optimizer: str | None = option(None, _OPTIMIZER)
    learning_rate: float | None = option(None, "peak rate of every optimizer", "(0, ]")
    adam_learning_rate: float | None = option(None, "of AdamW beside Muon", "(0, ]")
    schedule: Literal["cosine", "wsd", "constant"] = option("cosine", _SCHEDULE)
    warmup_steps: int = option(15, "steps of linear warm-up", "[0, ]")
    decay_fraction: float = option(0.2, "of the steps, in which wsd falls", "[0, 1]")
    final_lr_fraction: float = option(0.1, "where schedules end, of the peak", "[0, 1]")
    clip_norm: float = option(1.0, "clip the gradient norm here (0: never)", "[0, ]")
    weight_decay: float = option(0.0, "decoupled weight decay of the matrices", "[0, ]")
    adam_weight_decay: float = option(0.0, "that of embeddings and head", "[0, ]")
    b1: float | None = option(None, "momentum decay", "[0, 1)")
    b2: float | None = option(None, "second-moment decay", "[0, 1)")
    eps: float | None = option(None, "epsilon of the second moment", "[0, ]")
    ns_steps: int | None = option(None, "Newton-Schulz steps K", "[1, 100]")
    ns_coeffs: str | None = option(None, "Newton-Schulz coefficients, by name")
    nesterov: bool | None = option(None, "Nesterov momentum (default: on)")
    shape_scale: str | None = option(None, "spectral, keller, match_rms or none")
    mu_dtype: str | None = option(None, "dtype of the momentum, float32 or bfloat16")

    def names(self) -> tuple[str, ...]:
        """The names as written, without repeats; 'all' is resolved by `optim`."""
        names = (name.strip() for name in (self.optimizer or "").split(","))
        return tuple(dict.fromkeys(name for name in names if name))


@dataclasses.dataclass(frozen=True)
class RunConfig(Options):
    """Length of the run, its devices, how often it reports, where its files go."""

    steps: int = option(120, "training steps per optimizer", "[1, ]")
    batch_size: int = option(16, "sequences per step, over all devices", "[1, ]")
    accumulate: int = option(1, "micro-batches that a step is cut into", "[1, ]")
    mesh: str = option("", "as in fsdp=8,expert=2,tensor=-1 (default: data=-1)")
    distributed: bool = option(False, "one process of several: join the others first")
    loss_chunks: int = option(0, "parts of the logits (0: as memory asks)", "[0, ]")
    max_bad_steps: int = option(10, "stop at so many bad steps in a row", "[1, ]")
    eval_every: int = option(40, "steps between validations", "[1, ]")
    eval_tokens: int = option(32_768, "validation tokens (0: all)", "[0, 1e18]")
    sample_prompt: str | None = option(None, "continue this text at every validation")
    log_every: int = option(5, "steps between training records", "[1, ]")
    seed: int = option(0, "seed of the first weights and of the data order", "[0, ]")
    init_from: str | None = option(
        None, "begin with the weights of a run or .safetensors"
    )
    init_optimizer: bool = option(False, "and with the state of its optimizer")
    deterministic: bool = option(False, "only repeatable operations on GPUs (slower)")
    out: str | None = option(None, "output folder (default: a new one under runs/)")

    def __post_init__(self) -> None:
        super().__post_init__()
        said = f"--accumulate {self.accumulate} does not divide --batch-size"
        divides = self.batch_size % self.accumulate == 0
        check(divides, f"{said} {self.batch_size}")
        check(self.out != "", "--out must not be empty")
        shared = self.out is not None or not self.distributed
        check(shared, "--distributed needs --out, a folder that all processes share")
        run = bool(self.init_from) and not str(self.init_from).endswith(".safetensors")
        check(run or not self.init_optimizer, "--init-optimizer needs --init-from RUN")


@dataclasses.dataclass(frozen=True)
class TrainedConfig(Options):
    """Which parameters of which run a command is about."""

    run: str = option("", "folder of the run")
    optimizer: str | None = option(None, "whose model, if the run compared several")
    step: str | None = option(None, "a step or 'best' (default: the newest checkpoint)")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(bool(self.run), "--run FOLDER is needed")
        known = self.step in (None, "best") or str(self.step).isdecimal()
        check(known, f"--step {self.step}: neither the number of a step nor 'best'")


_RESUME = "go on with the run in --out (auto: start it if there is none)"


@dataclasses.dataclass(frozen=True)
class SaveConfig(Options):
    """Checkpoints; one is always written at the end and when a signal ends the run."""

    save_every: int = option(0, "steps between checkpoints (0: by time)", "[0, ]")
    save_minutes: float = option(10.0, "minutes between them (0: by steps)", "[0, ]")
    keep: int = option(2, "checkpoints to keep, the newest ones", "[1, ]")
    keep_best: bool = option(False, "and that of the lowest validation loss")
    resume: Literal["no", "yes", "auto"] = option("no", _RESUME, bare="yes")


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a run depends on."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    save: SaveConfig = dataclasses.field(default_factory=SaveConfig)

    def __post_init__(self) -> None:
        if self.optim.optimizer is None:
            names = COMPARED if self.model.is_tiny else RECOMMENDED
            optim = dataclasses.replace(self.optim, optimizer=names)
            object.__setattr__(self, "optim", optim)

    def flat(self) -> dict[str, Any]:
        """Every option by its field name, which no two sections share."""
        parts = dataclasses.asdict(self).values()
        return {key: value for part in parts for key, value in part.items()}


SECTIONS: dict[str, type[Options]] = typing.get_type_hints(Config)

BPE = lambda given: given["tokenizer"] == "bpe", "with --tokenizer bpe"
_FALLS = lambda given: given["schedule"] != "constant", "in a schedule that falls"
_MOE = lambda given: given["model"].startswith("moe"), "in a mixture of experts"
_TURNS = lambda given: not given["model"].startswith("gpt"), "on angles, not in a GPT"
_WSD = lambda given: given["schedule"] == "wsd", "with --schedule wsd"
CONDITIONS: options.Conditions = {
    "vocab_size": BPE,
    "final_lr_fraction": _FALLS,
    "decay_fraction": _WSD,
    "capacity_factor": _MOE,
    "balance_loss": _MOE,
    "router_z_loss": _MOE,
    "rope_theta": _TURNS,
}


def parse(
    argv: Sequence[str] | None = None, defaults: Mapping[str, Any] | None = None
) -> Config:
    """Read the command line; `UserError`, of one line, for a bad option."""
    words = "examples.pretrain", "Train a language model on text, compare optimizers."
    return Config(**options.parse(SECTIONS, argv, *words, defaults, CONDITIONS))
