"""The scripts of ``docs/migration.md``, before and after, and what its tables say."""

import dataclasses
import pathlib
import re
import runpy
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import muon2_optax as m2

SCRIPTS = pathlib.Path(__file__).parent / "migration"
PAGE = (pathlib.Path(__file__).parents[2] / "docs/migration.md").read_text()


def run(name):
    return runpy.run_path(str(SCRIPTS / f"{name}.py"))


def test_optax_script():
    """Nesterov's mix and NAdam differ a little, so the ends agree roughly only."""
    before, after = run("optax_before")["losses"], run("optax_after")["losses"]
    assert before[0] == after[0] and before[-1] < 0.2 * before[0]
    assert 0.8 < after[-1] / before[-1] < 1.25


def test_torch_script():
    losses = run("torch_after")["losses"]
    assert losses[-1] < losses[0]
    # What the argument table of the page says is checked number by number with the
    # files golden/torch_muon_*.npz (tests/test_golden.py).


def test_torch_script_before():
    torch = pytest.importorskip("torch")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no torch.optim.Muon")
    losses = run("torch_before")["losses"]
    assert losses[-1] < losses[0]


def test_adamw_script():
    before, after = run("adamw_before")["losses"], run("adamw_after")["losses"]
    assert after[0] == before[0] and after[-1] < 1.1 * before[-1] < 0.2


def test_lines_of_the_first_table():
    """All can be built; for those who come from a Muon, ``m2.muon`` keeps their own."""
    table = PAGE.split("\n\n")[1]
    lines = re.findall(r"`(m2\.muon2\(.*?\))`", table)
    assert len(lines) == 4 and all("nesterov=True" in line for line in lines)
    made = [eval(line, {"m2": m2, "rate": 0.3}) for line in lines]
    assert all(hasattr(tx, "update") for tx in made)
    params, grads = trees(1)
    for line, theirs in zip(
        lines,
        (
            {},
            {"weight_decay": 0.1},
            {"weight_decay": 0.1, "consistent_rms": 0.2},
        ),
    ):
        ours = eval(line.replace("m2.muon2(", "m2.muon("), {"m2": m2, "rate": 0.3})
        # The first step, in which both forms of Nesterov's momentum agree.
        (got,) = updates_of(ours, params, [grads])
        (want,) = updates_of(optax.contrib.muon(0.3, **theirs), params, [grads])
        for key in ("up", "down", "square"):
            error = np.linalg.norm(np.float64(got[key]) - want[key])
            assert error <= 1e-4 * np.linalg.norm(want[key]), (line, key)


SHAPES = {"up": (16, 64), "down": (64, 16), "square": (24, 24), "bias": (16,)}


def trees(count):
    """Parameters, then ``count`` trees of gradients."""
    draw = np.random.default_rng(0).standard_normal
    return [
        {k: jnp.asarray(draw(shape), "f4") for k, shape in SHAPES.items()}
        for _ in range(1 + count)
    ]


def updates_of(tx, params, grads):
    state, update, found = tx.init(params), jax.jit(tx.update), []
    for g in grads:
        updates, state = update(g, state, params)
        found.append(updates)
    return found


def keller_with(normalization):
    keller = m2.SCHEDULES["keller"]
    return dataclasses.replace(keller, normalization=normalization)


# Of fewer rows than Optax's default number of steps.
ROWS = ((3.3, -4.4, 1.9), (3.1, -4.2, 1.8), (2.0, -1.5, 0.5))
MASK = {"up": True, "down": False, "square": True, "bias": False}


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ({}, {}),
        ({"consistent_rms": 0.2}, {"shape_scale": "match_rms"}),
        ({"ns_steps": 3}, {"ns_steps": 3}),
        ({"weight_decay": 0.1, "adam_weight_decay": 0.1},) * 2,
        ({"adam_learning_rate": 1e-3},) * 2,
        ({"ns_coeffs": (2.0, -1.5, 0.5)},) * 2,
        ({"ns_coeffs": ROWS},) * 2,
        ({"ns_coeffs": "dion"}, {"ns_coeffs": "you5"}),
        ({"beta": 0.8}, {"b1": 0.8}),
        ({"consistent_rms": 0.37}, {"shape_scale": m2.MatchRMS(0.37)}),
        ({"adam_b1": 0.8, "adam_b2": 0.97, "adam_eps_root": 1e-3},) * 2,
        ({"adaptive": True}, {"adaptive": True, "bias_correction": True}),
        (
            # Half of the norm, about 24, so that its size counts.
            {"eps": 12.0},
            {
                "adam_eps": 12.0,
                "bias_correction": True,
                "ns_coeffs": keller_with(m2.Frobenius(eps=12.0)),
            },
        ),
        (
            {"weight_decay": 0.3, "weight_decay_mask": MASK, "adam_weight_decay": 0.2},
            {
                "weight_decay": 0.3,
                "weight_decay_mask": MASK,
                "rest": optax.adamw(0.02, weight_decay=0.2),
            },
        ),
    ],
    ids=lambda options: "-".join(options) or "defaults",
)
def test_table_of_optax(theirs, ours):
    """Without Nesterov both are one method: bias correction is a factor per step.

    Where a size counts, ``adaptive`` and eps, ours must be corrected as well.
    """
    params, *grads = trees(3)
    theirs = optax.contrib.muon(0.02, nesterov=False, **theirs)
    rules = m2.MatrixRules(by_name=False)
    ours = m2.muon(0.02, nesterov=False, rules=rules, **ours)
    wanted = updates_of(theirs, params, grads)
    for got, want in zip(updates_of(ours, params, grads), wanted, strict=True):
        for key in SHAPES:
            error = np.linalg.norm(np.float64(got[key]) - want[key])
            # Rounding of float32, 6e-8, times the gain of five steps, 485; the eps that
            # Optax adds to the norm is 1e-8 of about 20.
            assert error <= 1e-4 * np.linalg.norm(want[key]), key


