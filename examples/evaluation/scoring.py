"""Log-likelihoods of continuations, in batches of few shapes.

The rules are those of lm-evaluation-harness 0.4 (`TemplateLM._encode_pair` and
`HFLM._loglikelihood_tokens`), so that scores are the same: context and continuation are
tokenized as one text, spaces between them belong to the continuation, and a text longer
than the model's window loses tokens on the left.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples.data.tokens import Tokenizer
from examples.flags import UserError

# (B, L) tokens to (B, L, V) logits. A `jax.tree_util.Partial` over the parameters keeps
# these an argument of the compiled function, where a closure would make them constants.
LogitsFn = Callable[[jax.Array], jax.Array]

_SHORTEST = 32


class Request(NamedTuple):
    """Token ids to condition on (at least one) and token ids to score."""

    context: list[int]
    continuation: list[int]


class Score(NamedTuple):
    """Sum of the log-probabilities, and whether greedy decoding gives these tokens."""

    log_likelihood: float
    is_greedy: bool


def encode_pairs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]
) -> list[Request]:
    """Tokenize (context, continuation); an empty context becomes the end token."""

    def encode(texts: list[str]) -> list[list[int]]:
        unique = list(dict.fromkeys(texts))
        ids = tokenizer.encode([text.encode("utf-8") for text in unique])
        table = {text: part.tolist() for text, part in zip(unique, ids)}
        return [table[text] for text in texts]

    contexts = encode([context.rstrip() for context, _ in pairs])
    wholes = encode([context + continuation for context, continuation in pairs])
    requests = []
    for (context, continuation), start, whole in zip(pairs, contexts, wholes):
        ids = whole[len(start) :]
        if not ids:
            raise UserError(
                f"no token left to score in {continuation!r} after {context[-40:]!r}"
            )
        requests.append(Request(start or [tokenizer.end_id], ids))
    return requests


def _windows(request: Request, size: int) -> Iterator[Request]:
    """Parts of the continuation that fit into a window, with all that precedes them.

    Cut on the left when they are scored, these are the windows of the harness's rolling
    log-likelihood. (Its `loglikelihood` refuses continuations of more than one.)
    """
    context, ids = request
    for start in range(0, len(ids), size):
        yield Request(context + ids[:start], ids[start : start + size])


@jax.jit
def _score_step(
    logits_fn: LogitsFn, tokens_BxM: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each next token, and whether it is the most probable one."""
    logits_BxLxV = logits_fn(tokens_BxM[:, :-1]).astype(jnp.float32)
    target_BxLx1 = tokens_BxM[:, 1:, None]
    at_target = jnp.take_along_axis(logits_BxLxV, target_BxLx1, axis=-1)
    log_prob_BxL = at_target[..., 0] - jax.nn.logsumexp(logits_BxLxV, axis=-1)
    return log_prob_BxL, logits_BxLxV.argmax(axis=-1) == target_BxLx1[..., 0]


def bucket(length: int, max_length: int) -> int:
    """The padded length: a power of two, or the whole window."""
    return min(max_length, max(_SHORTEST, 1 << (length - 1).bit_length()))


def score(
    logits_fn: LogitsFn,
    requests: Sequence[Request],
    max_length: int,
    *,
    batch_tokens: int = 16_384,
    tell: Callable[[int], None] = lambda done: None,
) -> list[Score]:
    """Score every request, in order; `tell` hears how many windows are done.

    A window is padded on the right, which a causal model does not see.
    """
    groups: dict[int, list[tuple[int, list[int], int]]] = defaultdict(list)
    for number, request in enumerate(requests):
        for context, ids in _windows(request, max_length):
            tokens = (context + ids)[-(max_length + 1) :]
            size = bucket(len(tokens) - 1, max_length)
            groups[size].append((number, tokens, len(ids)))
    sums, greedy = np.zeros(len(requests)), np.ones(len(requests), bool)
    for size, group in sorted(groups.items(), reverse=True):
        rows = max(1, batch_tokens // size)
        for first in range(0, len(group), rows):
            part = group[first : first + rows]
            batch = np.zeros((rows, size + 1), np.int32)
            for row, (_, tokens, _) in enumerate(part):
                batch[row, : len(tokens)] = tokens
            log_prob, equal = map(np.asarray, _score_step(logits_fn, batch))
            for row, (number, tokens, count) in enumerate(part):
                scored = slice(len(tokens) - 1 - count, len(tokens) - 1)
                sums[number] += log_prob[row, scored].sum(dtype=np.float64)
                greedy[number] &= equal[row, scored].all()
            tell(len(part))
    return [Score(float(s), bool(g)) for s, g in zip(sums, greedy)]
