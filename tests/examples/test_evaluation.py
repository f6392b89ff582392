"""Zero-shot evaluation: scores by definition, prompts and metrics of the harness."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import evaluate
from benchmarks.evaluate import Request
from benchmarks.tasks import TASKS, read_task
from examples import files, runs, sample
from examples.config import parse
from examples.data import tokens as tok
from examples.files import WriteFailed
from examples.models import make_model
from examples.options import UserError
from examples.sample import Model

MAX_LENGTH = 48
CONFIG = parse(
    [*("--dim", "32", "--layers", "2", "--heads", "2", "--hidden", "64")]
    + ["--seq-len", str(MAX_LENGTH)]
)
GRAPHDEF, INIT = make_model(CONFIG.model.without_drops(), 257)


@pytest.fixture(scope="module")
def params() -> Any:
    # The initial logits are all but equal; larger ones make scores that differ.
    params = INIT(jax.random.key(0))
    params["lm_head"]["kernel"] *= 20
    return params


@pytest.fixture(scope="module")
def model(params: Any) -> Model:
    return Model(GRAPHDEF, params, tok.ByteTokenizer(), MAX_LENGTH)


@jax.jit
def all_logits(params: Any, tokens_1xL: jax.Array) -> jax.Array:
    return nnx.merge(GRAPHDEF, params)(tokens_1xL)[0]


def by_definition(model: Model, context: list[int], ids: list[int]) -> Any:
    """One text at a time, by a call of the model, in float64 from the logits on.

    Padding keeps compilation short; that it changes nothing is a test of the models.
    """
    tokens = (context + ids)[-(MAX_LENGTH + 1) :]
    padded = np.zeros((1, MAX_LENGTH), np.int32)
    padded[0, : len(tokens) - 1] = tokens[:-1]
    logits = np.asarray(all_logits(model.params, padded), np.float64)
    logits = logits[: len(tokens) - 1][-len(ids) :]
    log_prob = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    total = sum(log_prob[i, token] for i, token in enumerate(ids))
    return total, bool((logits.argmax(axis=1) == ids).all())


def test_scores_are_those_of_single_texts(model: Model) -> None:
    rng = np.random.default_rng(0)
    requests = [
        Request(rng.integers(0, 257, before).tolist(), rng.integers(0, 257, n).tolist())
        for before, n in [(1, 1), (3, 5), (30, 2), (47, 1), (48, 1), (90, 40), (1, 48)]
    ]
    context = requests[1].context
    padded = jnp.zeros((1, MAX_LENGTH), int).at[0, :3].set(jnp.asarray(context))
    best = int(all_logits(model.params, padded)[2].argmax())
    requests.append(Request(requests[1].context, [best]))
    for batch_tokens in (1, 10_000):
        scores = evaluate.score(model, requests, batch_tokens=batch_tokens)
        for request, found in zip(requests, scores, strict=True):
            total, greedy = by_definition(model, *request)
            assert found.log_likelihood == pytest.approx(total, abs=2e-4)
            assert found.is_greedy == greedy
        assert scores[-1].is_greedy and not scores[1].is_greedy


def test_long_continuations_go_window_by_window(model: Model) -> None:
    ids = np.random.default_rng(1).integers(0, 257, 2 * MAX_LENGTH + 10).tolist()
    (found,) = evaluate.score(model, [Request([256], ids)])
    first, second = MAX_LENGTH, 2 * MAX_LENGTH
    parts = [([256], ids[:first]), (ids[:first], ids[first:second])]
    parts.append((ids[:second], ids[second:]))
    total = sum(by_definition(model, *part)[0] for part in parts)
    assert found.log_likelihood == pytest.approx(total, abs=1e-3)


def test_few_shapes() -> None:
    sizes = {evaluate.bucket(n, 32, 1000) for n in range(1, 1001)}
    assert sizes == {32, 64, 128, 256, 512, 1000}
    assert {evaluate.bucket(n, 8, 64) for n in range(1, 65)} == {8, 32, 64}


def test_spaces_belong_to_the_continuation() -> None:
    tokenizer = tok.ByteTokenizer()
    pairs = [("ab ", "c"), ("ab", " c"), ("", "c"), (" ", "c")]
    one, two, empty, blank = evaluate.encode_pairs(tokenizer, pairs)
    assert one == two == Request([97, 98], [32, 99])
    assert empty == Request([256], [99])
    assert blank == Request([256], [32, 99])
    with pytest.raises(UserError, match="no token left"):
        evaluate.encode_pairs(tokenizer, [("ab", "")])


RECORDS = {
    "arc_easy.jsonl": [
        {
            "query": f"Question: What is {i}?",
            "choices": ["one", "a number", "three", "f"],
            "gold": i % 4,
        }
        for i in range(6)
    ],
    "piqa.jsonl": [
        {"query": f"Question: open {i}\n", "choices": ["pull it", "p"], "gold": i % 2}
        for i in range(5)
    ],
    "openbook_qa.jsonl": [
        {"query": f"A dog {i} eats", "choices": ["a", "bb", "c c", "d"], "gold": i % 4}
        for i in range(5)
    ],
    "winogrande.jsonl": [
        {
            "context_options": [f"The {i} dog saw the dog", f"The {i} dog saw the cat"],
            "continuation": "run.",
            "gold": i % 2,
        }
        for i in range(6)
    ],
    "lambada_openai.jsonl": [
        {"context": f"He said {i} and then she said", "continuation": "no"}
        for i in range(4)
    ],
    "copa.jsonl": [
        {
            "query": f"The man {i} ran, {word}",
            "choices": ["it rained.", "i swam."],
            "gold": i % 2,
        }
        for i, word in enumerate(["because", "therefore"] * 2)
    ],
    "boolq.jsonl": [
        {
            "query": f"Passage: A fox {i}.\nQuestion: is it a fox?",
            "choices": ["no", "yes"],
            "gold": i % 2,
        }
        for i in range(4)
    ],
}
RECORDS["arc_challenge.jsonl"] = RECORDS["arc_easy.jsonl"][1:4]
HELLASWAG = [
    ["Sailing: A man is in a boat. the man"],
    ["Cooking: How to bake. Take some flour (see above)."],
    ["Cutting: A dog sits! It barks. a woman in a red hat"],
]
ENDINGS = ["is seen.", "Takes a very long way home.", "x", "sings a song"]


@pytest.fixture(scope="module")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name, records in RECORDS.items():
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / name).write_text("".join(lines))
    blocks = [[*query, str(i), *ENDINGS] for i, query in enumerate(HELLASWAG)]
    text = "".join(f"{line}\n" for block in blocks for line in block)
    (folder / "hellaswag_val_full.txt").write_text(text)
    return folder


def test_prompts(task_data: Path) -> None:
    first = {name: read_task(name, task_data)[0] for name in TASKS}
    assert first["piqa"].pairs[0] == ("Question: open 0\nAnswer:", " pull it")
    assert first["arc_easy"].pairs[1] == ("Question: What is 0?\nAnswer:", " a number")
    assert first["openbookqa"].pairs[3] == ("A dog 0 eats", " d")
    assert first["winogrande"].pairs[1] == ("The 0 dog saw the cat", " run.")
    assert first["lambada_openai"].pairs == [("He said 0 and then she said", " no")]
    assert first["copa"].pairs[1] == ("The man 0 ran because", "  i swam.")
    context = "A fox 0.\nQuestion: is it a fox?\nAnswer:"
    assert first["boolq"].pairs == [(context, " no"), (context, " yes")]
    contexts = [q.pairs[0][0] for q in read_task("hellaswag", task_data)]
    assert contexts == [
        "Sailing: A man is in a boat. The man",
        "Cooking: How to bake. Take some flour (see above).",
        "Cutting: A dog sits! It barks. A woman in a red hat",
    ]
    assert len(read_task("arc_easy", task_data, limit=2)) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "line 1: not a record of piqa"),
        ('{"query": "q", "choices": ["a"], "gold": 1}', "not a record of piqa"),
        ('{"query": "q"}', "not a record of piqa"),
        ('{"query": "q", "choices": ["a", "b"], "gold": -2}', "answer is -2, of 2"),
        ('{"query": "q", "choices": ["a", "b"], "gold": false}', "answer is False"),
        ('{"query": "q", "choices": "abc", "gold": 0}', "'abc' is not a list"),
        ('{"query": "q", "choices": ["a", 3], "gold": 0}', "is not a list of texts"),
        ('{"query": "q", "choices": ["a", " "], "gold": 0}', "an answer is empty"),
        ('{"query": "\\udcff", "choices": ["a"], "gold": 0}', "surrogates"),
        ("", "no question"),
        (None, "No such file"),
    ],
)
def test_broken_task_files_are_named(
    tmp_path: Path, content: str | None, said: str
) -> None:
    path = tmp_path / "piqa.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as error:
        read_task("piqa", tmp_path)
    assert said in str(error.value) and str(path) in str(error.value)


def test_metrics_by_definition(model: Model, task_data: Path) -> None:
    results = {
        name: found for name, _, found in evaluate.evaluate_tasks(model, task_data)
    }
    assert list(results) == list(TASKS)
    right, right_norm = [], []
    for record in RECORDS["openbook_qa.jsonl"]:
        context = list(record["query"].encode())
        values = [
            by_definition(model, context, list(f" {choice}".encode()))[0]
            for choice in record["choices"]
        ]
        lengths = [len(choice) for choice in record["choices"]]
        right.append(np.argmax(values) == record["gold"])
        right_norm.append(np.argmax(np.divide(values, lengths)) == record["gold"])
    found = results["openbookqa"]
    assert found["acc"] == pytest.approx(np.mean(right))
    assert found["acc_norm"] == pytest.approx(np.mean(right_norm))
    error = np.std(right, ddof=1) / len(right) ** 0.5
    assert found["acc_stderr"] == pytest.approx(error)
    word = list(b" no")
    values = [
        by_definition(model, list(record["context"].encode()), word)[0]
        for record in RECORDS["lambada_openai.jsonl"]
    ]
    chances = {name: found.get("chance") for name, found in results.items()}
    assert chances["openbookqa"] == 0.25 and chances["piqa"] == 0.5
    found = results["lambada_openai"]
    assert "chance" not in found
    assert found["perplexity"] == pytest.approx(math.exp(-np.mean(values)), rel=1e-4)


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch, params: Any, tmp_path: Path) -> None:
    """A run's parameters, without a run."""
    found = params, CONFIG, None
    monkeypatch.setattr(sample, "load_params", lambda *_, **__: found)
    monkeypatch.setattr(runs, "stored_settings", lambda _: {"vocab_size": 257})


