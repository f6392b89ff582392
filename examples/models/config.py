"""Options of the model."""

import dataclasses
from typing import Literal

from examples.flags import check, check_range, option


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
            check_range(self, name, 1)
        check_range(self, "rope_theta", 0, open_low=True)
        check(
            self.dim % (2 * self.heads) == 0,
            f"--dim must be a multiple of 2 * --heads, got {self.dim} and {self.heads}",
        )
