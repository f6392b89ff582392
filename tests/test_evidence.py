"""The study: its data order, plan, statistics, verdicts and page."""

import json
import lzma
import math
import pathlib
import re

import jax
import numpy as np
import optax
import pytest

import muon2_optax as m2
from benchmarks import fit_schedules
from benchmarks.evidence import (
    arms,
    cells,
    claims,
    data,
    first_steps,
    plan,
    report,
    run,
    sizes,
    spectra,
    stages,
    stats,
    training,
)
from benchmarks.evidence.cells import Cell
from benchmarks.evidence.stats import Interval

DOCS = pathlib.Path(__file__).parents[1] / "docs"


# --- data -------------------------------------------------------------------------


def test_every_window_once_and_then_once_more():
    steps = list(data.batches(windows=20, batch_size=6, steps=7, seed=5))
    assert {len(rows) for rows in steps} == {6}
    seen = np.concatenate(steps)
    assert sorted(seen[:20]) == list(range(20)) == sorted(seen[20:40])
    assert not np.array_equal(seen[:20], seen[20:40])


def test_a_shorter_run_sees_the_start_of_a_longer_one():
    long, short = (list(data.batches(50, 4, steps, seed=1)) for steps in (9, 5))
    np.testing.assert_array_equal(short, long[:5])
    assert not np.array_equal(short, list(data.batches(50, 4, 5, seed=2)))


def test_tokenizing_ends_documents_and_keeps_the_parts_apart(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"one": 0, "two": 1, "three": 2, "</s>": 3}
    model = tokenizers.models.WordLevel(words, unk_token="one")
    coder = tokenizers.Tokenizer(model)
    coder.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    coder.save(str(tmp_path / "tokenizer.json"))
    texts = {"train_000": "two three\n<|endoftext|>\nthree\n", "train_001": "two\n"}
    for name, text in {**texts, "val_000": "one one\n"}.items():
        with lzma.open(tmp_path / f"{name}.txt.xz", "wt") as file:
            file.write(text)
    data.tokenize(tmp_path, tmp_path / "tokenizer.json", tmp_path / "out", 1)
    found = data.load(tmp_path / "out")
    assert found.train.tolist() == [1, 2, 3, 2, 3, 1, 3]
    assert found.val.tolist() == [0, 0, 3] and found.val.dtype == np.uint16


# --- cells and plan ---------------------------------------------------------------


def test_a_cell_is_told_from_its_line_again():
    cell = Cell("tiny", "muon K=5", "cautious", 0.03, 0.2, seed=7, steps=9)
    line = json.dumps(run.line(cell, {"loss": 1.5}, {"device": "d"}))
    assert cells.read([line, ""]) == {cell: json.loads(line)}


@pytest.mark.parametrize("control, decay", [("decay", 0.0), ("none", 0.1), ("ball", 0)])
def test_a_cell_must_make_sense(control, decay):
    with pytest.raises(ValueError, match=control):
        Cell("tiny", "muon K=5", control, 0.02, decay)


def finished(losses):
    return {cell: {"loss": loss} for cell, loss in losses.items()}


def test_every_planned_cell_names_things_that_exist():
    results = {}
    for name in plan.PLANS:
        while todo := plan.wanted(name, results):
            for cell in todo:
                assert cell.arm in arms.ARMS and cell.size in sizes.SIZES
                results[cell] = {"loss": 3 + cell.rate}
    assert len(results) > 100


def test_seeds_follow_when_the_grid_is_there():
    first, second = "muon K=5", "muon2_f K=3"
    stage = stages.repeats((first, second), "hyperball", trials=2, seeds=(102,))

    def cell(arm, rate, seed=101):
        return Cell("llama_60m", arm, "hyperball", rate, seed=seed)

    losses = {cell(first, 0.02): 3.0, cell(first, 0.03): 3.1, cell(second, 0.02): 2.9}
    assert stage(finished(losses)) == []
    losses[cell(second, 0.03)] = None  # diverged: never the best
    want = [cell(first, 0.02, 102), cell(second, 0.02, 102)]
    assert stage(finished(losses)) == want
    # Where the bests differ, both arms get both.
    losses[cell(second, 0.03)] = 2.8
    assert len(stage(finished(losses))) == 4


def test_more_of_a_treatment_only_beyond_the_edge():
    near, edge = ("decay", 0.1, (0.02,)), ("decay", 0.3, (0.02,))
    stage = stages.extended(("muon K=5",), edge, ("decay", 0.6, (0.02,)), trials=2)
    a, b = (Cell("llama_60m", "muon K=5", c, r[0], d) for c, d, r in (near, edge))
    assert stage(finished({a: 3.0, b: 3.1})) == []
    (more,) = stage(finished({a: 3.0, b: 2.9}))
    assert more.decay == 0.6