def test_a_run_is_evaluated_and_recorded(
    checkpoint: None,
    task_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tok.save(tok.ByteTokenizer(), tmp_path / tok.FILE)
    argv = ["--run", str(tmp_path), "--task-data", str(task_data), "--limit", "2"]
    assert evaluate.main([*argv, "--tasks", "piqa,lambada_openai"]) == 0
    said = capsys.readouterr().out
    assert "piqa" in said and "perplexity" in said and "mean accuracy" in said
    lines = (tmp_path / evaluate.RECORD_FILE).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["task"] for record in records] == ["piqa", "lambada_openai"]
    assert records[0]["questions"] == 2 and 0 <= records[0]["acc_norm"] <= 1
    tok.save(tok.train_bpe([b"some text"], 300), tmp_path / tok.FILE)
    assert evaluate.main([*argv, "--tasks", "piqa"]) == 2
    assert "not the tokenizer of these parameters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--run FOLDER"),
        (["--run", "x"], "--task-data FOLDER"),
        (["--run", "x", "--task-data", ".", "--tasks", "some"], "some: unknown"),
        (["--run", "x", "--task-data", ".", "--tasks", " , "], "names no task"),
    ],
)
def test_errors_are_one_line(
    checkpoint: None,
    argv: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    tok.save(tok.ByteTokenizer(), tmp_path / "x" / tok.FILE)
    assert evaluate.main(argv) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def hub_record(name: str, record: Any) -> dict[str, Any]:
    """A record of our files in the fields that the harness's task reads."""
    if name == "hellaswag":
        query, label, *endings = record
        activity, rest = query.split(": ", 1)
        ctx_a, ctx_b = rest, ""
        last = re.split(r"(?<=[.!?]) ", rest)[-1]
        if last[:1].islower():
            ctx_a, ctx_b = rest.removesuffix(last).strip(), last
        fields = {"activity_label": activity, "ctx_a": ctx_a, "ctx_b": ctx_b}
        return {**fields, "endings": endings, "label": label}
    if name == "lambada_openai":
        return {"text": f"{record['context']} {record['continuation']}"}
    if name == "winogrande":
        one, two = record["context_options"]
        start = os.path.commonprefix([one, two]).rpartition(" ")[0] + " "
        options = {f"option{i}": o.removeprefix(start) for i, o in ((1, one), (2, two))}
        sentence = f"{start}_ {record['continuation']}"
        return {**options, "sentence": sentence, "answer": str(record["gold"] + 1)}
    query, gold, choices = record["query"], record["gold"], record["choices"]
    if name == "piqa":
        goal = query.removeprefix("Question: ").removesuffix("\n")
        return {"goal": goal, "sol1": choices[0], "sol2": choices[1], "label": gold}
    if name == "copa":
        premise, word = query.rsplit(", ", 1)
        kind = {"because": "cause", "therefore": "effect"}[word]
        answers = {f"choice{i + 1}": c.capitalize() for i, c in enumerate(choices)}
        return {"premise": premise + ".", "question": kind, "label": gold, **answers}
    if name == "boolq":
        passage, question = query.removeprefix("Passage: ").split("\nQuestion: ")
        return {
            "passage": passage,
            "question": question.removesuffix("?"),
            "label": gold,
        }
    letters = [chr(ord("A") + i) for i in range(len(choices))]
    answers = {"text": choices, "label": letters}
    stem = "question_stem" if name == "openbookqa" else "question"
    text = query if name == "openbookqa" else query.removeprefix("Question: ")
    return {stem: text, "choices": answers, "answerKey": letters[gold]}


def hub_tasks(folder: Path, limit: int = 0) -> list[Any]:
    """The harness's tasks, reading our files in place of what they would download."""
    import datasets
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    index = TaskManager().task_index
    tasks = []
    for name, task in TASKS.items():
        text = (folder / task.file).read_text(encoding="utf-8")
        lines = text.split("\n")[:-1]
        if task.file.endswith(".jsonl"):
            records = [json.loads(line) for line in lines]
        else:
            records = [lines[i : i + 6] for i in range(0, len(lines), 6)]
        rows = [hub_record(name, record) for record in records[: limit or None]]
        splits = {
            split: datasets.Dataset.from_list(rows)
            for split in ("train", "validation", "test")
        }
        config = load_yaml(index[name].yaml_path, resolve_func=True)
        config.pop("tag", None)
        config["custom_dataset"] = lambda splits=splits, **_: splits
        tasks.append(ConfigurableTask(config=config))
    return tasks


@pytest.mark.slow
def test_all_numbers_are_those_of_the_harness(
    model: Model, task_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks, prompts, tokenization, metrics and errors, on the same model."""
    lm_eval = pytest.importorskip("lm_eval")
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # JAX does not survive a fork
    from benchmarks.harness import HarnessModel

    adapter = HarnessModel(model)
    found = lm_eval.simple_evaluate(
        model=adapter, tasks=hub_tasks(task_data), bootstrap_iters=2000
    )["results"]
    compared = 0
    for name, _, metrics in evaluate.evaluate_tasks(model, task_data):
        for key, value in metrics.items():
            theirs = found[name][f"{key},none"]
            # It finds the error of a perplexity by drawing samples of the questions.
            loose = {"rel": 0.25} if key == "perplexity_stderr" else {"rel": 1e-6}
            assert value == pytest.approx(theirs, **loose), (name, key)
            compared += 1
    assert compared == 2 * (9 + 5 + 1)  # acc, acc_norm and a perplexity, with errors


@pytest.mark.slow
def test_the_harness_rolls_and_generates(model: Model) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval import utils
    from lm_eval.api.instance import Instance

    from benchmarks.harness import HarnessModel

    adapter = HarnessModel(model)

    def ask(kind: str, *arguments: Any) -> list[Any]:
        request = Instance(request_type=kind, doc={}, arguments=arguments, idx=0)
        return getattr(adapter, kind)([request])

    text = "a text that is longer than the window of the model, by some " * 2
    windows = utils.get_rolling_token_windows(list(text.encode()), 256, MAX_LENGTH, 1)
    total = sum(
        by_definition(model, *utils.make_disjoint_window(window))[0]
        for window in windows
    )
    (rolled,) = ask("loglikelihood_rolling", text)
    assert rolled == pytest.approx(total, abs=1e-3)
    options = {"until": [], "max_gen_toks": 6, "do_sample": False}
    (generated,) = ask("generate_until", "abc", options)
    ids = list(b"abc")
    for _ in range(6):
        padded = jnp.zeros((1, MAX_LENGTH), int).at[0, : len(ids)].set(jnp.asarray(ids))
        ids.append(int(all_logits(model.params, padded)[len(ids) - 1].argmax()))
    expected = model.tokenizer.decode(ids[3:])
    assert generated == expected
    options["until"] = [expected[2]]
    assert ask("generate_until", "abc", options) == [
        expected[: expected.index(expected[2])]
    ]


def test_a_model_of_nan_has_no_accuracy(model: Model, task_data: Path) -> None:
    """The first of all answers would be the best: argmax of NaN is 0."""
    params = jax.tree.map(lambda x: x * jnp.nan, model.params)
    with pytest.raises(UserError, match="logits are not finite"):
        list(evaluate.evaluate_tasks(model._replace(params=params), task_data, "piqa"))


def test_tasks_are_evaluated_where_no_record_can_be_written(
    checkpoint: None,
    task_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tok.save(tok.ByteTokenizer(), tmp_path / tok.FILE)

    def refused(*_: object, **__: object) -> None:
        raise WriteFailed(tmp_path / "evaluation.jsonl", PermissionError(13, "denied"))

    monkeypatch.setattr(files, "RecordFile", refused)
    argv = ["--run", str(tmp_path), "--task-data", str(task_data), "--limit", "1"]
    assert evaluate.main([*argv, "--tasks", "piqa,copa"]) == 1
    out, err = capsys.readouterr()
    assert "piqa" in out and "copa" in out and "chance  50.00" in out
    assert "evaluation.jsonl could not be written" in err and err.count("\n") == 1
