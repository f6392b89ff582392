"""Routing: which leaves are matrices, along which axes, in trees of real models."""

import dataclasses
import functools
import re
import warnings
from typing import Any, NamedTuple

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from flax import nnx
from flax.core import freeze
from reference import relative_error

import muon2_optax as m2
from muon2_optax import MatrixAxes, MatrixRules


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """One or two steps of small matrices: compiling takes nearly all of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def _leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _labels(rules, tree):
    """{path: label}, for comparison at one glance."""
    labels = rules.labels(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): label
        for path, label in jax.tree_util.tree_flatten_with_path(labels)[0]
    }


def _matrices(tree, rules=MatrixRules()):  # noqa: B008 (frozen)
    return {path for path, label in _labels(rules, tree).items() if label == "matrix"}


# --- trees of real models ---------------------------------------------------------


def test_flax_gpt():
    block = {
        "attn": {
            "c_attn": {"kernel": _leaf(8, 24), "bias": _leaf(24)},
            "c_proj": {"kernel": _leaf(8, 8), "bias": _leaf(8)},
        },
        "ln_1": {"scale": _leaf(8), "bias": _leaf(8)},
        "ln_2": {"scale": _leaf(8), "bias": _leaf(8)},
        "mlp": {
            "c_fc": {"kernel": _leaf(8, 32), "bias": _leaf(32)},
            "c_proj": {"kernel": _leaf(32, 8), "bias": _leaf(8)},
        },
    }
    tree = {
        "params": {
            "wte": {"embedding": _leaf(50, 8)},
            "wpe": {"embedding": _leaf(16, 8)},
            "h_0": block,
            "h_1": block,
            "ln_f": {"scale": _leaf(8), "bias": _leaf(8)},
            "lm_head": {"kernel": _leaf(8, 50)},
        }
    }
    kernels = ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj")
    want = {f"params/h_{i}/{k}/kernel" for i in range(2) for k in kernels}
    assert _matrices(tree) == want
    assert set(_labels(MatrixRules(), tree).values()) == {"matrix", "adam"}


def test_llama():
    layer = {
        "self_attn": {
            "q_proj": {"kernel": _leaf(16, 16)},
            "k_proj": {"kernel": _leaf(16, 8)},
            "v_proj": {"kernel": _leaf(16, 8)},
            "o_proj": {"kernel": _leaf(16, 16)},
            "q_norm": {"scale": _leaf(4)},
        },
        "mlp": {
            "gate_proj": {"kernel": _leaf(16, 40)},
            "up_proj": {"kernel": _leaf(16, 40)},
            "down_proj": {"kernel": _leaf(40, 16)},
        },
        "input_layernorm": {"scale": _leaf(16)},
        "post_attention_layernorm": {"scale": _leaf(16)},
    }
    tree = {
        "model": {
            "embed_tokens": {"embedding": _leaf(100, 16)},
            "layers": [layer, layer],
            "norm": {"scale": _leaf(16)},
        },
        "lm_head": {"kernel": _leaf(16, 100)},
    }
    names = [f"self_attn/{n}_proj" for n in "qkvo"]
    names += [f"mlp/{n}_proj" for n in ("gate", "up", "down")]
    want = {f"model/layers/{i}/{n}/kernel" for i in range(2) for n in names}
    assert _matrices(tree) == want


def test_mixture_of_experts():
    layer = {
        "block_sparse_moe": {
            "gate": {"kernel": _leaf(16, 4)},
            "experts": {"w1": _leaf(4, 16, 40), "w2": _leaf(4, 40, 16)},
        },
        "moe": {"router": {"kernel": _leaf(16, 4)}},
        "mlp": {"gate_proj": {"kernel": _leaf(16, 40)}},
    }
    rules = MatrixRules((("experts/", MatrixAxes(-2, -1)),))
    assert _matrices(layer, rules) == {
        "block_sparse_moe/experts/w1",
        "block_sparse_moe/experts/w2",
        "mlp/gate_proj/kernel",
    }
    axes = rules.resolve("block_sparse_moe/experts/w1", (4, 16, 40))
    assert (axes.batch, axes.fan_in, axes.splits) == ((0,), 16, (40,))


def test_scanned_layers():
    """Stacked norm gains and biases are rank 2, stacked kernels rank 3."""
    layers = {
        "attn": {"q": {"kernel": _leaf(6, 16, 16), "bias": _leaf(6, 16)}},
        "mlp": {"up": {"kernel": _leaf(6, 16, 40), "bias": _leaf(6, 40)}},
        "norm": {"scale": _leaf(6, 16)},
        "ln_2": {"scale": _leaf(6, 16), "bias": _leaf(6, 16)},
    }
    rules = MatrixRules((("kernel$", MatrixAxes(-2, -1)),))
    assert _matrices({"layers": layers}, rules) == {
        "layers/attn/q/kernel",
        "layers/mlp/up/kernel",
    }


@pytest.mark.parametrize(
    "name",
    [
        *("wte/embedding", "embed_tokens/weight", "token_embedder/embedding"),
        *("tok_emb/w", "pos_emb", "position_table", "relative_position_bias/table"),
        *("lm_head/kernel", "lm_head", "logits_dense/kernel", "head/kernel"),
        *("classifier/kernel", "unembed/kernel", "output/kernel"),
        *("layers/norm/scale", "layers/input_layernorm/weight", "RMSNorm_0/scale"),
        *("layers/ln_1/weight", "LayerNorm_0/scale", "q_norm/scale", "block/gamma"),
        *("layers/mlp/bias", "layers/q_proj/bias", "b/bias"),
        *(
            "moe/router/kernel",
            "block_sparse_moe/gate/kernel",
            "MoeBlock_0/gate/kernel",
        ),
    ],
)
def test_default_names_of_tables_and_vectors(name):
    assert MatrixRules().resolve(name, (8, 16)) is None
    # Without the names, rank decides alone.
    assert MatrixRules(by_name=False).resolve(name, (8, 16)) is not None


@pytest.mark.parametrize(
    "name",
    [
        *("layers/0/attn/q_proj/kernel", "h_0/mlp/c_fc/kernel", "Dense_0/kernel"),
        *("w", "encoder/layers/0/linear/weight", "blocks/0/wi_gate/kernel"),
        *("mlp/gate_proj/kernel", "mlp/gate/kernel", "attn/out/kernel", "wo/kernel"),
        *("normal_block/kernel", "multihead_attn/query/kernel"),
        # Flax BERT, RoBERTa and ViT call the last projection of each part "output".
        "encoder/layer/0/attention/output/dense/kernel",
        "encoder/layer/0/output/dense/kernel",
    ],
)
def test_default_names_of_hidden_matrices(name):
    axes = MatrixRules().resolve(name, (8, 16))
    assert axes is not None and (axes.fan_in, axes.splits) == (8, (16,))


@pytest.mark.parametrize("shape", [(), (8,)])
def test_vectors_and_scalars_are_no_matrices(shape):
    assert MatrixRules().resolve("w", shape) is None
    assert MatrixRules(by_name=False, strict=True).resolve("w", shape) is None


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 3)])
def test_leaves_without_elements_are_no_matrices(shape):
    rules = MatrixRules((("w", MatrixAxes(-2, -1)),), strict=True)
    assert rules.resolve("w", shape) is None


# --- every documented rule against the same matrices one by one -------------------


class Rule(NamedTuple):
    """A parameter, its axes, and how to cut the (fan_in, fan_out) matrices out."""

    shape: tuple
    axes: MatrixAxes
    cuts: list  # of (index, order of the remaining axes, 2-D shape)


RULES = {
    "flax kernel": Rule((6, 10), MatrixAxes(0, 1), [(np.s_[:], (0, 1), (6, 10))]),
    "torch weight": Rule((10, 6), MatrixAxes(1, 0), [(np.s_[:], (1, 0), (6, 10))]),
    "stacked layers": Rule(
        (3, 6, 10),
        MatrixAxes(-2, -1),
        [(np.s_[i], (0, 1), (6, 10)) for i in range(3)],
    ),
    "layers of experts": Rule(
        (2, 3, 10, 6),
        MatrixAxes(-2, -1),
        [(np.s_[i, j], (0, 1), (10, 6)) for i in range(2) for j in range(3)],
    ),
    "DenseGeneral qkv": Rule(
        (6, 2, 5), MatrixAxes(0, (1, 2)), [(np.s_[:], (0, 1, 2), (6, 10))]
    ),
    "DenseGeneral out": Rule(
        (2, 5, 6), MatrixAxes((0, 1), 2), [(np.s_[:], (0, 1, 2), (10, 6))]
    ),
    "scanned DenseGeneral out": Rule(
        (2, 3, 5, 6),
        MatrixAxes((0, -2), -1),
        [(np.s_[:, i], (0, 1, 2), (10, 6)) for i in range(3)],
    ),
    "per head": Rule(
        (6, 3, 5),
        MatrixAxes(0, 2),
        [(np.s_[:, i], (0, 1), (6, 5)) for i in range(3)],
    ),
    "HWIO": Rule(
        (3, 2, 4, 7),
        MatrixAxes((0, 1, 2), 3),
        [(np.s_[:], (0, 1, 2, 3), (24, 7))],
    ),
    "OIHW": Rule(
        (7, 4, 3, 2),
        MatrixAxes((1, 2, 3), 0),
        [(np.s_[:], (1, 2, 3, 0), (24, 7))],
    ),
    "fused qkv, axis of 3": Rule(
        (6, 3, 10),
        MatrixAxes(0, 2),
        [(np.s_[:, i], (0, 1), (6, 10)) for i in range(3)],
    ),
    "fused qkv, flat, grouped queries": Rule(
        (6, 16),
        MatrixAxes(0, 1, (8, 4, 4)),
        [
            (np.s_[:, 0:8], (0, 1), (6, 8)),
            (np.s_[:, 8:12], (0, 1), (6, 4)),
            (np.s_[:, 12:16], (0, 1), (6, 4)),
        ],
    ),
    "fused qkv, flat, torch, scanned": Rule(
        (2, 16, 6),
        MatrixAxes(-1, -2, (8, 4, 4)),
        [
            (np.s_[i, part], (1, 0), (6, part.stop - part.start))
            for i in range(2)
            for part in (slice(0, 8), slice(8, 12), slice(12, 16))
        ],
    ),
}


@pytest.mark.parametrize("optimizer", ["muon2", "muon2_f"])
@pytest.mark.parametrize("name", RULES)
def test_documented_rule(name, optimizer):
    shape, axes, cuts = RULES[name]
    tx = m2.REGISTRY[optimizer](1.0, rules=MatrixRules((("w", axes),)))
    oracle = getattr(reference, optimizer)
    grads = [_normal(shape, i) for i in range(2)]

    def run(grads):
        state, updates = tx.init({"w": grads[0]}), []
        for g in grads:
            update, state = tx.update({"w": g}, state, {"w": g})
            updates.append(update["w"])
        return updates

    updates = jax.jit(run)(grads)
    seen = np.zeros(shape, int)
    for index, order, matrix in cuts:
        seen[index] += 1
        cut = lambda x: np.transpose(x[index], order).reshape(matrix)  # noqa: B023, E731
        want = oracle([cut(g) for g in grads], 1.0)
        for got, expected in zip(updates, want):
            # float32 of three steps; the factor is that of the cut-out matrix.
            assert relative_error(cut(np.asarray(got)), expected) < 1e-4, index
    assert np.all(seen == 1)  # the cuts above are the whole parameter


@pytest.mark.parametrize(
    "kind, want",
    [
        ("spectral", lambda n, m: (m / n) ** 0.5),
        ("keller", lambda n, m: max(1.0, m / n) ** 0.5),
        ("match_rms", lambda n, m: 0.2 * max(n, m) ** 0.5),
        ("none", lambda n, m: 1.0),
    ],
)
@pytest.mark.parametrize("name", RULES)
def test_shape_factor_of_each_matrix(name, kind, want):
    shape, axes, cuts = RULES[name]
    tx = m2.scale_by_shape(kind, rules=MatrixRules((("w", axes),)))
    ones = {"w": jnp.ones(shape, jnp.bfloat16)}
    got = tx.update(ones, tx.init(ones))[0]["w"]
    assert got.dtype == jnp.bfloat16 and got.shape == shape
    for index, _, (n, m) in cuts:
        # bfloat16 rounds by at most 4e-3.
        np.testing.assert_allclose(np.float32(got[index]), want(n, m), rtol=4e-3)


def test_unknown_shape_scale():
    with pytest.raises(ValueError, match="unknown shape scale 'sqrt'.*spectral"):
        m2.scale_by_shape("sqrt")


# --- order, strictness, errors ----------------------------------------------------


def test_first_match_wins_over_later_ones_and_over_the_defaults():
    rules = MatrixRules(
        (
            ("attn/special", None),
            ("attn", MatrixAxes(1, 0)),
            ("lm_head", MatrixAxes(0, 1)),
        )
    )
    assert rules.resolve("attn/special/kernel", (4, 6)) is None
    assert rules.resolve("attn/kernel", (4, 6)).fan_in == 6
    assert rules.resolve("lm_head/kernel", (4, 6)).fan_in == 4
    assert rules.resolve("mlp/kernel", (4, 6)).fan_in == 4  # default (in, out)


def test_patterns_are_searched_anywhere_in_the_path():
    rules = MatrixRules((("^q$", None), ("proj/k", MatrixAxes(1, 0))))
    assert rules.resolve("q", (4, 6)) is None
    assert rules.resolve("attn/q", (4, 6)) is not None
    assert rules.resolve("attn/proj/kernel", (4, 6)).fan_in == 6


UNCOVERED = {"conv": {"kernel": _leaf(3, 3, 4, 8)}, "w": _leaf(4, 4)}


def test_uncovered_higher_rank_is_shown():
    with pytest.warns(UserWarning, match=r"conv/kernel \(3, 3, 4, 8\)"):
        labels = _labels(MatrixRules(), UNCOVERED)
    assert labels == {"conv/kernel": "adam", "w": "matrix"}
    assert "NO RULE" in MatrixRules().describe(UNCOVERED)


def test_a_rule_or_none_silences_the_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for axes in (None, MatrixAxes((0, 1, 2), 3)):
            MatrixRules((("conv", axes),)).labels(UNCOVERED)
        # Tables of higher rank are covered by their name.
        MatrixRules().labels({"patch_embed": _leaf(3, 4, 5), "bias": _leaf(2, 3, 4)})


def test_strict_raises_naming_the_leaf():
    rules = MatrixRules(strict=True)
    with pytest.raises(ValueError, match=r"'conv/kernel' of shape \(3, 3, 4, 8\)"):
        rules.labels(UNCOVERED)
    with pytest.raises(ValueError, match="'conv/kernel'"):
        m2.muon2(0.1, rules=rules).init(UNCOVERED)
    assert _matrices({"w": _leaf(4, 4), "b": _leaf(4)}, rules) == {"w"}


def test_pattern_that_matches_nothing_is_named():
    rules = MatrixRules((("w", MatrixAxes(0, 1)), ("attn/qq_proj", MatrixAxes(0, 1))))
    with pytest.raises(ValueError, match="'attn/qq_proj' matches no parameter.*'b/w'"):
        rules.labels({"b": {"w": _leaf(4, 4)}})
    with pytest.raises(ValueError, match="'attn/qq_proj' matches no parameter"):
        m2.muon(0.1, rules=rules).init({"b": {"w": jnp.ones((4, 4))}})
    # Shadowed by an earlier pattern is not the same as matching nothing.
    MatrixRules((("w", MatrixAxes(0, 1)), ("w", None))).labels({"w": _leaf(4, 4)})


@pytest.mark.parametrize(
    "axes, shape, message",
    [
        (MatrixAxes(0, 2), (4, 6), "rank 2"),
        (MatrixAxes(-3, 1), (4, 6), "rank 2"),
        (MatrixAxes(0, 1), (4,), "rank 1"),
        (MatrixAxes(0, 0), (4, 6), "twice"),
        (MatrixAxes(1, -1), (4, 6), "twice"),
        (MatrixAxes((0, 1), -1), (4, 6), "twice"),
        (MatrixAxes(0, 1, (2, 3)), (4, 6), "add up to 5, but axis 1.*has 6"),
    ],
)
def test_axes_that_do_not_fit_name_the_leaf(axes, shape, message):
    rules = MatrixRules((("layers/.*kernel", axes),))
    with pytest.raises(ValueError, match=message) as info:
        rules.labels({"layers": {"q": {"kernel": _leaf(*shape)}}})
    assert "'layers/q/kernel'" in str(info.value)
    assert str(shape) in str(info.value)
    assert "layers/.*kernel" in str(info.value)


def test_malformed_axes():
    with pytest.raises(ValueError, match="input and an output"):
        MatrixAxes((), 1)
    with pytest.raises(ValueError, match="input and an output"):
        MatrixAxes(0, ())
    with pytest.raises(ValueError, match="single out_axis"):
        MatrixAxes(0, (1, 2), (3, 3))


def test_malformed_rules():
    with pytest.raises(ValueError, match=r"'\(' is no regular expression"):
        MatrixRules((("(", MatrixAxes(0, 1)),))
    with pytest.raises(TypeError, match="'w'.*want MatrixAxes or None"):
        MatrixRules((("w", (0, 1)),))
    with pytest.raises(TypeError, match="pair"):
        MatrixRules(("w", MatrixAxes(0, 1)))


def test_rules_are_values():
    """Frozen, hashable, equal by content, and never taken for a schedule."""
    build = lambda: MatrixRules([["w", MatrixAxes([0], [1, 2])]], strict=True)  # noqa: E731
    assert build() == build() and hash(build()) == hash(build())
    assert build() != MatrixRules((("w", MatrixAxes(0, (1, 2))),))
    assert not callable(build()) and not callable(MatrixAxes(0, 1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        build().strict = False
    with pytest.raises(dataclasses.FrozenInstanceError):
        MatrixAxes(0, 1).in_axis = 2

    @functools.partial(jax.jit, static_argnums=1)
    def double(x, rules):
        traces.append(rules)
        return 2 * x

    traces = []
    double(1.0, build()), double(1.0, build())
    assert len(traces) == 1
    state = optax.inject_hyperparams(m2.muon)(0.1, rules=build()).init(
        {"w": jnp.ones((2, 3, 4))}
    )
    assert "learning_rate" in state.hyperparams and "rules" not in state.hyperparams


def test_transforms_refuse_leaves_that_are_no_matrices():
    tree = {"norm": {"scale": jnp.ones((4, 4))}}
    for tx in (m2.newton_schulz_orthogonalize(), m2.scale_by_shape()):
        with pytest.raises(ValueError, match=r"'norm/scale'.*not a matrix"):
            tx.update(tree, tx.init(tree))
    with pytest.raises(ValueError, match=r"'norm/scale'.*not a matrix"):
        m2.factorized_second_moment().init(tree)


# --- describe ---------------------------------------------------------------------


def test_describe():
    rules = MatrixRules(
        (
            ("qkv", MatrixAxes(0, 1, (16, 4, 4))),
            ("experts", MatrixAxes(-2, -1)),
            ("frozen", None),
        )
    )
    tree = {
        "embedding": _leaf(50, 16),
        "frozen": _leaf(5, 5),
        "gone": None,
        "layers": {"qkv": _leaf(16, 24), "experts": _leaf(2, 3, 16, 64)},
        "mlp": _leaf(16, 64),
        "z": _leaf(7),
    }
    lines = rules.describe(tree).splitlines()
    table = {row[0]: row[1:] for row in (re.split(r"\s{2,}", x) for x in lines[1:])}
    assert set(re.split(r"\s{2,}", lines[0])) >= {"path", "shape", "group", "factor"}
    assert set(table) == {
        "embedding",
        "frozen",
        "layers/qkv",
        "layers/experts",
        "mlp",
        "z",
    }
    assert table["embedding"] == ["(50, 16)", "adam", "-", "-", "default: embedding"]
    assert table["frozen"][1] == "adam" and "'frozen'" in table["frozen"][-1]
    assert table["layers/qkv"][:4] == [
        "(16, 24)",
        "matrix",
        "1 x 16x16 + 1 x 16x4 + 1 x 16x4",
        "1, 0.5, 0.5",
    ]
    assert table["layers/experts"][1:4] == ["matrix", "6 x 16x64", "2"]
    assert table["mlp"] == ["(16, 64)", "matrix", "1 x 16x64", "2", "default: rank 2"]
    assert table["z"][1:] == ["adam", "-", "-", "rank 1"]
    other = rules.describe(tree, "match_rms").splitlines()
    assert "1.6" in next(x for x in other if x.startswith("mlp"))  # 0.2 sqrt(64)


# --- coming from optax.contrib.muon -----------------------------------------------

SPEC = optax.contrib.MuonDimensionNumbers
MODEL = {
    "blocks": {
        "conv": _normal((3, 3, 4, 6), 1),
        "out": _normal((2, 4, 6), 2),
        "w": _normal((6, 10), 3),
    },
    "embedding": _normal((12, 6), 4),
    "norm": {"scale": _normal((6,), 5), "gate": _normal((6, 6), 6)},
}
NUMBERS = {
    "None": None,
    "tree": {
        "blocks": {
            "conv": SPEC((0, 1, 2), 3),
            "out": SPEC((0, 1), (2,)),
            "w": SPEC(0, 1),
        },
        "embedding": None,
        "norm": {"scale": None, "gate": SPEC(1, 0)},
    },
    "prefix": {
        "blocks": {"conv": SPEC((-4, -3, -2), -1), "out": SPEC(-2, -1), "w": SPEC()},
        "embedding": SPEC(),
        "norm": None,
    },
    "function": lambda params: jax.tree.map(
        lambda p: SPEC(-2, -1) if p.ndim >= 2 else None, params
    ),
}


def _optax_matrices(numbers):
    state = optax.contrib.muon(1.0, muon_weight_dimension_numbers=numbers).init(MODEL)
    momentum = state.inner_states["muon"].inner_state[0].mu
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_flatten_with_path(momentum)[0]
    }


@pytest.mark.filterwarnings("ignore:no matrix rule:UserWarning")
@pytest.mark.parametrize("name", NUMBERS)
def test_from_dimension_numbers_routes_as_optax(name):
    rules = MatrixRules.from_dimension_numbers(NUMBERS[name], MODEL)
    routed = _matrices(MODEL, rules)
    assert routed == _optax_matrices(NUMBERS[name])
    assert routed not in (set(), set(_labels(rules, MODEL)))  # neither all nor none


@pytest.mark.parametrize("name", ["tree", "prefix"])
def test_from_dimension_numbers_steps_as_optax(name):
    """A first step without nesterov is the same in both: directions and factors."""
    rules = MatrixRules.from_dimension_numbers(NUMBERS[name])
    theirs = optax.contrib.muon(
        1.0, muon_weight_dimension_numbers=NUMBERS[name], nesterov=False
    )
    ours = m2.muon(1.0, rules=rules, nesterov=False)

    def step(tx):
        return jax.jit(lambda g: tx.update(g, tx.init(g), g)[0])(MODEL)

    errors = jax.tree.map(relative_error, step(ours), step(theirs))
    assert max(jax.tree.leaves(errors)) < 1e-4, errors  # float32


def test_single_dimension_numbers_for_every_leaf():
    tree = {"a": _leaf(3, 8, 4), "embedding": _leaf(4, 8)}
    rules = MatrixRules.from_dimension_numbers(SPEC(-2, -1))
    assert _matrices(tree, rules) == {"a", "embedding"}
    assert rules.resolve("a", (3, 8, 4)).fan_in == 8


def test_prefix_reaches_whole_subtrees_and_no_namesakes():
    tree = {
        "a": {"x": _leaf(4, 4), "y": [_leaf(4, 4)]},
        "ab": _leaf(4, 4),
        "a.": _leaf(4, 4),
    }
    rules = MatrixRules.from_dimension_numbers(
        {"a": SPEC(1, 0), "a.": None, "ab": SPEC(1, 0)}
    )
    assert _matrices(tree, rules) == {"a/x", "a/y/0", "ab"}
    rules = MatrixRules.from_dimension_numbers(
        {"a": SPEC(1, 0), "a.": None, "ab": None}
    )
    assert _matrices(tree, rules) == {"a/x", "a/y/0"}


def test_from_dimension_numbers_is_a_value():
    make = lambda: MatrixRules.from_dimension_numbers(NUMBERS["tree"])  # noqa: E731
    assert make() == make() and hash(make()) == hash(make())


def test_from_dimension_numbers_refusals():
    with pytest.raises(ValueError, match="needs params"):
        MatrixRules.from_dimension_numbers(NUMBERS["function"])
    with pytest.raises(TypeError, match="'w'.*MuonDimensionNumbers or None"):
        MatrixRules.from_dimension_numbers({"w": "in out"})


# --- every kind of tree -----------------------------------------------------------


class Layer(NamedTuple):
    kernel: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Dense:
    kernel: Any
    bias: Any


KERNEL, BIAS = _normal((6, 4), 1), _normal((2, 4), 2)
# One rule and one name decide: the kernel is (out, in), the stacked bias no matrix.
FORMS = {
    "dict": {"a": {"kernel": KERNEL, "bias": BIAS}},
    "frozen dict": freeze({"a": {"kernel": KERNEL, "bias": BIAS}}),
    "list": [{"kernel": KERNEL}, {"bias": BIAS}],
    "tuple": ({"kernel": KERNEL}, ({"bias": BIAS},)),
    "named tuple": {"a": Layer(KERNEL, BIAS)},
    "dataclass": [Dense(KERNEL, BIAS)],
    "flat keys": {"a/kernel": KERNEL, "a/bias": BIAS},
    "integer keys": {0: {"kernel": KERNEL}, 1: {"bias": BIAS}},
    "linen boxes": {
        "a": {
            "kernel": linen.Partitioned(KERNEL, names=(None, "model")),
            "bias": linen.Partitioned(BIAS, names=(None, None)),
        }
    },
    "nnx state": nnx.State(
        {"a": {"kernel": nnx.Param(KERNEL), "bias": nnx.Param(BIAS)}}
    ),
    "absent leaves": {"a": {"kernel": KERNEL, "bias": BIAS, "none": None}},
}
TRANSPOSED = MatrixRules(((r"(^|/)kernel$", MatrixAxes(1, 0)),))


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_trees(form):
    tree = jax.tree.map(jnp.asarray, FORMS[form])
    tx = m2.muon2_f(1.0, rules=TRANSPOSED)
    update = jax.jit(tx.update)
    updates, state = update(tree, tx.init(tree), tree)
    updates, _ = update(tree, state, tree)  # and once with a state of its own making
    assert jax.tree.structure(updates) == jax.tree.structure(tree)
    by_shape = {x.shape: x for x in jax.tree.leaves(updates)}
    want = reference.muon2_f([KERNEL.T, KERNEL.T], 1.0)[1]
    assert relative_error(by_shape[6, 4], want.T) < 1e-4  # float32
    assert relative_error(by_shape[2, 4], -np.sign(BIAS)) < 1e-4  # a step of AdamW


def test_paths_are_the_same_at_init_and_update_in_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 4, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            for layer in (self.first, *self.layers):
                x = layer(x)
            return x

    model = Model(nnx.Rngs(0))
    rules = MatrixRules(
        ((r"^layers/1/kernel$", MatrixAxes(1, 0)), (r"^first/kernel$", None))
    )
    optimizer = nnx.Optimizer(model, m2.muon(1.0, rules=rules), wrt=nnx.Param)
    grads = nnx.grad(lambda m: jnp.sum(m(jnp.ones((3, 4))) ** 2))(model)
    before = nnx.state(model, nnx.Param)
    want = {"layers/0/kernel", "layers/1/kernel"}
    assert _matrices(before, rules) == _matrices(grads, rules) == want
    kernels = [jnp.array(m.kernel[...]) for m in (model.first, model.layers[1])]
    optimizer.update(model, grads)
    moved = [m.kernel[...] - k for m, k in zip((model.first, model.layers[1]), kernels)]
    assert relative_error(jnp.abs(moved[0]), jnp.ones((4, 4))) < 1e-2  # AdamW
    top = np.linalg.norm(moved[1], 2)
    assert 0.6 < top < 1.3  # a Muon step


@pytest.mark.parametrize("form", ["dict", "nnx state", "linen boxes"])
def test_a_masked_leaf_still_counts_for_its_pattern(form):
    """An outer ``optax.masked`` hides a leaf, not the fact that it exists."""
    tree = jax.tree.map(jnp.asarray, FORMS[form])
    rules = MatrixRules(((r"(^|/)kernel$", MatrixAxes(1, 0)), (r"bias$", None)))
    mask = jax.tree.map(lambda x: x.shape == (6, 4), tree)
    tx = optax.masked(m2.muon(1.0, rules=rules), mask)
    updates, _ = tx.update(tree, tx.init(tree), tree)
    by_shape = {x.shape: x for x in jax.tree.leaves(updates)}
    np.testing.assert_array_equal(by_shape[2, 4], BIAS)
    assert np.linalg.norm(by_shape[6, 4] + KERNEL) > 1  # not passed through


@jax.tree_util.register_pytree_with_keys_class
class Named:
    """An array with named axes, as Haliax has: a node around one array."""

    def __init__(self, array):
        self.array = array

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("array"), self.array),), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


@pytest.mark.parametrize(
    "path",
    ["mlp/bias", "block/scale", "norm/scale", "wte/embedding", "lm_head/kernel"],
)
def test_a_wrapper_around_a_table_changes_nothing(path):
    """The names decide also where the path goes on to the array inside."""
    tree = _leaf(3, 4)
    wrapped = Named(tree)
    for key in reversed(path.split("/")):
        tree, wrapped = {key: tree}, {key: wrapped}
    assert not _matrices(tree)
    assert not _matrices(wrapped)


def test_outer_partition_with_rules_for_one_group():
    """Rules inside an outer partition see masked leaves for the rest."""
    tree = {"a": _normal((3, 6, 4), 1), "b": _normal((6, 4), 2)}
    inner = m2.muon2(1.0, rules=MatrixRules((("a", MatrixAxes(-2, -1)),)))
    tx = optax.partition({"m": inner, "s": optax.sgd(1.0)}, {"a": "m", "b": "s"})
    updates, _ = jax.jit(tx.update)(tree, tx.init(tree), tree)
    np.testing.assert_array_equal(updates["b"], -tree["b"])
    for i in range(3):
        want = reference.muon2([tree["a"][i]], 1.0)[0]
        assert relative_error(updates["a"][i], want) < 1e-4


def test_nothing_to_train():
    for tree in ({}, [], (), {"a": None}):
        tx = m2.muon2(0.1)
        updates, _ = tx.update(tree, tx.init(tree), tree)
        assert jax.tree.structure(updates) == jax.tree.structure(tree)
