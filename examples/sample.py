"""Text from a trained model: `python -m examples.sample --run RUN --prompt "def "`."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples import flags
from examples.flags import UserError, check, check_range, failed, option


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """What to continue, and how to choose each token."""

    run: str = option("", "folder of the run")
    prompt: str = option("", "text to continue (default: the start of a document)")
    optimizer: str | None = option(None, "whose model, if the run compared several")
    step: int | None = option(None, "checkpoint to take (default: the newest)")
    max_tokens: int = option(200, "tokens to add at most")
    temperature: float = option(0.8, "0: always the likeliest token")
    top_k: int = option(0, "choose among so many of the likeliest tokens (0: all)")
    seed: int = option(0, "seed of the choices")

    def __post_init__(self) -> None:
        check(bool(self.run), "--run FOLDER is needed")
        check_range(self, "max_tokens", 1)
        check_range(self, "temperature", 0)
        check_range(self, "top_k", 0)
        check_range(self, "seed", 0, 2**31 - 1)


def choose(logits_V: Any, key: Any, temperature: float, top_k: int) -> Any:
    """One token id out of the logits of a position."""
    import jax
    import jax.numpy as jnp

    if temperature == 0:
        return jnp.argmax(logits_V)
    if 0 < top_k < len(logits_V):
        least = jax.lax.top_k(logits_V, top_k)[0][-1]
        logits_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
    return jax.random.categorical(key, logits_V / temperature)


def make_generate(graphdef: Any, length: int, end_id: int, config: SampleConfig) -> Any:
    """(params, prompt of `length` ids filled up, its size) to `max_tokens` new ids.

    One program of fixed shapes, whatever the prompt. The model sees the last `length`
    tokens; what follows an end of document is -1.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    @jax.jit
    def generate(params: Any, window_L: jax.Array, size: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)
        key = jax.random.key(config.seed)

        def going(carry: Any) -> jax.Array:
            _, _, new_N, count = carry
            ended = (count > 0) & (new_N[count - 1] == end_id)
            return (count < config.max_tokens) & ~ended

        def add(carry: Any) -> Any:
            window_L, size, new_N, count = carry
            x_1xLxD, _ = model.features(window_L[None])
            last_1x1xD = jax.lax.dynamic_slice_in_dim(x_1xLxD, size - 1, 1, axis=1)
            logits_V = model.logits(last_1x1xD)[0, 0]
            step_key = jax.random.fold_in(key, count)
            token = choose(logits_V, step_key, config.temperature, config.top_k)
            token = token.astype(jnp.int32)
            full = size == length
            window_L = jnp.where(full, jnp.roll(window_L, -1), window_L)
            size = jnp.where(full, size, size + 1)
            window_L = window_L.at[size - 1].set(token)
            return window_L, size, new_N.at[count].set(token), count + 1

        new_N = jnp.full(config.max_tokens, -1, jnp.int32)
        return jax.lax.while_loop(going, add, (window_L, size, new_N, 0))[2]

    return generate


def sample(config: SampleConfig) -> str:
    """The continuation of the prompt."""
    import jax.numpy as jnp
    import numpy as np

    from examples.checkpoint import load_params
    from examples.data import tokens as tok
    from examples.state import make_model

    folder = Path(config.run)
    params, trained = load_params(folder, config.optimizer, config.step)
    tokenizer = tok.load_tokenizer(folder / tok.FILE)
    graphdef, _ = make_model(trained.model, tokenizer.vocab_size)
    length = trained.model.seq_len
    # Documents follow an end of document in training: so does the prompt.
    (prompt,) = tokenizer.encode([config.prompt.encode(errors="replace")])
    ids = np.r_[np.int32(tokenizer.end_id), np.int32(prompt)][-length:]
    window_L = np.full(length, tokenizer.end_id, np.int32)
    window_L[: len(ids)] = ids
    generate = make_generate(graphdef, length, tokenizer.end_id, config)
    new_N = np.asarray(generate(params, window_L, jnp.int32(len(ids))))
    new = [int(i) for i in new_N if i not in (-1, tokenizer.end_id)]
    # Together, since a character may be divided between tokens.
    return tokenizer.decode([*(int(i) for i in prompt), *new])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        sections = flags.parse(
            {"sample": SampleConfig},
            argv,
            prog="python -m examples.sample",
            description="Continue a prompt with a trained model.",
        )
        print(sample(sections["sample"]))
    except UserError as error:
        return failed("sample", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
