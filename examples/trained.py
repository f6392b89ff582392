"""A trained model, ready to be sampled or evaluated."""

from pathlib import Path
from typing import Any, NamedTuple

import jax

from examples.checkpoint import load_params
from examples.config import ModelConfig
from examples.data import tokens as tok
from examples.models import make_model
from examples.options import check


class Model(NamedTuple):
    """The structure of a model, its parameters, its tokenizer and what it sees."""

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
