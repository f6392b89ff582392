"""Every leaf of real models goes where it belongs, or a warning names it."""

import re

import jax
import pytest
import real_trees

from muon2_optax import MatrixAxes, MatrixRules

# Layers are stacked on axis 1, so that the matrix of most kernels is axes 0 and -1. The
# first match wins. MaxText decides alike, see its src/maxtext/utils/muon_utils.py.
_ATTENTION = (
    r"(^|/)(self_attention|full_attention|attention|self_attn|attn|attention_mla"
    r"|GptOssAttention)/"
)
MAXTEXT = (
    (
        r"scale|embedding|logits_dense|(post|pre|res)_beta|hc_base|sinks|tid2eid|A_log"
        r"|conv1d|shared_expert_gate|(?<!position_)bias(/|$)",
        None,
    ),
    (
        r"(MoeBlock_0|moe_block|routed_experts|GptOssMlp|routed_moe)/(?!.*shared_expert)"
        r"(.*/)?(wi|wi_0|wi_1|wo|gate_up_proj)(/|$)",
        MatrixAxes(-2, -1),
    ),
    (r"o_a_proj", MatrixAxes(-2, -1)),
    (_ATTENTION + r"(query|key|value|wq_b|wkv_b|wkv)/", MatrixAxes(0, (-2, -1))),
    (r"(self_attention|GptOssAttention)/out/", MatrixAxes((0, -2), -1)),
    (r"", MatrixAxes(0, -1)),
)
_MAXTEXT_TREES = [name for name in real_trees.NAMES if name.startswith("maxtext")]


@pytest.fixture(params=real_trees.NAMES)
def project(request):
    return real_trees.read(request.param)


def _shown(outcomes):
    return "\n".join(
        f"{o.path} {o.shape}, {o.what}: "
        f"want {o.expected}, got {o.got}, warned {o.warned}"
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


def test_every_leaf_has_a_meaning_and_axes_that_fit_its_shape(project):
    leaves = jax.tree.leaves(real_trees.parameters(project))
    assert len(leaves) == len(project["leaves"])
    for path, leaf in project["leaves"].items():
        assert leaf["what"], path
        if leaf["group"] == "adam":
            assert "in" not in leaf, path
            continue
        MatrixAxes(tuple(leaf["in"]), tuple(leaf["out"])).resolve(tuple(leaf["shape"]))


_NESTED = ["flax_wmt", "easylm_llama", "hf_flax_bert", "big_vision_vit", "mamba_flax"]


@pytest.mark.parametrize("container", ["tuple keys", "flat dotted", "attributes"])
@pytest.mark.parametrize("name", _NESTED)
def test_the_container_makes_no_difference(name, container):
    """Tuple keys are what flax.traverse_util.flatten_dict makes of a nested dict."""
    project = real_trees.read(name)
    if container == "flat dotted":
        leaves = {path.replace("/", "."): x for path, x in project["leaves"].items()}
        moved = project | {"leaves": leaves, "container": container}
    else:
        moved = project | {"container": container}

    def groups(tree):
        return sorted((o.what, o.shape, o.got) for o in real_trees.outcomes(tree))

    assert groups(moved) == groups(project)


def test_the_documented_table_is_current():
    text = real_trees.DOCUMENT.read_text()
    assert real_trees.fill(text) == text, "run python tests/real_trees.py"


@pytest.mark.parametrize("name", _MAXTEXT_TREES)
def test_six_patterns_give_the_true_axes_of_maxtext(name):
    """Routers apart, which MaxText itself sends to Muon and this library to AdamW."""
    project = real_trees.read(name)
    patterns = [  # a pattern that matches nothing is an error
        (pattern, axes)
        for pattern, axes in MAXTEXT
        if any(re.search(pattern, path) for path in project["leaves"])
    ]
    found = real_trees.outcomes(project, MatrixRules(tuple(patterns)))
    wrong = [o for o in found if o.wrong and not o.what.startswith("router")]
    assert not wrong, _shown(wrong)