def test_a_cell_is_claimed_once(tmp_path):
    cell = Cell("tiny", "muon K=5", "none", 0.02)
    assert run.claim(tmp_path, cell) and not run.claim(tmp_path, cell)
    assert run.claim(tmp_path, cell.with_seed(102))


# --- training ---------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 34, 35, 36, 400, 699])
def test_the_schedule_is_optax_s(step):
    want = optax.warmup_cosine_decay_schedule(0.0, 1.0, 35, 700, 0.1)(step)
    # optax computes in float32.
    assert training.rate_at(step, 700) == pytest.approx(float(want), abs=1e-6)


def test_looking_ahead_follows_the_rate_and_ends_before_the_run():
    """At the end the parameters must be those to evaluate."""
    shares = [training.ahead_at(step, 200) for step in range(201)]
    assert not any(shares[:30]) and not any(shares[150:])
    assert shares[30:150] == [training.rate_at(step, 200) for step in range(30, 150)]


def test_a_run_is_resumed_and_pairs_share_their_start(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    (tmp_path / "tiny").mkdir()
    for part, count in (("train", 900), ("val", 200)):
        ids = (rng.zipf(1.5, count) % 64).astype(np.uint16)
        np.save(tmp_path / "tiny" / f"{part}.npy", ids)
    decays = [("decay", 0.1, (0.02,)), ("none", 0.0, (0.02,))]
    steps = stages.shorter("muon K=5", "none", 1, (6,), (101,), size="tiny")
    monkeypatch.setitem(
        plan.PLANS, "test", [stages.grid(("muon K=5",), decays, size="tiny"), steps]
    )
    out = tmp_path / "lines.jsonl"

    def work():
        folder = tmp_path / f"claims{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        options = f"--plan test --tokens {tmp_path} --out {out} --commit c --claims"
        run.work(run.parse([*options.split(), str(folder)]))
        return [json.loads(line) for line in out.read_text().splitlines()]

    lines = work()
    assert [line["steps_run"] for line in lines] == [12, 12, 6]
    decayed, plain, short = lines
    assert plain["commit"] == "c" and plain["wall_s"] > 0
    # The first training losses are those of the same weights and data.
    assert decayed["curve"][0][0] == plain["curve"][0][0] == 4
    assert decayed["curve"][0][2] == pytest.approx(plain["curve"][0][2], abs=1e-3)
    assert decayed["loss"] != plain["loss"] and short["loss"] != plain["loss"]
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert work() == lines


def test_watching_changes_nothing_and_sees_what_enters():
    rules = m2.MatrixRules(((r"kernel$", m2.MatrixAxes(-2, -1)),))
    params = {"kernel": jax.numpy.ones((3, 4))}
    grads = jax.tree.map(lambda p: p * 1e-3, params)  # far below the clipping
    hyper = arms.Hyper(0.1, 0.1, 0.0)
    arm, taken = arms.ARMS["muon K=5"], []
    for watched in (False, True):
        tx = arms.transform(arm, "none", rules, hyper, watched=watched)
        updates, state = tx.update(grads, tx.init(params), params)
        taken.append(updates["kernel"])
    np.testing.assert_array_equal(*taken)
    kept = jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, arms.Watched))
    (seen,) = [s for s in kept if isinstance(s, arms.Watched)]
    # Nesterov's first step: b1 (1 - b1) + (1 - b1) = 0.0975 of the gradient.
    (entered,) = jax.tree.leaves(seen)
    np.testing.assert_allclose(entered, 0.0975 * 1e-3, rtol=1e-5)


def test_scaled_gradients_enter_the_momentum():
    """The factored moment divides each gradient, and the results are averaged."""
    rng = np.random.default_rng(3)
    rules = m2.MatrixRules(((r"kernel$", m2.MatrixAxes(-2, -1)),))
    steps = rng.standard_normal((2, 4, 5)) * np.linspace(0.1, 3, 5)
    row, col, momentum, want = np.zeros(4), np.zeros(5), np.zeros((4, 5)), None
    for g in steps:
        row = 0.95 * row + 0.05 * np.mean(g**2, axis=1)
        col = 0.95 * col + 0.05 * np.mean(g**2, axis=0)
        scaled = g / np.sqrt(np.outer(row, col) / np.mean(row))
        momentum = 0.95 * momentum + 0.05 * scaled
        want = 0.95 * momentum + 0.05 * scaled
    tx = arms.direction(arms.ARMS["muon2_f K=3 scaled gradients"], rules, watched=True)
    params = {"kernel": jax.numpy.zeros((4, 5))}
    state = tx.init(params)
    for g in steps:
        _, state = tx.update({"kernel": jax.numpy.asarray(g, "float32")}, state)
    (seen,) = [s for s in state if isinstance(s, arms.Watched)]
    np.testing.assert_allclose(seen.updates["kernel"], want, rtol=1e-4)


