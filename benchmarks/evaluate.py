"""Zero-shot evaluation: `python -m benchmarks.evaluate --run RUN --task-data DATA`.

Log-likelihoods of continuations by the rules of lm-evaluation-harness 0.4
(`TemplateLM._encode_pair` and `HFLM._loglikelihood_tokens`), so that scores are the
same: context and continuation are tokenized as one text, spaces between them belong to
the continuation, and a text longer than the model's window loses tokens on the left.
Tasks are read from local files. Numbers are printed and appended to `evaluation.jsonl`
in the run's folder.
"""

import dataclasses
import functools
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.tasks import TASKS, Score, measure, read_task
from examples import options
from examples.config import TrainedConfig
from examples.options import check, option

if TYPE_CHECKING:
    from examples.data.tokens import Tokenizer
    from examples.sample import Model

RECORD_FILE = "evaluation.jsonl"
# A scored position counts as much as these tokens: with a vocabulary of 50,000 its
# logits take 200 kB.
_LOGITS_COST = 16
_SHORTEST = 32, 8  # padded lengths of texts, and of what is scored of them


@dataclasses.dataclass(frozen=True)
class EvaluateConfig(TrainedConfig):
    """Which run is evaluated on what."""

    tasks: str = option("all", "names joined by commas, or 'all' that are in the files")
    task_data: str | None = option(None, "folder of the task files")
    limit: int = option(0, "only the first questions of each task (0: all)", "[0, ]")
    batch_tokens: int = option(16_384, "tokens that are scored at once", "[1, ]")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(bool(self.task_data), "--task-data FOLDER is needed")


class Request(NamedTuple):
    """Token ids to condition on (at least one) and token ids to score."""

    context: list[int]
    continuation: list[int]


def encode_pairs(
    tokenizer: "Tokenizer", pairs: Sequence[tuple[str, str]]
) -> list[Request]:
    """Tokenize (context, continuation); an empty context becomes the end token."""
    starts = [context.rstrip() for context, _ in pairs]
    texts = [*starts, *(context + continuation for context, continuation in pairs)]
    unique = list(dict.fromkeys(texts))
    ids = tokenizer.encode([text.encode("utf-8") for text in unique])
    table = {text: part.tolist() for text, part in zip(unique, ids)}
    requests = []
    for start, (context, continuation) in zip(starts, pairs):
        rest = table[context + continuation][len(table[start]) :]
        said = f"no token left to score in {continuation!r} after {context[-40:]!r}"
        check(bool(rest), said)
        requests.append(Request(table[start] or [tokenizer.end_id], rest))
    return requests


def bucket(length: int, shortest: int, longest: int) -> int:
    """The padded length: one of few powers of two, or the longest of all."""
    size = shortest
    while size < length:
        size *= 2 if shortest == _SHORTEST[0] else 4
    return min(size, longest)


