"""The models of the study, and how long each is trained."""

import dataclasses

from examples.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and its training: what all arms share.

    Attributes:
      config: shapes and compute dtype.
      vocab_size: rows of the embedding.
      tokenizer: folder of the tokenizer.
      steps: training steps, where a cell does not say otherwise.
      batch_size: sequences of a step.
      points: validations within a run, beside the one at its end.
      adam_rate: peak learning rate of embeddings, head, norms and biases.
      loss_chunks: parts in which the logits are computed.
    """

    config: ModelConfig
    vocab_size: int
    tokenizer: str
    steps: int = 700
    batch_size: int = 64
    points: int = 7
    adam_rate: float = 2e-3
    loss_chunks: int = 8

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.config.seq_len


def _wide(width: int) -> Size:
    """LLaMA-60M at another width, for the transfer of rates."""
    config = ModelConfig(
        model="llama_60m", dim=width, hidden=width * 21 // 8, heads=width // 64
    )
    return Size(config, 32000, "sp32k")


SIZES: dict[str, Size] = {
    "llama_60m": Size(ModelConfig(model="llama_60m"), 32000, "sp32k"),
    # The spectra are also taken at this second size, which has half the width of
    # LLaMA-60M and three quarters of its depth.
    "llama_20m": Size(
        ModelConfig(model="llama_60m", dim=256, hidden=688, layers=6, heads=4),
        32000,
        "sp32k",
    ),
    "gpt_124m": Size(ModelConfig(model="gpt_small"), 50257, "gpt2", adam_rate=1e-3),
    **{f"llama_w{width}": _wide(width) for width in (128, 256, 1024)},
    "moe_16x2": Size(
        ModelConfig(
            model="moe_7b", dim=512, hidden=768, layers=6, heads=8, seq_len=1024
        ),
        32000,
        "sp32k",
    ),
    # For tests and for a first look on a CPU.
    "tiny": Size(
        ModelConfig(
            model="llama_tiny", dim=32, hidden=48, layers=1, heads=2, seq_len=16
        ),
        64,
        "tiny",
        steps=12,
        batch_size=4,
        points=2,
        loss_chunks=1,
    ),
}
