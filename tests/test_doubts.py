"""Doubtful leaves: what is said of them, once, and what settles it."""

import linecache
import re
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from matrices import normal32
from routing import labels_of, leaf, matrices_of

import muon2_optax as m2
from muon2_optax import MatrixAxes, MatrixRules

BLOCK = {"fc": {"kernel": leaf(64, 256)}, "proj": {"kernel": leaf(256, 64)}}
# path, shape, where it goes, what is said
DOUBTFUL = [
    ("film/mix", (1, 256), "matrix", "a side is 1"),
    ("critic/out/kernel", (256, 3), "matrix", "a side is 3"),
    ("wide/kernel", (16, 2048), "matrix", "one side is 128 times the other"),
    # A gate per head, and the least ratio that is said.
    ("attn/gate/kernel", (640, 8), "matrix", "a side is 8"),
    ("mixing/kernel", (9, 576), "matrix", "one side is 64 times the other"),
    ("patch_embed_proj/w", (48, 64), "matrix", "half that of .*: embedding"),
    ("patch_embed/kernel", (256, 128), "adam", "only half says embedding"),
    ("txt/head/kernel", (128, 128), "adam", "a square"),
    ("decoder/kernel", (64, 10), "matrix", "half that of .*: head"),
    ("pair_bias/kernel", (64, 16), "matrix", "half that of .*: bias"),
    ("q_scale/kernel", (64, 64), "matrix", "half that of .*: scale"),
    ("norm_mixer/weight", (64, 64), "matrix", "half that of .*: norm"),
    ("conv/kernel", (9, 64), "matrix", "half that of .*: convolution"),
    ("fconv/w", (9, 64), "matrix", "half that of .*: convolution"),
    ("dueling_head/fc/kernel", (64, 64), "matrix", "half that of .*: head"),
    ("last_dense/w", (64, 64), "matrix", "half that of .*: head"),
    ("out_scale/weight", (256, 256), "adam", "only half says scale"),
]


@pytest.mark.parametrize("path, shape, group, said", DOUBTFUL)
def test_a_doubtful_leaf_is_warned_about_and_goes_where_documented(
    path, shape, group, said
):
    tree = {"block": BLOCK, path: leaf(*shape)}
    with pytest.warns(UserWarning, match=said) as seen:
        assert labels_of(MatrixRules(), tree)[path] == group
    assert len(seen) == 1 and repr(path) in str(seen[0].message)
    with pytest.raises(ValueError, match=re.escape(repr(path))):
        MatrixRules().check(tree)
    described = MatrixRules().describe(tree).splitlines()
    assert "DOUBTFUL" in described[described.index("") + 2]  # below the header


@pytest.mark.parametrize("path, shape, group, said", DOUBTFUL)
def test_each_line_of_the_warning_settles_it(path, shape, group, said):
    tree = {"block": BLOCK, path: leaf(*shape)}
    with pytest.warns(UserWarning) as seen:
        MatrixRules().labels(tree)
    lines = [x for x in str(seen[0].message).splitlines() if x.startswith("    (r")]
    ends = set()
    for line in lines:
        (pair,) = eval("[" + line + "\n]", {"MatrixAxes": MatrixAxes})
        rules = MatrixRules((pair,))
        rules.check(tree)
        ends.add(labels_of(rules, tree)[path])  # and does not warn
    assert ends == {"matrix", "adam"}


def test_no_line_turns_a_matrix_that_is_known_to_be_out_first():
    """Its bias shows which side is which, in this layer or in another one."""
    tree = {
        "fc": {"weight": leaf(96, 72), "bias": leaf(96)},
        "gate": {"weight": leaf(8, 72), "bias": leaf(8)},
        "mix": {"weight": leaf(6, 72)},
        "sigma_embed": {"weight": leaf(96, 72), "bias": leaf(96)},
    }
    with pytest.raises(ValueError) as refused:
        MatrixRules().check(tree)
    said = re.findall(r'r"\^(\w+)/weight\$", (.*)\),', str(refused.value))
    assert said == [
        ("gate", "MatrixAxes(-1, -2)"),
        ("gate", "None"),
        ("mix", "MatrixAxes(-1, -2)"),
        ("mix", "None"),
        # AdamW has this one, so that nothing has asked which side is which.
        ("sigma_embed", "MatrixAxes(-1, -2)"),
        ("sigma_embed", "MatrixAxes(-2, -1)"),
        ("sigma_embed", "None"),
    ]


def test_a_single_transposed_embedding_may_be_a_head():
    tree = {"embed": {"embedding": leaf(200, 64)}, "linear": {"w": leaf(64, 200)}}
    with pytest.warns(UserWarning, match="'linear/w'.*that of a head"):
        assert labels_of(MatrixRules(), tree)["linear/w"] == "matrix"
    labels_of(MatrixRules(), tree | {"more": {"w": leaf(64, 200)}})