def test_first_step_with_nesterov_is_the_same():
    """One gradient is a multiple of itself in either mix."""
    params, grads = trees(1)
    rules = m2.MatrixRules(by_name=False)
    (want,) = updates_of(optax.contrib.muon(0.02), params, [grads])
    (got,) = updates_of(m2.muon(0.02, rules=rules), params, [grads])
    for key in ("up", "down", "square"):
        error = np.linalg.norm(np.float64(got[key]) - want[key])
        assert error <= 1e-4 * np.linalg.norm(want[key]), key


def test_masks_reach_other_groups():
    """Optax's the matrices alone, ours both: what ``rest`` is for."""
    params, grads = trees(1)
    still = jax.tree.map(jnp.zeros_like, grads)
    decay = {"weight_decay": 0.3, "adam_weight_decay": 0.2, "weight_decay_mask": MASK}
    for tx, decayed in (
        (optax.contrib.muon(0.1, **decay), {"up", "square", "bias"}),
        (m2.muon(0.1, **decay), {"up", "square"}),
    ):
        (updates,) = updates_of(tx, params, [still])
        assert {k for k, u in updates.items() if np.any(np.asarray(u))} == decayed


def test_adaptive_without_correction_starts_small():
    """Step t by 1 - beta^t, as the page says: the dual norm is the momentum's."""
    params, *grads = trees(2)
    theirs = optax.contrib.muon(0.1, beta=0.8, adaptive=True, nesterov=False)
    ours = m2.muon(0.1, b1=0.8, adaptive=True, nesterov=False)
    pairs = zip(updates_of(ours, params, grads), updates_of(theirs, params, grads))
    for (got, want), factor in zip(pairs, (0.2, 0.36), strict=True):
        for key in ("up", "down", "square"):
            np.testing.assert_allclose(
                np.linalg.norm(got[key]), factor * np.linalg.norm(want[key]), rtol=1e-3
            )


def test_tables_of_optax_by_their_length():
    """More rows than steps: an error there; here a table always has its own number."""
    params, _ = trees(1)
    with pytest.raises(ValueError, match="Not enough coeffs"):
        optax.contrib.muon(0.1, ns_coeffs=ROWS * 3).init(params)
    m2.muon(0.1, ns_coeffs=ROWS * 3).init(params)
    with pytest.raises(ValueError, match="pass ns_steps=9"):
        m2.muon(0.1, ns_coeffs=ROWS * 3, ns_steps=5)


