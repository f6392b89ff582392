"""Zero-shot tasks from local files, with the prompts of lm-evaluation-harness 0.4.

The files are in the form of MosaicML's llm-foundry (`scripts/eval/local_data`) and, for
HellaSwag, of klosax/hellaswag_text_data. Each reader turns a record into the text that
the harness's task of the same name (`lm_eval/tasks/*/*.yaml`) builds from its own
fields.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.options import UserError


class Score(NamedTuple):
    """Sum of the log-probabilities, and whether greedy decoding gives these tokens."""

    log_likelihood: float
    is_greedy: bool


@dataclass(frozen=True)
class Question:
    """(context, continuation) pairs, of which `gold` is right.

    `choices` are the answers whose length in characters normalizes their scores.
    """

    pairs: list[tuple[str, str]]
    gold: int = 0
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """Where a task's records are and how they become questions."""

    name: str
    file: str
    read: Callable[[Any], Question]
    normalized: bool = False  # whether the harness reports acc_norm


def _last_word(record: Any) -> Question:
    return Question([(record["context"], " " + record["continuation"])])


def _choices(
    record: Any, after_query: str = "", query: Callable[[str], str] = str
) -> Question:
    """A query, changed and with words after it, and answers to choose from."""
    context = query(record["query"]) + after_query
    choices = tuple(record["choices"])
    pairs = [(context, f" {choice}") for choice in choices]
    return Question(pairs, record["gold"], choices)


def _winogrande(record: Any) -> Question:
    continuation = " " + record["continuation"]
    pairs = [(option, continuation) for option in record["context_options"]]
    return Question(pairs, record["gold"])


def _copa(record: Any) -> Question:
    """The harness writes no comma, and two spaces before the answer."""
    choices = [f" {choice[:1].lower()}{choice[1:]}" for choice in record["choices"]]
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
    task.name: task
    for task in (
        Task("arc_challenge", "arc_challenge.jsonl", _answer, normalized=True),
        Task("arc_easy", "arc_easy.jsonl", _answer, normalized=True),
        Task("openbookqa", "openbook_qa.jsonl", _choices, normalized=True),
        Task("hellaswag", "hellaswag_val_full.txt", _hellaswag, normalized=True),
        Task("piqa", "piqa.jsonl", _piqa, normalized=True),
        Task("winogrande", "winogrande.jsonl", _winogrande),
        Task("lambada_openai", "lambada_openai.jsonl", _last_word),
        Task("copa", "copa.jsonl", _copa),
        Task("boolq", "boolq.jsonl", _boolq),
    )
}


def _records(path: Path) -> Iterator[tuple[int, str | list[str]]]:
    """Numbered by their first line: lines of JSON, or six lines of plain text."""
    lines = path.read_text(encoding="utf-8").split("\n")
    if path.suffix == ".jsonl":
        yield from ((i, line) for i, line in enumerate(lines, start=1) if line)
    else:
        for start in range(0, len(lines) - 1, 6):
            yield start + 1, lines[start : start + 6]


def read_task(task: Task, folder: Path, limit: int = 0) -> list[Question]:
    """All questions of a task, or the first `limit`."""
    path = folder / task.file
    questions: list[Question] = []
    try:
        records = list(_records(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--task-data: {path}: {error}") from None
    for number, record in records[: limit or None]:
        try:
            fields = json.loads(record) if isinstance(record, str) else record
            question = task.read(fields)
            question.pairs[question.gold]  # an answer that is there
        except (ValueError, KeyError, TypeError, IndexError) as error:
            missing = isinstance(error, KeyError)
            reason = f"no field {error}" if missing else str(error)
            place = f"{path}, line {number}"
            raise UserError(
                f"{place}: not a record of {task.name} ({reason})"
            ) from None
        questions.append(question)
    if not questions:
        raise UserError(f"{path}: no question in it")
    return questions


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    array = np.asarray(values, np.float64)
    error = array.std(ddof=1) / math.sqrt(len(array)) if len(array) > 1 else math.nan
    return float(array.mean()), float(error)


def measure(
    task: Task, questions: Sequence[Question], scores: Sequence[Sequence[Score]]
) -> dict[str, float]:
    """The harness's metrics and their standard errors, from each question's scores,
    and the accuracy of a guess.

    For the perplexity, whose error the harness finds by resampling, it is that of the
    mean log-likelihood times the perplexity.
    """
    if task.read is _last_word:
        accuracy = _mean([float(first.is_greedy) for (first,) in scores])
        mean, error = _mean([first.log_likelihood for (first,) in scores])
        perplexity = math.exp(min(-mean, 700.0))
        found = {"acc": accuracy, "perplexity": (perplexity, perplexity * error)}
    else:
        right, right_norm = [], []
        for question, answers in zip(questions, scores, strict=True):
            values = np.asarray([answer.log_likelihood for answer in answers])
            right.append(float(values.argmax() == question.gold))
            if task.normalized:
                lengths = np.asarray([len(choice) for choice in question.choices])
                right_norm.append(float((values / lengths).argmax() == question.gold))
        found = {"acc": _mean(right)}
        if task.normalized:
            found["acc_norm"] = _mean(right_norm)
    metrics: dict[str, float] = {}
    for name, (value, error) in found.items():
        metrics |= {name: value, f"{name}_stderr": error}
    if task.read is not _last_word:
        metrics["chance"] = _mean([1 / len(q.pairs) for q in questions])[0]
    return metrics