def test_layers_alike_are_one_line():
    tree = {f"layers_{i}": {"gate_vector": leaf(1, 256), **BLOCK} for i in range(40)}
    with pytest.warns(UserWarning) as seen:
        MatrixRules().labels(tree)
    text = str(seen[0].message)
    assert "40 leaves" in text and "'layers_0/gate_vector' and 39 like it" in text
    assert text.count("\n") < 6
    pattern = re.search(r'\(r"(.*)", None', text).group(1)
    settled = MatrixRules(((pattern, None),))
    settled.check(tree)
    assert "layers_*/gate_vector x 40" in settled.describe(tree)


@pytest.mark.parametrize(
    "doubtful, others",
    [
        # The first and the last layer of a policy; the hidden ones are as usual.
        (
            {"fc_0/w": (6, 96), "fc_3/w": (96, 3)},
            {"fc_1/w": (96, 96), "fc_2/w": (96, 96)},
        ),
        # Doubtful in every other layer.
        (
            {f"h/{n}/mix/{m}/w": (4, 64) for n in (2, 10) for m in (0, 1)},
            {"h/9/mix/0/w": (64, 64), "h/100/mix/1/w": (64, 64), "h/2/mix/2/w": (64,)},
        ),
        # Numbers that agree crosswise.
        ({"a/1/2/w": (2, 64), "a/2/1/w": (2, 64)}, {"a/1/1/w": (64, 64)}),
    ],
)
def test_a_line_of_the_warning_leaves_other_layers_alone(doubtful, others):
    tree = {path: leaf(*shape) for path, shape in (doubtful | others).items()}
    with pytest.raises(ValueError) as refused:
        MatrixRules().check(tree)
    lines = re.findall(r'r"(.*)", None', str(refused.value))
    rules = MatrixRules(tuple((line, None) for line in lines))
    rules.check(tree)
    labels = labels_of(rules, tree)
    assert {path for path in tree if labels[path] == "adam"} == {
        *doubtful,
        *(path for path, shape in others.items() if len(shape) == 1),
    }


def test_numbers_in_a_line_of_the_warning_are_in_their_order():
    tree = {f"h/{n}/w": leaf(4, 64) for n in (100, 10, 9)} | {"h/2/w": leaf(64, 64)}
    with pytest.raises(ValueError, match=re.escape("h/(9|10|100)/w")):
        MatrixRules().check(tree)


def test_a_bias_beside_an_embedding_makes_it_doubtful():
    tree = {
        "sigma_embed": [{"weight": leaf(256, 64), "bias": leaf(256)}],
        "note_emb": {"weight": leaf(90, 64)},
        "node_embed": {"w": leaf(64, 96), "b": leaf(96)},
    }
    with pytest.warns(UserWarning, match="a bias is beside it") as seen:
        labels = labels_of(MatrixRules(), tree)
    assert set(labels.values()) == {"adam"}
    text = str(seen[0].message)
    assert "sigma_embed" in text and "node_embed" in text and "note_emb" not in text


def test_the_warning_of_uncovered_leaves_ends_somewhere():
    tree = {"x" * n: {"u": leaf(2, 3, 4)} for n in range(1, 150)}
    with pytest.warns(UserWarning, match="and 49 more, see rules.describe") as seen:
        MatrixRules().labels(tree)
    assert "x" * 101 not in str(seen[0].message)


def test_pythons_registry_shows_it_once():
    tree = {"block": BLOCK, "x": leaf(2, 64)}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            MatrixRules().labels(tree)
    assert len(seen) == 1


def test_sizes_beyond_the_limits_raise_no_doubt():
    tree = {"block": BLOCK, "gate": {"w": leaf(9, 575)}, "mix": {"w": leaf(640, 11)}}
    assert set(labels_of(MatrixRules(), tree).values()) == {"matrix"}


def test_small_leaves_on_adamw_are_no_lost_matrices():
    """A doubt about a side of 8 goes one way: AdamW may have the leaf."""
    tree = {
        "block": {"fc": {"kernel": leaf(8, 64)}},
        "out_scale": {"weight": leaf(8, 256)},
        "sigma_embed": {"weight": leaf(96, 8), "bias": leaf(96)},
    }
    rules = MatrixRules(((r"^block/", MatrixAxes(0, 1)),))
    rules.check(tree)
    assert labels_of(rules, tree)["out_scale/weight"] == "adam"


def test_sizes_of_toy_trees_mean_nothing():
    labels_of(MatrixRules(), {"w": leaf(2, 3), "v": leaf(1, 16), "u": leaf(32, 48)})


def test_models_of_ordinary_names_and_sizes_raise_no_doubt():
    block = {
        "ln_1": {"scale": leaf(128), "bias": leaf(128)},
        "attn": {"qkv": {"kernel": leaf(128, 384)}, "out": {"kernel": leaf(128, 128)}},
        "mlp": {"fc1": {"kernel": leaf(128, 512)}, "fc2": {"kernel": leaf(512, 128)}},
    }
    tree = {
        "params": {
            "cls_token": leaf(1, 128),
            "pos_embedding": leaf(197, 128),
            "blocks": [block, block],
            "encoder_norm": {"scale": leaf(128)},
            "head": {"kernel": leaf(128, 1000), "bias": leaf(1000)},
            "lm_head": {"kernel": leaf(128, 50_000)},
        }
    }
    MatrixRules().check(tree)
    assert len(matrices_of(tree)) == 8


