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

# (tokens (B, L), positions (B, K)) to the logits (B, K, V) at these positions: most of
# a question is only read, and logits cost more than all the rest. As a
# `jax.tree_util.Partial` over the parameters it keeps these an argument of the compiled
# function, where a closure would make them constants.
LogitsFn = Callable[[jax.Array, jax.Array], jax.Array]

# A scored position counts as much as these tokens: with a vocabulary of 50,000 its
# logits take 200 kB.
_LOGITS_COST = 16
_SHORTEST = 32, 8  # padded lengths of texts, and of what is scored of them


class Request(NamedTuple):
    """Token ids to condition on (at least one) and token ids to score."""

    context: list[int]
    continuation: list[int]


class _Window(NamedTuple):
    """Which request it belongs to, its tokens, how many of the last are scored."""

    request: int
    tokens: list[int]
    scored: int


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


def bucket(length: int, shortest: int, longest: int) -> int:
    """The padded length: one of few powers of two, or the longest of all."""
    size = shortest
    while size < length:
        size *= 2 if shortest == _SHORTEST[0] else 4
    return min(size, longest)


@jax.jit
def _score_step(
    logits_fn: LogitsFn, tokens_BxM: jax.Array, positions_BxK: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of the token after each position, and whether it is the top one.

    M is L + 1.
    """
    logits_BxKxV = logits_fn(tokens_BxM[:, :-1], positions_BxK).astype(jnp.float32)
    target_BxK = jnp.take_along_axis(tokens_BxM, positions_BxK + 1, axis=1)
    at_target = jnp.take_along_axis(logits_BxKxV, target_BxK[..., None], axis=-1)
    log_prob_BxK = at_target[..., 0] - jax.nn.logsumexp(logits_BxKxV, axis=-1)
    return log_prob_BxK, logits_BxKxV.argmax(axis=-1) == target_BxK


def score(
    logits_fn: LogitsFn,
    requests: Sequence[Request],
    max_length: int,
    *,
    batch_tokens: int = 16_384,
) -> list[Score]:
    """Score every request, in order, `batch_tokens` at a time.

    A window is padded on the right, which a causal model does not see.
    """
    groups: dict[tuple[int, int], list[_Window]] = defaultdict(list)
    for number, request in enumerate(requests):
        for context, ids in _windows(request, max_length):
            tokens = (context + ids)[-(max_length + 1) :]
            size = bucket(len(tokens) - 1, _SHORTEST[0], max_length)
            scored = bucket(len(ids), _SHORTEST[1], size)
            groups[size, scored].append(_Window(number, tokens, len(ids)))
    sums, greedy = np.zeros(len(requests)), np.ones(len(requests), bool)
    for (size, scored), group in sorted(groups.items(), reverse=True):
        rows = max(1, batch_tokens // max(size, _LOGITS_COST * scored))
        for first in range(0, len(group), rows):
            part = group[first : first + rows]
            tokens_BxM = np.zeros((rows, size + 1), np.int32)
            positions_BxK = np.zeros((rows, scored), np.int32)
            for row, (_, tokens, count) in enumerate(part):
                tokens_BxM[row, : len(tokens)] = tokens
                start = len(tokens) - 1 - count
                positions_BxK[row, :count] = np.arange(start, start + count)
            found = _score_step(logits_fn, tokens_BxM, positions_BxK)
            log_prob, equal = map(np.asarray, found)
            for row, (number, _, count) in enumerate(part):
                sums[number] += log_prob[row, :count].sum(dtype=np.float64)
                greedy[number] &= equal[row, :count].all()
    return [Score(float(s), bool(g)) for s, g in zip(sums, greedy)]
