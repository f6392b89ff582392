"""Text from a trained model: `python -m examples.sample --run RUN --prompt "def "`."""

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples import runs
from examples.checkpoint import load_params
from examples.config import ModelConfig, TrainedConfig
from examples.data import tokens as tok
from examples.models import make_model
from examples.options import check, command, option

_TOP_P = "choose among the likeliest that have this probability together"


@dataclasses.dataclass(frozen=True)
class SampleConfig(TrainedConfig):
    """What to continue, and how to choose each token."""

    prompt: str = option("", "text to continue (default: the start of a document)")
    max_tokens: int = option(200, "tokens to add at most", "[1, ]")
    temperature: float = option(0.8, "0: always the likeliest token", "[0, ]")
    top_k: int = option(0, "choose among so many likeliest tokens (0: all)", "[0, ]")
    top_p: float = option(1.0, _TOP_P, "(0, 1]")
    seed: int = option(0, "seed of the choices", "[0, ]")


class Model(NamedTuple):
    """A trained model: its structure, parameters, tokenizer and what it sees."""

    graphdef: Any
    params: Any
    tokenizer: tok.Tokenizer
    max_length: int

    @classmethod
    def of(cls, config: ModelConfig, tokenizer: tok.Tokenizer, params: Any) -> "Model":
        """The model whose experts serve every token, on any device."""
        config = dataclasses.replace(config.without_drops(), attention="auto")
        graphdef, _ = make_model(config, tokenizer.vocab_size)
        return cls(graphdef, params, tokenizer, config.seq_len)


def load_model(
    run: str, optimizer: str | None = None, step: str | None = None
) -> Model:
    """The parameters and the tokenizer of a run; see `load_params`."""
    params, config, _ = load_params(run, optimizer, step)
    file, stored = Path(run, tok.FILE), runs.stored_settings(Path(run))
    tokenizer = tok.load_tokenizer(file, stored.get("tokenizer"))  # not of earlier runs
    same = tokenizer.vocab_size == stored["vocab_size"]
    check(same, f"{file}: not the tokenizer of these parameters")
    return Model.of(config.model, tokenizer, params)


def choose(
    logits_V: jax.Array, key: Any, temperature: float, top_k: int = 0, top_p: float = 1
) -> jax.Array:
    """One token id, among the likeliest `top_k` (0: all), and of those among the fewest
    whose probabilities at this temperature are `top_p` together.
    """
    if temperature == 0:
        return jnp.argmax(logits_V)
    sorted_V = jnp.sort(logits_V, descending=True)
    if 0 < top_k < len(logits_V):
        logits_V = jnp.where(logits_V < sorted_V[top_k - 1], -jnp.inf, logits_V)
        sorted_V = jnp.where(jnp.arange(len(sorted_V)) < top_k, sorted_V, -jnp.inf)
    if top_p < 1:
        before_V = jnp.cumsum(jax.nn.softmax(sorted_V / temperature))[:-1]
        last = (before_V < top_p).sum()
        logits_V = jnp.where(logits_V < sorted_V[last], -jnp.inf, logits_V)
    return jax.random.categorical(key, logits_V / temperature)


@functools.cache
def _make_step(graphdef: Any, *choices: Any) -> Any:
    """A program from tokens (1, L) at a position to the token after one of them.

    Keys and values stay in a cache, so that each further token costs one position.
    `choices` are those of `choose`.
    """

    @jax.jit
    def step(
        params: Any, tokens_1xL: Any, caches: Any, position: Any, last: Any, key: Any
    ) -> tuple[jax.Array, Any]:
        model = nnx.merge(graphdef, params)
        found = model.features(tokens_1xL, caches, position)
        x_1x1xD = jax.lax.dynamic_slice_in_dim(found.x_BxLxD, last, 1, axis=1)
        return choose(model.logits(x_1x1xD)[0, 0], key, *choices), found.caches

    return step


def continue_text(
    model: Model,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> str:
    """The prompt and what the model adds, up to the end of the document.

    Where its window is full it goes on from the last half of it.
    """
    end_id, length = model.tokenizer.end_id, model.max_length
    step = _make_step(model.graphdef, temperature, top_k, top_p)
    empty = nnx.merge(model.graphdef, model.params).empty_caches(1)
    (ids,) = model.tokenizer.encode([prompt.encode(errors="replace")])
    # Documents follow an end of document in training: so does the prompt.
    text, place, caches = [end_id, *(int(i) for i in ids)], length, empty
    for number in range(max_tokens):
        if place == length:  # of the window, in which the next token takes this place
            seen = text[-(max(1, length // 2) if number else length - 1) :]
            tokens_1xL = np.full((1, length), end_id, np.int32)
            tokens_1xL[0, : len(seen)] = seen
            place, caches, position, last = len(seen), empty, 0, len(seen) - 1
        else:
            tokens_1xL = np.asarray([text[-1:]], np.int32)
            position, last = place - 1, 0
        key = jax.random.fold_in(jax.random.key(seed), number)
        places = np.int32(position), np.int32(last)
        token, caches = step(model.params, tokens_1xL, caches, *places, key)
        text.append(int(token))
        place += 1
        if text[-1] == end_id:
            break
    # Together, since a character may be divided between tokens.
    return model.tokenizer.decode([i for i in text if i != end_id])


def _sample(config: SampleConfig) -> None:
    """Continue a prompt with a trained model."""
    model = load_model(config.run, config.optimizer, config.step)
    names = ("max_tokens", "temperature", "top_k", "top_p", "seed")
    choices = {name: getattr(config, name) for name in names}
    print(continue_text(model, config.prompt, **choices))


main = command("examples.sample", SampleConfig, _sample)

if __name__ == "__main__":
    sys.exit(main())