def test_optax_to_the_last_argument():
    """The page's call for equal updates: dimension numbers, mask, Nesterov, NAdam."""
    draw = np.random.default_rng(1).standard_normal
    shapes = {
        "query": (12, 2, 5),
        "out": (2, 5, 12),
        "table": (14, 12),
        "proj": {"kernel": (12, 20), "bias": (20,)},
    }
    params, *grads = (
        jax.tree.map(
            lambda s: jnp.asarray(draw(s), "f4"),
            shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        for _ in range(4)
    )
    spec = optax.contrib.MuonDimensionNumbers
    dims = {
        "query": spec(0, (1, 2)),
        "out": spec((0, 1), 2),
        "table": None,
        "proj": {"kernel": spec(0, 1), "bias": None},
    }
    mask = {
        "query": False,
        "out": True,
        "table": False,
        "proj": {"kernel": True, "bias": False},
    }
    theirs = optax.contrib.muon(
        0.03,
        weight_decay=0.2,
        weight_decay_mask=mask,
        adam_learning_rate=0.004,
        adam_b2=0.96,
        adam_weight_decay=0.05,
        muon_weight_dimension_numbers=dims,
    )
    ours = run("optax_exact")["muon_as_in_optax"](
        params, 0.03, lambda _: dims, mask, 0.004, 0.96, 0.2, 0.05
    )
    wanted = updates_of(theirs, params, grads)
    for got, want in zip(updates_of(ours, params, grads), wanted, strict=True):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            # As in ``test_table_of_optax``.
            assert np.linalg.norm(np.float64(a) - b) <= 1e-4 * np.linalg.norm(b)


def torch_trees():
    """GPT-2 and LLaMA as ``state_dict`` names them, at other sizes and with GQA."""
    d, rows = 24, 160
    gpt = {"wte.weight": (rows, d), "wpe.weight": (40, d), "ln_f.weight": (d,)}
    llama = {"model.embed_tokens.weight": (rows, d), "model.norm.weight": (d,)}
    for i in range(2):
        for name, shape in {
            "attn.c_attn": (3 * d, d),
            "attn.c_proj": (d, d),
            "mlp.c_fc": (4 * d, d),
            "mlp.c_proj": (d, 4 * d),
        }.items():
            gpt[f"transformer.h.{i}.{name}.weight"] = shape
            gpt[f"transformer.h.{i}.{name}.bias"] = shape[:1]
        gpt[f"transformer.h.{i}.ln_1.weight"] = (d,)
        layer = f"model.layers.{i}"
        for name, shape in {
            "self_attn.q_proj": (d, d),
            "self_attn.k_proj": (d // 2, d),
            "self_attn.v_proj": (d // 2, d),
            "self_attn.o_proj": (d, d),
            "mlp.gate_proj": (64, d),
            "mlp.up_proj": (64, d),
            "mlp.down_proj": (d, 64),
        }.items():
            llama[f"{layer}.{name}.weight"] = shape
        llama[f"{layer}.self_attn.q_norm.weight"] = (d // 2,)
        llama[f"{layer}.post_attention_layernorm.weight"] = (d,)
    heads = {"lm_head.weight": (rows, d)}
    return {"gpt": gpt | heads, "llama": llama | heads}


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize(
    "rules",
    [
        m2.MatrixRules(),
        *(
            m2.MatrixRules(((pattern, m2.MatrixAxes(-1, -2)),))
            for pattern in re.findall(r'\(\(\(r"(.*?)", MatrixAxes\(-1, -2\)', PAGE)
        ),
    ],
    ids=["default", "of the page"],
)
def test_layout_of_torch(name, rules):
    """Linear layers are matrices (out, in); embeddings, head and norms are AdamW's."""
    shapes = torch_trees()[name]
    tree = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        labels = rules.labels(tree)
    layers = ("c_attn", "c_proj", "c_fc", "_proj")
    bound = rules.bind(tree)
    for path, shape in shapes.items():
        linear = path.endswith(".weight") and path.split(".")[-2].endswith(layers)
        assert labels[path] == ("matrix" if linear else "adam"), path
        if linear:
            axes = bound.resolve(path, shape)
            assert (axes.ins, axes.outs) == ((1,), (0,)), path


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_rule_for_every_weight_fails(name):
    """Why the page warns of ``weight$``: norms are called so too, and embeddings."""
    shapes = torch_trees()[name]
    tree = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    rules = m2.MatrixRules(((r"weight$", m2.MatrixAxes(-1, -2)),))
    with pytest.raises(ValueError, match="norm|ln_"):
        rules.labels(tree)
    assert rules.labels({k: x for k, x in tree.items() if x.ndim > 1})[
        "lm_head.weight"
    ] == ("matrix")


def test_singular_values_after_five_steps():
    """The page's 0.68 to 1.21 from 0.0016 up, by the polynomial in float64."""
    within, below = np.geomspace(0.0016, 1, 4001), np.geomspace(1e-5, 0.0012, 99)
    for _ in range(5):
        within, below = (
            3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5 for x in (within, below)
        )
    assert 0.68 <= within.min() and within.max() <= 1.21 and below.max() < 0.68


@pytest.mark.parametrize("fan_in, fan_out", [(64, 64), (64, 256), (256, 64)])
def test_rates_of_shape_factors(fan_in, fan_out):
    """The page's conversions: the factors' ratios, from their definitions."""
    factor = {
        "keller": max(1.0, fan_out / fan_in) ** 0.5,
        "match_rms": 0.2 * max(fan_in, fan_out) ** 0.5,
        "spectral": (fan_out / fan_in) ** 0.5,
    }
    ones = {"w": jnp.ones((fan_in, fan_out))}
    for kind, want in factor.items():
        tx = m2.scale_by_shape(kind)
        got, _ = tx.update(ones, tx.init(ones))
        np.testing.assert_allclose(got["w"], want, rtol=1e-6)
    ratio = factor["match_rms"] / factor["keller"]
    np.testing.assert_allclose(ratio, 0.2 * fan_in**0.5)


def test_match_rms_is_the_size_of_adamws_updates():
    """0.2 of the rate, times the root mean square of the singular values after K steps,
    which for Keller's triple and K = 5 lie between 0.68 and 1.21 (from 0.0016 up)."""
    params, grads = trees(1)
    (got,) = updates_of(
        m2.muon2(1.0, ns_steps=5, shape_scale="match_rms"), params, [grads]
    )
    for key in ("up", "down"):
        rms = np.sqrt(np.mean(np.square(np.float64(got[key]))))
        assert 0.68 * 0.2 < rms < 1.21 * 0.2, key