@functools.cache
def _score_step(graphdef: Any) -> Any:
    """A function of tokens (B, L + 1) and positions (B, K): the log-probability of the
    token after each position, and whether it is the likeliest one.

    Most of a question is only read, and logits cost more than all the rest.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    @jax.jit
    def step(params: Any, tokens_BxM: Any, positions_BxK: Any) -> tuple[Any, Any]:
        model = nnx.merge(graphdef, params)
        x_BxLxD = model.features(tokens_BxM[:, :-1]).x_BxLxD
        x_BxKxD = jnp.take_along_axis(x_BxLxD, positions_BxK[..., None], axis=1)
        logits_BxKxV = model.logits(x_BxKxD)
        target_BxK = jnp.take_along_axis(tokens_BxM, positions_BxK + 1, axis=1)
        at_target = jnp.take_along_axis(logits_BxKxV, target_BxK[..., None], axis=-1)
        log_prob_BxK = at_target[..., 0] - jax.nn.logsumexp(logits_BxKxV, axis=-1)
        return log_prob_BxK, logits_BxKxV.argmax(axis=-1) == target_BxK

    return step


def score(
    model: "Model", requests: Sequence[Request], *, batch_tokens: int = 16_384
) -> list[Score]:
    """Score every request, in order, `batch_tokens` at a time.

    A continuation longer than the model's window is scored in parts, each with all that
    precedes it: the windows of the harness's rolling log-likelihood. Windows are padded
    on the right, which a causal model does not see.
    """
    # (padded length, padded scored length) to (request, tokens, how many are scored)
    groups: dict[tuple[int, int], list[tuple[int, list[int], int]]] = defaultdict(list)
    longest = model.max_length
    for number, (context, ids) in enumerate(requests):
        for first in range(0, len(ids), longest):
            part = ids[first : first + longest]
            tokens = (context + ids[:first] + part)[-(longest + 1) :]
            size = bucket(len(tokens) - 1, _SHORTEST[0], longest)
            scored = bucket(len(part), _SHORTEST[1], size)
            groups[size, scored].append((number, tokens, len(part)))
    sums, greedy = np.zeros(len(requests)), np.ones(len(requests), bool)
    step = _score_step(model.graphdef)
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
            found = step(model.params, tokens_BxM, positions_BxK)
            log_prob, equal = map(np.asarray, found)
            for row, (number, _, count) in enumerate(part):
                sums[number] += log_prob[row, :count].sum(dtype=np.float64)
                greedy[number] &= equal[row, :count].all()
    check(bool(np.isfinite(sums).all()), "the model's logits are not finite numbers")
    return [Score(float(s), bool(g)) for s, g in zip(sums, greedy)]


def evaluate_tasks(
    model: "Model",
    folder: Path,
    tasks: str = "all",
    limit: int = 0,
    batch_tokens: int = 16_384,
) -> Iterator[tuple[str, int, dict[str, float]]]:
    """(task, questions, metrics) for each task, from local files."""
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    check(bool(names), "--tasks names no task")
    if names == ["all"]:
        names = [name for name, task in TASKS.items() if (folder / task.file).exists()]
        files = ", ".join(task.file for task in TASKS.values())
        check(bool(names), f"--task-data {folder}: no task file in it ({files})")
    unknown = ", ".join(name for name in names if name not in TASKS)
    check(not unknown, f"--tasks {unknown}: unknown; there are {', '.join(TASKS)}")
    # All are read first: a broken file is named before hours of scoring.
    read = {name: read_task(name, folder, limit) for name in names}
    for name, questions in read.items():
        pairs = [pair for question in questions for pair in question.pairs]
        requests = encode_pairs(model.tokenizer, pairs)
        scores = iter(score(model, requests, batch_tokens=batch_tokens))
        answers = [[next(scores) for _ in question.pairs] for question in questions]
        yield name, len(questions), measure(TASKS[name], questions, answers)


def describe(metrics: dict[str, float]) -> str:
    """Metrics and errors, accuracies in percent, and what guessing would give."""
    parts = []
    for key, value in metrics.items():
        if not key.endswith("_stderr"):
            scale = 1 if key == "perplexity" else 100
            error = metrics.get(f"{key}_stderr")
            shown = "" if error is None else f" ± {scale * error:.2f}"
            parts.append(f"{key} {scale * value:6.2f}{shown}")
    return "  ".join(parts)


def _evaluate(config: EvaluateConfig) -> None:
    """Zero-shot evaluation of a training run."""
    from examples.files import RecordFile, WriteFailed
    from examples.sample import load_model

    model = load_model(config.run, config.optimizer, config.step)
    path, failed = Path(config.run, RECORD_FILE), None
    settings = {key: getattr(config, key) for key in ("optimizer", "step", "limit")}
    accuracies, begin = [], time.perf_counter()
    for name, questions, metrics in evaluate_tasks(
        model, Path(config.task_data or ""), config.tasks, config.limit,
        config.batch_tokens,
    ):  # fmt: skip
        print(f"{name:>16} {questions:6,}  {describe(metrics)}", flush=True)
        accuracies.append(metrics["acc"])
        record = {"kind": "zero_shot", "task": name, "questions": questions}
        try:
            RecordFile(path).write(record | metrics | settings)
        except WriteFailed as error:  # the other tasks are worth as much
            failed = error
    mean = sum(accuracies) / len(accuracies)
    print(f"mean accuracy {100 * mean:.2f}; {time.perf_counter() - begin:.0f} s")
    if failed is not None:
        raise failed
    print(f"record: {path}")


main = options.command("benchmarks.evaluate", EvaluateConfig, _evaluate)

if __name__ == "__main__":
    sys.exit(main())