def test_convolutions_in_embeddings_are_as_uncovered_as_others():
    tree = {"patch_embed": {"kernel": leaf(4, 4, 3, 64)}, "block": BLOCK}
    with pytest.warns(UserWarning, match=r"no matrix rule.*patch_embed/kernel"):
        MatrixRules().labels(tree)


def test_check_also_refuses_what_no_rule_covers():
    tree = {"block": BLOCK, "conv": {"kernel": leaf(3, 3, 16, 32)}}
    with pytest.raises(ValueError, match=r"'conv/kernel' \(3, 3, 16, 32\).*no rule"):
        MatrixRules().check(tree)
    MatrixRules((("conv", MatrixAxes((0, 1, 2), 3)),)).check(tree)


def test_flattened_parameters_are_warned_about():
    tree = {"w": normal32((8, 16)), "b": normal32((16,))}
    tx = optax.flatten(m2.muon(0.1))
    with pytest.warns(UserWarning, match=r"optax\.flatten"):
        tx.init(tree)
    # A model with a single vector is another matter.
    m2.muon(0.1).init({"w": jnp.ones(16)})


def test_large_trees_are_described_by_pattern_within_100_columns():
    layers = [{"attn": {"q": {"kernel": leaf(64, 64)}}, **BLOCK} for _ in range(48)]
    text = MatrixRules().describe({"params": {"layers": layers}})
    assert "params/layers/*/attn/q/kernel x 48" in text
    assert max(map(len, text.splitlines())) <= 100
    size = 48 * (64 * 64 + 2 * 64 * 256)
    assert f"total of matrix (Muon): 144 leaves, {size:,} parameters" in text


def line_of(warning):
    assert warning.filename == __file__
    return linecache.getline(warning.filename, warning.lineno)


def test_the_warning_points_at_the_line_of_the_user():
    shape = (2, 3, 5)  # no rule for it

    def warned(width, use):
        tree = {"mystery": jnp.ones((*shape, width))}
        with pytest.warns(UserWarning, match="no matrix rule") as seen:
            use(tree)
        return line_of(seen[0])

    def labels(tree):
        MatrixRules().labels(tree)  # labels

    def init(tree):
        m2.muon2(0.1).init(tree)  # init

    def chain(tree):
        tx = optax.chain(optax.clip_by_global_norm(1.0), m2.muon(0.1))
        jax.eval_shape(tx.init, tree)  # chain

    def jitted(tree):
        def step(tree):
            return m2.muon_h(0.1).init(tree)  # jitted

        jax.jit(step)(tree)

    def in_nnx(tree):
        class Model(nnx.Module):
            def __init__(self):
                self.mystery = nnx.Param(tree["mystery"])

        nnx.Optimizer(Model(), m2.muon2_f(0.1), wrt=nnx.Param)  # nnx

    # Each text appears at one place only, so each tree has a shape of its own.
    assert "# labels" in warned(3, labels)
    assert "# init" in warned(4, init)
    assert "# chain" in warned(5, chain)
    assert "# jitted" in warned(6, jitted)
    assert "# nnx" in warned(7, in_nnx)


def test_init_and_update_show_it_once():
    params = {"block": {"w": jnp.ones((24, 24))}, "odd": jnp.ones((2, 3, 9, 7))}
    tx = m2.muon2(0.1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        state = tx.init(params)
        for _ in range(2):
            jax.eval_shape(tx.update, params, state, params)
        jax.eval_shape(lambda g: tx.update(g, state, params), params)
    assert len(seen) == 1 and "tx.init(params)" in line_of(seen[0])


def test_filters_know_the_module_of_the_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module=r"muon2_optax\.routing")
        MatrixRules().labels({"block": BLOCK, "x": leaf(2, 65)})


@pytest.mark.parametrize(
    "count, said", [(1, "^1 leaf may .* settles it"), (2, "^2 leaves may .* each:")]
)
def test_one_leaf_is_a_leaf(count, said):
    tree = {"block": BLOCK} | {f"x{'y' * i}": leaf(2, 66) for i in range(count)}
    with pytest.warns(UserWarning, match=said):
        MatrixRules().labels(tree)
    said = said.replace(" may ", " (is|are) doubtful").replace(" .* ", ".* ")
    with pytest.raises(ValueError, match=said):
        MatrixRules().check(tree)


@pytest.mark.parametrize(
    "count, said", [(2, "nor has 1 other leaf of"), (3, "nor have 2 other leaves of")]
)
def test_one_other_leaf_without_a_rule(count, said):
    tree = {f"x{'y' * i}": leaf(2, 3, 4) for i in range(count)}
    with pytest.raises(ValueError, match=said):
        MatrixRules(strict=True).labels(tree)
