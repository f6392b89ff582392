"""A trained model as a model of lm-evaluation-harness (`pip install lm_eval`).

`python -m benchmarks.harness --run RUN --tasks mmlu,piqa` runs the harness's own tasks,
which it downloads. The model can also be handed to `lm_eval.simple_evaluate`.
"""

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import lm_eval
import numpy as np
from flax import nnx
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from benchmarks.evaluate import Request, bucket, score
from examples.sample import Model, load_model


@functools.cache
def _next_token(graphdef: Any) -> Any:
    @jax.jit
    def step(params: Any, tokens_1xL: Any, last: Any, key: Any, heat: Any) -> jax.Array:
        model = nnx.merge(graphdef, params)
        x_1xLxD = model.features(tokens_1xL).x_BxLxD
        x_1x1xD = jax.lax.dynamic_slice_in_dim(x_1xLxD, last, 1, axis=1)
        logits_V = model.logits(x_1x1xD)[0, 0]
        drawn = jax.random.categorical(key, logits_V / jnp.maximum(heat, 1e-6))
        return jnp.where(heat > 0, drawn, logits_V.argmax())

    return step


class HarnessModel(TemplateLM):
    """Scores and generates for the harness."""

    def __init__(self, model: Model, batch_tokens: int = 16_384):
        super().__init__()
        self.max_length = model.max_length
        self._model, self._ours = model, model.tokenizer
        self._batch_tokens = batch_tokens

    @property
    def eot_token_id(self) -> int:
        return self._ours.end_id

    @property
    def tokenizer_name(self) -> str:
        return self._ours.name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; models of this trainer see no beginning-of-text token."""
        del add_special_tokens, kwargs
        return self._ours.encode([string.encode("utf-8")])[0].tolist()

    def _score(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        found = score(self._model, requests, batch_tokens=self._batch_tokens)
        return [tuple(one) for one in found]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        del kwargs
        found = self._score([Request(*ids) for _, *ids in requests])
        for (texts, *_), answer in zip(requests, found):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole texts, window by window."""
        del disable_tqdm
        texts = [self.tok_encode(request.args[0]) for request in requests]
        found = self._score([Request([self.eot_token_id], ids) for ids in texts])
        return [log_likelihood for log_likelihood, _ in found]

    def generate_until(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[str]:
        """Continue each context up to one of its stop strings."""
        del disable_tqdm
        contexts_and_options: list[Any] = [request.args for request in requests]
        return [
            self._generate(context, dict(options), number)
            for number, (context, options) in enumerate(contexts_and_options)
        ]

    def _generate(self, context: str, options: dict[str, Any], seed: int) -> str:
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        wanted = int(options.get("max_gen_toks", 256))
        sampled = options.get("do_sample", True) is not False
        temperature = float(options.get("temperature", 0.0)) if sampled else 0.0
        # As much context as leaves room for the answer, but at least one token.
        room = max(1, self.max_length - wanted)
        ids = (self.tok_encode(context) or [self.eot_token_id])[-room:]
        start, key = len(ids), jax.random.key(seed)
        while len(ids) - start < wanted and len(ids) < self.max_length:
            tokens = np.zeros((1, bucket(len(ids), 32, self.max_length)), np.int32)
            tokens[0, : len(ids)] = ids
            step = _next_token(self._model.graphdef)
            step_key = jax.random.fold_in(key, len(ids))
            place = np.int32(len(ids) - 1)
            token = int(step(self._model.params, tokens, place, step_key, temperature))
            if token == self.eot_token_id:
                break
            ids.append(token)
            text = self._ours.decode(ids[start:])
            ends = [text.find(stop) for stop in stops if stop and stop in text]
            if ends:
                return text[: min(ends)]
        return self._ours.decode(ids[start:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="folder of a training run")
    parser.add_argument("--tasks", required=True, help="names joined by commas")
    parser.add_argument("--optimizer", help="which of the run's, if several")
    parser.add_argument("--step", help="checkpoint (default: the newest)")
    parser.add_argument("--limit", type=int, help="only the first questions of each")
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    args = parser.parse_args()
    model = load_model(args.run, args.optimizer, args.step)
    adapter = HarnessModel(model, args.batch_tokens)
    found = lm_eval.simple_evaluate(
        model=adapter, tasks=args.tasks.split(","), limit=args.limit
    )
    print(lm_eval.utils.make_table(found))


if __name__ == "__main__":
    main()