def test_an_arm_for_some_matrices_leaves_the_others_to_muon():
    rng = np.random.default_rng(5)
    tree = {"blocks": [{"attention": {"kernel": 0}, "mlp": {"down": {"kernel": 0}}}]}
    params, grads = (
        jax.tree.map(
            lambda _: jax.numpy.asarray(rng.standard_normal((5, 7)), "float32"), tree
        )
        for _ in range(2)
    )

    def updates(arm):
        hyper = arms.Hyper(0.1, 0.1, 0.0)
        tx = arms.transform(arms.ARMS[arm], "none", m2.MatrixRules(), hyper)
        (block,) = tx.update(grads, tx.init(params), params)[0]["blocks"]
        return block

    some, every, none = map(updates, ("muon2_f attention", plan.FIVE, plan.BASE))
    for part, whole in (("attention", every), ("mlp", none)):
        jax.tree.map(np.testing.assert_array_equal, some[part], whole[part])
    assert np.any(some["mlp"]["down"]["kernel"] != every["mlp"]["down"]["kernel"])


def test_a_look_at_one_matrix_knows_its_polar_factor():
    """A diagonal matrix, whose singular values the steps map one by one."""
    s = np.array([0.8, 0.6, 1e-3])  # of Frobenius norm 1, to 5e-7
    want = s.copy()
    for _ in range(3):
        want = 3.4445 * want - 4.7750 * want**3 + 2.0315 * want**5
    found = first_steps.compare(5 * np.diag(s), np.diag(want), arms.ARMS["muon K=3"])
    assert found["error"] < 1e-5 and abs(found["largest"] - 0.8) < 1e-6
    assert found["median"] == pytest.approx(0.6, rel=1e-6)
    cosine = want.sum() / np.linalg.norm(want) / 3**0.5
    assert found["cosine"] == pytest.approx(cosine, rel=1e-6)
    off = first_steps.compare(np.diag(s), 1.1 * np.diag(want), arms.ARMS["muon K=3"])
    assert off["error"] == pytest.approx(0.1, rel=1e-3)
    assert off["cosine"] == pytest.approx(cosine, rel=1e-6)


def test_schatten_norms_are_those_of_the_matrices():
    """From what is kept of a spectrum, also where one value stands out."""
    rng = np.random.default_rng(4)
    for top in (0.0, 3.0, 30.0):
        matrix = rng.standard_normal((160, 200)) / 14
        matrix[0] += top / 14
        s = np.linalg.svd(matrix, compute_uv=False)
        want = np.sum((s / np.linalg.norm(s)) ** 4) ** 0.25
        (found,) = fit_schedules.schatten_norms(
            [{"shape": matrix.shape}], spectra.quantiles(matrix)[None]
        )
        # How much of the largest value is in the last quantile depends on the size.
        assert found == pytest.approx(want, rel=0.1)


def test_the_schatten_table_is_fitted_to_the_spectra():
    entries, quantiles = fit_schedules.of_kind("muon2", *spectra.load(spectra.SPECTRA))
    norms = fit_schedules.schatten_norms(entries, quantiles)
    fitted = np.minimum(quantiles / norms[:, None], 1)
    rows = arms.SCHATTEN.rows(3)
    assert fit_schedules.cosine(rows, fitted) > 0.91
    # No coefficient can move by a hundredth without loss.
    for i, j in np.ndindex(3, 3):
        for factor in (0.99, 1.01):
            moved = np.array(rows)
            moved[i, j] *= factor
            other = fit_schedules.cosine(moved, fitted)
            assert other < fit_schedules.cosine(rows, fitted) + 2e-4


# --- statistics -------------------------------------------------------------------


def test_quantiles_are_student_s():
    scipy_stats = pytest.importorskip("scipy.stats")
    for freedom, quantile in stats.T_QUANTILES.items():
        assert quantile == pytest.approx(scipy_stats.t.ppf(0.975, freedom), abs=5e-4)


