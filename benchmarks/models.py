"""The paper's models: their vocabularies, and (count, shape) of their matrices."""

Matrices = list[tuple[int, tuple[int, ...]]]


def gpt(width: int, layers: int) -> Matrices:
    """Separate q, k, v, o and a four times wider MLP."""
    return [
        (4 * layers, (width, width)),
        (layers, (width, 4 * width)),
        (layers, (4 * width, width)),
    ]


def llama(width: int, hidden: int, layers: int) -> Matrices:
    """Separate q, k, v, o and a gated MLP."""
    return [
        (4 * layers, (width, width)),
        (2 * layers, (width, hidden)),
        (layers, (hidden, width)),
    ]


# The vocabulary that the paper's parameter counts refer to, by architecture.
VOCAB_SIZES: dict[str, int] = {"gpt": 50257, "llama": 32000, "moe": 32000}
MODELS: dict[str, Matrices] = {
    "tiny": llama(64, 160, 2),
    # GPT-Small at half its width and a third of its layers: for CPUs.
    "gpt_small_cpu": gpt(384, 4),
    "gpt_small": gpt(768, 12),
    "gpt_base": gpt(1024, 24),
    "gpt_large": gpt(1280, 36),
    "llama_60m": llama(512, 1344, 8),
    "llama_350m": llama(1024, 2736, 24),
    "llama_1b": llama(2048, 5472, 24),
    "llama_7b": llama(4096, 11008, 32),
    # 13827 in the paper, which no power of two divides; 13824 is LLaMA's.
    "llama_13b": llama(5120, 13824, 40),
    # Experts as one leaf a layer: (experts, in, out).
    "moe_7b": [
        (4 * 24, (2048, 2048)),
        (24, (16, 2048, 4096)),
        (24, (16, 4096, 2048)),
    ],
}


def leaves(model: str) -> dict[str, tuple[int, ...]]:
    """One entry per leaf, named so that no default rule takes it for a table."""
    shapes = {}
    for kind, (count, shape) in enumerate(MODELS[model]):
        for i in range(count):
            shapes[f"kind{kind}/layer{i:03d}/kernel"] = shape
    return shapes
