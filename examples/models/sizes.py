"""Parameters and floating-point operations of a model, by formula."""

from examples.models.config import ModelConfig


def _feed_forward(config: ModelConfig, experts: int) -> int:
    """Weights of one block's feed-forward of which `experts` experts are counted."""
    matrix = config.dim * config.hidden
    if config.architecture == "moe":
        return 2 * experts * matrix + config.dim * config.experts  # and the router
    return (2 if config.architecture == "gpt" else 3) * matrix


def _matmul_weights(config: ModelConfig, experts: int) -> int:
    """Weights of all blocks that multiply activations."""
    return config.layers * (4 * config.dim**2 + _feed_forward(config, experts))


def _other(config: ModelConfig, vocab_size: int) -> int:
    """Embeddings, head, norms, biases and positions."""
    dim, layers = config.dim, config.layers
    if config.architecture == "gpt":
        norms = 2 * (2 * layers + 1) * dim  # scales and biases
        biases = layers * (5 * dim + config.hidden)
        return (vocab_size + config.seq_len) * dim + norms + biases  # the head is tied
    return 2 * vocab_size * dim + (2 * layers + 1) * dim


def parameter_count(config: ModelConfig, vocab_size: int) -> int:
    """All parameters of the model, without building it."""
    return _matmul_weights(config, config.experts) + _other(config, vocab_size)


def active_parameter_count(config: ModelConfig, vocab_size: int) -> int:
    """Parameters that one token passes through; equal to all but for an MoE."""
    return _matmul_weights(config, config.active_experts) + _other(config, vocab_size)


def flops_per_token(config: ModelConfig, vocab_size: int) -> float:
    """Floating-point operations per token of a training step, for MFU.

    Products of the forward pass, and twice that for the backward pass; of attention the
    half that a causal mask leaves. Recomputation, lookups and elementwise work are
    left out.
    """
    weights = _matmul_weights(config, config.active_experts) + config.dim * vocab_size
    attention = config.layers * 2 * config.seq_len * config.dim
    return 3.0 * (2 * weights + attention)