def test_interval():
    found = stats.interval([1.0, 2.0, 3.0])
    # Deviation 1: half of the width is 4.303 / sqrt(3).
    assert found == pytest.approx((2.0, 2 - 2.4843, 2 + 2.4843, 3), abs=1e-4)
    assert stats.interval([0.5]) == (0.5, None, None, 1)
    assert stats.interval([]) is None


def test_pairs_are_of_the_same_seed():
    a = Cell("tiny", "muon K=5", "none", 0.02)
    b = Cell("tiny", "adamw", "none", 0.04)
    losses = {a.with_seed(s): s / 100 for s in (101, 102, 103)}
    losses |= {b.with_seed(s): s / 100 + 0.1 for s in (102, 103, 104)}
    found = stats.paired(finished(losses), a, b)
    assert found == pytest.approx((-0.1, -0.1, -0.1, 2), abs=1e-9)


def test_fewer_steps_of_a_known_curve():
    """Losses on 5 - 0.4 log(n): 20 % fewer steps are where the target was put."""
    ours = Cell("tiny", "muon2 K=3", "none", 0.02)
    short, target = (
        Cell("tiny", "muon2 K=3", "none", 0.02, steps=60),
        Cell("tiny", "muon K=5", "none", 0.02),
    )

    def loss(n):
        return 5 - 0.4 * math.log(n)

    results = finished({ours: loss(100), short: loss(60), target: loss(80)})
    found = stats.fewer_steps(results, short, ours, target, 100)
    assert found == (pytest.approx(20.0), None, None, 1)


@pytest.mark.parametrize(
    "found, target, want",
    [
        (None, -3.0, "not yet measured"),
        (Interval(-3.1, -3.4, -2.8, 3), -3.0, "holds"),
        (Interval(-2.4, -2.8, -2.1, 3), -3.0, "holds, weaker"),
        (Interval(-1.0, -1.2, -0.8, 3), -3.0, "does not hold here"),
        (Interval(-2.4, -6.0, 1.0, 2), -3.0, "not decided"),
        (Interval(1.0, 0.5, 1.5, 3), None, "does not hold here"),
        (Interval(-0.5, None, None, 1), None, "not decided (one seed)"),
        (Interval(-0.9, None, None, 1), None, "not decided (one seed)"),
        (Interval(-1.4, None, None, 1), None, "holds (one seed)"),
        (Interval(4.9, None, None, 1), None, "does not hold here (one seed)"),
    ],
    ids=str,
)
def test_verdicts(found, target, want):
    claim = claims.Claim("", "", target, lambda results: found, "")
    assert claims.verdict(claim, claim.measure({})) == want


# --- the pages --------------------------------------------------------------------


def test_the_page_is_what_the_lines_say(tmp_path):
    """And it is written again: nobody has edited it by hand."""
    report.write(run.read(run.RESULTS), tmp_path)
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "{{" not in text
    assert text == (DOCS / "results.md").read_text(encoding="utf-8")
    for picture in re.findall(r"\((figures/.*?)\)", text):
        assert (DOCS / picture).stat().st_size < 100_000


def test_advice_quotes_only_what_was_measured():
    page = (DOCS / "choosing.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    results = (DOCS / "results.md").read_text(encoding="utf-8")
    quoted = re.findall(r"(\d+\.\d) %", prose)
    assert len(quoted) > 5
    known = {x for x in re.findall(r"\d+\.\d", results)}
    # The cost of another rate, from two cells of the grid.
    known |= {"1.8", "3.0"}
    assert set(quoted) <= known


def test_the_recommended_recipe_is_the_arm_that_was_measured():
    page = (DOCS / "choosing.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    # At a constant rate, since a warm-up starts with a step of length 0.
    names = {}
    exec(re.sub(r"return optax.warmup.*", "return rate", code), names)
    rng = np.random.default_rng(0)
    params, grads = (
        {k: jax.numpy.asarray(rng.standard_normal(s), "float32") for k, s in shapes}
        for shapes in [[("kernel", (6, 9)), ("bias", (9,))]] * 2
    )
    hyper = arms.Hyper(0.03, 2e-3, 0.0)
    arm = arms.ARMS[plan.FIVE]
    measured = arms.transform(arm, "hyperball", m2.MatrixRules(), hyper, clip=1e9)
    taken = []
    for tx in (names["tx"], measured):
        updates, _ = tx.update(grads, tx.init(params), params)
        taken.append(updates)
    # The measured arm has a shape factor and the recipe has none. The hyperball
    # normalizes it away, so only rounding is left between the two.
    np.testing.assert_allclose(taken[0]["kernel"], taken[1]["kernel"], atol=1e-6)
    np.testing.assert_allclose(taken[0]["bias"], taken[1]["bias"], rtol=1e-6)
