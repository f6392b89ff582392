"""Zero-shot tasks from local files, with the prompts of lm-evaluation-harness 0.4.

The files are in the form of MosaicML's llm-foundry (`scripts/eval/local_data`) and, for
HellaSwag, of klosax/hellaswag_text_data. Each reader turns a record into the text that
the harness's task of the same name (`lm_eval/tasks/*/*.yaml`) builds from its own
fields.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.options import UserError, check


class Score(NamedTuple):
    """Sum of the log-probabilities, and whether greedy decoding gives these tokens."""

    log_likelihood: float
    is_greedy: bool


class Question(NamedTuple):
    """(context, continuation) pairs, of which `gold` is right.

    `choices` are the answers whose length in characters normalizes their scores.
    """

    pairs: list[tuple[str, str]]
    gold: int = 0
    choices: tuple[str, ...] = ()


class Task(NamedTuple):
    """Where a task's records are and how they become questions."""

    file: str
    read: Callable[[Any], Question]
    normalized: bool = False  # whether the harness reports acc_norm


def _texts(values: Any) -> tuple[str, ...]:
    """A list of texts; `TypeError` if it is something else."""
    if not isinstance(values, list) or not all(isinstance(x, str) for x in values):
        raise TypeError(f"{values!r} is not a list of texts")
    return tuple(values)


def _check(question: Question) -> None:
    """`ValueError` if one of the answers is no text, or the right one is not there."""
    for context, answer in question.pairs:
        if not answer.strip():
            raise ValueError("an answer is empty")
        (context + answer).encode()  # half a surrogate pair is no text
    gold, count = question.gold, len(question.pairs)
    if type(gold) is not int or not 0 <= gold < count:
        raise ValueError(f"the right answer is {gold!r}, of {count}")


def _last_word(record: Any) -> Question:
    return Question([(record["context"], " " + record["continuation"])])


def _choices(
    record: Any, after_query: str = "", query: Callable[[str], str] = str
) -> Question:
    """A query, changed and with words after it, and answers to choose from."""
    context, choices = query(record["query"]) + after_query, _texts(record["choices"])
    pairs = [(context, f" {choice}") for choice in choices]
    return Question(pairs, record["gold"], choices)


def _winogrande(record: Any) -> Question:
    continuation = " " + record["continuation"]
    pairs = [(option, continuation) for option in _texts(record["context_options"])]
    return Question(pairs, record["gold"])


def _copa(record: Any) -> Question:
    """The harness writes no comma, and two spaces before the answer."""
    found = _texts(record["choices"])
    choices = [f" {choice[:1].lower()}{choice[1:]}" for choice in found]
    without_comma = partial(re.sub, r", (because|therefore)$", r" \1")
    return _choices(record | {"choices": choices}, query=without_comma)


def _hellaswag(record: Any) -> Question:
    """The harness capitalizes the sentence that the answer goes on with."""
    query, gold, *choices = record
    *rest, last = re.split(r"(?<=[.!?]) ", query)
    if last[:1].islower():
        query = " ".join([*rest, last.capitalize()])
    return _choices({"query": query, "gold": int(gold), "choices": choices})


_answer = partial(_choices, after_query="\nAnswer:")
# The query of PIQA ends with a line end; that of BoolQ begins with a word more.
_piqa = partial(_choices, after_query="Answer:")
_boolq = partial(_answer, query=lambda query: query.removeprefix("Passage: "))

TASKS = {
    "arc_challenge": Task("arc_challenge.jsonl", _answer, normalized=True),
    "arc_easy": Task("arc_easy.jsonl", _answer, normalized=True),
    "openbookqa": Task("openbook_qa.jsonl", _choices, normalized=True),
    "hellaswag": Task("hellaswag_val_full.txt", _hellaswag, normalized=True),
    "piqa": Task("piqa.jsonl", _piqa, normalized=True),
    "winogrande": Task("winogrande.jsonl", _winogrande),
    "lambada_openai": Task("lambada_openai.jsonl", _last_word),
    "copa": Task("copa.jsonl", _copa),
    "boolq": Task("boolq.jsonl", _boolq),
}


def read_task(name: str, folder: Path, limit: int = 0) -> list[Question]:
    """All questions of a task, or the first `limit`."""
    task, questions = TASKS[name], []
    path = folder / task.file
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--task-data: {path}: {error}") from None
    # Lines of JSON, or six lines of plain text each.
    size = 1 if path.suffix == ".jsonl" else 6
    starts = [i for i in range(0, len(lines) - size // 6, size) if lines[i]]
    for start in starts[: limit or None]:
        try:
            record = lines[start : start + size]
            question = task.read(json.loads(record[0]) if size == 1 else record)
            _check(question)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
            place = f"{path}, line {start + 1}"
            raise UserError(f"{place}: not a record of {name} ({reason})") from None
        questions.append(question)
    check(bool(questions), f"{path}: no question in it")
    return questions


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    array = np.asarray(values, np.float64)
    error = array.std(ddof=1) / math.sqrt(len(array)) if len(array) > 1 else math.nan
    return float(array.mean()), float(error)


def measure(
    task: Task, questions: Sequence[Question], scores: Sequence[Sequence[Score]]
) -> dict[str, float]:
    """The harness's metrics with their standard errors, and the accuracy of a guess.

    For the perplexity, whose error the harness finds by resampling, it is that of the
    mean log-likelihood times the perplexity.
    """
    found: dict[str, tuple[float, float]] = {}
    metrics: dict[str, float] = {}
    if task.read is _last_word:
        found["acc"] = _mean([float(first.is_greedy) for (first,) in scores])
        mean, error = _mean([first.log_likelihood for (first,) in scores])
        perplexity = math.exp(min(-mean, 700.0))
        found["perplexity"] = perplexity, perplexity * error
    else:
        kinds = ("acc", "acc_norm") if task.normalized else ("acc",)
        for kind in kinds:
            right = []
            for question, answers in zip(questions, scores, strict=True):
                values = np.asarray([answer.log_likelihood for answer in answers])
                if kind == "acc_norm":
                    values /= [len(choice) for choice in question.choices]
                right.append(float(values.argmax() == question.gold))
            found[kind] = _mean(right)
    for name, (value, error) in found.items():
        metrics |= {name: value, f"{name}_stderr": error}
    if task.read is not _last_word:
        metrics["chance"] = _mean([1 / len(q.pairs) for q in questions])[0]
    return metrics
