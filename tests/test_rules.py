"""Rules: their order, what they refuse, and how they describe a tree."""

import dataclasses
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from routing import labels_of, leaf, matrices_of

import muon2_optax as m2
from muon2_optax import MatrixAxes, MatrixRules

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


UNCOVERED = {"conv": {"kernel": leaf(3, 3, 4, 8)}, "w": leaf(4, 4)}


def test_uncovered_higher_rank_is_shown():
    with pytest.warns(UserWarning, match=r"conv/kernel \(3, 3, 4, 8\)"):
        labels = labels_of(MatrixRules(), UNCOVERED)
    assert labels == {"conv/kernel": "adam", "w": "matrix"}
    assert "NO RULE" in MatrixRules().describe(UNCOVERED)


def test_a_rule_or_none_silences_the_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for axes in (None, MatrixAxes((0, 1, 2), 3)):
            MatrixRules((("conv", axes),)).labels(UNCOVERED)
        # Tables of higher rank are covered by their name.
        MatrixRules().labels({"patch_embed": leaf(3, 4, 5), "bias": leaf(2, 3, 4)})


def test_strict_raises_naming_the_leaf():
    rules = MatrixRules(strict=True)
    with pytest.raises(ValueError, match=r"'conv/kernel' of shape \(3, 3, 4, 8\)"):
        rules.labels(UNCOVERED)
    with pytest.raises(ValueError, match="'conv/kernel'"):
        m2.muon2(0.1, rules=rules).init(UNCOVERED)
    assert matrices_of({"w": leaf(4, 4), "b": leaf(4)}, rules) == {"w"}


KERNELS = {
    "encoder": {
        "SelfAttention_0": {
            "to_v": {"kernel": leaf(5, 48, 6, 8)},
            "out": {"kernel": leaf(5, 6, 8, 48)},
        },
        "wide": {"kernel": leaf(7, 48, 24)},
        "dense": {"kernel": leaf(48, 24)},
    }
}


def test_strict_lists_every_leaf_and_rules_that_settle_it():
    """The lines for attention make one matrix per layer; no line guesses at others."""
    with pytest.raises(ValueError, match=r"MatrixRules\.of\(model\)") as strict:
        MatrixRules(strict=True).labels(KERNELS)
    with pytest.raises(ValueError) as checked:
        MatrixRules(strict=True).check(KERNELS)
    listed = str(checked.value).splitlines()[1:]
    assert str(strict.value).splitlines()[1:] == listed
    lines = [x.strip().split("  #")[0] for x in listed if "MatrixAxes" in x]
    stated = [x for x in lines if "<in>" not in x]
    assert len(lines) == 5 and len(stated) == 2
    settled = [eval(x, {"MatrixAxes": MatrixAxes})[0] for x in stated]
    rules = MatrixRules((*settled, ("wide", MatrixAxes(-2, -1))), strict=True)
    rules.check(KERNELS)
    for name in ("to_v", "out"):
        shape = KERNELS["encoder"]["SelfAttention_0"][name]["kernel"].shape
        axes = rules.resolve(f"encoder/SelfAttention_0/{name}/kernel", shape)
        assert (axes.batch, axes.fan_in, axes.splits) == ((0,), 48, (48,))


@pytest.mark.parametrize("path", ["flatten/out/kernel", "conv/keys/kernel", "out"])
def test_only_names_of_attention_get_its_axes(path):
    with pytest.raises(ValueError, match="<in>, <out>") as found:
        MatrixRules(strict=True).resolve(path, (3, 3, 8, 16))
    assert "-3" not in str(found.value)


def test_leaves_without_a_rule_are_described_first_as_doubtful():
    text = MatrixRules().describe({"a": leaf(16, 16), "z": leaf(2, 16, 32)})
    before, table = text.split("\n\n", 1)
    assert '(r"^z$", MatrixAxes(<in>, <out>))' in before
    rows = table.splitlines()
    assert rows[1].startswith("z ") and rows[1].endswith("(DOUBTFUL)")
    assert rows[2].startswith("a ") and "DOUBTFUL" not in rows[2]


def test_a_tree_in_which_nothing_is_a_matrix_is_said_loudly():
    tree = {"stack": leaf(5, 16, 32), "scale": leaf(32)}
    loud = r"NO LEAF IS A MATRIX(.|\n)*'stack'(.|\n)*MatrixAxes\(<in>"
    with pytest.warns(UserWarning, match=loud):
        MatrixRules().labels(tree)
    with pytest.warns(UserWarning, match="no matrix rule") as seen:
        MatrixRules().labels(tree | {"w": leaf(8, 8)})
    assert "NO LEAF" not in str(seen[0].message)


