"""Routing: which leaves are matrices, in trees of real models."""

import pytest
from routing import labels_of, leaf, matrices_of

from muon2_optax import MatrixAxes, MatrixRules


def test_flax_gpt():
    block = {
        "attn": {
            "c_attn": {"kernel": leaf(8, 24), "bias": leaf(24)},
            "c_proj": {"kernel": leaf(8, 8), "bias": leaf(8)},
        },
        "ln_1": {"scale": leaf(8), "bias": leaf(8)},
        "ln_2": {"scale": leaf(8), "bias": leaf(8)},
        "mlp": {
            "c_fc": {"kernel": leaf(8, 32), "bias": leaf(32)},
            "c_proj": {"kernel": leaf(32, 8), "bias": leaf(8)},
        },
    }
    tree = {
        "params": {
            "wte": {"embedding": leaf(50, 8)},
            "wpe": {"embedding": leaf(16, 8)},
            "h_0": block,
            "h_1": block,
            "ln_f": {"scale": leaf(8), "bias": leaf(8)},
            "lm_head": {"kernel": leaf(8, 50)},
        }
    }
    kernels = ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj")
    want = {f"params/h_{i}/{k}/kernel" for i in range(2) for k in kernels}
    assert matrices_of(tree) == want
    assert set(labels_of(MatrixRules(), tree).values()) == {"matrix", "adam"}


def test_llama():
    layer = {
        "self_attn": {
            "q_proj": {"kernel": leaf(16, 16)},
            "k_proj": {"kernel": leaf(16, 12)},
            "v_proj": {"kernel": leaf(16, 12)},
            "o_proj": {"kernel": leaf(16, 16)},
            "q_norm": {"scale": leaf(4)},
        },
        "mlp": {
            "gate_proj": {"kernel": leaf(16, 40)},
            "up_proj": {"kernel": leaf(16, 40)},
            "down_proj": {"kernel": leaf(40, 16)},
        },
        "input_layernorm": {"scale": leaf(16)},
        "post_attention_layernorm": {"scale": leaf(16)},
    }
    tree = {
        "model": {
            "embed_tokens": {"embedding": leaf(100, 16)},
            "layers": [layer, layer],
            "norm": {"scale": leaf(16)},
        },
        "lm_head": {"kernel": leaf(16, 100)},
    }
    names = [f"self_attn/{n}_proj" for n in "qkvo"]
    names += [f"mlp/{n}_proj" for n in ("gate", "up", "down")]
    want = {f"model/layers/{i}/{n}/kernel" for i in range(2) for n in names}
    assert matrices_of(tree) == want


def test_mixture_of_experts():
    layer = {
        "block_sparse_moe": {
            "gate": {"kernel": leaf(16, 4)},
            "experts": {"w1": leaf(4, 16, 40), "w2": leaf(4, 40, 16)},
        },
        "moe": {"router": {"kernel": leaf(16, 4)}},
        "mlp": {"gate_proj": {"kernel": leaf(16, 40)}},
    }
    rules = MatrixRules((("experts/", MatrixAxes(-2, -1)),))
    assert matrices_of(layer, rules) == {
        "block_sparse_moe/experts/w1",
        "block_sparse_moe/experts/w2",
        "mlp/gate_proj/kernel",
    }
    axes = rules.resolve("block_sparse_moe/experts/w1", (4, 16, 40))
    assert (axes.batch, axes.fan_in, axes.splits) == ((0,), 16, (40,))


def test_scanned_layers():
    """Stacked norm gains and biases are rank 2, stacked kernels rank 3."""
    layers = {
        "attn": {"q": {"kernel": leaf(6, 16, 16), "bias": leaf(6, 16)}},
        "mlp": {"up": {"kernel": leaf(6, 16, 40), "bias": leaf(6, 40)}},
        "norm": {"scale": leaf(6, 16)},
        "ln_2": {"scale": leaf(6, 16), "bias": leaf(6, 16)},
    }
    rules = MatrixRules((("kernel$", MatrixAxes(-2, -1)),))
    assert matrices_of({"layers": layers}, rules) == {
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
