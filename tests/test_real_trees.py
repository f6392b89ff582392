"""Every leaf of real models goes where it belongs, or a warning says that it may not."""

import math

import jax
import pytest
import real_trees

from muon2_optax import MatrixAxes, MatrixRules

# Table of shared notes on MaxText: layers stacked on axis 1, first match wins.
_SELF = r"(self_attention|full_attention|attention|self_attn|attn|GptOssAttention)"
MAXTEXT = MatrixRules(
    (
        (r"scale|embedding|logits_dense|sinks|(?<!position_)bias(/|$)", None),
        (r"(MoeBlock_0|GptOssMlp)/w[io]", MatrixAxes(-2, -1)),
        (rf"{_SELF}/(query|key|value|wq_b|wkv_b|wkv)/", MatrixAxes(0, (-2, -1))),
        (r"(self_attention|GptOssAttention)/out/", MatrixAxes((0, -2), -1)),
        (r"", MatrixAxes(0, -1)),
    )
)


@pytest.fixture(params=real_trees.NAMES)
def project(request):
    return real_trees.read(request.param)


def _shown(outcomes):
    return "\n".join(
        f"{o.path} {o.shape}, {o.what}: want {o.expected}, got {o.got}, warned {o.warned}"
        for o in outcomes
    )


def test_the_only_silently_wrong_leaves_are_the_documented_ones(project):
    found = real_trees.outcomes(project)
    surprising = [o for o in found if o.silently_wrong != o.known]
    assert not surprising, _shown(surprising)


def test_warnings_name_exactly_the_listed_leaves(project):
    found = real_trees.outcomes(project)
    surprising = [o for o in found if o.warned != o.listed]
    assert not surprising, _shown(surprising)


def test_the_data_is_sound(project):
    """Every leaf is there once, in its own container, with axes that fit its shape."""
    leaves = jax.tree.leaves(real_trees.parameters(project))
    assert len(leaves) == len(project["leaves"])
    for path, leaf in project["leaves"].items():
        assert leaf["what"], path
        if leaf["group"] == "adam":
            assert "in" not in leaf, path
            continue
        axes = MatrixAxes(tuple(leaf["in"]), tuple(leaf["out"]))
        resolved = axes.resolve(tuple(leaf["shape"]))
        assert resolved.fan_in * sum(resolved.splits) <= math.prod(leaf["shape"]), path


def test_the_documented_table_is_current():
    text = real_trees.DOCUMENT.read_text()
    assert real_trees.fill(text) == text, "run python tests/real_trees.py"


@pytest.mark.parametrize("name", [n for n in real_trees.NAMES if "maxtext" in n])
def test_maxtext_patterns_give_the_true_axes(name):
    """Routers apart, which MaxText itself sends to Muon and this library to AdamW."""
    found = real_trees.outcomes(real_trees.read(name), _fitting(MAXTEXT, name))
    wrong = [o for o in found if o.wrong and not o.what.startswith("router")]
    assert not wrong, _shown(wrong)


def _fitting(rules, name):
    """The rules without patterns that match nothing in this tree."""
    import re

    paths = real_trees.read(name)["leaves"]
    kept = [p for p in rules.patterns if any(re.search(p[0], path) for path in paths)]
    return MatrixRules(tuple(kept))
