"""Text from a trained model: `python -m examples.sample --run RUN --prompt "def "`."""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples import options
from examples.checkpoint import load_params
from examples.config import ModelConfig
from examples.data import tokens as tok
from examples.models import make_model
from examples.options import Options, check, option

_STEP = "checkpoint: a step or 'best' (default: the newest)"
_TOP_P = "choose among the likeliest that have this probability together"


@dataclasses.dataclass(frozen=True)
class SampleConfig(Options):
    """What to continue, and how to choose each token."""

    run: str = option("", "folder of the run")
    prompt: str = option("", "text to continue (default: the start of a document)")
    optimizer: str | None = option(None, "whose model, if the run compared several")
    step: str | None = option(None, _STEP)
    max_tokens: int = option(200, "tokens to add at most", "[1, ]")
    temperature: float = option(0.8, "0: always the likeliest token", "[0, ]")
    top_k: int = option(0, "choose among so many likeliest tokens (0: all)", "[0, ]")
    top_p: float = option(1.0, _TOP_P, "(0, 1]")
    seed: int = option(0, "seed of the choices", "[0, ]")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(bool(self.run), "--run FOLDER is needed")


class Model(NamedTuple):
    """A trained model: its structure, parameters, tokenizer and what it sees."""

    graphdef: Any
    params: Any
    tokenizer: tok.Tokenizer
    max_length: int

    @classmethod
    def of(cls, config: ModelConfig, tokenizer: tok.Tokenizer, params: Any) -> "Model":
        """The model whose experts serve every token."""
        graphdef, _ = make_model(config.without_drops(), tokenizer.vocab_size)
        return cls(graphdef, params, tokenizer, config.seq_len)


def load_model(
    run: str, optimizer: str | None = None, step: str | None = None
) -> Model:
    """The parameters and the tokenizer of a run; see `load_params`."""
    number = step is None or step == "best" or step.isdecimal()
    check(number, f"--step {step}: neither the number of a step nor 'best'")
    params, config, _ = load_params(run, optimizer, step)
    file = Path(run, tok.FILE)
    tokenizer = tok.load_tokenizer(file)
    _, init = make_model(config.model, tokenizer.vocab_size)
    wanted = jax.tree.map(lambda x: x.shape, jax.eval_shape(init, jax.random.key(0)))
    same = wanted == jax.tree.map(lambda x: x.shape, params)
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


@functools.lru_cache(maxsize=4)
def make_generate(graphdef: Any, length: int, end_id: int, *choices: Any) -> Any:
    """A program that reads a prompt and adds tokens until its window is full.

    It takes (params, ids filled up to `length`, how many are the prompt, how many to
    add, key, number of tokens added before) and gives the window and how much of it is
    filled. Keys and values stay in a cache, so that each token costs one position.
    `choices` are those of `choose`.
    """

    @jax.jit
    def generate(
        params: Any, window_L: Any, size: Any, wanted: Any, key: Any, count: Any
    ) -> Any:
        model = nnx.merge(graphdef, params)
        end = jnp.minimum(length, size + wanted)
        first = model.features(window_L[None], model.empty_caches(1))
        x_1x1xD = jax.lax.dynamic_slice_in_dim(first.x_BxLxD, size - 1, 1, axis=1)

        def going(carry: Any) -> jax.Array:
            window_L, place, _, _ = carry
            ended = (place > size) & (window_L[place - 1] == end_id)
            return (place < end) & ~ended

        def add(carry: Any) -> Any:
            window_L, place, x_1x1xD, caches = carry
            step_key = jax.random.fold_in(key, count + place - size)
            token = choose(model.logits(x_1x1xD)[0, 0], step_key, *choices)
            token = token.astype(jnp.int32)
            found = model.features(token[None, None], caches, place)
            window_L = window_L.at[place].set(token)
            return window_L, place + 1, found.x_BxLxD, found.caches

        start = window_L, size, x_1x1xD, first.caches
        return jax.lax.while_loop(going, add, start)[:2]

    return generate


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
    choices = temperature, top_k, top_p
    generate = make_generate(model.graphdef, length, end_id, *choices)
    (ids,) = model.tokenizer.encode([prompt.encode(errors="replace")])
    # Documents follow an end of document in training: so does the prompt.
    text, added = [end_id, *(int(i) for i in ids)], 0
    while added < max_tokens and (added == 0 or text[-1] != end_id):
        most = length - 1 if added == 0 else max(1, length // 2)
        seen = text[-most:]
        window_L = np.full(length, end_id, np.int32)
        window_L[: len(seen)] = seen
        sizes = np.int32(len(seen)), np.int32(max_tokens - added)
        key = jax.random.key(seed)
        window_L, size = generate(model.params, window_L, *sizes, key, np.int32(added))
        new = np.asarray(window_L)[len(seen) : int(size)].tolist()
        text, added = [*text, *new], added + len(new)
    # Together, since a character may be divided between tokens.
    return model.tokenizer.decode([i for i in text if i != end_id])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""

    def run() -> None:
        about = "Continue a prompt with a trained model."
        given = dataclasses.asdict(options.parse_one(SampleConfig, argv, about))
        model = load_model(*(given.pop(name) for name in ("run", "optimizer", "step")))
        print(continue_text(model, given.pop("prompt"), **given))

    return options.run_command("sample", run)


if __name__ == "__main__":
    sys.exit(main())
