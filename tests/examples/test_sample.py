"""Sampling continues what a model has learnt, with any tokenizer."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import sample as sampling
from examples.pretrain import main as pretrain
from examples.sample import choose, continue_text, load_model

GREEDY: dict[str, Any] = {"temperature": 0.0}
SENTENCE = "the quick brown fox jumps over the lazy dog, so it does. "


@pytest.fixture(
    scope="module", params=[pytest.param("bytes", marks=pytest.mark.slow), "bpe"]
)
def run(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny: list[str],
) -> Path:
    """A model that has learnt one sentence by heart."""
    folder = tmp_path_factory.mktemp("sample")
    (folder / "text.txt").write_text(SENTENCE * 300)
    argv = [*tiny, "--data", str(folder / "text.txt"), "--tokenizer", request.param]
    argv += ["--vocab-size", "300"] if request.param == "bpe" else []
    argv += ["--optimizer", "muon", "--steps", "250"]
    assert pretrain([*argv, "--out", str(folder / "run")]) == 0
    return folder / "run"


def test_the_likeliest_text_is_the_one_it_knows(run: Path) -> None:
    text = continue_text(load_model(str(run)), SENTENCE[:-1], max_tokens=70, **GREEDY)
    # Longer than the model sees at once (32 tokens): the window moves on.
    assert text.startswith(SENTENCE + SENTENCE[:40])


def test_each_token_is_the_likeliest_after_those_before(run: Path) -> None:
    """The program with a cache against one pass over the finished text."""
    model = load_model(str(run))
    tokenizer = model.tokenizer
    text = continue_text(model, "the quick", max_tokens=12, **GREEDY)
    (prompt,), (ids,) = (tokenizer.encode([t.encode()]) for t in ("the quick", text))
    ids = np.r_[np.int32(tokenizer.end_id), np.int32(ids)]
    likeliest = nnx.merge(model.graphdef, model.params)(ids[None])[0].argmax(axis=-1)
    np.testing.assert_array_equal(likeliest[len(prompt) : -1], ids[len(prompt) + 1 :])


def test_seeds_and_errors(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_model(str(run))
    texts = [
        continue_text(model, "", temperature=3, seed=seed, max_tokens=40)
        for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]
    argv = ["--run", str(run), "--prompt", "the quick brown", "--top-k", "1"]
    assert sampling.main(argv) == 0
    assert capsys.readouterr().out.startswith("the quick brown fox")
    assert sampling.main(["--run", str(run.parent / "none")]) == 2
    assert sampling.main([]) == 2
    assert sampling.main(["--run", str(run), "--optimizer", "adamw"]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_choose() -> None:
    logits = jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05]))
    keys = jax.random.split(jax.random.key(0), 4000)

    def shares(temperature: float, top_k: int, top_p: float = 1.0) -> np.ndarray:
        choices = temperature, top_k, top_p
        drawn = jax.vmap(lambda key: choose(logits, key, *choices))(keys)
        return np.bincount(drawn, minlength=4) / len(keys)

    np.testing.assert_allclose(shares(1.0, 0), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(shares(1.0, 2), [0.625, 0.375, 0, 0], atol=0.03)
    # The fewest that have this probability together: 0.5 + 0.3, or of the two best.
    np.testing.assert_allclose(shares(1.0, 0, 0.6), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(1.0, 0, 0.4), [1, 0, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(1.0, 2, 0.7), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(1.0, 2, 0.6), [1, 0, 0, 0], atol=0.03)
    assert shares(0, 0)[0] == 1
    sharp = np.exp(np.asarray(logits) / 0.5)
    np.testing.assert_allclose(shares(0.5, 0), sharp / sharp.sum(), atol=0.03)
