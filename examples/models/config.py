"""Options of the model: a preset by name, and what overrides it.

This module imports neither JAX nor NumPy, so that a bad option is reported at once.
"""

import dataclasses
from typing import Any, Literal

from examples.flags import check, check_range, option

Architecture = Literal["gpt", "llama", "moe"]


def _sizes(
    architecture: Architecture,
    dim: int,
    hidden: int,
    layers: int,
    heads: int,
    seq_len: int,
    **more: Any,
) -> dict[str, Any]:
    """One preset; the tiny ones are for CPUs, the others compute in bfloat16."""
    tiny = dim <= 128
    return {
        "architecture": architecture,
        "dim": dim,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "seq_len": seq_len,
        "experts": 0,
        "active_experts": 0,
        "dtype": "float32" if tiny else "bfloat16",
        # Compiles faster, runs slower: on an H100, LLaMA-350M took 121 ms for its
        # gradients instead of 87, and 3 s to compile instead of 12.
        "scan_layers": False,
    } | more


# Widths, depths and heads from the tables of configurations in arXiv:2604.09967,
# appendix; LLaMA-7B, which is missing there, from arXiv:2302.13971.
PRESETS: dict[str, dict[str, Any]] = {
    "llama_tiny": _sizes("llama", 128, 352, 2, 4, 128),
    "gpt_tiny": _sizes("gpt", 128, 512, 2, 4, 128),
    "moe_tiny": _sizes("moe", 128, 192, 2, 4, 128, experts=8, active_experts=2),
    "gpt_small": _sizes("gpt", 768, 3072, 12, 12, 1024),
    "gpt_base": _sizes("gpt", 1024, 4096, 24, 16, 1024),
    "gpt_large": _sizes("gpt", 1280, 5120, 36, 20, 1024),
    "llama_60m": _sizes("llama", 512, 1344, 8, 8, 1024),
    "llama_350m": _sizes("llama", 1024, 2736, 24, 16, 1024),
    "llama_1b": _sizes("llama", 2048, 5472, 24, 32, 4096),
    "llama_7b": _sizes("llama", 4096, 11008, 32, 32, 4096),
    "llama_13b": _sizes("llama", 5120, 13827, 40, 40, 4096),
    "moe_7b": _sizes("moe", 2048, 4096, 24, 32, 4096, experts=16, active_experts=2),
}
# The vocabulary that a preset's parameter count in the paper refers to.
VOCAB_SIZES: dict[str, int] = {"gpt": 50257, "llama": 32000, "moe": 32000}


def _preset(text: str) -> Any:
    """A field whose default comes from the preset."""
    return option(None, f"{text} (default: the preset's)")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder: a preset, and single sizes that differ from it.

    Fields left at None take the preset's value as soon as the object exists, so that
    everybody else reads plain numbers.
    """

    model: str = option("llama_tiny", f"preset: {', '.join(PRESETS)}")
    dim: int = _preset("width of the residual stream")
    layers: int = _preset("number of decoder blocks")
    heads: int = _preset("attention heads per block")
    hidden: int = _preset("width inside the feed-forward, or inside one expert")
    experts: int = _preset("feed-forward experts per block of an MoE")
    active_experts: int = _preset("experts that each token passes through")
    seq_len: int = _preset("tokens the model sees at once")
    dtype: str = _preset("compute dtype, float32 or bfloat16; parameters are float32")
    scan_layers: bool = _preset("compile one block for all layers")
    rope_theta: float = option(10_000.0, "base of the rotary position angles")
    remat: Literal["none", "dots", "full"] = option(
        "none",
        "recompute in the backward pass: nothing, all but matrix products, or whole "
        "blocks",
    )
    attention: Literal["auto", "xla", "cudnn"] = option(
        "auto", "attention kernel; auto: cuDNN on GPUs in 16 bits, else XLA"
    )
    moe_dispatch: Literal["auto", "ragged", "capacity"] = option(
        "auto",
        "how tokens reach experts: ragged drops none, capacity has limited places; "
        "auto: ragged on one TPU, else capacity",
    )
    capacity_factor: float = option(
        1.25, "places per expert, as a multiple of an even share of the tokens"
    )
    balance_loss: float = option(0.01, "weight of the load-balancing loss of experts")
    router_z_loss: float = option(0.0, "weight of the squared router log-sum-exp")

    def __post_init__(self) -> None:
        known = ", ".join(PRESETS)
        check(
            self.model in PRESETS,
            f"--model: unknown name {self.model!r} (known: {known})",
        )
        for name, value in PRESETS[self.model].items():
            if name != "architecture" and getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in ("dim", "layers", "heads", "hidden", "seq_len"):
            check_range(self, name, 1)
        check_range(self, "rope_theta", 0, open_low=True)
        check_range(self, "capacity_factor", 0, open_low=True)
        for name in ("balance_loss", "router_z_loss"):
            check_range(self, name, 0)
        check(
            self.dim % (2 * self.heads) == 0,
            f"--dim must be a multiple of 2 * --heads, got {self.dim} and {self.heads}",
        )
        check(
            self.dtype in ("float32", "bfloat16"),
            f"--dtype must be float32 or bfloat16, got {self.dtype}",
        )
        self._check_experts()

    def _check_experts(self) -> None:
        if self.architecture != "moe":
            check(
                not self.experts and not self.active_experts,
                f"--experts and --active-experts do not apply to --model {self.model}",
            )
            return
        check_range(self, "experts", 1)
        check(
            1 <= self.active_experts <= self.experts,
            f"--active-experts must be at least 1 and at most --experts "
            f"{self.experts}, got {self.active_experts}",
        )

    @property
    def architecture(self) -> Architecture:
        return PRESETS[self.model]["architecture"]
