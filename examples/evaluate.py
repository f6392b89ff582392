"""Zero-shot evaluation of a run: `python -m examples.evaluate --run RUN --task-data D`.

Tasks are read from local files (`examples.evaluation.tasks`). Numbers are printed and
appended to `evaluation.jsonl` in the run's folder.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples import flags
from examples.flags import UserError, check, check_range, failed, option

RECORD_FILE = "evaluation.jsonl"


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Which run is evaluated on what."""

    run: str = option("", "folder of a training run")
    optimizer: str | None = option(None, "which of the run's optimizers, if several")
    step: int | None = option(None, "the checkpoint of this step (default: the last)")
    tasks: str = option("all", "names joined by commas, or 'all' that are in the files")
    task_data: str | None = option(None, "folder of the task files")
    limit: int = option(0, "only the first questions of each task (0: all)")
    batch_tokens: int = option(16_384, "tokens that are scored at once")

    def __post_init__(self) -> None:
        check(bool(self.run), "--run FOLDER is needed")
        check_range(self, "limit", 0)
        check_range(self, "batch_tokens", 1)
        check(bool(self.task_data), "--task-data FOLDER is needed")


@dataclasses.dataclass(frozen=True)
class Model:
    """What an evaluation needs of a trained model."""

    logits_fn: Any  # a jax.tree_util.Partial over the parameters
    tokenizer: Any
    max_length: int


def make_logits_fn(graphdef: Any, params: Any) -> Any:
    """What `evaluation.scoring` takes, from a model's structure and its numbers."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    def logits(
        params: Any, tokens_BxL: jax.Array, positions_BxK: jax.Array
    ) -> jax.Array:
        model = nnx.merge(graphdef, params)
        x_BxLxD, _ = model.features(tokens_BxL)
        x_BxKxD = jnp.take_along_axis(x_BxLxD, positions_BxK[..., None], axis=1)
        return model.logits(x_BxKxD)

    return jax.tree_util.Partial(logits, params)


def load_model(config: EvaluateConfig) -> Model:
    """The parameters and the tokenizer of a run."""
    import jax

    from examples.checkpoint import load_params
    from examples.data import tokens as tok
    from examples.state import make_model

    folder = Path(config.run)
    params, trained = load_params(folder, optimizer=config.optimizer, step=config.step)
    file = folder / tok.FILE
    if file.exists() or trained.data.tokenizer != "bytes" or trained.data.data:
        tokenizer = tok.load_tokenizer(file)
    else:
        tokenizer = tok.ByteTokenizer()
    graphdef, init = make_model(trained.model, tokenizer.vocab_size)
    wanted, found = (
        jax.tree.map(lambda x: x.shape, tree)
        for tree in (jax.eval_shape(init, jax.random.key(0)), params)
    )
    check(wanted == found, f"{file}: not the tokenizer of these parameters")

    return Model(make_logits_fn(graphdef, params), tokenizer, trained.model.seq_len)


def evaluate_files(
    model: Model, config: EvaluateConfig
) -> Iterator[tuple[str, int, dict[str, float]]]:
    """(task, questions, metrics) for each task, from local files."""
    from examples.evaluation import scoring
    from examples.evaluation.tasks import TASKS, measure, read_task

    folder = Path(config.task_data or "")
    names = [name.strip() for name in config.tasks.split(",")]
    if names == ["all"]:
        names = [name for name, task in TASKS.items() if (folder / task.file).exists()]
        known = ", ".join(task.file for task in TASKS.values())
        check(bool(names), f"--task-data {folder}: no task file in it ({known})")
    if unknown := [name for name in names if name not in TASKS]:
        known = ", ".join(TASKS)
        raise UserError(f"--tasks {','.join(unknown)}: unknown; there are {known}")
    # All are read first: a broken file is named before hours of scoring.
    read = {name: read_task(TASKS[name], folder, config.limit) for name in names}
    for name, questions in read.items():
        pairs = [pair for question in questions for pair in question.pairs]
        requests = scoring.encode_pairs(model.tokenizer, pairs)
        sizes = {"max_length": model.max_length, "batch_tokens": config.batch_tokens}
        scores = iter(scoring.score(model.logits_fn, requests, **sizes))
        answers = [[next(scores) for _ in question.pairs] for question in questions]
        yield name, len(questions), measure(TASKS[name], questions, answers)


def _show(name: str, questions: int, metrics: dict[str, float]) -> str:
    parts = []
    for key, value in metrics.items():
        if key.endswith("_stderr"):
            continue
        scale = 1 if key == "perplexity" else 100
        error = metrics.get(f"{key}_stderr", float("nan"))
        parts.append(f"{key} {scale * value:6.2f} ± {scale * error:.2f}")
    return f"{name:>16} {questions:6,}  " + "  ".join(parts)


def run(config: EvaluateConfig) -> dict[str, dict[str, float]]:
    """Evaluate, print and record; returns the metrics of each task."""
    model = load_model(config)
    results: dict[str, dict[str, float]] = {}
    path = Path(config.run, RECORD_FILE)
    begin = time.perf_counter()
    for name, questions, metrics in evaluate_files(model, config):
        print(_show(name, questions, metrics), flush=True)
        record = {"kind": "zero_shot", "task": name, "questions": questions, **metrics}
        record |= {key: getattr(config, key) for key in ("optimizer", "step", "limit")}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        results[name] = metrics
    mean = sum(metrics.get("acc", 0.0) for metrics in results.values()) / len(results)
    seconds = time.perf_counter() - begin
    print(f"mean accuracy {100 * mean:.2f}; {seconds:.0f} s; record: {path}")
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate a run; returns the exit code (2: the user can fix it)."""
    try:
        options = flags.parse(
            {"evaluate": EvaluateConfig},
            argv,
            prog="python -m examples.evaluate",
            description="Zero-shot evaluation of a training run.",
        )
        run(options["evaluate"])
    except UserError as error:
        return failed("evaluate", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