def test_pattern_that_matches_nothing_is_named():
    rules = MatrixRules((("w", MatrixAxes(0, 1)), ("attn/qq_proj", MatrixAxes(0, 1))))
    with pytest.raises(ValueError, match="'attn/qq_proj' matches no parameter.*'b/w'"):
        rules.labels({"b": {"w": leaf(4, 4)}})
    with pytest.raises(ValueError, match="'attn/qq_proj' matches no parameter"):
        m2.muon(0.1, rules=rules).init({"b": {"w": jnp.ones((4, 4))}})
    # An optimizer of a part of the tree sees a part of the paths.
    parts = optax.multi_transform(
        {"x": m2.muon(0.1, rules=rules), "y": optax.sgd(0.1)}, {"a": "y", "w": "x"}
    )
    with pytest.raises(ValueError, match="allow_unused=True.*multi_transform"):
        parts.init({"a": jnp.ones((4, 4)), "w": jnp.ones((4, 4))})
    # Shadowed by an earlier pattern is not the same as matching nothing.
    MatrixRules((("w", MatrixAxes(0, 1)), ("w", None))).labels({"w": leaf(4, 4)})


def test_describe_prints_patterns_that_match_nothing():
    """``init`` and ``check`` raise for the first; the table names all of them."""
    patterns = (("w_ot$", None), ("w_in$", MatrixAxes(1, 0)), ("bilinear", None))
    tree = {"w_in": leaf(6, 4), "w_out": leaf(4, 6)}
    shown = MatrixRules(patterns).describe(tree)
    assert "match no parameter" in shown
    assert "  'w_ot$'\n  'bilinear'\n" in shown and "  'w_in$'\n" not in shown
    for rules in (
        MatrixRules(patterns, allow_unused=True),
        MatrixRules(patterns[1:2]),
    ):
        assert "match no parameter" not in rules.describe(tree)


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
        rules.labels({"layers": {"q": {"kernel": leaf(*shape)}}})
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
    for no_pair in (("w", MatrixAxes(0, 1), None), "wv"):
        with pytest.raises(TypeError, match="pair"):
            MatrixRules((no_pair,))


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


def table_of(text):
    """{path: cells} of the table in a description, and the lines of totals."""
    lines = text.splitlines()
    start = next(i for i, x in enumerate(lines) if x.startswith("path "))
    end = lines.index("", start)
    rows = (re.split(r"\s{2,}", line) for line in lines[start + 1 : end])
    return {row[0]: row[1:] for row in rows}, lines[end + 1 :]


def test_describe():
    rules = MatrixRules(
        (
            ("qkv", MatrixAxes(0, 1, (16, 4, 4))),
            ("experts", MatrixAxes(-2, -1)),
            ("frozen", None),
        )
    )
    tree = {
        "embedding": leaf(50, 16),
        "frozen": leaf(5, 5),
        "gone": None,
        "layers": {"qkv": leaf(16, 24), "experts": leaf(2, 3, 16, 64)},
        "mlp": leaf(16, 64),
        "z": leaf(7),
    }
    table, totals = table_of(rules.describe(tree))
    assert set(table) == {
        "embedding",
        "frozen",
        "layers/qkv",
        "layers/experts",
        "mlp",
        "z",
    }
    shape, *rest = table["embedding"]
    assert (shape, rest) == (
        "(50, 16)",
        ["adam", "-", "-", "-", "800", "name: embedding"],
    )
    assert table["frozen"][1] == "adam" and "your rule 3 'frozen'" in table["frozen"]
    assert table["layers/qkv"][:6] == [
        "(16, 24)",
        "matrix",
        "1 x 16x(16+4+4)",
        "0 -> 1",
        "1, 0.5, 0.5",
        "384",
    ]
    assert table["layers/experts"][1:5] == ["matrix", "6 x 16x64", "2 -> 3", "2"]
    assert table["mlp"][1:4] == ["matrix", "1 x 16x64", "0 -> 1"]
    assert table["mlp"][4:] == ["2", "1,024", "default: rank 2"]
    assert table["z"][1:] == ["adam", "-", "-", "-", "7", "rank 1"]
    assert totals == [
        "total of matrix (Muon): 3 leaves, 7,552 parameters",
        "total of adam (AdamW): 3 leaves, 832 parameters",
    ]
    other, _ = table_of(rules.describe(tree, "match_rms"))
    assert other["mlp"][4] == "1.6"  # 0.2 sqrt(64)
